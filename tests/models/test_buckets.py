"""Centroids that move, shared queries and keys, a Reformer: buckets in layers, models and training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import (
    ClusterAttention,
    FavorAttention,
    SoftmaxAttention,
)
from subquad.models import SubquadForCausalLM
from subquad.nn import Context, SelfAttention
from subquad.testing import assert_close, make_inputs
from subquad.training.callbacks import UpdateCentroids
from tiny_models import make, random_ids

D = 6


# Centroids ------------------------------------------------------------------------------------------------------------


def test_only_update_moves_centroids() -> None:
    mechanism = ClusterAttention(D, num_clusters=4, bucket_size=4, decay=0.5)
    q, k, v = make_inputs(mechanism, 50).to(torch.float32)
    before, buffer = mechanism.centroids.clone(), mechanism.centroids
    mechanism(q, k, v)
    mechanism.train()(q, k, v, causal=True)
    mechanism.extend(q, k, v)
    assert torch.equal(mechanism.centroids, before)
    mechanism.update(q, k)
    assert mechanism.centroids is buffer
    x = torch.cat([q.flatten(0, 2), k.flatten(0, 2)])
    x = x / x.norm(dim=-1, keepdim=True)
    member = (x @ before[0].T).argmax(-1)
    for c in range(4):
        mean = x[member == c].sum(0)
        want = before[0, c] + mean / mean.norm()
        assert_close(mechanism.centroids[0, c], want / want.norm(), 1e-5)


def test_masked_tokens_and_empty_clusters_move_nothing() -> None:
    mechanism = ClusterAttention(2, num_clusters=3, num_heads=1, decay=0.9)
    mechanism.centroids.copy_(torch.tensor([[[1.0, 0], [0, 1], [-1, 0]]]))
    q = torch.tensor([[1.0, 0.2], [0.1, 1]])[None, None]
    hidden = torch.tensor([[-1.0, 0.5]])[None, None]
    padded = torch.cat([q, hidden * torch.nan], 2)
    mechanism.update(padded, padded, torch.tensor([[True, True, False]]))
    moved = mechanism.centroids.clone()
    assert moved[0, 2].tolist() == [-1, 0]
    assert_close(moved.norm(dim=-1), torch.ones(1, 3), 1e-6)
    other = ClusterAttention(2, num_clusters=3, num_heads=1, decay=0.9)
    other.centroids.copy_(torch.tensor([[[1.0, 0], [0, 1], [-1, 0]]]))
    other.update(q, q)
    assert_close(other.centroids, moved, 1e-6)


def test_updates_find_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(1, 1, 4, 8, generator=generator), dim=-1)
    member = torch.randint(0, 4, (400,), generator=generator)
    x = centres[:, :, member] + 0.05 * torch.randn(1, 1, 400, 8, generator=generator)
    mechanism = ClusterAttention(8, num_clusters=4, decay=0.5)
    mechanism.centroids.copy_(centres[0] + 0.5 * torch.randn(1, 4, 8, generator=generator))
    for _ in range(20):
        mechanism.update(x, x)
    assert_close(mechanism.centroids, centres[0], 0.05)


def test_clusters_without_vectors_keep_their_bits() -> None:
    """Not even rounded once more."""
    mechanism = ClusterAttention(8, num_clusters=64, decay=0.9)
    before = mechanism.centroids.clone()
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    mechanism.update(x, x)
    moved = (mechanism.centroids != before).any(-1)
    assert 1 <= int(moved.sum()) <= 3


def test_ranks_update_by_the_sum_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, ours, theirs = (ClusterAttention(D, num_clusters=4) for _ in range(3))
    q, k, _ = make_inputs(one, 40, batch=4).to(torch.float32)
    one.update(q, k)
    of_the_other = theirs._sum_of_directions(q[2:]) + theirs._sum_of_directions(k[2:])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(of_the_other))
    ours.update(q[:2], k[:2])
    assert_close(ours.centroids, one.centroids, 1e-6)


def test_the_callback_updates_from_the_batch_of_its_step() -> None:
    model = make(attention="cluster", attention_options={"num_clusters": 4, "bucket_size": 4}, dtype=torch.float32)
    moved: list[bool] = []
    callback = UpdateCentroids(every=2)
    for step in range(4):
        before = [m.centroids.clone() for m in model.mechanisms()]
        state: Any = type("State", (), {"global_step": step})
        control: Any = None
        callback.on_step_begin(None, state, control, model=model)
        model(random_ids(2, 20), labels=random_ids(2, 20)).loss.backward()
        callback.on_step_end(None, state, control, model=model)
        now = [m.centroids for m in model.mechanisms()]
        moved.append(all(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))
        unmoved = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert moved[-1] != unmoved
    assert moved == [True, False, True, False]
    assert not any(m._forward_pre_hooks for m in model.mechanisms())


def test_training_moves_centroids(tmp_path: Path) -> None:
    from processes import OPTIONS, quiet_train

    learned = {}
    for every in (0, 1):
        options = {"num_clusters": 4, "bucket_size": 16}
        run = {**vars(OPTIONS), "attention": "cluster", "attention_options": options, "redraw_every": 0, "steps": 3}
        quiet_train(tmp_path / str(every), type(OPTIONS)(**{**run, "update_every": every}))
        model = SubquadForCausalLM.from_pretrained(tmp_path / str(every) / "model")
        learned[every] = model.mechanisms()[0].centroids
    assert not torch.equal(learned[0], learned[1])
    assert torch.equal(learned[0], make_layer_centroids(options))


def make_layer_centroids(options: dict[str, Any]) -> Tensor:
    return SelfAttention(16, 2, attention="cluster", options=options, layer=0).mechanism.centroids  # pyright: ignore


def test_one_cluster_of_features_is_favor() -> None:
    whole = ClusterAttention(D, num_clusters=1, inside="favor", num_features=16)
    favor = FavorAttention(D, 16, near=0, sinks=0)
    assert whole.weight is not None
    favor.feature_map.query.copy_(whole.weight)
    inputs = make_inputs(whole, 50)
    for causal in (False, True):
        assert_close(whole(*inputs, causal=causal), favor(*inputs, causal=causal), 1e-10)
    centroids = whole.centroids.clone()
    whole.redraw(5)
    assert not torch.equal(whole.weight, favor.feature_map.query)
    assert torch.equal(whole.centroids, centroids)
    whole.reset_parameters()
    assert torch.equal(whole.weight, favor.feature_map.query)


# Layers and models ----------------------------------------------------------------------------------------------------


def test_shared_keys_are_normalised_queries() -> None:
    layer = SelfAttention(16, 2, attention="softmax", shared_qk=True).double()
    assert {name for name, _ in layer.named_parameters()} == {"q_proj.weight", "v_proj.weight", "o_proj.weight"}
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, v = (weight(x).view(2, 9, 2, 8).transpose(1, 2) for weight in (layer.q_proj, layer.v_proj))
    k = q / q.square().mean(-1, keepdim=True).sqrt()
    want = layer.o_proj((SoftmaxAttention(8)(q, k, v, causal=True)).transpose(1, 2).flatten(-2))
    assert_close(layer(x, Context(causal=True)), want, 1e-12)


REFORMER = {
    "attention": "lsh",
    "attention_options": {"num_buckets": 4, "bucket_size": 4, "rounds": 2},
    "num_key_value_heads": 4,
    "shared_qk": True,
    "reversible": True,
}


def test_a_reformer_decodes_what_it_computes() -> None:
    model = make(**REFORMER)
    ids = random_ids(2, 40)
    want = model(ids).logits
    logits, cache = [], None
    for piece in ids.split([25, 1, 1, 1, 12], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        cache = out.past_key_values
    assert_close(torch.cat(logits, 1), want, 1e-10)
    cached, plain = (
        model.generate(ids[:, :10], max_new_tokens=15, use_cache=c, do_sample=False) for c in (True, False)
    )
    assert torch.equal(cached, plain)


def test_a_reformer_learns() -> None:
    model = make(**REFORMER, dtype=torch.float32).train()
    ids = random_ids(1, 20).repeat(2, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_layers_have_rotations_and_centroids_of_their_own() -> None:
    for name, buffer in (("lsh", "weight"), ("cluster", "centroids")):
        first, second = (m for m in make(attention=name).mechanisms())
        assert getattr(first, buffer).shape[0] == 2
        assert not torch.equal(getattr(first, buffer), getattr(second, buffer))
