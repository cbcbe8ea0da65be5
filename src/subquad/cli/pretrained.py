"""Models of transformers, as they are or converted, for the commands that run models: loading, tokens, generation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from subquad.checks import architecture, pretrained
from subquad.checks import cli as checks
from subquad.cli.common import Loaded, Named, file_name
from subquad.data.vocabulary import AMINO_ACIDS
from subquad.mechanism import outermost

if TYPE_CHECKING:
    from torch import Tensor

FASTA = (".fasta", ".fa", ".faa")


@dataclass(frozen=True)
class Pretrained(Loaded):
    """A model of transformers with its tokenizer.

    domain: "protein" if its tokens are residues, else "text".
    folder, saved_as: where it came from, and the name of its class there.
    task: "causal" or "masked", what it predicts; None if it predicts no tokens.
    around: the special tokens that its tokenizer puts before and behind a text.
    """

    folder: Path
    saved_as: str
    task: str | None
    around: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def causal(self) -> bool:
        return self.task == "causal"

    @property
    def limit(self) -> int | None:
        return longest(self.model, self.tokenizer)

    @property
    def start(self) -> int:
        """Its start token, or the one that ends texts, if it has none."""
        candidates = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, *self.ends)
        token = pretrained.first_token(self.folder, candidates)
        self._check_known("the first token", [token])
        return token

    @property
    def before(self) -> tuple[int, ...]:
        return self.around[0]

    @property
    def after(self) -> tuple[int, ...]:
        return self.around[1]

    @property
    def context(self) -> tuple[int, ...]:
        return self.before or (self.start,)

    @property
    def mask(self) -> int:
        token = pretrained.mask_token(self.folder, self.tokenizer.mask_token_id)
        self._check_known("the mask token", [token])
        return token

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text: those of generation_config.json, or else that of the tokenizer."""
        settings = getattr(self.model, "generation_config", None)
        said = getattr(settings, "eos_token_id", None)
        said = self.tokenizer.eos_token_id if said is None else said
        return [] if said is None else said if isinstance(said, list) else [said]

    def check_predicts(self) -> None:
        architecture.predicts_tokens(self.folder, self.saved_as, self.task)

    def check_generates(self, path: Path) -> None:
        architecture.generates(path, self.saved_as, self.task)
        architecture.keeps_states(path, outermost(self.model))

    def read(self, paths: list[Path]) -> list[Named]:
        """FASTA records for models of residues and from files with such a suffix, else a sequence for each text."""
        from subquad.checks.data import readable
        from subquad.data import read_fasta
        from subquad.data.text import text_files

        found = []
        for file in paths if self.domain == "protein" else text_files(paths):
            if self.domain == "protein" or is_fasta(file):
                records = [(name, sequence, f"{file}: {name}") for name, sequence in read_fasta(file)]
            else:
                with readable(file):
                    records = [(file_name(file), file.read_text(encoding="utf-8"), str(file))]
            found += [Named(name, self.encode(text, where)) for name, text, where in records]
        return found

    def encode(self, text: str, name: str) -> "Tensor":
        """`[T]`: the tokens of a text, at least one, without special ones around it. name: of the text, for errors."""
        import torch

        if self.domain == "protein":
            sequence = text.removesuffix("*").upper()
            vocabulary = self.tokenizer.get_vocab()
            pretrained.known_residue(name, sequence, vocabulary)
            ids = [vocabulary[letter] for letter in sequence]
        else:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        pretrained.some_tokens(name, ids)
        self._check_known(name, [*self.before, *ids, *self.after])
        return torch.tensor(ids, dtype=torch.long)

    def _check_known(self, name: str, ids: list[int]) -> None:
        pretrained.known_tokens(f"{self.folder}: {name}", ids, self.model.config.get_text_config().vocab_size)

    def prompt_ids(self, prompt: str) -> "Tensor":
        import torch

        checks.utf8_prompt(prompt)
        if not prompt:
            return torch.tensor([self.context])
        return torch.cat([torch.tensor(self.before, dtype=torch.long), self.encode(prompt, "--prompt")])[None]

    def generation(self, *, endless: bool) -> dict[str, Any]:
        """Beams and several returned sequences, which a generation_config.json may ask for, cannot be streamed."""
        ends, pad = self.ends, self.tokenizer.pad_token_id
        options: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "eos_token_id": ends or None}
        options["pad_token_id"] = pad if pad is not None else next(iter(ends), 0)
        if endless and ends:
            options["suppress_tokens"] = [*(self.model.generation_config.suppress_tokens or []), *ends]
        return options

    @property
    def hidden(self) -> set[int]:
        return set(self.tokenizer.all_special_ids)

    def content(self, row: "Tensor", prompt: int) -> "Tensor":
        ids, ends = row.tolist(), self.ends
        end = next((place for place in range(prompt, len(ids)) if ids[place] in ends), len(ids))
        return super().content(row[:end], prompt)

    def text(self, ids: "Tensor | list[int]") -> str:
        if self.domain == "protein":
            return "".join(self.tokenizer.convert_ids_to_tokens(ids))
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def load_pretrained(folder: Path, config: Any, *, head: bool = True) -> Pretrained:
    """head: False leaves out what predicts tokens, and gives the body, whose output is hidden states."""
    import transformers

    with checks.loadable(folder):
        base = config.base_config() if config.model_type == "subquad_converted" else config
        kind = architecture.saved_class(folder, config, transformers)
        architecture.one_sequence_of_tokens(folder, kind, base)
        tokenizer = load_tokenizer(folder, base)
        model, report = _load(folder, config, kind)
        checks.whole_model(folder, report, allowed=checks.UNUSED)
        domain = "protein" if reads_residues(tokenizer) else "text"
        body = model if head else model.base_model
        around = special_tokens_around(tokenizer)
    return Pretrained(body.eval(), tokenizer, domain, folder, kind.__name__, task_of(kind, base), around)


