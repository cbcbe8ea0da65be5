"""Which candidate each key head gets, so that what is to be kept small is as small as a budget for the other allows."""

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 60  # of the bisection: the price is known to 18 digits


CONSTANT, GROWING = ("window", "features"), ("pages", "exact")


class Budget(NamedTuple):
    """what: "constant", "exact" (a share of the key heads), "cache" (of their memory) or "loss" (of perplexity)."""

    what: str
    share: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """What a key head may become."""
        return CONSTANT if self.what == "constant" else (*CONSTANT, *GROWING)

    @property
    def of_memory(self) -> bool:
        return self.what in ("cache", "loss")

    def __str__(self) -> str:
        return self.what if self.what == "constant" else f"{self.what} {100 * self.share:g}%"


def cheapest(value: Tensor, cost: Tensor, limit: float) -> Tensor:
    """int64 `[N]`: a candidate for each head: the sum of `value` is small, that of `cost` is within the limit.

    value, cost: float64 `[N, C]`. Of all price levels one is sought at which heads that each choose for themselves, by
    value + price * cost, just stay within the limit (Lagrange); what is then left is spent where it helps most. The
    cheapest candidates are within the limit.
    """
    low, high = 0.0, 1.0
    while _total(cost, _at_price(value, cost, high)) > limit and high < 1e30:
        high *= 4
    if _total(cost, _at_price(value, cost, low)) <= limit:
        return _at_price(value, cost, low)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _total(cost, _at_price(value, cost, middle)) <= limit:
            high = middle
        else:
            low = middle
    return _spend_the_rest(value, cost, _at_price(value, cost, high), limit)


def _at_price(value: Tensor, cost: Tensor, price: float) -> Tensor:
    """Ties go to the earlier candidate."""
    return (value + price * cost).argmin(1)


def _total(of: Tensor, chosen: Tensor) -> float:
    return of.gather(1, chosen[:, None]).sum().item()


def _spend_the_rest(value: Tensor, cost: Tensor, chosen: Tensor, limit: float) -> Tensor:
    """One change of one head at a time: the one that helps most and still fits."""
    chosen = chosen.clone()
    while True:
        now_value, now_cost = (x.gather(1, chosen[:, None]) for x in (value, cost))
        room = limit - now_cost.sum().item()
        gain = torch.where(cost - now_cost <= room, now_value - value, 0)
        best = int(gain.argmax())
        if not gain.flatten()[best] > 0:
            return chosen
        chosen[best // value.shape[1]] = best % value.shape[1]
