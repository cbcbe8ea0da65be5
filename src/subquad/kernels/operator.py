"""Operations of the engines as torch operators: opaque to `torch.compile` and `torch.export`, with their own gradients.

An `Operation` is attention that goes through a state: FAVOR and linear attention. The fields of two NamedTuples are
its arguments: the inputs, all tensors, and the options, all numbers and words. Nothing counts positions. Letters as in
`blocks.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from subquad import checks
from subquad.kernels import arguments, engines
from subquad.kernels.arguments import Declared, Sizes
from subquad.kernels.centre import LOW
from subquad.kernels.precision import without_autocast
from subquad.kernels.problem import Gradients, Outputs, Saved, keeps_low

SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", bool: "bool", float: "float", str: "str"}


def schema_of(*records: type[NamedTuple]) -> str:
    """The fields of NamedTuples as arguments of an operator."""
    fields = [field for record in records for field in get_type_hints(record).items()]
    return ", ".join(f"{SCHEMA[kind]} {name}" for name, kind in fields)


def make_operator(name: str, implementation: Any, fake: Any, schema: str) -> Any:
    operator: Any = torch.library.custom_op(
        f"subquad::{name}", without_autocast(implementation), mutates_args=(), schema=schema
    )
    operator.register_fake(fake)
    return operator


def refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise checks.no_double_backward()


def grad_or_zeros(grad_out: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of `out`, of its dtype: a hook may have changed that."""
    if grad_out is None:
        return torch.zeros_like(out)
    return grad_out if grad_out.dtype == out.dtype or not grad_out.is_floating_point() else grad_out.to(out.dtype)


