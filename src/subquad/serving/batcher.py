"""Continuous batching: sequences join a batch of states when their prompts are read, and leave it when they end."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.checks import count
from subquad.checks import serving as checks
from subquad.models.cache import SubquadCache
from subquad.serving.reader import CHUNK, Reader
from subquad.serving.request import Request, Token
from subquad.serving.sampling import Sampling


class _Reading(NamedTuple):
    """A request whose prompt is being read, and what is left of it, `[1, T]`."""

    request: Request
    cache: SubquadCache
    rest: Tensor


class Batcher:
    """Continues many prompts at once, each as `model.generate` would alone, up to rounding.

    Every step gives each running sequence one token, and reads at most `prefill` tokens of new prompts, in the order in
    which they were submitted: a long prompt holds the others up by no more than that. A batch keeps states: constant
    ones cost the same whatever the lengths; growing ones (`softmax`, `pages`, `strided`) are as long as the longest.

    If the model raises in a step, no token is lost or counted twice, and the next step goes on; a request whose prompt
    made it raise is out. It is for one thread.

    Args:
        model: a causal model of `subquad.models`, or one of transformers whose attention was swapped, in evaluation
            mode. Of its generation config, tokens that end a sequence count; nothing else does.
        rows: sequences at once, at most; others wait.
        prefill: tokens of prompts per step, at most.

    Example:
        >>> from subquad.models import SubquadConfig, SubquadForCausalLM
        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> batcher = Batcher(SubquadForCausalLM(SubquadConfig(**sizes)).eval())
        >>> first, second = batcher.submit([3, 1, 4], max_new_tokens=2), batcher.submit([1, 5], max_new_tokens=4)
        >>> [len(request.tokens) for request in batcher.run()]
        [2, 4]
    """

    def __init__(self, model: Any, *, rows: int = 16, prefill: int = CHUNK) -> None:
        self._reader = Reader("Batcher", model)
        checks.joinable("Batcher", self._reader.mechanisms)
        self.rows = count("Batcher", "rows", rows)
        self.prefill = count("Batcher", "prefill", prefill)
        self._longest = self._reader.longest()
        self._waiting: deque[Request] = deque()
        self._reading: _Reading | None = None
        self._read: list[_Reading] = []  # prompts that were read, not yet in the batch
        self._running: list[Request] = []
        self._cache: SubquadCache | None = None  # of those that run, row by row
        self._news: list[Token] = []

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        prefix: SubquadCache | None = None,
    ) -> Request:
        """A request that joins the batch when there is room.

        Args:
            prompt: ids `[T]`, at least one; those after the prefix, if there is one.
            max_new_tokens: it ends after so many.
            temperature: of sampling; None takes the likeliest token.
            top_k: with a temperature, samples from the k likeliest tokens only.
            top_p: with a temperature, samples from the likeliest tokens that make up this share.
            seed: with a temperature, of what is drawn; drawn from torch's generator unless given.
            eos_token_id: tokens that end it; those of the model's generation config unless given, `()` for none.
            prefix: a cache of one sequence that this one begins with (`read`, `load_cache`). It stays as it is.
        """
        ids = checks.prompt("submit", prompt, self._reader.config.vocab_size, rows=False)[0]
        count("submit", "max_new_tokens", max_new_tokens)
        sampling = Sampling(*checks.sampling(temperature, top_k, top_p, seed))
        if temperature is not None and seed is None:
            sampling = sampling._replace(seed=int(torch.randint(2**32, ())))
        if prefix is not None:
            checks.prefix(prefix, type(self._reader.new_cache()), len(self._reader.mechanisms))
            prefix = prefix.snapshot()
        past = 0 if prefix is None or prefix.length is None else int(prefix.length[0])
        checks.short_enough(past, len(ids), max_new_tokens, self._longest)
        ends = self._reader.model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        request = Request(ids, max_new_tokens, sampling, checks.ends(ends), prefix)
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether another step would do something."""
        return bool(self._waiting or self._reading or self._read or self._running)

    def nbytes(self) -> int:
        """Memory of the states of running sequences, and of prompts that are being read."""
        others = [*self._read, *([self._reading] if self._reading else [])]
        return sum(cache.nbytes() for cache in (self._cache, *(one.cache for one in others)) if cache is not None)

    def step(self) -> list[Token]:
        """One token more for each running sequence, and the first of each prompt that was read; given once."""
        self._regroup()
        self._decode()
        self._regroup()  # there may be room now
        self._read_prompts()
        self._regroup()
        news, self._news = self._news, []
        return news

    def stream(self) -> Iterator[Token]:
        """Tokens as they come, of all requests, until there is nothing to do; more may be submitted meanwhile."""
        while self.busy:
            yield from self.step()

    def run(self) -> list[Request]:
        """Steps until there is nothing to do: the requests, in the order in which they ended."""
        ended = []
        while self.busy:
            reading = [one.request for one in (*self._read, self._reading) if one is not None]
            there = [*self._running, *reading, *self._waiting]
            self.step()
            ended += [request for request in there if request.finished]
        return ended

    def _add(self, request: Request, logits: Tensor) -> None:
        self._news.append(Token(request, request.add(logits)))

    def _decode(self) -> None:
        if self._cache is None:
            return
        last = torch.tensor([[request.tokens[-1]] for request in self._running], device=self._reader.device)
        rows = self._reader.read(self._cache, last).float().cpu()
        for request, logits in zip(self._running, rows, strict=True):
            self._add(request, logits)

    def _read_prompts(self) -> None:
        left = self.prefill
        while left and (self._reading or self._begin()):
            reading = self._reading
            assert reading is not None
            piece, rest = reading.rest[:, :left], reading.rest[:, left:]
            try:
                logits = self._reader.read(reading.cache, piece)
            except Exception:
                reading.request.reason = "error"
                raise
            left -= piece.shape[1]
            self._reading = reading._replace(rest=rest) if rest.shape[1] else None
            if self._reading is None:
                self._add(reading.request, logits[0].float().cpu())
                self._read.append(reading)

    def _begin(self) -> bool:
        """The next prompt, if there is one, and room for it."""
        if not self._waiting or len(self._running) + len(self._read) >= self.rows:
            return False
        request = self._waiting.popleft()
        cache = self._reader.new_cache() if request.start is None else request.start
        request.start = None  # it is read on
        self._reading = _Reading(request, cache, request.prompt[None].to(self._reader.device))
        return True

    def _regroup(self) -> None:
        """The batch without sequences that have ended, with those whose prompts were read."""
        self._waiting = deque(request for request in self._waiting if not request.finished)
        if self._reading is not None and self._reading.request.finished:
            self._reading = None
        staying = [row for row, request in enumerate(self._running) if not request.finished]
        fresh = [reading for reading in self._read if not reading.request.finished]
        if len(staying) < len(self._running) or fresh:
            before = [self._cache.select(staying)] if self._cache is not None and staying else []
            caches = [*before, *(reading.cache for reading in fresh)]
            self._cache = self._reader.join(caches) if caches else None
            self._running = [self._running[row] for row in staying] + [reading.request for reading in fresh]
        self._read = []
