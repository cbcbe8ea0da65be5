"""Calls of `torch.ops.subquad.*`, which nobody is meant to call and everybody can: for `hostile_calls.py`."""

from typing import Any

import torch
from torch import Tensor

from hostile_judging import double, judge
from hostile_values import DTYPES, Dice


class Operators(Dice):
    def operator(self) -> None:
        call = self.rng.choice((*[self.favor_operator, self.linear_operator] * 2, self.sparse_operators))
        self.say(call.__name__)
        call()

    def _inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rng = self.rng
        batch, heads, groups = (rng.choice((1, 2)) for _ in range(3))
        length = rng.choice((1, 5, 70))
        dim, value_dim = rng.choice((1, 4, 16)), rng.choice((1, 3, 16))
        dtype = rng.choice((torch.float32, *DTYPES))
        sizes = {"batch": batch, "heads": heads, "length": length, "dim": dim, "value_dim": value_dim, "dtype": dtype}
        tensors = {
            "q": self.normal(batch, heads * groups, length, dim).to(dtype),
            "k": self.normal(batch, heads, length, dim).to(dtype),
            "v": self.normal(batch, heads, length, value_dim).to(dtype),
        }
        self.say(sizes, groups)
        return tensors, sizes

    def _state(self, sizes: dict[str, Any], maxima: int, features: int) -> dict[str, Any]:
        if self.rng.random() < 0.5:
            return {"far_max": None, "far_sum": None}
        heads = sizes["batch"], sizes["heads"]
        dtype = torch.promote_types(sizes["dtype"], torch.float32)
        far_max = self.normal(*heads, maxima) if maxima > 1 else torch.zeros(*heads, maxima)
        return {
            "far_max": far_max.to(dtype),
            "far_sum": self.normal(*heads, features, sizes["value_dim"] + 1).abs().to(dtype),
        }

    def favor_operator(self) -> None:
        rng = self.rng
        tensors, sizes = self._inputs()
        features, near, sinks = rng.choice((1, 8, 40)), rng.choice((0, 0, 4, 90)), rng.choice((0, 0, 2))
        maps = rng.choice((1, sizes["heads"]))
        sinks = min(sinks, sizes["length"])
        given = rng.random() < 0.5  # or cut off by the operator
        tensors["sink_k"], tensors["sink_v"] = (tensors[n][:, :, :sinks] if given else None for n in "kv")
        shapes = ((maps, features, sizes["dim"]),) * 2 + ((maps, features),)
        tensors |= {n: self.normal(*s).float() for n, s in zip(("query", "key", "key_bias"), shapes, strict=True)}
        offset = rng.random() < 0.3
        tensors["offset_weight"] = self.normal(maps, sizes["dim"]).float() if offset else None
        tensors["offset_bias"] = self.normal(maps).float() if offset else None
        mask = torch.rand(rng.choice((1, sizes["batch"])), sizes["length"], generator=self.generator) < 0.8
        tensors |= {"alive": rng.choice((None, mask)), "fold": None}
        seen = torch.arange(1, sizes["length"] + 1).clamp(max=sinks)[None]
        tensors["sink_seen"] = seen if sinks else None
        tensors |= self._state(sizes, features, features)
        options = {
            "rule": rng.choice(("none", "norm")),
            "groups": 1,
            "near": near,
            "sinks": sinks,
            "causal": rng.random() < 0.7,
            "scale": 0.5,
        }
        options |= {
            "gaussian": rng.random() < 0.3,
            "chunk": rng.choice((0, 3, 100)),
            "borders": True,
            "backend": rng.choice(("cpu", "torch")),
            "reach": rng.choice((1, 1, 2, 7, 1000)) if near else 1,
            "far": rng.random() < 0.8 or not (near or sinks),
        }
        if not options["causal"] or not options["far"]:
            tensors |= {"far_max": None, "far_sum": None}
        self._run_operator("favor", tensors, options)

    def linear_operator(self) -> None:
        rng = self.rng
        tensors, sizes = self._inputs()
        features = rng.choice((None, 5, 40))
        tensors["weight"] = (
            None if features is None else self.normal(rng.choice((1, sizes["heads"])), features, sizes["dim"]).float()
        )
        tensors["log_weight"] = None
        mask = torch.rand(rng.choice((1, sizes["batch"])), sizes["length"], generator=self.generator) < 0.8
        tensors["alive"] = rng.choice((None, mask))
        tensors |= self._state(sizes, 1, features or sizes["dim"])
        options = {"feature_map": rng.choice(("elu1", "softplus")), "causal": rng.random() < 0.7, "root": 0.7}
        options |= {"chunk": rng.choice((0, 3, 100)), "borders": True, "backend": rng.choice(("cpu", "torch"))}
        if not options["causal"]:
            tensors |= {"far_max": None, "far_sum": None}
        self._run_operator("linear", tensors, options)

    def _run_operator(self, name: str, tensors: dict[str, Any], options: dict[str, Any]) -> None:
        given, chosen = self.spoil(tensors), self.spoil_options(options)
        forward = getattr(torch.ops.subquad, f"{name}_forward")
        saved = forward(**given, **chosen)
        if any(t.is_meta for t in saved):
            return
        exact_inputs = {
            n: double(t) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()
        }
        exact_options = chosen | {"backend": "torch"}
        exact = forward(**exact_inputs, **exact_options)
        if chosen.get("scale", 1) > 1 or chosen.get("root", 1) > 1:
            return  # float32 has no digits for such logits
        out, *rest, _, state = saved
        judge("output", out, exact[0])
        judge("far_sum", state, exact[-1])
        if not chosen["borders"]:
            return
        grad = self.normal(*out.shape).to(out.dtype)
        grad_state = self.normal(*state.shape).to(state.dtype) if state.numel() and self.rng.random() < 0.5 else None
        kept = {"out": out} | dict(zip(("normaliser", "low", "borders_max", "borders_sum"), rest, strict=True))
        low = torch.zeros_like(out, dtype=torch.int8) if self.rng.random() < 0.5 else None
        plain = {"grad_out": grad} | kept | {"low": low, "grad_far_sum": grad_state}
        kept = self.spoil(plain, 2)
        backward = getattr(torch.ops.subquad, f"{name}_backward")
        got = backward(**kept, want_map=True, **given, **chosen)
        if all(given is right for given, right in zip(kept.values(), plain.values(), strict=True)):
            names = ("out", "normaliser", "low", "borders_max", "borders_sum")
            exact_kept = dict(zip(names, (exact[0], exact[1], low, *exact[3:5]), strict=True))
            grads = {"grad_out": grad.double(), "grad_far_sum": None if grad_state is None else grad_state.double()}
            want = backward(**grads, **exact_kept, want_map=True, **exact_inputs, **exact_options)
            if grad.dtype not in (torch.float32, torch.float64):
                return  # the output that the backward starts from is rounded
            size = max(t.norm().item() for t in (grad, *want))
            for place, (g, w) in enumerate(zip(got, want, strict=True)):
                judge(f"gradient {place}", g, w, size)

    def sparse_operators(self) -> None:
        """Called by nobody but window, lsh, ...; wrong calls must not get through."""
        tensors, _ = self._inputs()
        q, k, _ = tensors.values()
        shape = (2, q.shape[0], q.shape[1], q.shape[2])
        codes = torch.randint(-1, 3, shape, generator=self.generator, dtype=torch.int32)
        codes = {"q_code": codes, "k_code": codes[:, :, :: q.shape[1] // k.shape[1]].contiguous()}
        if self.rng.random() < 0.5:
            given = self.spoil(tensors | codes)
            chosen = self.spoil_options({"causal": True, "scale": 0.5, "tile": 4})
            torch.ops.subquad.bucket_forward(*given.values(), *chosen.values())
            return
        self._sparse({n: t.float().reshape(-1, *t.shape[2:]) for n, t in tensors.items()})

    def _sparse(self, tiles: dict[str, Any]) -> None:
        """q, k and v as tiles and blocks; some of the numbers of blocks may be wrong."""
        rng, (count, length) = self.rng, tiles["k"].shape[:2]
        queries, met, wrong = tiles["q"].shape[0], rng.choice((1, 2, 20)), rng.random() < 0.2
        low, end = (-1, count + 2) if wrong else (0, count + 1)
        pairs: dict[str, Any] = {"blocks": torch.randint(low, end, (queries, met), generator=self.generator)}

        def labels(*shape: int, most: int) -> Tensor:
            return torch.randint(-1, most, shape, generator=self.generator, dtype=torch.int32)

        pairs |= dict.fromkeys(("q_place", "k_place", "q_code", "k_code", "alive"))
        if rng.random() < 0.5:
            pairs |= {"q_place": labels(length, most=length), "k_place": labels(met * length, most=length)}
            alive = torch.rand(count, length, generator=self.generator) < 0.8
            pairs["alive"] = rng.choice((None, alive))
        else:
            pairs |= {"q_place": labels(queries, length, most=length), "k_place": labels(count, length, most=length)}
            rounds = rng.choice((0, 1, 3))
            if rounds:
                pairs["q_code"] = labels(queries, length, rounds, most=3)
                pairs["k_code"] = labels(count, length, rounds, most=3)
        numbers = {"place_low": rng.choice((-5, 0, 1)), "place_high": rng.choice((5, 1, 1 << 28))}
        numbers |= {"code_low": 0, "code_high": 1, "round": rng.choice((0, 1, 2)), "skip_self": rng.random() < 0.5}
        given = self.spoil(tiles | pairs)
        chosen = self.spoil_options(numbers | {"scale": 0.5})
        saved = torch.ops.subquad.sparse_forward(*given.values(), *chosen.values())
        q, k = (double(given[name]) for name in "qk")
        if saved[0].is_meta or not float(q.abs().max() * k.abs().max()) * k.shape[-1] * abs(chosen["scale"]) < 100:
            return  # float32 has no digits for such logits
        exact_given = {n: double(t) if t is not None and n in "qkv" else t for n, t in given.items()}
        exact = torch.ops.subquad.sparse_forward(*exact_given.values(), *chosen.values())
        judge("output", saved[0], exact[0])
        grads = self.normal(*saved[0].shape).to(saved[0].dtype), self.normal(*saved[1].shape).to(saved[1].dtype)
        got = torch.ops.subquad.sparse_backward(*grads, *saved, *given.values(), *chosen.values())
        want = torch.ops.subquad.sparse_backward(
            grads[0].double(), grads[1], *exact, *exact_given.values(), *chosen.values()
        )
        size = max(t.norm().item() for t in (*grads, *want))
        for name, g, w in zip("qkv", got, want, strict=True):
            judge(f"gradient of {name}", g, w, size)
