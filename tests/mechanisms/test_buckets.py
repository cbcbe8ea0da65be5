"""`lsh` and `cluster`: the contract, and what is theirs alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import (
    ClusterAttention,
    LshAttention,
    Mechanism,
    SoftmaxAttention,
    attention,
    errors,
    state_bytes,
)
from subquad.functional import cluster_attention, draw_rotations, lsh_attention
from subquad.kernels.sparse import torch as sparse
from subquad.kernels.sparse.groups import group, meetings
from subquad.kernels.sparse.torch import ABSENT_KEY, ABSENT_QUERY, Bounds, Inputs, Pairs
from subquad.mechanisms.census import Census
from subquad.nn import SelfAttention
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract, relative_error

D = 6


@parametrize_contract(
    {
        "lsh": lambda: LshAttention(D, num_buckets=4, bucket_size=3, rounds=2),
        "lsh-one-round": lambda: LshAttention(D, num_buckets=6, bucket_size=2, rounds=1, scale=0.6),
        "lsh-per-head": lambda: LshAttention(D, num_buckets=4, bucket_size=5, rounds=3, num_heads=3, seed=4),
        "lsh-hashes": lambda: LshAttention(D, num_buckets=16, bucket_size=2, rounds=2, hashes=2),
        "lsh-more-directions-than-dims": lambda: LshAttention(D, num_buckets=20, bucket_size=2, rounds=3),
        "lsh-tiny-blocks": lambda: LshAttention(D, num_buckets=2, bucket_size=1, rounds=2),
        "lsh-everything-near": lambda: LshAttention(D, num_buckets=2, bucket_size=64, rounds=1),
        "cluster": lambda: ClusterAttention(D, num_clusters=4, bucket_size=3),
        "cluster-per-head": lambda: ClusterAttention(D, num_clusters=5, bucket_size=4, num_heads=2, scale=0.6),
        "cluster-one": lambda: ClusterAttention(D, num_clusters=1, bucket_size=7),
        "cluster-favor": lambda: ClusterAttention(D, num_clusters=4, inside="favor", num_features=8),
        "cluster-favor-per-head": lambda: ClusterAttention(
            D, num_clusters=3, inside="favor", num_features=8, num_heads=3, scale=0.6
        ),
        "cluster-tiny-blocks": lambda: ClusterAttention(D, num_clusters=3, bucket_size=1, num_heads=3, seed=2),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


def small(**options: Any) -> LshAttention:
    return LshAttention(D, **{"num_buckets": 8, "bucket_size": 4, "rounds": 3, **options})


MECHANISMS = {"lsh": small, "cluster": lambda: ClusterAttention(D, num_clusters=8, bucket_size=4)}
both = pytest.mark.parametrize("make_mechanism", MECHANISMS.values(), ids=MECHANISMS)


# What a query sees ----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_sees_what_the_definition_says(make_mechanism: Callable[[], Any], causal: bool) -> None:
    """Pair by pair, in plain Python."""
    mechanism = make_mechanism()
    q, k, _ = make_inputs(mechanism, 40)
    q_bucket, k_bucket = (mechanism.buckets(x) for x in (q, k))
    matrix = mechanism.attention_matrix(q, k, causal=causal) > 0
    size = mechanism.bucket_size
    for head in range(q.shape[1]):
        rounds = list(zip(q_bucket[:, 0, head].tolist(), k_bucket[:, 0, head // 2].tolist(), strict=True))
        for t in range(40):
            for s in range(t + 1 if causal else 40):
                visible = s == t
                for of_q, of_k in rounds:
                    own = of_k[:t].count(of_q[t]) // size
                    block = of_k[:s].count(of_k[s]) // size
                    visible |= of_q[t] == of_k[s] and abs(own - block) <= 1
                assert bool(matrix[0, head, t, s]) == visible, (head, t, s)


@both
def test_a_token_always_sees_itself(make_mechanism: Callable[[], Any]) -> None:
    mechanism = make_mechanism()
    q, k, v = make_inputs(mechanism, 30)
    q = -k.repeat_interleave(2, 1)  # opposite directions never share a bucket
    assert bool((mechanism.attention_matrix(q, k, causal=True).diagonal(dim1=2, dim2=3) > 0).all())
    apart = mechanism.buckets(q) != mechanism.buckets(k.repeat_interleave(2, 1))
    assert bool(apart.any())
    assert_close(mechanism(q, k, v, causal=True)[:, :, :1], v.repeat_interleave(2, 1)[:, :, :1], 1e-12)


def test_pairs_that_meet_in_several_rounds_count_once() -> None:
    """Rounds that are all alike change nothing."""
    one, four = small(rounds=1), small(rounds=4)
    four.weight.copy_(one.weight.expand_as(four.weight))
    inputs = make_inputs(one, 50)
    for causal in (False, True):
        assert_close(four(*inputs, causal=causal), one(*inputs, causal=causal), 1e-12)


def test_blocks_that_hold_everything_are_exact_attention() -> None:
    mechanism = ClusterAttention(D, num_clusters=1, bucket_size=64)
    inputs = make_inputs(mechanism, 50)
    for causal in (False, True):
        assert_close(mechanism(*inputs, causal=causal), SoftmaxAttention(D)(*inputs, causal=causal), 1e-12)


def test_error_falls_with_rounds() -> None:
    """Shared queries and keys in groups: what a Reformer has to find."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1, 2, 32, 16, generator=generator)
    member = torch.randint(0, 32, (512,), generator=generator)
    k = centres[:, :, member] + 0.3 * torch.randn(1, 2, 512, 16, generator=generator)
    q, v = 3 * k, torch.randn(1, 2, 512, 16, generator=generator)
    want = SoftmaxAttention(16)(q, k, v)
    errors_ = []
    for rounds in (1, 2, 4, 8, 16):
        draws = [LshAttention(16, num_buckets=16, bucket_size=32, rounds=rounds, seed=seed) for seed in range(4)]
        errors_.append(sum(relative_error(draw(q, k, v), want) for draw in draws) / 4)
    assert errors_ == sorted(errors_, reverse=True)
    assert errors_[-1] < errors_[0] / 3


