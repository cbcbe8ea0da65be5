"""Whether an answer is right: by the definition, or by the torch engine, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad import Mechanism
from subquad.kernels.problem import FLOOR
from subquad.testing.inputs import relative_error

SINGLE = 1e-5  # what the README promises of float32


class WrongAnswerError(AssertionError):
    pass


class RefusedError(Exception):
    """By torch or by subquad, before anything was computed."""


def double(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x


def allowed(dtype: torch.dtype) -> float:
    """float64: a few roundings. float32: what is promised. Less: computed in float32, rounded once."""
    if dtype == torch.float64:
        return 1e-9
    return SINGLE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


def judge(what: str, got: Tensor, want: Tensor, size: float = 0.0) -> None:
    if got.shape != want.shape:
        raise WrongAnswerError(f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}")
    if not bool(want.isfinite().all()):
        return
    error = relative_error(got, want, size)
    if error > allowed(got.dtype):
        raise WrongAnswerError(f"{what}: relative error {error:.1e}")


def judge_forward(mechanism: Mechanism, given: dict[str, Any], causal: Any, out: Tensor) -> None:
    if mechanism.name in ("lsh", "cluster") and out.dtype not in (torch.float32, torch.float64):
        return  # buckets are found in float32 whatever the dtype: compared in float64 below
    exact = [double(given[n]) for n in "qkv"]
    want = as_double(mechanism, lambda: mechanism.reference(*exact, causal=causal, key_mask=given["key_mask"]))
    naive = 0.0
    if out.dtype not in (torch.float32, torch.float64) or mechanism.name in ("softmax", "linformer", "mixed"):
        naive = relative_error(out, want)  # torch's own kernels round as they like: judged by their own definition
        own = relative_error(
            mechanism.reference(*(given[n] for n in "qkv"), causal=causal, key_mask=given["key_mask"]), want
        )
        if naive <= 2 * own + 2 * torch.finfo(out.dtype).eps:
            return
    # projections have both signs: what they leave may be small beside what was rounded
    judge("output", out, want, double(given["v"]).norm().item() if mechanism.name == "linformer" else 0.0)


def judge_gradients(
    mechanism: Mechanism,
    given: dict[str, Any],
    causal: Any,
    leaves: list[Tensor],
    direction: Tensor,
    got: tuple[Any, ...],
) -> None:
    if direction.dtype not in (torch.float32, torch.float64) or mechanism.name in ("lsh", "cluster"):
        return
    exact = {id(given[n]): double(given[n]).requires_grad_() for n in "qkv"}
    tensors = [exact[id(given[n])] for n in "qkv"]
    out = as_double(mechanism, lambda: mechanism.reference(*tensors, causal=causal, key_mask=given["key_mask"]))
    want = torch.autograd.grad(out, [exact[id(x)] for x in leaves], direction.double(), allow_unused=True)
    size = max(t.norm().item() for t in (direction, *want) if t is not None)
    for g, w in zip(got, want, strict=True):
        if g is not None and w is not None:
            judge("gradient", g, w, size)


def judge_extend(mechanism: Mechanism, given: dict[str, Any], state: Any, out: Tensor, after: Any) -> None:
    """The same by the torch engine in float64, from the state as it was converted."""
    if mechanism.name in ("lsh", "cluster") and out.dtype != torch.float64:
        return
    if callable(getattr(mechanism, "feature_map", None)) and out.dtype != torch.float64:
        return  # a function gets what it would get in the definition, and rounds as it likes
    past = None
    if state is not None:
        past = type(state)(
            *(t.to(a.dtype).double() if a.is_floating_point() else t for t, a in zip(state, after, strict=True))
        )
        for name in past._fields:
            if name.endswith("far_max") and getattr(state, name).dtype != getattr(after, name).dtype:
                past = past._replace(**{name: getattr(past, name).clamp(min=FLOOR)})
    q, k, v = (double(given[n]) for n in "qkv")
    with torch.no_grad():
        want, want_after = as_double(mechanism, lambda: mechanism.extend(q, k, v, past, key_mask=given["key_mask"]))
    judge("extended", out, want)
    for name, g, w in zip(after._fields, after, want_after, strict=True):
        if not g.is_floating_point() and not torch.equal(g, w):
            raise WrongAnswerError(f"state.{name}: other numbers")
        if g.is_floating_point() and not name.endswith(("far_max", "far_low")):  # of parts of `mixed`, too
            judge(f"state.{name}", total(name, g, after), total(name, w, want_after))


def total(name: str, tensor: Tensor, state: Any) -> Tensor:
    """A sum with what was rounded off it, where a state keeps that."""
    low = getattr(state, name.replace("far_sum", "far_low"), None) if name.endswith("far_sum") else None
    return tensor if low is None else (tensor.double() + low.double()).to(tensor.dtype)


def as_double(mechanism: Mechanism, call: Callable[[], Any]) -> Any:
    """By the torch engine, with weights in float64."""
    modules: list[Any] = [module for module in mechanism.modules() if isinstance(module, Mechanism)]
    options: list[tuple[Any, Any]] = [(module, getattr(module, "options", None)) for module in modules]
    weights = {name: p.detach().clone() for name, p in mechanism.named_parameters()}
    try:
        for module, own in options:
            if hasattr(own, "backend"):
                module.options = own._replace(backend="torch")
        mechanism.double()
        return call()
    finally:
        mechanism.float()
        for name, p in mechanism.named_parameters():
            p.data.copy_(weights[name])
        for module, own in options:
            if own is not None:
                module.options = own
