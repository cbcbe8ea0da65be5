"""Sums, maxima and logarithms in full precision, also where autocast would round every matrix product."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which takes its inputs in the dtype they come in, whatever autocast is on around it."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device_of(args, kwargs)
        if not _autocast_is_on(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of the first tensor. A loop, and no names of devices on CPUs: this runs with every token."""
    for values in (args, kwargs.values()):
        for x in values:
            if isinstance(x, Tensor):
                return "cpu" if x.is_cpu else x.device.type
    return "cpu"


def _autocast_is_on(device: str) -> bool:
    return (device == "cpu" or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def bounded_(x: Tensor) -> Tensor:
    """Queries or keys, in place, no larger than what can be squared and summed up over the last dimension.

    An infinite product is NaN once it meets another, and would reach every row of its tile, also those that may not see
    it. Where it matters, logits are beyond 1e36, and mean nothing in float32 anyway. NaN stays NaN.
    """
    most = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    limit = (most / (4 * x.shape[-1])) ** 0.5
    return x.clamp_(-limit, limit)
