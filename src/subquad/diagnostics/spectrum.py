"""Are attention matrices of low rank? Their singular values, as in Figure 1 of the Linformer paper."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from subquad import files
from subquad.checks import diagnostics as checks
from subquad.diagnostics.matrices import attention_matrices, shuffled_rows
from subquad.recording.stream import evaluating


@dataclass(frozen=True)
class SpectrumResult:
    """Singular values of attention matrices over `length` tokens, the mean over `sequences`.

    cumulative: float64 `[layers, heads, length]`; entry r - 1 is the share of their sum that the r largest hold.
    """

    cumulative: Tensor
    sequences: int

    @property
    def length(self) -> int:
        return self.cumulative.shape[-1]

    def captured(self, rank: int) -> Tensor:
        """`[layers, heads]`: the share that the first `rank` hold."""
        checks.rank(rank, self.length)
        return self.cumulative[..., rank - 1]

    def rank_for(self, share: float) -> Tensor:
        """int64 `[layers, heads]`: the fewest singular values that hold `share` of the sum."""
        checks.share(share)
        return ((self.cumulative < share).sum(-1) + 1).clamp(max=self.length)

    def save(self, path: str | Path) -> None:
        """As JSON."""
        shares = [[[round(x, 6) for x in head] for head in layer] for layer in self.cumulative.tolist()]
        record = {"length": self.length, "sequences": self.sequences, "cumulative": shares}
        with checks.writable(Path(path)):
            files.write_text(path, json.dumps(record) + "\n")

    def plot(self, path: str | Path, *, title: str = "", control: "SpectrumResult | None" = None) -> None:
        """Curves of the layers and a map of the heads, as a picture. control: a dashed curve, the mean of all heads."""
        from subquad.diagnostics.plots import plot_spectrum

        plot_spectrum(self, Path(path), title, control)


def spectrum(
    model: nn.Module,
    batch: Tensor | Mapping[str, Tensor],
    *,
    length: int | None = None,
    shuffle: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SpectrumResult:
    """Cumulative singular values of all attention matrices of a model, by layer and head.

    Sequences run one by one, without their padding. Cost: O(length^3) for each matrix, quadratic memory.

    Args:
        model: any model with subquad mechanisms, or a Hugging Face model that can return attention weights.
        batch: token ids `[B, T]`, or the inputs of the model by name, with an `attention_mask` where there is padding.
        length: real tokens to take of each sequence, the first ones. None takes all; they must be equally many.
        shuffle: puts the weights of each row in random places first. What is low-rank still is so because rows are
            flat, not because they are alike: the control for a claim about structure.
        progress: called after each sequence.

    Example:
        >>> from subquad.models import SubquadConfig, SubquadModel
        >>> model = SubquadModel(SubquadConfig(vocab_size=10, hidden_size=32, num_hidden_layers=2))
        >>> spectrum(model, torch.arange(10)[None]).cumulative.shape
        torch.Size([2, 4, 10])
    """
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    real = checks.batch(inputs)
    tokens = checks.one_length(real, length)
    total = None
    with evaluating(model):
        for row, mask in enumerate(real):
            places = mask.nonzero()[:tokens, 0]
            alone = {name: x[row : row + 1, places] for name, x in inputs.items() if name != "attention_mask"}
            shares = _shares(attention_matrices(model, alone), shuffle, seed=row)
            total = shares if total is None else total + shares
            if progress is not None:
                progress(1)
    assert total is not None
    return SpectrumResult(total / len(real), len(real))


def _shares(matrices: list[Tensor], shuffle: bool, seed: int) -> Tensor:
    """`[layers, heads, n]`."""
    checks.alike(matrices)
    shares = []
    for layer, matrix in enumerate(matrices):
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        matrix = shuffled_rows(matrix, seed * len(matrices) + layer) if shuffle else matrix
        sums = torch.linalg.svdvals(matrix).double().cumsum(-1)
        shares.append(sums / sums[..., -1:])
    return torch.stack(shares).cpu()