@both
def test_buckets_are_those_of_float32(make_mechanism: Callable[[], Any]) -> None:
    """The same in every precision, whatever the dtype says about the rest of the model."""
    mechanism = make_mechanism()
    q, _, _ = make_inputs(mechanism, 200)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = q.to(dtype)
        assert torch.equal(mechanism.buckets(x), mechanism.buckets(x.float()))
        assert torch.equal(mechanism.to(dtype).buckets(x), mechanism.buckets(x.double()))
    close = q.float()[:, :, :1] * (1 + 1e-12 * torch.randn(1, 1, 500, D, dtype=torch.float64))
    assert len(mechanism.buckets(close)[0, 0, 0].unique()) == 1


@both
def test_one_bucket_for_all_heads_or_one_for_each(make_mechanism: Callable[[], Any]) -> None:
    mechanism = make_mechanism()
    x = make_inputs(mechanism, 100).k[:, :1].expand(-1, 2, -1, -1)
    shared = mechanism.buckets(x)
    assert torch.equal(shared[:, :, 0], shared[:, :, 1])
    own = type(mechanism)(D, num_heads=2).buckets(x)
    assert not torch.equal(own[:, :, 0], own[:, :, 1])


def test_many_hashes_combine() -> None:
    x = torch.randn(1, 1, 400, D, generator=torch.Generator().manual_seed(0))
    combined = LshAttention(D, num_buckets=16, rounds=1, hashes=2)
    first, second = (LshAttention(D, num_buckets=4, rounds=1) for _ in range(2))
    first.weight.copy_(combined.weight[:, :, :1])
    second.weight.copy_(combined.weight[:, :, 1:])
    assert torch.equal(combined.buckets(x), 4 * first.buckets(x) + second.buckets(x))


def test_opposites_are_in_opposite_buckets() -> None:
    mechanism = small(rounds=1)
    x = torch.randn(1, 1, 100, D)
    assert torch.equal((mechanism.buckets(x) + 4) % 8, mechanism.buckets(-x))
    turned = mechanism.weight[0, 0, 0].T @ torch.eye(4)  # the directions themselves
    assert mechanism.buckets(turned.T[None, None]).flatten().tolist() == [0, 1, 2, 3]


