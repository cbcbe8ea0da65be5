"""What the README promises, at the sizes it promises it for."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import (
    ClusterAttention,
    FavorAttention,
    LinearAttention,
    LshAttention,
    Mechanism,
    PagesAttention,
    SoftmaxAttention,
    StridedAttention,
    WindowAttention,
    state_bytes,
)
from subquad.testing import assert_close

DEFAULT: dict[str, Any] = {"near": 64, "sinks": 4}
PAPER: dict[str, Any] = {"near": 0, "sinks": 0}
EVERY_FAVOR = pytest.mark.parametrize("options", [DEFAULT, PAPER], ids=["default", "paper"])


def draw(*shape: int, size: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return size * q, size * k, v


@EVERY_FAVOR
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_a_thousand_tokens_equal_the_definition(options: dict, causal: bool, size: float) -> None:
    attention = FavorAttention(head_dim=64, num_features=256, **options)
    inputs = draw(1, 1, 1000, 64, size=size)
    want = attention.reference(*inputs, causal=causal)
    assert_close(attention(*inputs, causal=causal), want, 1e-10, "float64")
    single = [t.float() for t in inputs]
    assert_close(attention(*single, causal=causal), want, 1e-5, "float32")


@EVERY_FAVOR
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_padded_batch_equals_each_sequence_alone(options: dict, causal: bool, left: bool) -> None:
    attention = FavorAttention(head_dim=64, num_features=256, **options)
    lengths = (1, 7, 64, 65, 500)
    q, k, v = (t.float() for t in draw(len(lengths), 2, 500, 64))
    positions = torch.arange(500)
    mask = torch.stack([positions >= 500 - n if left else positions < n for n in lengths])
    batch = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*batch, causal=causal, key_mask=mask) * mask[:, None, :, None]
    out.square().sum().backward()
    for b, real in enumerate(mask):
        alone = [t.detach()[b : b + 1, :, real].requires_grad_() for t in batch]
        want = attention(*alone, causal=causal)
        want.square().sum().backward()
        assert_close(out[b : b + 1, :, real], want, 1e-5, f"length {lengths[b]}")
        for together, single in zip(batch, alone, strict=True):
            assert together.grad is not None
            assert single.grad is not None
            size = together.grad.norm().item()
            assert_close(together.grad[b : b + 1, :, real], single.grad, 1e-5, f"gradient, length {lengths[b]}", size)


@pytest.mark.parametrize(
    "attention",
    [FavorAttention(64), FavorAttention(64, **PAPER), LinearAttention(64)],
    ids=["favor", "favor-paper", "linear"],
)
def test_thousands_of_decoded_tokens_equal_the_forward(attention: Mechanism) -> None:
    q, k, v = (t.float() for t in draw(1, 2, 4096, 64))
    want = attention(q, k, v, causal=True)
    with torch.no_grad():
        out, state = attention.extend(q[:, :, :96], k[:, :, :96], v[:, :, :96])
        size, outs = state_bytes(state), [out]
        for t in range(96, 4096):
            out, state = attention.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            assert state_bytes(state) == size
            outs.append(out)
    assert_close(torch.cat(outs, dim=2), want, 1e-5, "4,000 tokens one by one")


def test_near_as_long_as_the_sequence_is_softmax() -> None:
    inputs = draw(2, 3, 90, 16)
    exact = SoftmaxAttention(16)
    for near in (90, 1000):
        for sinks in (0, 4):
            favor = FavorAttention(16, 8, near=near, sinks=sinks)
            for causal in (False, True):
                assert_close(favor(*inputs, causal=causal), exact(*inputs, causal=causal), 1e-12, f"near={near}")


FAST = {
    "favor": FavorAttention(8, 32, near=8, sinks=2),
    "favor, paper": FavorAttention(8, 32, **PAPER),
    "favor, sinks alone": FavorAttention(8, 32, near=0, sinks=3),
    "gaussian": FavorAttention(8, 32, near=8, sinks=2, kernel="gaussian"),
    "learned": FavorAttention(8, 32, near=8, sinks=2, estimator="hedgehog"),
    **{f"linear, {phi}": LinearAttention(8, feature_map=phi) for phi in ("elu1", "relu", "softplus", "relu2", "exp")},
    "window": WindowAttention(8, window=8),
    "strided": StridedAttention(8, stride=8),
    "pages": PagesAttention(8, 2, page=4, window=8),
    "lsh": LshAttention(8, bucket_size=8),
    "cluster": ClusterAttention(8, num_clusters=4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FAST)
def test_no_number_is_large_enough_to_leak(name: str, dtype: torch.dtype) -> None:
    """Products of the largest numbers are infinite, and differences of those NaN: not in rows that may not see them."""
    attention = FAST[name]
    inputs = [t.to(dtype) for t in draw(1, 2, 40, 8)]
    before = attention(*inputs, causal=True)
    most = torch.finfo(dtype).max
    for token, size in itertools.product((7, 20, 39), (most**0.51, most**0.8, most)):
        for which in (0, 1, 2, slice(3)):
            changed = [t.clone() for t in inputs]
            for t in changed[which] if isinstance(which, slice) else [changed[which]]:
                t[:, :, token] = size * t[:, :, token].sign()
            after = attention(*changed, causal=True)[:, :, :token]
            assert_close(after, before[:, :, :token], 1e-6, f"{size:g} in token {token} of {which}")
