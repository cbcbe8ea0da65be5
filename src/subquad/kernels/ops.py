"""The two hot operations as torch operators: opaque to `torch.compile` and `torch.export`, with their own gradients.

`favor_attention` and `linear_attention` here are the engines' only doors; everything before them is plain torch.
"""

from typing import Any

import torch
from torch import Tensor

from subquad import checks
from subquad.features import FeatureMap
from subquad.kernels import arguments, favor, linear
from subquad.kernels.arguments import Sizes
from subquad.kernels.centre import LOW
from subquad.kernels.cpu import favor as cpu_favor
from subquad.kernels.cpu import linear as cpu_linear
from subquad.kernels.engines import choose_engine
from subquad.kernels.favor import EngineOptions, FavorInputs
from subquad.kernels.linear import LinearInputs, LinearOptions
from subquad.kernels.precision import without_autocast
from subquad.kernels.problem import Saved, keeps_low


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise checks.no_double_backward()


def make_operator(name: str, implementation: Any, fake: Any, schema: str) -> Any:
    operator: Any = torch.library.custom_op(
        f"subquad::{name}", without_autocast(implementation), mutates_args=(), schema=schema
    )
    operator.register_fake(fake)
    return operator


def grad_or_zeros(grad_out: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of `out`, of its dtype: a hook may have changed that."""
    if grad_out is None:
        return torch.zeros_like(out)
    return grad_out if grad_out.dtype == out.dtype or not grad_out.is_floating_point() else grad_out.to(out.dtype)


def _of_last_state(grads: tuple[Tensor | None, ...], like: Tensor) -> Tensor | None:
    """The gradient of `far_sum`; it is empty, and has none, when there is no last state (not causal)."""
    grad = grads[-1]
    return None if grad is None or not grad.numel() else grad_or_zeros(grad, like)


# FAVOR ----------------------------------------------------------------------------------------------------------------

_FAVOR_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor sink_k, Tensor sink_v, "
    "Tensor query, Tensor key, Tensor key_bias, Tensor? offset_weight, Tensor? offset_bias, "
    "Tensor? alive, Tensor? fold, Tensor? sink_seen, Tensor? far_max, Tensor? far_sum, "
    "str rule, int groups, int near, bool causal, float scale, bool gaussian, int chunk, bool borders, str engine"
)
_FAVOR_TENSORS = 15
_FAVOR_DIFFERENTIABLE = 10  # the leading ones, and far_sum
_FAVOR_ENGINES: dict[str, Any] = {"torch": favor, "cpu": cpu_favor}


def favor_attention(
    inputs: FavorInputs, *, near: int, causal: bool, scale: float, gaussian: bool, chunk: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, T, Dv]` and, when causal, the far field after the last token (max, sum)."""
    m = inputs.map
    checks.no_transforms(*inputs[:3])
    tensors = (*inputs[:5], m.query, m.key, m.key_bias, m.offset_weight, m.offset_bias, *inputs[6:])
    borders = _needs_gradients(*tensors[:_FAVOR_DIFFERENTIABLE], inputs.far_sum)
    engine = choose_engine("favor", backend, inputs.q)
    options = (m.rule, m.groups, near, causal, scale, gaussian, chunk, borders, engine)
    out, *_, far_max, far_sum = favor_forward(*tensors, *options)
    return out, far_max, far_sum


def _favor_problem(op: str, *args: Any) -> tuple[FavorInputs, EngineOptions, Sizes]:
    query, key, key_bias, offset_weight, offset_bias = args[5:10]
    rule, groups, *options = args[_FAVOR_TENSORS:]
    feature_map = FeatureMap(query, key, key_bias, rule, groups, offset_weight, offset_bias)
    tensors: tuple[Any, ...] = (*args[:5], feature_map, *args[10:_FAVOR_TENSORS])
    inputs, options = FavorInputs(*tensors), EngineOptions(*options)
    return inputs, options, arguments.favor(op, inputs, options, _FAVOR_ENGINES)


def _favor_borders(inputs: FavorInputs, options: EngineOptions) -> int:
    heads = inputs.q.shape[0] * inputs.q.shape[1]
    count = _FAVOR_ENGINES[options.engine].border_count
    return count(inputs.q.shape[2], heads, inputs.map.num_features, options)


def _favor_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, _ = _favor_problem("favor_forward", *args)
    return tuple(_FAVOR_ENGINES[options.engine].forward(inputs, options))


def _favor_forward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, _ = _favor_problem("favor_forward", *args)
    num_features, count = inputs.map.num_features, _favor_borders(inputs, options)
    return _fake_outputs(inputs, options, num_features, num_features, (2,), count)


def _fake_outputs(
    inputs: FavorInputs | LinearInputs,
    options: EngineOptions | LinearOptions,
    num_features: int,
    num_maxima: int,
    normaliser: tuple,
    borders: int,
) -> tuple[Tensor, ...]:
    q, k, v = inputs[:3]
    dtype, causal = torch.promote_types(q.dtype, torch.float32), options.causal
    heads, rows = (q.shape[0], k.shape[1]), (*q.shape[:3], v.shape[-1])
    far_max, far_sum = (*heads, num_maxima), (*heads, num_features, v.shape[-1] + 1)
    return (
        q.new_empty(rows),
        q.new_empty(*q.shape[:3], *normaliser, dtype=dtype),
        q.new_empty(rows if keeps_low(q, options.borders) else (0,), dtype=LOW),
        q.new_empty(borders, *far_max, dtype=dtype),
        q.new_empty(borders, *heads, num_features + 1, v.shape[-1] + 1, dtype=dtype),
        q.new_empty(far_max if causal else (0,), dtype=dtype),
        q.new_empty(far_sum if causal else (0,), dtype=dtype),
    )


def _fake_state_gradient(borders_sum: Tensor, causal: bool) -> Tensor:
    return borders_sum.new_empty(borders_sum[0, :, :, :-1].shape if causal else (0,))


def _favor_saved(*args: Any) -> tuple[FavorInputs, EngineOptions]:
    inputs, options, sizes = _favor_problem("favor_backward", *args[8:])
    borders = _favor_borders(inputs, options._replace(borders=True))
    given = zip(arguments.FAVOR_SAVED, args[:7], strict=True)
    arguments.saved(sizes, arguments.FAVOR_SAVED, borders, dict(given))
    return inputs, options


def _favor_backward(*args: Any) -> list[Tensor]:
    grad_out, out, lognorm, low, borders_max, borders_sum, grad_far_sum, want_map, *rest = args
    inputs, options = _favor_saved(*args)
    saved = Saved(grad_out, out, lognorm, low)
    gradients, grad_state, of_map = _FAVOR_ENGINES[options.engine].backward(
        inputs, options, saved, borders_max, borders_sum, grad_far_sum, want_map
    )
    of_tensors = [g.to(t.dtype) for g, t in zip(gradients, rest[:5], strict=True)]
    return [*of_tensors, *(of_map or ()), grad_state.clone()]


def _favor_backward_fake(*args: Any) -> list[Tensor]:
    _, _, _, _, _, borders_sum, _, want_map, *rest = args
    _favor_saved(*args)
    tensors = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in rest[:5]]
    dtype = borders_sum.dtype
    maps = [borders_sum.new_empty(0) if t is None else t.new_empty(t.shape, dtype=dtype) for t in rest[5:10]]
    state = _fake_state_gradient(borders_sum, causal=rest[18])
    return [*tensors, *(maps if want_map else ()), state]


