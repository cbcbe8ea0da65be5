"""What a training step sees. Every sample is a pure function of (seed, index): no global generator, no hidden order.

Index runs over all epochs: sample i belongs to epoch `i // per_epoch`, and each epoch has an order of its own. A run
resumed at sample i therefore goes on exactly as one that was never interrupted, however far a loader reads ahead.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.checks import data as checks
from subquad.data.corpus import Corpus
from subquad.data.vocabulary import Vocabulary

OBJECTIVES = ("causal", "masked")
MASKED_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1  # of all; of those: hidden, replaced, the rest left as they are
IGNORED = -100


class Samples(Dataset, ABC):
    """Sample i is a dict of `input_ids` and `labels`, 1-D int64 tensors.

    Args:
        length: tokens per sample, at most.
        total: samples in all, over as many epochs as that takes; one epoch unless given.
        evaluation: hides all masked targets.
    """

    def __init__(
        self,
        corpus: Corpus,
        length: int,
        *,
        objective: str,
        seed: int,
        total: int | None = None,
        evaluation: bool = False,
    ) -> None:
        checks.objective(objective, corpus.vocabulary.mask)
        self.corpus, self.length, self.objective, self.seed = corpus, length, objective, seed
        self._total, self.evaluation = total, evaluation
        self._order = lru_cache(maxsize=2)(self._shuffle)
        self.per_epoch = self.count()

    @abstractmethod
    def count(self) -> int:
        """Samples per epoch."""

    def __len__(self) -> int:
        return self.per_epoch if self._total is None else self._total

    @abstractmethod
    def tokens(self, index: int) -> np.ndarray:
        """Token ids of sample `index`."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.tokens(index).astype(np.int64))
        if self.objective == "causal":
            return {"input_ids": tokens, "labels": tokens}
        random = np.random.default_rng([self.seed, 1, index])
        return mask_tokens(tokens, self.corpus.vocabulary, random, hide_all=self.evaluation)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.corpus))


class Windows(Samples):
    """Fixed windows over all sequences, one after another with a separator behind each, as in the Performer paper.

    A window may hold parts of several sequences, and attention sees across the separators.
    """

    def count(self) -> int:
        tokens = self.corpus.num_tokens + len(self.corpus)
        checks.window_fits(self.length, tokens)
        self._ends = lru_cache(maxsize=2)(self._ends_of)
        return tokens // self.length

    def _ends_of(self, epoch: int) -> np.ndarray:
        """Where each sequence's separator ends, in the order of the epoch."""
        return np.cumsum(self.corpus.lengths[self._order(epoch)] + 1)

    def tokens(self, index: int) -> np.ndarray:
        epoch, window = divmod(index, self.per_epoch)
        order, ends = self._order(epoch), self._ends(epoch)
        start = window * self.length
        out = np.full(self.length, self.corpus.vocabulary.sep, self.corpus.vocabulary.dtype)
        filled, place = 0, int(np.searchsorted(ends, start, side="right"))
        while filled < self.length:
            sequence = self.corpus[order[place]]
            begin = start + filled - (int(ends[place]) - len(sequence) - 1)
            piece = sequence[begin : begin + self.length - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece) + 1  # the separator is there already
            place += 1
        return out


class Crops(Samples):
    """One sequence per sample, or a random stretch of it if it is longer than `length`; shorter ones are padded."""

    def count(self) -> int:
        checks.crop_length(self.length)
        return len(self.corpus)

    def tokens(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.per_epoch)
        sequence, sep = self.corpus[self._order(epoch)[place]], self.corpus.vocabulary.sep
        whole = np.concatenate([[sep], sequence, [sep]]).astype(self.corpus.vocabulary.dtype)
        spare = len(whole) - self.length
        start = int(np.random.default_rng([self.seed, 2, index]).integers(spare + 1)) if spare > 0 else 0
        return whole[start : start + self.length]


class Images(Samples):
    """One image per sample, whole, behind a separator."""

    def __init__(self, corpus: Corpus, **options: Any) -> None:
        super().__init__(corpus, int(corpus.lengths.max()) + 1, **options)

    def count(self) -> int:
        return len(self.corpus)

    def tokens(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.per_epoch)
        return np.concatenate([[self.corpus.vocabulary.sep], self.corpus[self._order(epoch)[place]]])


def mask_tokens(
    tokens: Tensor, vocabulary: Vocabulary, random: np.random.Generator, *, hide_all: bool = False
) -> dict[str, Tensor]:
    """BERT's objective: 15 % of the content is to be predicted; 80 % of that is hidden, 10 % replaced, 10 % left.

    `hide_all`: all of it is hidden, as evaluation wants it; a token left as it is gives its answer away.
    """
    special = (tokens == vocabulary.pad) | (tokens == vocabulary.sep) | (tokens == vocabulary.mask)
    content = torch.nonzero(~special)[:, 0].numpy()
    chosen = content[random.random(len(content)) < MASKED_SHARE]
    if not len(chosen) and len(content):
        chosen = content[[random.integers(len(content))]]
    labels, inputs = torch.full_like(tokens, IGNORED), tokens.clone()
    labels[chosen] = tokens[chosen]
    kind = random.random(len(chosen)) * (MASK_SHARE if hide_all else 1)
    assert vocabulary.mask is not None
    inputs[chosen[kind < MASK_SHARE]] = vocabulary.mask
    replaced = chosen[(kind >= MASK_SHARE) & (kind < MASK_SHARE + RANDOM_SHARE)]
    ordinary = np.asarray(vocabulary.ordinary)
    inputs[replaced] = torch.from_numpy(ordinary[random.integers(len(ordinary), size=len(replaced))])
    return {"input_ids": inputs, "labels": labels}


class Collator:
    """Samples of any lengths in one batch, padded on the right; a mask only where something was padded."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        pad_to = torch.nn.utils.rnn.pad_sequence
        batch = {
            "input_ids": pad_to([s["input_ids"] for s in samples], True, self.pad),
            "labels": pad_to([s["labels"] for s in samples], True, IGNORED),
        }
        if bool((lengths != lengths[0]).any()):
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return batch


class Unigram(NamedTuple):
    """What a model knows that has counted tokens and nothing else. loss: nats per target."""

    loss: float
    accuracy: float


def unigram_baseline(train: Corpus, samples: Samples, count: int) -> Unigram:
    """On the targets of the first `count` samples, with the frequencies (plus one) of `train`."""
    vocabulary = train.vocabulary
    counts = np.ones(vocabulary.size)
    for sequence in train:
        counts += np.bincount(sequence, minlength=vocabulary.size)
    if not isinstance(samples, Images):
        counts[vocabulary.sep] += len(train)
    first = 1 if samples.objective == "causal" else 0
    labels = np.concatenate([samples[i]["labels"][first:].numpy() for i in range(count)])
    labels = labels[labels != IGNORED]
    log_probability = np.log(counts / counts.sum())
    return Unigram(float(-log_probability[labels].mean()), float((labels == counts.argmax()).mean()))
