"""How likely a model finds a sequence, and the vectors it makes of it; any length, batched by length."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from subquad.checks import models as checks
from subquad.models.batching import Batch, batches_by_length
from subquad.models.cache import SubquadCache
from subquad.models.heads import SubquadForCausalLM, SubquadForMaskedLM
from subquad.models.modeling import SubquadModel

BATCH_TOKENS = 16_384
PIECE = 4096  # tokens whose logits are held at once
PASSES = 8
Progress = Callable[[int], None]  # called with the number of tokens done


def _ignore(tokens: int) -> None:
    pass


@torch.inference_mode()
def log_likelihoods(
    model: SubquadForCausalLM, sequences: Sequence[Tensor], *, start: int, progress: Progress = _ignore
) -> list[Tensor]:
    """log p of each token given those before it and a `start` token: one float32 vector `[T]` per sequence `[T]`.

    A causal model reads long sequences piece by piece, with the state of its mechanisms in between.
    """
    checks.sequences(sequences)
    out = [torch.empty(0)] * len(sequences)
    begun = [torch.cat([torch.tensor([start]), sequence]) for sequence in sequences]
    for batch in batches_by_length(begun, batch_tokens=BATCH_TOKENS, pad=start):
        scores = _piecewise(model, batch)
        for row, place in enumerate(batch.places):
            out[place] = scores[row, : len(sequences[place])]
        progress(sum(len(sequences[place]) for place in batch.places))
    return out


def _piecewise(model: SubquadForCausalLM, batch: Batch) -> Tensor:
    """`[B, T - 1]`: log p of the tokens after the first."""
    device, length = model.device, batch.ids.shape[1]
    ids, mask = batch.ids.to(device), batch.mask.to(device)
    cache, scores = SubquadCache(model.config.num_hidden_layers), []
    for begin in range(0, length - 1, PIECE):
        end = min(begin + PIECE, length - 1)
        use_cache = length - 1 > PIECE
        logits = model(
            ids[:, begin:end],
            attention_mask=mask[:, begin:end],
            past_key_values=cache if use_cache else None,
            use_cache=use_cache,
        ).logits
        targets = ids[:, begin + 1 : end + 1, None]
        scores.append(logits.float().log_softmax(-1).gather(-1, targets)[..., 0].cpu())
    return torch.cat(scores, 1)


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: SubquadForMaskedLM,
    sequences: Sequence[Tensor],
    *,
    start: int,
    mask: int,
    passes: int | None = PASSES,
    progress: Progress = _ignore,
) -> list[Tensor]:
    """log p of each token given the others, every token hidden exactly once: one vector `[T]` per sequence `[T]`.

    `passes` forward passes hide every passes-th token at a time (8: about the 15 % of training). None hides one token
    at a time, the textbook definition, in T passes.
    """
    checks.sequences(sequences)
    out = [torch.empty(len(sequence)) for sequence in sequences]
    for jobs in _masked_batches(sequences, passes):
        width = 1 + max(len(sequences[place]) for place, _ in jobs)
        ids, real = torch.full((len(jobs), width), start), torch.zeros(len(jobs), width, dtype=torch.long)
        for row, (place, hidden) in enumerate(jobs):
            ids[row, 1 : 1 + len(sequences[place])] = sequences[place]
            ids[row, 1 + hidden] = mask
            real[row, : 1 + len(sequences[place])] = 1
        logits = model(ids.to(model.device), attention_mask=real.to(model.device)).logits.cpu()
        for row, (place, hidden) in enumerate(jobs):
            targets = sequences[place][hidden, None]
            out[place][hidden] = logits[row, 1 + hidden].float().log_softmax(-1).gather(-1, targets)[:, 0]
            progress(len(hidden))
    return out


def _masked_batches(sequences: Sequence[Tensor], passes: int | None) -> Iterator[list[tuple[int, Tensor]]]:
    """(sequence, positions to hide) pairs, similar lengths together, about BATCH_TOKENS tokens each."""
    batch: list[tuple[int, Tensor]] = []
    for place in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        length = len(sequences[place])
        count = length if passes is None else min(passes, length)
        for first in range(count):
            batch.append((place, torch.arange(first, length, count)))
            if len(batch) * (1 + len(sequences[batch[0][0]])) >= BATCH_TOKENS:
                yield batch
                batch = []
    if batch:
        yield batch


@torch.inference_mode()
def embeddings(
    model: SubquadModel, sequences: Sequence[Tensor], *, start: int, mean: bool = True, progress: Progress = _ignore
) -> list[Tensor]:
    """Hidden states of each sequence's tokens `[T, E]`, or their mean `[E]`; the start token is left out."""
    checks.sequences(sequences)
    out = [torch.empty(0)] * len(sequences)
    begun = [torch.cat([torch.tensor([start]), sequence]) for sequence in sequences]
    for batch in batches_by_length(begun, batch_tokens=BATCH_TOKENS, pad=start):
        hidden = model(batch.ids.to(model.device), attention_mask=batch.mask.to(model.device)).last_hidden_state
        for row, place in enumerate(batch.places):
            vectors = hidden[row, 1 : 1 + len(sequences[place])].float().cpu()
            out[place] = vectors.mean(0) if mean else vectors.clone()
        progress(sum(len(sequences[place]) for place in batch.places))
    return out
