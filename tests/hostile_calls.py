"""Wrong and right calls at random: each must end in an error that subquad words, or in the right answer.

Run as a script, in a process that may die: `python tests/hostile_calls.py --seed 0 --count 1000`. The call at work is
written to `--log`, so that one that kills the process can be repeated with `--seed S --first N --count 1`.
"""

import argparse
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostile_judging import RefusedError, WrongAnswerError, double, judge, judge_extend, judge_forward, judge_gradients
from hostile_operators import Operators
from hostile_values import DTYPES, mutate, odd_option, shown
from subquad import MECHANISMS, Mechanism, attention, functional
from subquad.errors import SubquadError, UncalibratedWarning
from subquad.features import draw_feature_map
from subquad.mechanisms.lsh import draw_rotations
from subquad.nn import ShortConvolution
from subquad.testing.inputs import relative_error

OPTIONS_OF: dict[str, tuple[dict[str, Any], ...]] = {
    "favor": (
        {"num_features": 8, "near": 4, "sinks": 2},
        {"num_features": 20, "near": 0, "sinks": 0, "num_heads": 2},
        {"num_features": 8, "near": 0, "sinks": 3, "kernel": "gaussian"},
        {"num_features": 40, "near": 3, "sinks": 0, "estimator": "hyperbolic", "chunk": 5},
        {"num_features": 8, "near": 4, "sinks": 2, "estimator": "hedgehog"},
        {"num_features": 8, "near": 4, "sinks": 2, "num_heads": 4},
        {"num_features": 8, "near": 2, "reach": 3, "sinks": 2},
        {"num_features": 8, "near": 3, "reach": 2, "sinks": 2, "far": False},
        {"num_features": 8, "near": 0, "sinks": 3, "far": False},
    ),
    "linear": (
        {},
        {"feature_map": "softplus", "num_features": 9, "num_heads": 2},
        {"feature_map": "exp"},
        {"feature_map": "elu1", "chunk": 3},
        {"feature_map": torch.exp},
    ),
    "softmax": ({},),
    "identity": ({},),
    "window": ({"window": 4}, {"window": 4, "dilation": 2, "global_tokens": 2}),
    "strided": ({"stride": 3}, {"stride": 4, "pattern": "fixed", "summary": 2}),
    "lsh": ({"num_buckets": 4, "bucket_size": 2, "rounds": 2},),
    "cluster": ({"num_clusters": 3, "bucket_size": 2}, {"num_clusters": 3, "inside": "favor", "num_features": 8}),
    "pages": ({"pages": 2, "page": 2, "window": 4, "sinks": 1}, {"pages": 1, "page": 3, "window": 0, "sinks": 0}),
    "linformer": ({"rank": 4, "max_length": 24}, {"rank": 4, "max_length": 24, "projection": "mean"}),
    "mixed": (
        {"parts": [{"attention": "favor", "heads": [0, 2], "near": 4}, {"attention": "softmax", "heads": [1]}]},
        {"parts": [{"attention": "linear", "heads": [0]}, {"attention": "favor", "heads": [1], "near": 0}]},
        {"parts": [{"attention": "window", "heads": [1, 0], "window": 4}]},
    ),
}
assert set(OPTIONS_OF) == {mechanism.name for mechanism in MECHANISMS}


class Case(NamedTuple):
    """A mechanism, and inputs that fit it."""

    mechanism: Mechanism
    tensors: dict[str, Any]  # q, k, v, key_mask
    causal: bool
    dtype: torch.dtype