def _needs_gradients(tensors: list[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class Operation:
    """`subquad::NAME_forward` and `subquad::NAME_backward`, done by the engine that the options name.

    torch wants many functions of an operator (real, fake, what is saved, gradients), forward and backward: each is a
    method here.

    Args:
        inputs, options: the records.
        of_map: inputs that belong to the feature map; their gradients are computed only if one of them needs its own.
        sizes: checks a call, and tells its sizes.
        saved: how the tensors are declared that the backward gets.
        normalisers: sizes of a row's normaliser.
    """

    others = ("sink_k", "sink_v", "log_weight", "far_sum")  # inputs with gradients, beside q, k, v and the map's

    def __init__(
        self,
        name: str,
        inputs: Any,
        options: Any,
        *,
        of_map: tuple[str, ...],
        sizes: Callable[[str, Any, Any], Sizes],
        saved: Declared,
        normalisers: tuple[int, ...],
    ) -> None:
        self.name, self.inputs, self.options = name, inputs, options
        self.of_map, self.sizes, self.saved, self.normalisers = of_map, sizes, saved, normalisers
        names = ("q", "k", "v", *of_map, *self.others)
        self.differentiable = tuple(name for name in inputs._fields if name in names)
        arguments, outputs = schema_of(inputs, options), ", ".join(["Tensor"] * len(Outputs._fields))
        self.forward = make_operator(
            f"{name}_forward", self._forward, self._fake_forward, f"({arguments}) -> ({outputs})"
        )
        schema = f"({schema_of(Saved)}, bool want_map, {arguments}) -> Tensor[]"
        self.backward = make_operator(f"{name}_backward", self._backward, self._fake_backward, schema)
        self.forward.register_autograd(self._gradients, setup_context=self._save)
        self.backward.register_autograd(refuse_double_backward)

    def run(
        self, inputs: Any, options: Any, *, near: bool = False, signed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output `[B, H, T, Dv]` and, when causal, the far field after the last token (max, sum)."""
        checks.no_transforms(inputs.q, inputs.k, inputs.v)
        borders = _needs_gradients([getattr(inputs, name) for name in self.differentiable])
        needs = {"near": near, "signed": signed, "gradients": borders, **self.needs(options)}
        engine = engines.choose(self.name, options.backend, inputs.q, **needs)
        outputs = self.forward(*inputs, *options._replace(backend=engine.name, borders=borders))
        out, *_, far_max, far_sum = outputs
        return out, far_max, far_sum

    def needs(self, options: Any) -> dict[str, bool]:
        """What else an engine must be able to do."""
        return {}

    def keeps_state(self, options: Any) -> bool:
        """Whether there is a far field."""
        return True

    def with_all_inputs(self, inputs: Any, options: Any) -> Any:
        """Inputs as the engines want them."""
        return inputs

    def with_own_gradients(self, gradients: Gradients, inputs: Any, options: Any) -> Gradients:
        """Gradients of the inputs as they were given."""
        return gradients

    def _engine(self, options: Any) -> Any:
        return engines.ENGINES[options.backend].operations[self.name]

    def _parse(self, op: str, args: tuple[Any, ...]) -> tuple[Any, Any, Sizes]:
        count = len(self.inputs._fields)
        inputs, options = self.inputs(*args[:count]), self.options(*args[count:])
        return inputs, options, self.sizes(op, inputs, options)

    def _parse_backward(self, args: tuple[Any, ...]) -> tuple[Saved, bool, Any, Any]:
        count = len(Saved._fields)
        saved, want_map, rest = Saved(*args[:count]), args[count], args[count + 1 :]
        inputs, options, sizes = self._parse(f"{self.name}_backward", rest)
        borders = self._border_count(inputs, options._replace(borders=True))
        arguments.saved(sizes, self.saved, borders, saved._asdict())
        return saved, want_map, inputs, options

    def _border_count(self, inputs: Any, options: Any) -> int:
        """How many states the forward keeps for the backward."""
        batch, heads, length, _ = inputs.q.shape
        return self._engine(options).border_count(length, batch * heads, inputs.num_features, options)

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, options, _ = self._parse(f"{self.name}_forward", args)
        return tuple(self._engine(options).forward(self.with_all_inputs(inputs, options), options))

    def _fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, options, sizes = self._parse(f"{self.name}_forward", args)
        q, value_dim = inputs.q, inputs.v.shape[-1]
        dtype, rows = torch.promote_types(q.dtype, torch.float32), (*q.shape[:3], value_dim)
        heads, borders = (q.shape[0], inputs.k.shape[1]), self._border_count(inputs, options)
        far_max, far_sum = (*heads, sizes["maxima"]), (*heads, sizes["M"], value_dim + 1)
        far = self.keeps_state(options)
        return Outputs(
            out=q.new_empty(rows),
            normaliser=q.new_empty(*q.shape[:3], *self.normalisers, dtype=dtype),
            low=q.new_empty(rows if keeps_low(q, options.borders and far) else (0,), dtype=LOW),
            borders_max=q.new_empty(borders, *far_max, dtype=dtype),
            borders_sum=q.new_empty(borders, *heads, sizes["M"] + 1, value_dim + 1, dtype=dtype),
            far_max=q.new_empty(far_max if options.causal and far else (0,), dtype=dtype),
            far_sum=q.new_empty(far_sum if options.causal and far else (0,), dtype=dtype),
        )

    def _backward(self, *args: Any) -> list[Tensor]:
        saved, want_map, inputs, options = self._parse_backward(args)
        everything = self.with_all_inputs(inputs, options)
        gradients = self._engine(options).backward(everything, options, saved, want_map)
        gradients = self.with_own_gradients(gradients, inputs, options)
        made = []
        for name in self.differentiable:
            wanted = self._is_wanted(name, inputs, want_map)
            made.append(gradients[name].to(getattr(inputs, name).dtype) if wanted else saved.borders_sum.new_empty(0))
        return made

    def _fake_backward(self, *args: Any) -> list[Tensor]:
        saved, want_map, inputs, _ = self._parse_backward(args)
        made = []
        for name in self.differentiable:
            wanted, tensor = self._is_wanted(name, inputs, want_map), getattr(inputs, name)
            made.append(tensor.new_empty(tensor.shape) if wanted else saved.borders_sum.new_empty(0))
        return made

    def _is_wanted(self, name: str, inputs: Any, want_map: bool) -> bool:
        return getattr(inputs, name) is not None and (want_map or name not in self.of_map)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        outputs, count = Outputs(*output), len(self.inputs._fields)
        ctx.set_materialize_grads(False)
        ctx.options = inputs[count:]
        kept = (outputs.out, outputs.normaliser, outputs.low, outputs.borders_max, outputs.borders_sum)
        ctx.save_for_backward(*kept, *inputs[:count])
        ctx.mark_non_differentiable(*(t for name, t in outputs._asdict().items() if name not in ("out", "far_sum")))

    def _gradients(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_outputs = Outputs(*grads)
        out, normaliser, low, borders_max, borders_sum, *tensors = ctx.saved_tensors
        inputs = self.inputs(*tensors)
        names = self.inputs._fields
        want_map = any(ctx.needs_input_grad[names.index(name)] for name in self.of_map)
        grad_state = grad_outputs.far_sum
        if grad_state is not None:  # it is empty when there is no last state (not causal)
            grad_state = grad_or_zeros(grad_state, borders_sum) if grad_state.numel() else None
        low = low if low.numel() else None
        saved = Saved(grad_or_zeros(grad_outputs.out, out), out, normaliser, low, borders_max, borders_sum, grad_state)
        found = dict(zip(self.differentiable, self.backward(*saved, want_map, *inputs, *ctx.options), strict=True))
        wanted = {name: grad for name, grad in found.items() if self._is_wanted(name, inputs, want_map)}
        return (*(wanted.get(name) for name in names), *(None for _ in ctx.options))
