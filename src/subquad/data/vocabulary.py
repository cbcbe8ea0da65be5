"""Token ids, and the fast tokenizers that go with a model: amino acids and bytes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<sep>", "<mask>", "<unk>")
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
AMBIGUOUS = "XBZUOJ"  # any; Asx; Glx; selenocysteine; pyrrolysine; Leu or Ile
GAP = "-"


class Vocabulary(NamedTuple):
    """Which ids mean what. `sep` stands before, between and after sequences; `ordinary` are the ids of real content."""

    size: int
    pad: int
    sep: int
    mask: int | None
    ordinary: Sequence[int]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest one that holds every id."""
        return np.uint8 if self.size <= 1 << 8 else np.uint16 if self.size <= 1 << 16 else np.uint32


def _after_specials(count: int, ordinary: int | None = None) -> Vocabulary:
    first = len(SPECIALS)
    return Vocabulary(first + count, pad=0, sep=1, mask=2, ordinary=range(first, first + (ordinary or count)))


PROTEIN = _after_specials(len(AMINO_ACIDS + AMBIGUOUS + GAP), ordinary=len(AMINO_ACIDS))
BYTES = _after_specials(256)


def pixels(levels: int) -> Vocabulary:
    return _after_specials(levels)


def of_tokenizer(tokenizer: Any) -> Vocabulary:
    """The vocabulary of any tokenizer; its end, separator or start token, the first there is, separates documents."""
    from subquad.checks import data as checks

    ids = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id)
    sep = checks.separator(next((i for i in ids if i is not None), None), tokenizer.name_or_path)
    pad = sep if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    special = set(tokenizer.all_special_ids)
    ordinary = tuple(i for i in range(len(tokenizer)) if i not in special)
    return Vocabulary(len(tokenizer), pad, sep, tokenizer.mask_token_id, ordinary)


def protein_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per residue; a separator in front, lower case accepted, anything else is unknown.

    Example:
        >>> tokenizer = protein_tokenizer()
        >>> tokenizer.decode(tokenizer("mkvX")["input_ids"])
        '<sep>MKVX'
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    symbols = [*SPECIALS, *AMINO_ACIDS, *AMBIGUOUS, GAP]
    inner = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    upper = [normalizers.Replace(letter.lower(), letter) for letter in AMINO_ACIDS + AMBIGUOUS]
    inner.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), ""), *upper])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return _wrap(inner)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per byte of UTF-8; a separator in front.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("é!")["input_ids"], tokenizer.decode([199, 173, 37])
        ([1, 199, 173, 37], 'é!')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    symbols = [*SPECIALS, *(letters[byte] for byte in range(256))]
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _wrap(inner)


def default_tokenizer(domain: str) -> "PreTrainedTokenizerFast | None":
    """Of residues or bytes, for models that were trained without one from elsewhere; images have none."""
    return {"protein": protein_tokenizer, "text": byte_tokenizer}[domain]() if domain != "image" else None


def _wrap(inner) -> "PreTrainedTokenizerFast":
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    inner.post_processor = processors.TemplateProcessing(single="<sep> $A", special_tokens=[("<sep>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<sep>",
        eos_token="<sep>",
        mask_token="<mask>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        padding_side="left",  # as generation wants it; training and scoring pad by themselves
    )
