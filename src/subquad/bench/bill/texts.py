"""What a causal model makes of text: the loss of every token, copies of what it read before, a number it was told."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.recording.stream import evaluating

BLOCK = 64  # tokens: neighbouring errors are alike, so standard errors are over blocks
AT_ONCE = 1024  # tokens whose logits are in memory
COPIED = 512  # tokens of a copy that are judged
FIRST_PLACE = 2048  # the first range of positions
PASSKEYS, DIGITS = 4, 5


class Compared(NamedTuple):
    """Perplexity divided by that of the exact model, the standard error of its logarithm, and the ratio by position."""

    ratio: float
    error: float
    by_place: dict[str, float]


@torch.no_grad()
def losses(model: Any, ids: Tensor) -> Tensor:
    """Nats of every token of ids `[1, T]` but the first, `[T - 1]`."""
    with evaluating(model):
        if _head_is_all(model, ids[:, :8]):
            head = model.get_output_embeddings()
            with last_words(model, 1) as behind:
                model(ids, use_cache=False)
            hidden = behind[0][0, :-1]
        else:
            head, hidden = torch.nn.Identity(), model(ids, use_cache=False).logits[0, :-1]
    parts = zip(hidden.split(AT_ONCE), ids[0, 1:].split(AT_ONCE), strict=True)
    return torch.cat([F.cross_entropy(head(x).float(), wanted, reduction="none") for x, wanted in parts])


def _head_is_all(model: Any, ids: Tensor) -> bool:
    """Whether logits are what the output layer makes of hidden states, and nothing changes them afterwards."""
    with last_words(model, 1) as behind:
        last = model(ids, use_cache=False).logits
    return bool(behind) and torch.equal(model.get_output_embeddings()(behind[0][:, -1:]), last)


@contextmanager
def last_words(model: Any, count: int) -> Iterator[list[Tensor]]:
    """Logits of the last `count` tokens only: those of all would be larger than the model.

    Gives the hidden states of all tokens, as the output layer was given them.
    """
    behind: list[Tensor] = []

    def pick(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        behind.append(given[0])
        return (given[0][:, -count:], *given[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield behind
    finally:
        hook.remove()


def compared(now: Sequence[Tensor], exact: Sequence[Tensor]) -> Compared:
    """Losses of texts of one length."""
    worse = [a - b for a, b in zip(now, exact, strict=True)]
    blocks = torch.cat([x[: len(x) // BLOCK * BLOCK].view(-1, BLOCK).mean(1) for x in worse])
    length, borders = len(worse[0]), [0]
    while borders[-1] < length:
        borders.append(min(length, max(FIRST_PLACE, 2 * borders[-1])))
    places = {f"{a}-{b}": torch.cat([x[a:b] for x in worse]) for a, b in itertools.pairwise(borders)}
    error = blocks.std().item() / math.sqrt(len(blocks)) if len(blocks) > 1 else math.nan
    return Compared(perplexity(worse), error, {place: perplexity([x]) for place, x in places.items()})


def perplexity(losses: Sequence[Tensor]) -> float:
    """A text without attention can surprise by more than a float holds."""
    return math.exp(min(700.0, torch.cat(list(losses)).double().mean().item()))


def copy_distances(length: int) -> list[int]:
    """Half of the length, a quarter, and so on down to some hundred tokens."""
    found = [length // 2]
    while found[-1] >= 256:
        found.append(found[-1] // 2)
    return sorted(found)


def copying(model: Any, texts: Sequence[Tensor], distance: int) -> float:
    """Perplexity of the beginning of each text where it comes again, `distance` tokens after it was read."""
    again = [losses(model, text[:, :distance].repeat(1, 2))[distance:][:COPIED] for text in texts]
    return perplexity(again)


@torch.no_grad()
def passkey(model: Any, tokenizer: Any, text: Tensor, distance: int) -> float | None:
    """How much of a number that stood `distance` tokens ago in real text is told rightly, of its tokens.

    text `[1, T]`: what stands around it. Chance is about a tenth. None if the words take more tokens.
    """
    right = total = 0
    for number in range(PASSKEYS):
        key = "".join(random.Random(number).choices("0123456789", k=DIGITS))
        told = _ids(tokenizer, f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
        asked = _ids(tokenizer, "\nWhat is the pass key? The pass key is")
        answer = _ids(tokenizer, f" {key}")
        if told.shape[1] + asked.shape[1] > distance:
            return None
        first = number * (text.shape[1] - distance) // PASSKEYS
        between = text[:, first : first + distance - told.shape[1] - asked.shape[1]]
        before = text[:, :first][:, -64:]
        given = torch.cat([before, told, between, asked, answer], 1)
        with evaluating(model), last_words(model, answer.shape[1] + 1):
            guess = model(given, use_cache=False).logits[0, -answer.shape[1] - 1 : -1].argmax(-1)
        right, total = right + int((guess == answer[0]).sum()), total + answer.shape[1]
    return right / total


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


@torch.no_grad()
def continuation(model: Any, tokenizer: Any, prompt: Tensor, tokens: int) -> str:
    """What the model makes of the prompt `[1, T]`, the likeliest token each time."""
    with evaluating(model):
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=False,
            pad_token_id=0,
        )
    return tokenizer.decode(made[0, prompt.shape[1] :])