# The engine -----------------------------------------------------------------------------------------------------------


def test_groups_hold_equal_codes_in_order() -> None:
    codes = torch.tensor([5, 2, -1, 5, 5, 2, -1, 9])
    groups = group(codes, 2)
    assert groups.codes.tolist() == [2, 5, 5, 9]
    assert groups.tokens.tolist() == [[1, 5], [0, 3], [4, 8], [7, 8]]
    values = torch.arange(8.0)
    assert groups.scatter(groups.gather(values), -5).tolist() == [0, 1, -5, 3, 4, 5, -5, 7]
    assert groups.labels(codes, 77).tolist() == [[2, 2], [5, 5], [5, 77], [9, 77]]
    tiles, met = meetings(group(torch.tensor([5, 3, 7]), 1), group(torch.tensor([2, 3, 4, 5]), 1), 1, 1)
    assert dict(zip(tiles.codes.tolist(), met.tolist(), strict=True)) == {3: [0, 1, 2], 5: [2, 3, 4], 7: [4, 4, 4]}


def test_codes_of_buckets_never_touch() -> None:
    """A full last block puts the next query one past it: no other bucket may begin there."""
    k_bucket = torch.tensor([0] * 4 + [1] * 4 + [2] * 3)[None, None, None]
    census = Census.of(k_bucket, None, 4)
    assert census.counts.flatten().tolist() == [4, 4, 3, 0]
    codes = census.codes(k_bucket, 2, None).flatten()
    last = torch.stack([census.codes(torch.full_like(k_bucket, b), 2, None).flatten()[-1] for b in range(4)])
    for b, code in enumerate(last.tolist()):
        others = codes[k_bucket.flatten() != b]
        assert int((others - code).abs().min()) > 1


def test_a_rule_counts_a_pair_in_its_first_round() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 3, 4, generator=generator, dtype=torch.float64) for n in (2, 3, 3)]
    codes = [torch.randint(0, 3, (n, 3, 2), generator=generator, dtype=torch.int32) for n in (2, 3)]
    places = [torch.arange(3 * n, dtype=torch.int32).view(n, 3) for n in (2, 3)]
    blocks = torch.tensor([[0, 2, 3], [1, 3, 3]])
    pairs = Pairs(blocks, *places, *codes)
    for r in (0, 1):
        out, _ = sparse.forward(Inputs(*tensors), pairs, Bounds(code_low=-1, round=r, skip_self=True), 0.5)
        for n, row in ((0, 0), (0, 2), (1, 1)):
            total, weighted = 0.0, torch.zeros(4, dtype=torch.float64)
            for block in blocks[n][blocks[n] < 3].tolist():
                for s in range(3):
                    apart = (codes[0][n, row] - codes[1][block, s]).tolist()
                    met = [-1 <= a <= 0 for a in apart]
                    if met[r] and not any(met[:r]) and places[0][n, row] != places[1][block, s]:
                        weight = (0.5 * tensors[0][n, row] @ tensors[1][block, s]).exp()
                        total, weighted = total + weight, weighted + weight * tensors[2][block, s]
            assert_close(out[n, row], weighted / total if total else weighted, 1e-12)
    absent = Pairs(blocks, torch.full_like(places[0], ABSENT_QUERY), torch.full_like(places[1], ABSENT_KEY))
    assert not bool(sparse.forward(Inputs(*tensors), absent, Bounds(), 0.5)[0].any())


