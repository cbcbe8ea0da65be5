"""Sequences whose answers lie far back. Each batch is a pure function of a seed.

Letters: B sequences, T tokens.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import bench as checks

IGNORED = -100  # the label of tokens that nothing is asked of
NEVER = 1 << 40


class Batch(NamedTuple):
    """ids `[B, T]`; labels `[B, T]`, the token that should come next, or -100; distances `[B, T]`: how many tokens ago
    the answer was last to be seen, where a label is."""

    ids: Tensor
    labels: Tensor
    distances: Tensor


class Task(ABC):
    """`keys` says how much there is to remember."""

    name: str
    about: str
    vocabulary: int
    chance: float  # accuracy of a guess

    def __init__(self, keys: int, length: int) -> None:
        checks.recall_size(self.name, keys, length, self.least_length(keys))
        self.keys, self.length = keys, length

    @staticmethod
    @abstractmethod
    def least_length(keys: int) -> int:
        """The shortest sequence that has room for so many."""

    @abstractmethod
    def batch(self, size: int, seed: int) -> Batch:
        """`size` sequences; other seeds give other ones."""


class Recall(Task):
    """Pairs of a key and its value, which each sequence draws anew; a key that comes again asks for its value."""

    name, about = "recall", "associative recall"

    def __init__(self, keys: int, length: int) -> None:
        super().__init__(keys, length)
        self.vocabulary, self.chance = 2 * keys, 1 / keys

    @staticmethod
    def least_length(keys: int) -> int:
        return 2 * keys

    def batch(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pairs = self.length // 2
        keys = torch.randint(self.keys, (size, pairs), generator=generator)
        values = torch.randint(self.keys, (size, self.keys), generator=generator).gather(1, keys) + self.keys
        ids = torch.stack([keys, values], -1).flatten(1)
        since = 2 * _since_last(keys)
        labels = torch.where(since < NEVER, values, IGNORED)
        nothing = torch.full_like(labels, IGNORED)
        return Batch(ids, torch.stack([labels, nothing], -1).flatten(1), since.repeat_interleave(2, 1))


class Copy(Task):
    """`keys` random symbols, a long silence, a sign, and the symbols again."""

    name, about, symbols = "copy", "copying at a distance", 32

    def __init__(self, keys: int, length: int) -> None:
        super().__init__(keys, length)
        self.vocabulary, self.chance = self.symbols + 2, 1 / self.symbols

    @staticmethod
    def least_length(keys: int) -> int:
        return 2 * keys + 2

    def places(self, size: int, generator: torch.Generator) -> Tensor:
        """`[B, keys]`: where the symbols stand, in order."""
        return torch.arange(self.keys).expand(size, -1)

    def batch(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        silence, sign = self.symbols, self.symbols + 1
        symbols = torch.randint(self.symbols, (size, self.keys), generator=generator)
        places = self.places(size, generator)
        ids = torch.full((size, self.length), silence).scatter(1, places, symbols)
        begin = self.length - self.keys
        ids[:, begin - 1], ids[:, begin:] = sign, symbols
        labels, distances = torch.full_like(ids, IGNORED), torch.full_like(ids, NEVER)
        labels[:, begin - 1 : -1] = symbols
        distances[:, begin - 1 : -1] = torch.arange(begin, self.length) - places
        return Batch(ids, labels, distances)


class SelectiveCopy(Copy):
    """The symbols are scattered over the silence."""

    name, about = "selective", "selective copying"

    def places(self, size: int, generator: torch.Generator) -> Tensor:
        room = self.length - self.keys - 1
        return torch.rand(size, room, generator=generator).topk(self.keys).indices.sort().values


class Passkey(Task):
    """A number of `keys` digits, told in real text (the topics of Python's own help), asked for at the end."""

    name, about, vocabulary, chance = "passkey", "a passkey in real text", 256, 0.1
    told, asked = b" The pass key is %s. ", b" What is the pass key? The pass key is %s"

    def __init__(self, keys: int, length: int) -> None:
        super().__init__(keys, length)
        from pydoc_data.topics import topics  # English prose that every Python has

        self.text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()

    @staticmethod
    def least_length(keys: int) -> int:
        return 64 + len(Passkey.told) + len(Passkey.asked) + 2 * keys

    def batch(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        digits = torch.randint(ord("0"), ord("9") + 1, (size, self.keys), generator=generator)
        rows = [self._sequence(row, generator) for row in digits]
        ids = torch.stack([row for row, _ in rows])
        labels, distances = torch.full_like(ids, IGNORED), torch.full_like(ids, NEVER)
        asked = slice(self.length - self.keys - 1, self.length - 1)
        labels[:, asked] = digits
        distances[:, asked] = torch.tensor([[distance] for _, distance in rows])
        return Batch(ids, labels, distances)

    def _sequence(self, digits: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
        """The tokens, and how many tokens lie between a digit and the same digit when it is asked for."""
        number = bytes(digits.tolist())
        told, asked = (torch.tensor(list(words % number)) for words in (self.told, self.asked))
        room = self.length - len(told) - len(asked)
        begin = int(torch.randint(len(self.text) - room, (), generator=generator))
        place = int(torch.randint(room, (), generator=generator))
        text = self.text[begin : begin + room]
        first_digit = place + self.told.index(b"%s")
        return torch.cat([text[:place], told, text[place:], asked]), self.length - self.keys - first_digit


TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Copy, SelectiveCopy, Passkey)}


def make_task(name: str, keys: int, length: int) -> Task:
    """Example:
    >>> make_task("recall", keys=4, length=16).batch(2, seed=0).ids.shape
    torch.Size([2, 16])
    """
    checks.choice("bench recall", "task", name, tuple(TASKS))
    return TASKS[name](keys, length)


def _since_last(keys: Tensor) -> Tensor:
    """`[B, N]`: how many places ago the same key stood, NEVER if it did not."""
    count = keys.shape[1]
    order = keys.sort(dim=1, stable=True)
    same = order.values[:, 1:] == order.values[:, :-1]
    gaps = torch.where(same, order.indices[:, 1:] - order.indices[:, :-1], NEVER)
    first = torch.full((len(keys), 1), NEVER)
    return torch.empty(len(keys), count, dtype=torch.int64).scatter(1, order.indices, torch.cat([first, gaps], 1))
