"""How likely a model finds a sequence, and the vectors it makes of it; any length, batched by length."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.checks import models as checks
from subquad.models.batching import Batch, batches_by_length

BATCH_TOKENS = 16_384
PIECE = 4096  # tokens of a sequence that are read at once
LOGITS = 2**27  # of a batch or piece, at most: vocabularies of models of transformers are large
PASSES = 8
Start = int | Sequence[int]  # special tokens in front of every sequence
Progress = Callable[[int], None]  # called with the number of tokens done


def _ignore(tokens: int) -> None:
    pass


@torch.inference_mode()
def log_likelihoods(
    model: PreTrainedModel, sequences: Sequence[Tensor], *, start: Start, progress: Progress = _ignore
) -> list[Tensor]:
    """log p of each token given those before it and `start`: one float32 vector `[T]` per sequence `[T]`.

    A causal model reads long sequences piece by piece, with the state of its mechanisms, or its cache of keys and
    values, in between.

    Args:
        model: a causal model of ours or of transformers.
        start: a token, or several, that stand in front of every sequence; at least one.
    """
    checks.sequences(sequences)
    before = checks.start_tokens(_tokens(start))
    out = [torch.empty(0)] * len(sequences)
    begun = [torch.cat([before, sequence]) for sequence in sequences]
    for batch in batches_by_length(begun, batch_tokens=_batch_tokens(model), pad=int(before[0])):
        scores = _piecewise(model, batch)[:, len(before) - 1 :]
        for row, place in enumerate(batch.places):
            out[place] = scores[row, : len(sequences[place])]
        progress(sum(len(sequences[place]) for place in batch.places))
    return out


def _tokens(given: Start) -> Tensor:
    return torch.tensor([given] if isinstance(given, int) else list(given), dtype=torch.long)


def _padding(before: Tensor, after: Tensor) -> int:
    """Any token, as none is real there, but that of masked ones, whose share ESM takes of all tokens it is given."""
    return next(iter([*before.tolist(), *after.tolist()]), 0)


def _batch_tokens(model: PreTrainedModel) -> int:
    """As many as have no more than LOGITS logits."""
    return max(1, min(BATCH_TOKENS, LOGITS // model.config.get_text_config().vocab_size))


def _piecewise(model: PreTrainedModel, batch: Batch) -> Tensor:
    """`[B, T - 1]`: log p of the tokens after the first."""
    device, length = model.device, batch.ids.shape[1] - 1
    ids, mask = batch.ids.to(device), batch.mask.to(device)
    piece, past, scores = min(PIECE, _batch_tokens(model)), {}, []
    for begin in range(0, length, piece):
        end = min(begin + piece, length)
        out = model(ids[:, begin:end], attention_mask=mask[:, :end], use_cache=length > piece, **past)
        targets = ids[:, begin + 1 : end + 1, None]
        scores.append(out.logits.float().log_softmax(-1).gather(-1, targets)[..., 0].cpu())
        if end < length:
            past = {"past_key_values": checks.goes_on(model, getattr(out, "past_key_values", None), piece)}
    return torch.cat(scores, 1)


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    *,
    start: Start,
    end: Sequence[int] = (),
    mask: int,
    passes: int | None = PASSES,
    progress: Progress = _ignore,
) -> list[Tensor]:
    """log p of each token given the others, every token hidden exactly once: one vector `[T]` per sequence `[T]`.

    `passes` forward passes hide every passes-th token at a time (8: about the 15 % of training). None hides one token
    at a time, the textbook definition, in T passes. `start` and `end` are special tokens around every sequence, which
    are never hidden and have no score.
    """
    checks.sequences(sequences)
    before, after = _tokens(start), _tokens(end)
    first, around = len(before), len(before) + len(after)
    out = [torch.empty(len(sequence)) for sequence in sequences]
    for jobs in _masked_batches(sequences, passes, around, _batch_tokens(model)):
        width = around + max(len(sequences[place]) for place, _ in jobs)
        ids, real = (
            torch.full((len(jobs), width), _padding(before, after)),
            torch.zeros(len(jobs), width, dtype=torch.long),
        )
        for row, (place, hidden) in enumerate(jobs):
            whole = torch.cat([before, sequences[place], after])
            whole[first + hidden] = mask
            ids[row, : len(whole)], real[row, : len(whole)] = whole, 1
        logits = model(ids.to(model.device), attention_mask=real.to(model.device)).logits.cpu()
        for row, (place, hidden) in enumerate(jobs):
            targets = sequences[place][hidden, None]
            out[place][hidden] = logits[row, first + hidden].float().log_softmax(-1).gather(-1, targets)[:, 0]
            progress(len(hidden))
    return out


def _masked_batches(
    sequences: Sequence[Tensor], passes: int | None, around: int, tokens: int
) -> Iterator[list[tuple[int, Tensor]]]:
    """(sequence, positions to hide) pairs, similar lengths together, about so many tokens each; around: specials."""
    batch: list[tuple[int, Tensor]] = []
    for place in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        length = len(sequences[place])
        count = length if passes is None else min(passes, length)
        for first in range(count):
            batch.append((place, torch.arange(first, length, count)))
            if (len(batch) + 1) * (around + len(sequences[batch[0][0]])) > tokens:
                yield batch
                batch = []
    if batch:
        yield batch


@torch.inference_mode()
def embeddings(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    *,
    start: Start,
    end: Sequence[int] = (),
    mean: bool = True,
    progress: Progress = _ignore,
) -> list[Tensor]:
    """Hidden states of the last layer of each sequence's tokens `[T, E]`, or their mean `[E]`, in float32.

    The special tokens around it, `start` and `end`, are read, too, but are neither in the mean nor among the states.
    """
    checks.sequences(sequences)
    before, after = _tokens(start), _tokens(end)
    out = [torch.empty(0)] * len(sequences)
    whole = [torch.cat([before, sequence, after]) for sequence in sequences]
    for batch in batches_by_length(whole, batch_tokens=BATCH_TOKENS, pad=_padding(before, after)):
        hidden = model(batch.ids.to(model.device), attention_mask=batch.mask.to(model.device)).last_hidden_state
        for row, place in enumerate(batch.places):
            vectors = hidden[row, len(before) : len(before) + len(sequences[place])].float().cpu()
            out[place] = vectors.mean(0) if mean else vectors.clone()
        progress(sum(len(sequences[place]) for place in batch.places))
    return out