@both
@pytest.mark.parametrize("pairs", [1, 40, 300])
def test_pairs_at_once_are_a_matter_of_speed(
    make_mechanism: Callable[[], Any], pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = make_mechanism()
    inputs = make_inputs(mechanism, 60).leaves()

    def run() -> list[Tensor]:
        out = mechanism(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    want = run()
    monkeypatch.setattr(sparse, "PAIRS_AT_ONCE", pairs)
    monkeypatch.setattr("subquad.mechanisms.buckets.PRODUCTS_AT_ONCE", pairs)
    for got, wanted in zip(run(), want, strict=True):
        assert_close(got, wanted, 1e-12)


@pytest.mark.full
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@both
def test_compiled(make_mechanism: Callable[[], Any]) -> None:
    mechanism = make_mechanism()
    compiled, step = torch.compile(mechanism, fullgraph=True), torch.compile(mechanism.extend)
    for length in (9, 17, 33):  # the second length makes it dynamic
        inputs = make_inputs(mechanism, length).leaves()
        got, want = compiled(*inputs, causal=True), mechanism(*inputs, causal=True)
        assert_close(got, want, 1e-12, f"length {length}")
        for g, w in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)), strict=True):
            assert_close(g, w, 1e-12, f"gradient, length {length}")
    inputs = make_inputs(mechanism, 33)
    want = mechanism(*inputs, causal=True)
    _, state = mechanism.extend(*inputs.tokens(0, 29))
    for t in range(29, 33):
        out, state = step(*inputs.tokens(t, t + 1), state)
        assert_close(out, want[:, :, t : t + 1], 1e-12, f"token {t}")


def test_functions_are_the_mechanisms() -> None:
    lsh, cluster = small(seed=3), ClusterAttention(D, num_clusters=8, bucket_size=4, seed=3)
    inputs = make_inputs(lsh, 40)
    rotations = draw_rotations(D, 8, 3, seed=3)
    assert torch.equal(rotations, lsh.weight)
    got = lsh_attention(*inputs, rotations, bucket_size=4, causal=True)
    assert torch.equal(got, lsh(*inputs, causal=True))
    got = cluster_attention(*inputs, cluster.centroids, bucket_size=4)
    assert torch.equal(got, cluster(*inputs))


# State ----------------------------------------------------------------------------------------------------------------


@both
def test_decoding_copies_rings_seldom(make_mechanism: Callable[[], Any]) -> None:
    """A token costs the same at any length: the large part of a state is shared until the tail is full."""
    mechanism = make_mechanism()
    inputs = make_inputs(mechanism, 60)
    _, state = mechanism.extend(*inputs.tokens(0, 20))
    copies = 0
    for t in range(20, 60):
        _, after = mechanism.extend(*inputs.tokens(t, t + 1), state)
        copies += after.ring_k.data_ptr() != state.ring_k.data_ptr()
        state = after
    assert copies == 4  # tails of 8 tokens


@both
def test_long_decoding_equals_forward(make_mechanism: Callable[[], Any]) -> None:
    """Rings that have been overwritten several times."""
    mechanism = make_mechanism()
    inputs = make_inputs(mechanism, 400)
    want = mechanism(*inputs, causal=True)
    out, state = mechanism.extend(*inputs.tokens(0, 50))
    outs, start, size = [out], 50, state_bytes(state)
    for piece in (1, 3, 100, 1, 1, 44, 150, 50):
        out, state = mechanism.extend(*inputs.tokens(start, start + piece), state)
        outs.append(out)
        start += piece
    assert start == 400
    assert state_bytes(state) == size
    assert_close(torch.cat(outs, 2), want, 1e-10)


# Errors ---------------------------------------------------------------------------------------------------------------

x = torch.randn(1, 4, 6, 8)
lsh, cluster = LshAttention(8, num_heads=2), ClusterAttention(8, num_heads=2)

