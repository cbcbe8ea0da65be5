"""Caches as values: copies, rows, and what was before."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import errors
from subquad.conversion import swap_attention
from subquad.conversion.generation import StateCache
from subquad.mechanism import outermost
from subquad.models import SubquadCache
from tiny_heads import llama
from tiny_models import NARROW, make, random_ids


def models() -> dict[str, Any]:
    options = NARROW["favor"]
    return {
        "ours": make(attention="favor", attention_options=options, short_conv=3, stir=True),
        "swapped": swap_attention(llama(), "favor", **options),
    }


def tensors(state: Any) -> Iterator[Tensor]:
    for part in state:
        yield from [part] if isinstance(part, Tensor) else tensors(part)


def held(cache: Any) -> list[Tensor]:
    return [*(tensor for layer in cache.layers for tensor in tensors(layer.state)), cache.length]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def read(model: Any, cache: Any, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, **options).past_key_values


both = pytest.mark.parametrize("name", ["ours", "swapped"])


@both
def test_tokens_are_read_into_new_tensors(name: str) -> None:
    """In float32, where the C++ engine decodes."""
    model = models()[name].float()
    cache = read(model, None, random_ids(2, 9))
    kept, bits = cache.snapshot(), [tensor.clone() for tensor in held(cache)]
    for _ in range(6):
        cache = read(model, cache, random_ids(2, 1))
    assert same(held(kept), bits)
    assert not same(held(cache), bits)
    assert (kept.get_seq_length(), cache.get_seq_length()) == (9, 15)


@both
def test_a_snapshot_shares_all_tensors(name: str) -> None:
    cache = read(models()[name], None, random_ids(2, 5))
    assert all(a is b for a, b in zip(held(cache), held(cache.snapshot()), strict=True))


@both
def test_restored_any_number_of_times(name: str) -> None:
    model = models()[name]
    cache = read(model, None, random_ids(2, 5))
    kept, want = cache.snapshot(), held(cache)
    for length in (1, 3):
        read(model, cache, random_ids(2, length))
        assert cache.get_seq_length() == 5 + length
        cache.restore(kept)
        assert same(held(cache), want)
        assert cache.get_seq_length() == 5
    fresh = type(cache)(2)
    cache.restore(fresh)
    assert (cache.get_seq_length(), cache.length, cache.layers[0].state) == (0, None, None)


@both
def test_a_call_that_failed_can_be_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models()[name]
    cache = read(model, None, random_ids(1, 5))
    kept = cache.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(outermost(model)[1][1], "extend", None, raising=False)
        with pytest.raises(TypeError):
            read(model, cache, random_ids(1, 2))
    assert cache.length.tolist() == [7]
    cache.restore(kept)
    assert read(model, cache, random_ids(1, 2)).length.tolist() == [7]


@both
def test_forks_and_rows_are_caches_of_their_own(name: str) -> None:
    model = models()[name]
    cache = read(model, None, random_ids(2, 5))
    want = held(cache)
    many = cache.fork(3)
    assert same(held(many), [tensor.repeat_interleave(3, 0) for tensor in want])
    assert same(held(cache.select([1])), [tensor[1:] for tensor in want])
    assert same(held(cache.select(torch.tensor([1, 0, 1]))), [tensor[[1, 0, 1]] for tensor in want])
    read(model, many, random_ids(6, 2))
    assert same(held(cache), want)
    assert (many.length.tolist(), many.get_seq_length()) == ([7] * 6, 7)


@both
def test_real_tokens_are_counted_row_by_row(name: str) -> None:
    """Whatever the padding, and however the mask is given."""
    model, ids = models()[name], random_ids(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :4] = 0
    cache = read(model, None, ids, attention_mask=mask)
    assert cache.length.tolist() == [2, 6]
    read(model, cache, ids[:, :1])
    assert cache.length.tolist() == [3, 7]
    longer = torch.cat([mask, torch.tensor([[1, 1, 0], [1, 1, 1]])], 1)
    read(model, cache, ids[:, :2], attention_mask=longer)
    assert cache.length.tolist() == [4, 9]
    cache.reset()
    assert cache.length is None


ERRORS = {
    "another kind": (
        lambda: SubquadCache(2).restore(StateCache(2)),
        "SubquadCache: can only be restored from one, got StateCache",
    ),
    "another depth": (
        lambda: StateCache(2).restore(StateCache(3)),
        "StateCache: has 2 layers, what it is to be restored from 3",
    ),
    "no copies": (lambda: SubquadCache(2).fork(0), "fork: copies must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message
