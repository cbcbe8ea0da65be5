"""What a key head of a converted layer can be, and what each of that costs: nats per token, and bytes of its state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.calibration.fitted import learned_attention
from subquad.conversion.budget import GROWING
from subquad.mechanism import Mechanism, state_bytes
from subquad.mechanisms.favor import FavorAttention
from subquad.nn.self_attention import layer_mechanism
from subquad.recording.calls import Call

NEAR = 16  # tokens of a near block: a window of W tokens keeps 16 more, of which half are seen
ROWS = 256  # queries of each call that the start of learned features is fitted to


class Candidate(NamedTuple):
    """kind: one of KINDS. attention, options: the mechanism, as `swap_attention` takes it."""

    kind: str
    attention: str
    options: dict[str, Any]

    @property
    def grows(self) -> bool:
        """Whether its state grows with the length."""
        return self.kind in GROWING

    def __str__(self) -> str:
        return f"window {self.options['window']}" if self.kind == "window" else self.kind


class Shape(NamedTuple):
    """Sizes of the exact window and of the far field. window: 0 for none, and then no sinks either."""

    window: int
    sinks: int
    num_features: int


def candidates(shape: Shape, kinds: Sequence[str], windows: Sequence[int] = ()) -> list[Candidate]:
    """Those of the given kinds; `windows` are further widths that a head may have, without features."""
    found = []
    if "window" in kinds:
        found += [_window(width, shape.sinks) for width in sorted({*windows, shape.window}) if width]
    if "features" in kinds:
        exact = {"near": 0, "sinks": 0}
        if shape.window:
            exact = {"near": NEAR, "reach": shape.window // NEAR, "sinks": shape.sinks}
        options = {"num_features": shape.num_features, "estimator": "hedgehog", **exact}
        found.append(Candidate("features", "favor", options))
    if "pages" in kinds:
        found.append(Candidate("pages", "pages", {"window": shape.window // 2, "sinks": shape.sinks}))
    if "exact" in kinds:
        found.append(Candidate("exact", "softmax", {}))
    return found


def _window(width: int, sinks: int) -> Candidate:
    """Global tokens of a causal window are sinks: all later tokens see them."""
    return Candidate("window", "window", {"window": width, "global_tokens": sinks})


class Price(NamedTuple):
    """Of one candidate in one layer, for each key head: float64 `[K]`. copying: nats per token that is read again."""

    nats: Tensor
    copying: Tensor
    nbytes: Tensor


class Priced(NamedTuple):
    """One layer. prices: by the words for the candidate. all_nbytes: of the keys and values of a head, which exact
    attention keeps. features: what was fitted, by the name of the parameter, `[K, ...]`; empty if nothing was."""

    prices: dict[str, Price]
    all_nbytes: float
    features: dict[str, Tensor]

    def missing(self, found: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in found if str(candidate) not in self.prices]

    def table(self, found: Sequence[Candidate]) -> Price:
        """float64 `[K, C]`."""
        chosen = [self.prices[str(candidate)] for candidate in found]
        return Price(*(torch.stack(column, 1) for column in zip(*chosen, strict=True)))

    def joined(self, other: "Priced") -> "Priced":
        return Priced(self.prices | other.prices, other.all_nbytes, self.features | other.features)


NOTHING = Priced({}, 0.0, {})


class Judges(NamedTuple):
    """What candidates are priced by. calls: of held-out batches. sensitivity `[H, Dv, Dv]`: see
    `conversion/sensitivity.py`. copies, of_copies: the same of texts that are read twice; there may be none."""

    calls: Sequence[Call]
    sensitivity: Tensor
    copies: Sequence[Call]
    of_copies: Tensor

    def answered(self) -> "Judges":
        """With the outputs of exact attention."""
        calls, copies = (
            [call.answered(call.exact(), exact=True) for call in some] for some in (self.calls, self.copies)
        )
        return self._replace(calls=calls, copies=copies)


def priced(
    found: Sequence[Candidate],
    fit: Sequence[Call],
    judges: Judges,
    *,
    dtype: torch.dtype,
    layer: int,
    steps: int,
    seed: int,
) -> Priced:
    """Fits features to the calls `fit`, and prices all candidates. All calls are in float32 at least.

    dtype: of the model, and so of most of its states.
    """
    fit, judges = [call.answered(call.exact(), exact=True) for call in fit], judges.answered()
    held = judges.calls
    features: dict[str, Tensor] = {}
    prices: dict[str, Price] = {}
    all_nbytes = max(_bytes_of_all(call, dtype) for call in held)
    free = torch.zeros(held[0].k.shape[1], dtype=torch.float64)
    for candidate in found:
        lost, copying, kept = free, free, all_nbytes
        if candidate.kind != "exact":
            mechanism = _made(candidate, held[0], layer)
            if isinstance(mechanism, FavorAttention):
                how = {"steps": steps, "rows": ROWS, "seed": seed}
                mechanism = learned_attention(mechanism, fit, "hedgehog", mechanism.num_features, **how)
                features = {name: x.detach() for name, x in mechanism.features.named_parameters()}
            lost = _lost(mechanism, held, judges.sensitivity)
            if judges.copies:
                copying = _lost(mechanism, judges.copies, judges.of_copies, second_half=True)
            kept = max(_state_bytes(mechanism, call, dtype) for call in held)
        prices[str(candidate)] = Price(lost, copying, torch.full_like(lost, kept))
    return Priced(prices, all_nbytes, features)


def _made(candidate: Candidate, call: Call, layer: int) -> Mechanism:
    """For all key heads of the layer of the call."""
    head_dim, key_heads = call.q.shape[-1], call.k.shape[1]
    scale = {} if call.scale == head_dim**-0.5 else {"scale": call.scale}
    made = layer_mechanism(
        candidate.attention, candidate.options | scale, head_dim=head_dim, key_heads=key_heads, layer=layer
    )
    return made.to(call.q.device)


@torch.no_grad()
def _lost(mechanism: Mechanism, calls: Sequence[Call], sensitivity: Tensor, *, second_half: bool = False) -> Tensor:
    """Nats per token, `[K]`; not a number where there is no token."""
    lost, tokens = torch.zeros(calls[0].q.shape[1], dtype=torch.float64), 0
    for call in calls:
        rows = slice(call.q.shape[2] // 2 if second_half else 0, None)
        off, real = (call.attend(mechanism) - call.exact())[:, :, rows], call.real[:, rows]
        off = torch.where(real[:, None, :, None], off, 0).transpose(0, 1).flatten(1, 2).float()
        lost += ((off @ sensitivity) * off).sum((1, 2)).double().cpu() / 2
        tokens += int(real.sum())
    return (lost / tokens).unflatten(0, (calls[0].k.shape[1], -1)).sum(1)


@torch.no_grad()
def _state_bytes(mechanism: Mechanism, call: Call, dtype: torch.dtype) -> float:
    """What is kept for each sequence and key head; 0 for what is not causal."""
    if not call.causal:
        return 0.0
    one = call.sequences(torch.tensor([0], device=call.q.device))
    q, k, v = (x.to(dtype) for x in (one.q, one.k, one.v))
    _, state = mechanism.extend(q, k, v)
    return state_bytes(state) / one.k.shape[1]


def _bytes_of_all(call: Call, dtype: torch.dtype) -> float:
    """Keys and values of one head."""
    return float((call.k[0, 0].numel() + call.v[0, 0].numel()) * dtype.itemsize) if call.causal else 0.0