class Caller(Operators):
    """The call of one seed and number."""

    # What is called with what ---------------------------------------------------------------------------------------

    def make_mechanism(self, dim: int) -> Mechanism:
        torch.manual_seed(0)  # of what mechanisms draw themselves: a call is a function of its seed
        name = self.rng.choice(("favor", "linear", *OPTIONS_OF))
        options = dict(self.rng.choice(OPTIONS_OF[name]))
        if name in ("favor", "linear"):
            options["backend"] = self.rng.choice(("auto", "auto", "cpu", "torch"))
        self.say(name, options)
        return attention(name, head_dim=dim, **options)

    def case(self, length: int | None = None) -> Case:
        rng = self.rng
        dim, value_dim = rng.choice((1, 3, 4, 8, 16)), rng.choice((1, 3, 8, 16))
        mechanism = self.make_mechanism(dim)
        batch, groups = rng.choice((1, 2, 3)), rng.choice((1, 2))
        heads = getattr(mechanism, "key_heads", None) or getattr(mechanism, "num_heads", None) or rng.choice((1, 2))
        length = length or rng.choice((1, 2, 5, 9, 17, 24))
        dtype = rng.choice((torch.float32, *DTYPES))
        shapes = {"q": (batch, heads * groups, length, dim), "k": (batch, heads, length, dim)}
        shapes["v"] = (batch, heads, length, value_dim)
        tensors: dict[str, Any] = {name: self.normal(*shape).to(dtype) for name, shape in shapes.items()}
        tensors["key_mask"] = None
        if rng.random() < 0.3:
            counts = torch.tensor([[rng.randrange(1, length + 1)] for _ in range(batch)])
            tensors["key_mask"] = torch.arange(length) < counts
        self.say(f"{dtype}, {shapes}, mask {tensors['key_mask'] is not None}")
        return Case(mechanism, tensors, rng.random() < 0.5, dtype)

    # Calls ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        threads = self.rng.choice((1, 1, 2, 3))
        torch.set_num_threads(threads)
        calls = (self.forward, self.forward, self.extend, self.extend, self.matrix, self.function, self.operator)
        call = self.rng.choice((*calls, self.convolution))
        self.say(call.__name__, f"{threads} threads")
        call()

    def forward(self) -> None:
        case = self.case()
        given = self.spoil(case.tensors)
        causal = case.causal if self.rng.random() < 0.95 else odd_option(self.rng)
        wants_gradients = self.rng.random() < 0.5
        if wants_gradients:
            given = {name: leaf(x) if name in "qkv" else x for name, x in given.items()}
        out = case.mechanism(*(given[n] for n in "qkv"), causal=causal, key_mask=given["key_mask"])
        if out.is_meta:
            return
        judge_forward(case.mechanism, given, causal, out)
        if wants_gradients and out.requires_grad:
            self.backward(case.mechanism, given, causal, out)

    def backward(self, mechanism: Mechanism, given: dict[str, Any], causal: bool, out: Tensor) -> None:
        direction = self.normal(*out.shape).to(out.dtype)
        odd, how = mutate(direction, self.rng) if self.rng.random() < 0.4 else (direction, "plain")
        self.say(f"gradient: {how} {shown(odd)}")
        hooked = self.rng.random() < 0.3
        if hooked:  # reaches the operator past autograd's own checks
            out.register_hook(lambda _: odd if isinstance(odd, Tensor) else direction)
        leaves = [given[name] for name in "qkv" if given[name].requires_grad]
        try:
            got = torch.autograd.grad(out, leaves, direction if hooked else odd, allow_unused=True)
        except (RuntimeError, TypeError, ValueError) as error:
            by_torch = str(error).startswith(("hook ", "Internal error: NestedTensorImpl"))  # its own checks of hooks
            if isinstance(error, SubquadError) or not hooked or by_torch:
                raise RefusedError from error
            raise
        used = odd if isinstance(odd, Tensor) else direction
        if used.shape == out.shape and used.is_floating_point() and used.layout == torch.strided and not used.is_meta:
            judge_gradients(mechanism, given, causal, leaves, used.to(out.dtype), got)

    def matrix(self) -> None:
        case = self.case()
        given = self.spoil({name: case.tensors[name] for name in ("q", "k", "key_mask")})
        rows = self.rng.choice((None, None, torch.tensor([0]), torch.tensor([99]), torch.tensor([-1]), [0], 1.5))
        causal = (case.causal and case.mechanism.supports_causal) or not case.mechanism.supports_bidirectional
        options = {"causal": causal, "key_mask": given["key_mask"], "rows": rows}
        got = case.mechanism.attention_matrix(given["q"], given["k"], **options)
        if got.is_meta:
            return
        exact = case.mechanism.double().attention_matrix(double(given["q"]), double(given["k"]), **options)
        naive = relative_error(got, exact)
        if naive > 64 * torch.finfo(got.dtype).eps * max(1.0, float(exact.isnan().any())):
            if case.mechanism.name in ("lsh", "cluster"):  # a rounded product may fall into another bucket
                return
            raise WrongAnswerError(f"matrix: relative error {naive:.1e}")

    def extend(self) -> None:
        case = self.case()
        mechanism: Any = case.mechanism
        steps = self.rng.choice((1, 2, 3))
        last = state = None
        fresh: dict[str, Any] = {}
        for number in range(steps):
            length = 1 if number else case.tensors["q"].shape[2]
            fresh = {
                name: self.normal(*x.shape[:2], length, x.shape[3]).to(case.dtype)
                for name, x in case.tensors.items()
                if name in "qkv"
            }
            fresh["key_mask"] = None
            with torch.no_grad():
                last = state
                _, state = mechanism.extend(*(fresh[n] for n in "qkv"), state)
        fresh = self.spoil(fresh, 2)
        odd = self.spoil_state(last if self.rng.random() < 0.5 else state)
        gradients = self.rng.random() < 0.2
        with torch.set_grad_enabled(gradients):
            out, after = mechanism.extend(*(fresh[n] for n in "qkv"), odd, key_mask=fresh["key_mask"])
        if not out.is_meta:
            judge_extend(mechanism, fresh, odd, out, after)

    def spoil_state(self, state: Any) -> Any:
        rng = self.rng
        if state is None:
            return state
        kind = rng.choice(("as it was", "field", "field", "length", "shuffled", "another", "thing"))
        self.say("state:", kind)
        if kind == "field":
            name = rng.choice(state._fields)
            value, how = mutate(getattr(state, name), rng)
            self.say(f"{name}: {how} {shown(value)}")
            return state._replace(**{name: value})
        if kind == "length":
            counts = [name for name, x in state._asdict().items() if x.dtype == torch.int64]
            if not counts:
                return state
            name = rng.choice(counts)
            value = rng.choice(
                (-(2**63), -(2**40), -1, 0, 1, 2, 5, 63, 64, 2**31, 2**40, 2**41, 2**62 - 1, 2**62, 2**63 - 1)
            )
            dtype = rng.choice((torch.int64, torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8))
            filled = (
                torch.full_like(getattr(state, name), value) if rng.random() < 0.7 else getattr(state, name) + value
            )
            self.say(f"{name} = {value} {dtype}")
            return state._replace(**{name: filled.to(dtype)})
        if kind == "shuffled":
            tensors = list(state)
            rng.shuffle(tensors)
            return type(state)(*tensors)
        if kind == "another":
            other = self.case(length=4)
            tensors = {n: x for n, x in other.tensors.items() if n in "qkv"}
            return other.mechanism.extend(*tensors.values())[1] if other.mechanism.supports_state else None
        return rng.choice(
            (tuple(state), list(state), state[:1], 0, "state", {}, state[0], tuple.__new__(type(state), state[:1]))
        )

    def convolution(self) -> None:
        rng = self.rng
        width, channels, dtype = rng.choice((1, 2, 4, 9)), rng.choice((1, 3, 16, 40)), rng.choice(DTYPES)
        layer = ShortConvolution(channels, width)
        with torch.no_grad():
            layer.weight.copy_(self.normal(channels, 1, width))
        batch, length, causal = rng.choice((1, 2)), rng.choice((1, 2, 5, 600)), rng.random() < 0.7
        mask = torch.rand(batch, length, generator=self.generator) < 0.8 if rng.random() < 0.3 else None
        tensors: dict[str, Any] = {"x": self.normal(batch, length, channels).to(dtype), "key_mask": mask}
        extends = causal and rng.random() < 0.5
        if extends:
            tensors["recent"] = self.normal(batch, width - 1, channels).to(dtype)
        self.say(f"{width} taps, {dtype}, {batch, length, channels}, causal {causal}, extends {extends}")
        given = self.spoil(tensors)

        def run(layer: ShortConvolution, given: dict[str, Any]) -> Tensor:
            if extends:
                return layer.extend(given["x"], given["recent"], key_mask=given["key_mask"])[0]
            return layer(given["x"], causal=causal, key_mask=given["key_mask"])

        wants_gradients = rng.random() < 0.5
        x = given["x"] = leaf(given["x"]) if wants_gradients else given["x"]
        with torch.set_grad_enabled(wants_gradients):
            out = run(layer, given)
        if out.is_meta:
            return
        exact = {name: double(tensor) for name, tensor in given.items()}
        if wants_gradients:
            exact["x"] = leaf(exact["x"])
        want = run(layer.double(), exact)
        terms = [double(t).norm().item() for t in (x, given.get("recent")) if isinstance(t, Tensor)]
        size = math.hypot(*terms) * layer.weight.norm().item()
        judge("convolution", out, want, size)
        if wants_gradients and out.requires_grad:
            direction, how = mutate(self.normal(*out.shape).to(out.dtype), rng)
            self.say(f"gradient: {how} {shown(direction)}")
            try:
                (got,) = torch.autograd.grad(out, (x,), direction)
            except (RuntimeError, TypeError, ValueError) as error:
                raise RefusedError from error
            judge("gradient", got, torch.autograd.grad(want, (exact["x"],), double(direction))[0], size)

    # Functions --------------------------------------------------------------------------------------------------------

    def function(self) -> None:
        case = self.case()
        given = self.spoil(case.tensors)
        heads, dim = case.tensors["k"].shape[1], case.tensors["q"].shape[3]
        maps = self.rng.choice((None, heads))
        drawn = draw_feature_map(dim, 8, num_heads=maps)
        if self.rng.random() < 0.5:
            fields = self.spoil(drawn._asdict())
            if self.rng.random() < 0.2:
                fields[self.rng.choice(("rule", "groups"))] = odd_option(self.rng)
            drawn = type(drawn)(**fields)
        weight, _ = mutate(self.normal(maps or 1, 8, dim).float(), self.rng)
        table: dict[str, tuple[Any, dict[str, Any]]] = {
            "favor_attention": ((drawn,), {"near": 4, "sinks": 2, "scale": None, "chunk": None, "backend": "auto"}),
            "linear_attention": (
                (),
                {"feature_map": "elu1", "projection": weight, "scale": None, "chunk": 3, "backend": "auto"},
            ),
            "softmax_attention": ((), {"scale": None}),
            "window_attention": ((), {"window": 4, "dilation": 1, "scale": None, "global_mask": given["key_mask"]}),
            "strided_attention": ((), {"stride": 3, "pattern": "strided", "summary": None}),
            "lsh_attention": ((mutate(draw_rotations(dim, 4, 2), self.rng)[0],), {"bucket_size": 2, "scale": None}),
            "cluster_attention": (
                (mutate(self.normal(1, 3, dim).float(), self.rng)[0],),
                {"bucket_size": 2, "scale": None},
            ),
        }
        name = self.rng.choice([*table])
        more, options = table[name]
        if self.rng.random() < 0.3:
            option = self.rng.choice([*options])
            options[option] = odd_option(self.rng)
            if isinstance(options[option], int) and options[option] > 2**20:
                options[option] = 2**20
        self.say(name, {option: shown(value) for option, value in options.items()}, [shown(x) for x in more])
        call = getattr(functional, name)
        tensors = [given[n] for n in "qkv"]
        out = call(*tensors, *more, causal=case.causal, key_mask=given["key_mask"], **options)
        if out.is_meta:
            return
        if "backend" in options:
            options["backend"] = "torch"
        more = [
            x._replace(**{n: double(t) for n, t in x._asdict().items() if isinstance(t, Tensor)})
            if hasattr(x, "_replace")
            else x
            for x in more
        ]
        exact = call(*(double(t) for t in tensors), *more, causal=case.causal, key_mask=given["key_mask"], **options)
        if isinstance(options.get("scale"), float | int) and options["scale"] > 1:
            return  # float32 has no digits for such logits
        if name not in ("lsh_attention", "cluster_attention") or out.dtype == torch.float64:
            judge(name, out, exact)


