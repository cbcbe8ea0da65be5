"""What an encoder makes of sequences: guesses at masked tokens, and the means of its hidden states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.recording.stream import evaluating

SHARE = 0.15  # of the tokens are masked


class Vocabulary(NamedTuple):
    """mask: the token that stands for a masked one, None if there is none. special: tokens that are not worth a guess:
    they stand where they always stand."""

    mask: int | None
    special: tuple[int, ...] = ()


class Encoded(NamedTuple):
    """guesses `[N]`: tokens, empty without a language model; truth `[N]`; means `[S, E]`, of each sequence."""

    guesses: Tensor
    truth: Tensor
    means: Tensor


@torch.no_grad()
def encoded(model: Any, batches: Sequence[dict[str, Tensor]], vocabulary: Vocabulary) -> Encoded:
    guesses, truth, means = [], [], []
    generator = torch.Generator().manual_seed(0)
    with evaluating(model):
        for batch in batches:
            ids, real = batch["input_ids"], batch["attention_mask"].bool()
            body = getattr(model, model.base_model_prefix, model)
            hidden = body(**batch).last_hidden_state
            means.append((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True))
            if vocabulary.mask is not None and model.get_output_embeddings() is not None:
                chosen = (torch.rand(ids.shape, generator=generator) < SHARE) & real
                chosen &= ~torch.isin(ids, torch.tensor(vocabulary.special, dtype=ids.dtype))
                logits = model(**{**batch, "input_ids": ids.masked_fill(chosen, vocabulary.mask)}).logits
                guesses.append(logits[chosen].argmax(-1))
                truth.append(ids[chosen])
    empty = [torch.zeros(0, dtype=torch.long)]
    return Encoded(torch.cat(guesses or empty), torch.cat(truth or empty), torch.cat(means))


def accuracy(found: Encoded) -> float | None:
    return (found.guesses == found.truth).double().mean().item() if len(found.truth) else None


def cosines(now: Encoded, exact: Encoded) -> Tensor:
    """`[S]`: of the means with those of the exact model."""
    return F.cosine_similarity(now.means.double(), exact.means.double())


def neighbours_kept(now: Encoded, exact: Encoded) -> float | None:
    """The share of sequences whose nearest other sequence is still the same; None for fewer than three."""
    if len(exact.means) < 3:
        return None
    return (_nearest(now.means) == _nearest(exact.means)).double().mean().item()


def _nearest(means: Tensor) -> Tensor:
    unit = F.normalize(means.double(), dim=-1)
    return (unit @ unit.mT).fill_diagonal_(-2).argmax(-1)