def _load(folder: Path, config: Any, kind: Any) -> tuple[Any, Any]:
    if config.model_type == "subquad_converted":
        import subquad

        return subquad.load(folder, output_loading_info=True)
    return kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)


def load_tokenizer(folder: Path, config: Any) -> Any:
    from transformers import AutoTokenizer

    pretrained.tokenizer_there(folder)
    with pretrained.tokenizer(folder):
        return cast(Any, AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False))


def task_of(kind: Any, config: Any) -> str | None:
    """What a class of transformers predicts: "causal" the next token, "masked" hidden ones, None none of them."""
    from transformers.models.auto import modeling_auto as auto

    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder = config.model_type in masked  # families of encoders, whose causal classes look ahead unless told not to
    decodes = not encoder or getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind.__name__ in causal.values() and decodes:
        return "causal"
    return "masked" if kind.__name__ in masked.values() else None


def reads_residues(tokenizer: Any) -> bool:
    """Whether its tokens are residues: the 20 amino acids are tokens, and no token is a small letter or a word.

    Tokens in brackets, such as <null_1> of ESM, do not count.
    """
    special = set(tokenizer.all_special_tokens)
    plain = {token for token in tokenizer.get_vocab() if token not in special}
    plain = {token for token in plain if len(token) == 1 or (token[0], token[-1]) not in (("<", ">"), ("[", "]"))}
    return set(AMINO_ACIDS) <= plain and all(len(token) == 1 and token == token.upper() for token in plain)


def special_tokens_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and behind every text, by the first one that has a token of its own."""
    for text in ("A", *tokenizer.get_vocab()):
        found = tokenizer(text, return_special_tokens_mask=True)
        ids, special = found["input_ids"], found["special_tokens_mask"]
        if 0 in special:
            first, behind = special.index(0), special[::-1].index(0)
            return tuple(ids[:first]), tuple(ids[len(ids) - behind :])
    return (), ()


def longest(model: Any, tokenizer: Any) -> int | None:
    """Tokens, special ones included, that a model takes at most; None if nothing says so."""
    from torch import nn

    known = [getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    for name, module in model.named_modules():  # RoBERTa and ESM keep the first places for padding
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            known.append(module.num_embeddings - module.padding_idx - 1)
    sizes = [size for size in known if isinstance(size, int) and 0 < size < 10**9]  # without one: huge, or -1
    return min(sizes, default=None)


def is_fasta(file: Path) -> bool:
    """By its name, compressed or not."""
    return Path(file.name.removesuffix(".gz")).suffix in FASTA