# The script -----------------------------------------------------------------------------------------------------------


def leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested else x


def is_clean(caller: Caller, error: Exception) -> bool:
    """A worded error; of the operators also what torch says where their signature is violated."""
    if isinstance(error, (SubquadError, RefusedError)):
        return True
    raw = "operator" in caller.story[0] if caller.story else False
    return (
        raw
        and isinstance(error, (RuntimeError, TypeError, ValueError, NotImplementedError))
        and not isinstance(error, AssertionError)
    )


def calls(seed: int, first: int, count: int) -> Iterator[tuple[int, Caller]]:
    for number in range(first, first + count):
        yield number, Caller(seed, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--log", default=os.devnull)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    warnings.simplefilter("ignore", UncalibratedWarning)
    refused = answered = 0
    failures = []
    with open(given.log, "w") as log:
        for number, caller in calls(given.seed, given.first, given.count):
            log.seek(0)
            log.write(f"--seed {given.seed} --first {number} --count 1\n")
            log.flush()
            try:
                caller.run()
                answered += 1
            except Exception as error:
                refused += 1
                if not is_clean(caller, error):
                    story = "; ".join([*caller.story, f"{type(error).__name__}: {error}"])
                    failures.append(f"--seed {given.seed} --first {number}: {story}")
                    if given.count == 1:
                        raise
    print(*failures[:20], sep="\n", file=sys.stderr)
    print(f"{answered} answered, {refused} refused, {len(failures)} neither")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
