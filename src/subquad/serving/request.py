"""What is asked of a model, and how far it is."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.models.cache import SubquadCache
from subquad.serving.sampling import Sampling, chosen


@dataclass(eq=False)
class Request:
    """A prompt and its continuation, which grows while its batcher steps.

    prompt: ids `[T]` that were submitted. tokens: the new ids so far. reason: why there will be no more, or None: "eos"
    (its last token ends a sequence), "length" (as many as asked for), "cancelled", "nan" (the model gives no finite
    logits), "error" (its prompt could not be read: a step has raised why).
    """

    prompt: Tensor
    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    start: SubquadCache | None = field(repr=False)  # what its prompt goes on from, until that is read
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    _generator: torch.Generator | None = field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        return self.reason is not None

    def cancel(self) -> None:
        """No more tokens; it leaves the batch with the next step. A finished one stays as it is."""
        self.reason = self.reason or "cancelled"

    def add(self, logits: Tensor) -> int | None:
        """The next token by its logits `[V]`; None if they are no numbers, which ends the request."""
        if not bool(logits.max().isfinite()):
            self.reason = "nan"
            return None
        if self._generator is None and self.sampling.seed is not None:
            self._generator = torch.Generator().manual_seed(self.sampling.seed)
        token = chosen(logits, self.sampling, self._generator)
        self.tokens.append(token)
        if token in self.ends:
            self.reason = "eos"
        elif len(self.tokens) == self.max_new_tokens:
            self.reason = "length"
        return token


class Token(NamedTuple):
    """One new token of a request; id: None where the model gives none, and the request ends (`request.reason`)."""

    request: Request
    id: int | None
