"""Random shapes, masks, splits and options against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad import FavorAttention, LinearAttention, LinformerAttention, Mechanism, attention
from subquad.testing import assert_close

pytestmark = pytest.mark.full

DIMS = st.integers(1, 9)


@st.composite
def mechanisms(draw: st.DrawFn) -> Mechanism:
    dim = draw(DIMS)
    if draw(st.booleans()):
        feature_map = draw(st.sampled_from(["elu1", "softplus", "exp"]))
        return LinearAttention(dim, feature_map=feature_map, num_features=draw(st.none() | st.integers(1, 20)))
    return FavorAttention(
        dim,
        2 * draw(st.integers(1, 10)),
        near=draw(st.integers(0, 20)),
        sinks=draw(st.integers(0, 6)),
        estimator=draw(st.sampled_from(["positive", "hyperbolic"])),
        kernel=draw(st.sampled_from(["softmax", "gaussian"])),
        chunk=draw(st.none() | st.integers(1, 70)),
    )


@st.composite
def sparse(draw: st.DrawFn) -> Mechanism:
    """Those that look at some of the keys."""
    name = draw(st.sampled_from(["window", "lsh", "cluster", "strided", "pages"]))
    small, pattern = st.integers(1, 9), draw(st.sampled_from(["strided", "fixed"]))
    page = draw(small)
    options: dict[str, dict[str, object]] = {
        "window": {"window": 2 * draw(small), "dilation": draw(small), "global_tokens": draw(st.integers(0, 3))},
        "lsh": {"num_buckets": 2 * draw(small), "bucket_size": draw(small), "rounds": draw(st.integers(1, 3))},
        "cluster": {"num_clusters": draw(small), "bucket_size": draw(small)},
        "pages": {
            "pages": draw(small) - 1,
            "page": page,
            "window": page * draw(st.integers(0, 3)),
            "sinks": draw(small),
        },
        "strided": {"stride": draw(small), "pattern": pattern, "summary": 1 if pattern == "fixed" else None},
    }
    return attention(name, head_dim=draw(DIMS), **options[name])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mechanism, list[Tensor], Tensor | None]:
    mechanism = draw(mechanisms() | sparse())
    batch, heads, groups = (draw(st.integers(1, 3)) for _ in range(3))
    length, value_dim, size = draw(st.integers(1, 70)), draw(DIMS), draw(st.sampled_from([0.1, 1.0, 5.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64)

    tensors = [size * normal(heads * groups, mechanism.head_dim), size * normal(heads, mechanism.head_dim)]
    tensors.append(normal(heads, value_dim))
    density = draw(st.sampled_from([0.0, 0.3, 0.9]))
    mask = torch.rand(batch, length, generator=generator) < density if draw(st.booleans()) else None
    return mechanism, tensors, mask


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_forward_and_gradients(case: tuple[Mechanism, list[Tensor], Tensor | None], causal: bool) -> None:
    mechanism, tensors, mask = case
    causal = causal or not mechanism.supports_bidirectional
    leaves = [t.requires_grad_() for t in tensors]
    got = mechanism(*leaves, causal=causal, key_mask=mask)
    want = mechanism.reference(*leaves, causal=causal, key_mask=mask)
    assert_close(got, want, 1e-9, "output")
    grads = ([*torch.autograd.grad(out.square().sum(), leaves)] for out in (got, want))
    size = max(t.norm().item() for t in tensors)
    for name, g, w in zip("qkv", *grads, strict=True):
        assert_close(g, w, 1e-8, f"gradient of {name}", size)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_any_split(case: tuple[Mechanism, list[Tensor], Tensor | None], data: st.DataObject) -> None:
    mechanism, tensors, mask = case
    length = tensors[0].shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=8)) | {length})
    state, outs, start = None, [], 0
    for stop in cuts:
        piece = [t[:, :, start:stop] for t in tensors]
        part = None if mask is None else mask[:, start:stop]
        out, state = mechanism.extend(*piece, state=state, key_mask=part)
        outs.append(out)
        start = stop
    want = mechanism(*tensors, causal=True, key_mask=mask)
    assert_close(torch.cat(outs, 2), want, 1e-9, f"pieces ending at {cuts}")


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_padding_moves_nothing(case: tuple[Mechanism, list[Tensor], Tensor | None], data: st.DataObject) -> None:
    """A sequence with padding put in at random places gives the same outputs."""
    mechanism, tensors, _ = case
    length = tensors[0].shape[2]
    holes = data.draw(st.integers(0, 20))
    order = torch.randperm(length + holes, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    real = order[:length].sort().values
    batch = tensors[0].shape[0]
    mask = torch.zeros(batch, length + holes, dtype=torch.bool)
    mask[:, real] = True
    padded = [t.new_full((*t.shape[:2], length + holes, t.shape[3]), 3.0) for t in tensors]
    for target, source in zip(padded, tensors, strict=True):
        target[:, :, real] = source
    causal = data.draw(st.booleans()) or not mechanism.supports_bidirectional
    got = mechanism(*padded, causal=causal, key_mask=mask)[:, :, real]
    assert_close(got, mechanism(*tensors, causal=causal), 1e-9, f"{holes} holes, causal={causal}")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_linformer(data: st.DataObject) -> None:
    """Bidirectional, keys and queries of any number, padding on the right."""
    projection = data.draw(st.sampled_from(["learned", "convolution", "mean", "gaussian"]))
    block, rank, heads, groups, dim = (data.draw(st.integers(1, 5)) for _ in range(5))
    sharing = None if projection == "mean" else data.draw(st.sampled_from(["none", "headwise", "key_value"]))
    mechanism = LinformerAttention(
        dim,
        rank,
        max_length=block * rank,
        projection=projection,
        sharing=sharing,
        num_heads=heads if sharing == "none" else None,
        kernel=data.draw(st.sampled_from(["softmax", "linear"])),
    ).double()
    keys, queries = data.draw(st.integers(1, block * rank)), data.draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    shapes = ((heads * groups, queries), (heads, keys), (heads, keys))
    q, k, v = (torch.randn(2, *shape, dim, generator=generator, dtype=torch.float64) for shape in shapes)
    real = torch.arange(keys) < torch.tensor([[keys], [data.draw(st.integers(0, keys))]])
    mask = data.draw(st.sampled_from([None, real]))
    assert_close(mechanism(q, k, v, key_mask=mask), mechanism.reference(q, k, v, key_mask=mask), 1e-9)