ERRORS = {
    "odd": (lambda: LshAttention(8, num_buckets=5), "lsh: num_buckets must be an even number, got 5"),
    "no power": (
        lambda: LshAttention(8, num_buckets=12, hashes=2),
        "lsh: num_buckets must be an even number to the power of hashes=2, got 12",
    ),
    "one bucket": (
        lambda: LshAttention(8, num_buckets=1),
        "lsh: num_buckets must be a whole number of at least 2, got 1",
    ),
    "hashes": (lambda: LshAttention(8, hashes=0), "lsh: hashes must be a whole number of at least 1, got 0"),
    "rounds": (lambda: LshAttention(8, rounds=0), "lsh: rounds must be a whole number of at least 1, got 0"),
    "bucket size": (
        lambda: ClusterAttention(8, bucket_size=0),
        "cluster: bucket_size must be a whole number of at least 1, got 0",
    ),
    "clusters": (
        lambda: ClusterAttention(8, num_clusters=0),
        "cluster: num_clusters must be a whole number of at least 1, got 0",
    ),
    "decay": (lambda: ClusterAttention(8, decay=1.0), "cluster: decay must be at least 0 and below 1, got 1.0"),
    "heads": (
        lambda: lsh(x, x, x),
        "lsh: the rotations have 2 heads, but k has 4; make them with num_heads = the heads of k",
    ),
    "heads of clusters": (
        lambda: cluster.update(x, x),
        "cluster: the centroids have 2 heads, but k has 4; make them with num_heads = the heads of k",
    ),
    "rotations": (
        lambda: lsh_attention(x, x, x, torch.randn(4, 8)),
        "lsh: the rotations must be [1 or 4, rounds, hashes, directions, 8], got [4, 8]",
    ),
    "centroids": (
        lambda: cluster_attention(x, x, x, torch.randn(1, 3, 7)),
        "cluster: the centroids must be [1 or 4, clusters, 8], got [1, 3, 7]",
    ),
    "redraw": (
        lambda: cluster.redraw(1),
        "cluster: centroids are learned, there is nothing to redraw; use update(q, k)",
    ),
    "inside": (
        lambda: ClusterAttention(8, inside="exakt"),
        "cluster: inside must be one of exact, favor, got 'exakt' (did you mean 'exact'?)",
    ),
    "features without favor": (
        lambda: ClusterAttention(8, num_features=8),
        "cluster: num_features belongs to inside='favor'; leave it out with inside='exact'",
    ),
    "blocks with favor": (
        lambda: ClusterAttention(8, inside="favor", bucket_size=8),
        "cluster: bucket_size belongs to inside='exact'; leave it out with inside='favor'",
    ),
    "cross": (
        lambda: lsh_attention(x, x[:, :, :3], x[:, :, :3], draw_rotations(8)),
        "lsh: compares positions, so it needs as many queries as keys, got 6 and 3",
    ),
    "cross in clusters": (
        lambda: cluster_attention(x, x[:, :, :3], x[:, :, :3], torch.randn(1, 3, 8)),
        "cluster: compares positions, so it needs as many queries as keys, got 6 and 3",
    ),
    "update with fewer keys": (
        lambda: ClusterAttention(8).update(x, x[:, :, :3]),
        "cluster: compares positions, so it needs as many queries as keys, got 6 and 3",
    ),
    "shared heads": (
        lambda: SelfAttention(16, 4, num_key_value_heads=2, shared_qk=True),
        "attention layer: shared_qk=True makes keys of the queries, so num_key_value_heads must be num_heads, "
        "got 2 and 4",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message


def test_another_device_is_refused() -> None:
    with pytest.raises(errors.BackendError) as caught:
        lsh_attention(x, x, x, draw_rotations(8).to("meta"))
    assert str(caught.value) == "lsh: the rotations are on meta, k on cpu; move one of them"


def test_modules_say_what_they_are() -> None:
    shown = "head_dim=8, num_buckets=64, bucket_size=64, rounds=4, hashes=1, num_heads=2, scale=0.3536"
    assert repr(lsh) == f"LshAttention({shown})"
    shown = "head_dim=8, num_clusters=64, inside='{}', {}, num_heads={}, decay=0.99, scale=0.3536"
    assert repr(cluster) == f"ClusterAttention({shown.format('exact', 'bucket_size=64', 2)})"
    favor = ClusterAttention(8, inside="favor", num_features=16)
    assert repr(favor) == f"ClusterAttention({shown.format('favor', 'num_features=16', None)})"
    assert attention("cluster", head_dim=8, num_clusters=3).name == "cluster"
    meta = torch.device("meta")
    with meta:
        made = [LshAttention(8, seed=1), ClusterAttention(8, seed=1)]
    for mechanism, alike in zip(made, [LshAttention(8, seed=1), ClusterAttention(8, seed=1)], strict=True):
        alive = mechanism.to_empty(device="cpu")
        alive.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(alive.buffers(), alike.buffers(), strict=True))