favor_forward = make_operator(
    "favor_forward",
    _favor_forward,
    _favor_forward_fake,
    f"({_FAVOR_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
favor_backward = make_operator(
    "favor_backward",
    _favor_backward,
    _favor_backward_fake,
    "(Tensor grad_out, Tensor out, Tensor lognorm, Tensor? low, Tensor borders_max, Tensor borders_sum, "
    f"Tensor? grad_far_sum, bool want_map, {_FAVOR_ARGUMENTS}) -> Tensor[]",
)


def _favor_save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_FAVOR_TENSORS:]
    ctx.save_for_backward(*output[:5], *inputs[:_FAVOR_TENSORS])
    ctx.mark_non_differentiable(*output[1:6])


def _favor_gradients(ctx: Any, grad_out: Tensor | None, *others: Tensor | None) -> tuple:
    out, lognorm, low, borders_max, borders_sum, *tensors = ctx.saved_tensors
    want_map = any(ctx.needs_input_grad[5:_FAVOR_DIFFERENTIABLE])
    of_tensors = favor_backward(
        *(
            grad_or_zeros(grad_out, out),
            out,
            lognorm,
            low if low.numel() else None,
            borders_max,
            borders_sum,
            _of_last_state(others, borders_sum),
            want_map,
        ),
        *tensors,
        *ctx.options,
    )
    *of_tensors, of_state = of_tensors
    of_maps = of_tensors[5:] or [None] * 5
    of_maps = [None if t is None or g is None else g.to(t.dtype) for g, t in zip(of_maps, tensors[5:10], strict=True)]
    of_state = None if tensors[-1] is None else of_state
    return (*of_tensors[:5], *of_maps, *[None] * 4, of_state, *[None] * len(ctx.options))


favor_forward.register_autograd(_favor_gradients, setup_context=_favor_save)
favor_backward.register_autograd(refuse_double_backward)


# Linear attention -----------------------------------------------------------------------------------------------------

