"""Every path of the C++ engine once, on small odd sizes; run under sanitizers by `kernels/test_cpu.py`."""

import itertools

import torch

from subquad import (
    ClusterAttention,
    FavorAttention,
    LinearAttention,
    LshAttention,
    Mechanism,
    PagesAttention,
    StridedAttention,
    WindowAttention,
)
from subquad.kernels import problem
from subquad.kernels.cpu import library
from subquad.nn import ShortConvolution
from subquad.testing import make_inputs
from subquad.testing.inputs import gradients, make_mask
from subquad.testing.judging import directions

MECHANISMS: tuple[Mechanism, ...] = (
    FavorAttention(7, 37, near=8, sinks=2, backend="cpu"),
    FavorAttention(7, 37, near=5, sinks=9, num_heads=2, kernel="gaussian", backend="cpu"),
    FavorAttention(17, 33, near=100, sinks=0, backend="cpu"),
    FavorAttention(7, 37, near=5, sinks=2, reach=3, backend="cpu"),
    FavorAttention(7, 37, near=8, sinks=2, reach=2, far=False, backend="cpu"),
    FavorAttention(7, 37, near=0, sinks=0, backend="cpu"),
    FavorAttention(7, 37, near=0, sinks=3, backend="cpu"),
    LinearAttention(33, backend="cpu"),
    LinearAttention(7, feature_map="softplus", num_features=37, num_heads=2, backend="cpu"),
    LinearAttention(7, feature_map="exp", backend="cpu"),
    WindowAttention(7, window=8, dilation=2, global_tokens=2),
    StridedAttention(17, stride=6),
    PagesAttention(7, 2, page=4, window=4, sinks=3),
    PagesAttention(32, 3, page=3, window=0, sinks=0),
    LshAttention(7, num_buckets=4, bucket_size=5, rounds=2),
    ClusterAttention(16, num_clusters=3, bucket_size=5, num_heads=2),
)


def run(mechanism: Mechanism, length: int, causal: bool, dtype: torch.dtype, size: float) -> None:
    inputs = make_inputs(mechanism, length, batch=3, size=size).to(dtype).leaves()
    for mask in (None, make_mask(length, "holes")):
        gradients(mechanism(*inputs, causal=causal, key_mask=mask), inputs)
    if causal:
        with torch.no_grad():
            _, state = mechanism.extend(*inputs.tokens(0, length // 2 + 1))
            for t in range(length // 2 + 1, length):
                _, state = mechanism.extend(*inputs.tokens(t, t + 1), state)


def run_long(mechanism: Mechanism, causal: bool, batch: int) -> None:
    """Far fields have a centre, outputs a low part."""
    inputs = make_inputs(mechanism, 1200, batch=batch).to(torch.float32)
    inputs = inputs._replace(v=inputs.v + 1).leaves()
    gradients(mechanism(*inputs, causal=causal), inputs)


def run_convolution(length: int, channels: int, causal: bool) -> None:
    layer, x = ShortConvolution(channels, 4), torch.randn(3, length, channels, requires_grad=True)
    torch.autograd.grad(layer(x, causal=causal).square().sum(), [x, layer.weight])


def main() -> None:
    assert library.AVAILABLE, library.WHY_MISSING
    problem.LOW_FROM = 1000
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for mechanism, length in itertools.product(MECHANISMS, (1, 2, 33, 150)):
            for causal in directions(mechanism):
                run(mechanism, length, causal, torch.float32, 1.0)
        for mechanism, dtype in itertools.product(MECHANISMS, dtypes):
            run(mechanism, 40, True, dtype, 1.0)
            run(mechanism, 70, True, torch.float32, 30.0)
        for mechanism, batch in itertools.product(MECHANISMS, (1, 3)):
            for causal in directions(mechanism):
                run_long(mechanism, causal, batch)
        for length, channels, causal in itertools.product((1, 2, 513, 1025), (1, 7, 16, 40), (False, True)):
            run_convolution(length, channels, causal)
    print("all cases done")


if __name__ == "__main__":
    main()
