"""Claims about numbers: bounds, extreme logits, single and half precision."""

import torch
from torch import Tensor

from subquad.mechanism import Mechanism
from subquad.testing.inputs import Inputs, assert_close, gradients, make_inputs, relative_error
from subquad.testing.judging import EPSILON, EXACT, SINGLE, directions, exact, extend_in_pieces


def outputs_are_convex_combinations(mechanism: Mechanism) -> None:
    if not mechanism.convex:
        return
    inputs = make_inputs(mechanism, 40, size=3.0)
    for causal in directions(mechanism):
        out = mechanism(*inputs, causal=causal)
        groups = out.shape[1] // inputs.v.shape[1]
        low, high = (bound(2).repeat_interleave(groups, 1)[:, :, None] for bound in (inputs.v.amin, inputs.v.amax))
        low, high = (torch.where(out == 0, out, bound) for bound in (low, high))  # rows without weight
        slack = exact(mechanism, 1e-12)
        assert bool(((out >= low - slack) & (out <= high + slack)).all()), "an output lies outside its values"


def extreme_logits_are_right(mechanism: Mechanism) -> None:
    """Logits up to 1e4 in size: float64 to 1e-8; float32 to twice what the definition in float32 loses, or twice
    what rounding q and k does to the exact result at worst (a logit of 1e4 rounds by 5e-4, however it is computed)."""
    if not mechanism.convex:
        return
    for name, inputs in _extreme_inputs(mechanism).items():
        for causal in directions(mechanism):
            what = f"{name}, causal={causal}"
            leaves = inputs.leaves()
            got = mechanism(*leaves, causal=causal)
            for gradient in gradients(got, leaves):
                assert bool(gradient.isfinite().all()), f"{what}: gradient is not finite"
            if exact(mechanism) == EXACT:
                assert_close(got, mechanism.reference(*leaves, causal=causal), 1e-8, what)
                mask = torch.arange(40).expand(2, -1) < torch.tensor([[40], [23]])
                want = mechanism.reference(*inputs, causal=causal, key_mask=mask)
                assert_close(mechanism(*inputs, causal=causal, key_mask=mask), want, 1e-8, f"{what}, padded")
            single = inputs.to(torch.float32)
            want = mechanism.reference(*single.to(torch.float64), causal=causal)
            others = [single, *(_one_rounding_away(single, seed) for seed in range(8))]
            allowed = max(relative_error(mechanism.reference(*other, causal=causal), want) for other in others)
            assert_close(
                mechanism(*single, causal=causal), want, max(mechanism.float32_floor, 2 * allowed), f"{what}, float32"
            )


def lopsided_sizes_are_right(mechanism: Mechanism) -> None:
    """q times 300 and k over 300: the same logits, so float32 outputs, gradients and decoded tokens stay as good."""
    if not mechanism.convex or not mechanism.of_inner_products:
        return
    q, k, v = make_inputs(mechanism, 40)
    inputs = Inputs(300 * q, k / 300, v)
    for causal in directions(mechanism):
        single = inputs.to(torch.float32).leaves()
        exact = Inputs(*(t.detach().double() for t in single)).leaves()
        moved = _one_rounding_away(inputs.to(torch.float32)).leaves()
        naive = inputs.to(torch.float32).leaves()
        got, want = mechanism(*single, causal=causal), mechanism.reference(*exact, causal=causal)
        others = [mechanism.reference(*x, causal=causal) for x in (moved, naive)]
        allowed = max(SINGLE, *(2 * relative_error(other, want) for other in others))
        assert_close(got, want, allowed, f"causal={causal}")
        every = zip(
            "qkv",
            gradients(got, single),
            gradients(want, exact),
            gradients(others[0], moved),
            gradients(others[1], naive),
            strict=True,
        )
        for name, g, w, m, n in every:
            allowed = max(SINGLE, 2 * relative_error(m, w), 2 * relative_error(n, w))
            assert_close(g, w, allowed, f"gradient of {name}, causal={causal}")
        if causal and mechanism.supports_state:
            steps, _ = extend_in_pieces(mechanism, inputs.to(torch.float32), [1] * 40, None)
            allowed = max(SINGLE, *(2 * relative_error(other, want) for other in others))
            assert_close(steps, want, allowed, "token by token")


def _one_rounding_away(inputs: Inputs, seed: int = 3) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def moved(t: Tensor) -> Tensor:
        signs = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return t.double() * (1 + EPSILON / 2 * signs)

    return Inputs(moved(inputs.q), moved(inputs.k), inputs.v.double())


def _extreme_inputs(mechanism: Mechanism) -> dict[str, Inputs]:
    """Sizes such that q.k / sqrt(D) reaches 1e4: everywhere, growing, falling, and in single tokens."""
    inputs = make_inputs(mechanism, 40)
    size = 100 * mechanism.head_dim**-0.25
    ramp = torch.linspace(0.01, 1, 40, dtype=torch.float64)[:, None]
    spikes = torch.full((40, 1), 0.01, dtype=torch.float64)
    spikes[::13] = 1
    cases = {"everywhere": torch.ones_like(ramp), "growing": ramp, "falling": ramp.flip(0), "spikes": spikes}
    return {name: Inputs(inputs.q * size * w, inputs.k * size * w, inputs.v) for name, w in cases.items()}


def single_precision_is_single_precision(mechanism: Mechanism) -> None:
    """float32 in, 1e-5 at most, outputs and gradients."""
    inputs = make_inputs(mechanism, 60).to(torch.float32)
    for causal in directions(mechanism):
        fast, exact = inputs.leaves(), inputs.to(torch.float64).leaves()
        got, want = mechanism(*fast, causal=causal), mechanism.reference(*exact, causal=causal)
        assert_close(got, want, SINGLE, f"causal={causal}")
        for name, g, w in zip("qkv", gradients(got, fast), gradients(want, exact), strict=True):
            assert_close(g, w, SINGLE, f"gradient of {name}, causal={causal}")


def low_precision_is_as_good_as_it_can_be(mechanism: Mechanism) -> None:
    """Half-precision outputs and gradients err at most twice as much as the definition in the same dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make_inputs(mechanism, 60, size=0.7).to(dtype)
        for causal in directions(mechanism):
            low, exact = inputs.leaves(), inputs.to(torch.float64).leaves()
            fast, naive = mechanism(*low, causal=causal), mechanism.reference(*low, causal=causal)
            want = mechanism.reference(*exact, causal=causal)
            _three_way(fast, naive, want, f"{dtype}, causal={causal}")
            every = zip("qkv", gradients(fast, low), gradients(naive, low), gradients(want, exact), strict=True)
            for name, f, n, w in every:
                _three_way(f, n, w, f"gradient of {name}, {dtype}, causal={causal}")


def _three_way(fast: Tensor, naive: Tensor, want: Tensor, what: str) -> None:
    assert bool(naive.isfinite().all()), f"{what}: the definition is not finite"
    allowed = 2 * relative_error(naive, want) + torch.finfo(fast.dtype).eps / 2  # storing the answer rounds it
    assert_close(fast, want, allowed, what)
