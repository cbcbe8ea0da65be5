"""FAVOR attention of whole sequences: its options, and how padding and sinks become what the engines take."""

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import favor as favor_checks
from subquad.features.positive import FeatureMap
from subquad.kernels import engines
from subquad.kernels.favor import operator as favor_operator
from subquad.kernels.favor.inputs import FavorOptions
from subquad.mechanism import real_index
from subquad.mechanisms.favor_state import map_heads
from subquad.mechanisms.packing import pack, slots_of, unpack

KERNELS = ("softmax", "gaussian")


def make_options(
    near: int,
    sinks: int,
    kernel: str,
    scale: float | None,
    backend: str,
    chunk: int | None,
    *,
    head_dim: int,
    reach: int = 1,
    far: bool = True,
) -> FavorOptions:
    checks.choice("favor", "kernel", kernel, KERNELS)
    near, sinks = (checks.count("favor", name, x, minimum=0) for name, x in (("near", near), ("sinks", sinks)))
    return FavorOptions(
        near=near,
        sinks=sinks,
        gaussian=kernel == "gaussian",
        scale=checks.scale("favor", scale, head_dim),
        chunk=checks.optional_count("favor", "chunk", chunk) or 0,
        backend=engines.backend("favor", backend),
        reach=favor_checks.reach(near, checks.count("favor", "reach", reach)),
        far=favor_checks.far(far, near, sinks),
    )


def attend(
    options: FavorOptions, q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, causal: bool, key_mask: Tensor | None
) -> Tensor:
    k, v = map_heads(map, q, k, v)
    if not options.near:
        return _attend_unmoved(options, q, k, v, map, causal, key_mask)
    if key_mask is None:
        return _attend_packed(options, q, k, v, map, causal, None)
    slots = slots_of(real_index(key_mask, k), key_mask, q.shape[2])
    q, k, v = (pack(x, slots, q.shape[2]) for x in (q, k, v))
    return unpack(_attend_packed(options, q, k, v, map, causal, key_mask.sum(-1)), slots)


def _attend_unmoved(
    options: FavorOptions, q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, causal: bool, key_mask: Tensor | None
) -> Tensor:
    """No near blocks: any number of queries, padding anywhere."""
    tensors: dict[str, Tensor] = {} if key_mask is None else {"alive": key_mask}
    if options.sinks:
        index = real_index(key_mask, k)
        real = torch.ones_like(index, dtype=torch.bool) if key_mask is None else key_mask
        slots = slots_of(index, real & (index < options.sinks), options.sinks)
        tensors |= {name: pack(x, slots, options.sinks) for name, x in (("sink_k", k), ("sink_v", v))}
        tensors["alive"] = real & (index >= options.sinks)
        count = real.cumsum(-1) if causal else real.sum(-1, keepdim=True).expand(-1, q.shape[2])
        tensors["sink_seen"] = count.clamp(max=options.sinks)
    return favor_operator.favor_attention(q, k, v, map, options, causal=causal, **tensors)[0]


def _attend_packed(
    options: FavorOptions, q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, causal: bool, lengths: Tensor | None
) -> Tensor:
    """Real tokens come first, `lengths` `[B]` of them (None: all)."""
    length = q.shape[2]
    sinks = min(options.sinks, length)
    index = torch.arange(length, device=q.device)[None]
    total = torch.full_like(index[:, :1], length) if lengths is None else lengths[:, None]
    alive = None if lengths is None and not sinks else (index >= sinks) & (index < total)
    seen = (index + 1 if causal else total.expand(-1, length)).clamp(max=sinks) if sinks else None
    masks, options = {"alive": alive, "sink_seen": seen}, options._replace(sinks=sinks)
    return favor_operator.favor_attention(q, k, v, map, options, causal=causal, **masks)[0]