_LINEAR_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? weight, Tensor? log_weight, "
    "Tensor? alive, Tensor? far_max, Tensor? far_sum, "
    "str feature_map, bool causal, float root, int chunk, bool borders, str engine"
)
_LINEAR_TENSORS = 8
_LINEAR_ENGINES: dict[str, Any] = {"torch": linear, "cpu": cpu_linear}


def linear_attention(
    inputs: LinearInputs, *, feature_map: str, causal: bool, root: float, chunk: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, T, Dv]` and, when causal, the state after the last token (max, sum)."""
    checks.no_transforms(*inputs[:3])
    borders = _needs_gradients(*inputs[:5], inputs.far_sum)
    engine = choose_engine("linear", backend, inputs.q, signed=inputs.log_weight is not None)
    out, *_, far_max, far_sum = linear_forward(*inputs, feature_map, causal, root, chunk, borders, engine)
    return out, far_max, far_sum


def _linear_problem(op: str, *args: Any) -> tuple[LinearInputs, LinearOptions, Sizes]:
    inputs, options = LinearInputs(*args[:_LINEAR_TENSORS]), LinearOptions(*args[_LINEAR_TENSORS:])
    return inputs, options, arguments.linear(op, inputs, options, _LINEAR_ENGINES)


def _linear_borders(inputs: LinearInputs, options: LinearOptions, num_features: int) -> int:
    heads = inputs.q.shape[0] * inputs.q.shape[1]
    return _LINEAR_ENGINES[options.engine].border_count(inputs.q.shape[2], heads, num_features, options)


def _linear_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, _ = _linear_problem("linear_forward", *args)
    return tuple(_LINEAR_ENGINES[options.engine].forward(inputs, options))


def _linear_forward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, sizes = _linear_problem("linear_forward", *args)
    num_features = sizes["M"]
    count = _linear_borders(inputs, options, num_features)
    return _fake_outputs(inputs, options, num_features, 1, (), count)


def _linear_saved(*args: Any) -> tuple[LinearInputs, LinearOptions]:
    inputs, options, sizes = _linear_problem("linear_backward", *args[8:])
    borders = _linear_borders(inputs, options._replace(borders=True), sizes["M"])
    given = zip(arguments.LINEAR_SAVED, args[:7], strict=True)
    arguments.saved(sizes, arguments.LINEAR_SAVED, borders, dict(given))
    return inputs, options


def _linear_backward(*args: Any) -> list[Tensor]:
    grad_out, out, normaliser, low, borders_max, borders_sum, grad_far_sum, want_weight, *_ = args
    inputs, options = _linear_saved(*args)
    saved = Saved(grad_out, out, normaliser, low)
    backward = _LINEAR_ENGINES[options.engine].backward
    gradients = backward(inputs, options, saved, borders_max, borders_sum, grad_far_sum, want_weight)
    tensors = (*inputs[:5], borders_sum)
    return [g if t is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)]


def _linear_backward_fake(*args: Any) -> list[Tensor]:
    _, _, _, _, _, borders_sum, _, _, *rest = args
    _linear_saved(*args)
    state = _fake_state_gradient(borders_sum, causal=rest[9])
    tensors = [borders_sum.new_empty(0) if t is None else t.new_empty(t.shape) for t in rest[:5]]
    return [*tensors, state]


linear_forward = make_operator(
    "linear_forward",
    _linear_forward,
    _linear_forward_fake,
    f"({_LINEAR_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
linear_backward = make_operator(
    "linear_backward",
    _linear_backward,
    _linear_backward_fake,
    "(Tensor grad_out, Tensor out, Tensor normaliser, Tensor? low, Tensor borders_max, Tensor borders_sum, "
    f"Tensor? grad_far_sum, bool want_weight, {_LINEAR_ARGUMENTS}) -> Tensor[]",
)


def _linear_save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_LINEAR_TENSORS:]
    ctx.save_for_backward(*output[:5], *inputs[:_LINEAR_TENSORS])
    ctx.mark_non_differentiable(*output[1:6])


def _linear_gradients(ctx: Any, grad_out: Tensor | None, *others: Tensor | None) -> tuple:
    out, normaliser, low, borders_max, borders_sum, *tensors = ctx.saved_tensors
    gradients = linear_backward(
        *(
            grad_or_zeros(grad_out, out),
            out,
            normaliser,
            low if low.numel() else None,
            borders_max,
            borders_sum,
            _of_last_state(others, borders_sum),
            ctx.needs_input_grad[3],
        ),
        *tensors,
        *ctx.options,
    )
    of_tensors = [None if t is None else g for g, t in zip(gradients[:5], tensors[:5], strict=True)]
    of_state = None if tensors[-1] is None else gradients[-1]
    return (*of_tensors, None, None, of_state, *[None] * len(ctx.options))


linear_forward.register_autograd(_linear_gradients, setup_context=_linear_save)
linear_backward.register_autograd(refuse_double_backward)
