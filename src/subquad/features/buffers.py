"""What the feature modules of layers have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from subquad.features.positive import FeatureMap


class Float32Buffers(nn.Module):
    """A module whose buffers move with it but stay float32, as `.half()` would make them other features."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Buffers":
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in buffers.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class LayerFeatures(Float32Buffers, ABC):
    """The features of one layer, drawn or learned."""

    num_features: int

    @property
    @abstractmethod
    def feature_map(self) -> "FeatureMap":
        """As data, for the engines."""

    def feature_map_for(self, dtype: torch.dtype) -> "FeatureMap":
        """The same, with no more digits than inputs of `dtype` can use."""
        return self.feature_map

    def feature_map_of_step(self, dtype: torch.dtype) -> "FeatureMap":
        """The same for one token in float32 or less, on a CPU: dense and float32, as engines want it, and soon."""
        made = self.feature_map_for(dtype)
        return made._replace(
            **{name: x.float().contiguous() for name, x in made._asdict().items() if isinstance(x, Tensor)}
        )

    @abstractmethod
    def reset_parameters(self) -> None:
        """As constructed."""
