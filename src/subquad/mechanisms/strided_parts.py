"""The two parts of a Sparse Transformer's attention: near tokens, and the columns that reach all others.

Tensors are `[B, H, T, D]`, real tokens first, padded to whole blocks of the stride. Letters as in `sparse/lines.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.sparse.lines import Lines, Part, causal_band, cross, padded, symmetric_band
from subquad.kernels.sparse.torch import ABSENT_KEY, Bounds, merge


class StridedOptions(NamedTuple):
    """summary: places of the summaries at the end of a block; 0 for the pattern without."""

    stride: int
    summary: int
    scale: float

    def within(self, length: int) -> "StridedOptions":
        """The same pattern for so many tokens: one block holds all of them, and no memory is for more."""
        return self._replace(stride=min(self.stride, length), summary=min(self.summary, length))


class Tokens(NamedTuple):
    """q `[B, H, T, D]`, k and v `[B, K, T, ..]`, whole blocks; counts `[B]`: tokens that are there, None if all are."""

    q: Tensor
    k: Tensor
    v: Tensor
    counts: Tensor | None


def in_blocks(q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, stride: int) -> Tokens:
    """In full precision, with empty places up to a multiple of the stride."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if q.shape[2] % stride and counts is None:
        counts = torch.full((q.shape[0],), q.shape[2], device=q.device)
    q, k, v = (padded(x.to(dtype), stride) for x in (q, k, v))
    return Tokens(q, k, v, counts)


def attend(options: StridedOptions, tokens: Tokens, causal: bool) -> Tensor:
    """All tokens to each other, `[B, H, T, Dv]`."""
    near, far = (own_block, _summaries) if options.summary else (window, _columns)
    parts = [near(options, tokens, causal)]
    if tokens.q.shape[2] > options.stride:
        parts.append(far(options, tokens, causal))
    return merged(parts)


def merged(parts: list[Part]) -> Tensor:
    return merge([part.out for part in parts], [part.log_normaliser for part in parts])


# The strided pattern --------------------------------------------------------------------------------------------------


def window(options: StridedOptions, tokens: Tokens, causal: bool) -> Part:
    """The nearest tokens, less than a stride away."""
    lines, reach = _whole(tokens.q, tokens.k, tokens.v), options.stride - 1
    if causal:
        return _of_tokens(causal_band(lines, 0, reach, options.scale), tokens.q)
    return _of_tokens(symmetric_band(lines, reach, tokens.counts, options.scale), tokens.q)


def _columns(options: StridedOptions, tokens: Tokens, causal: bool) -> Part:
    """Tokens whole strides away, but not the token itself, which the window has: a line for each residue."""
    q, k, v, counts = tokens
    lines, rows = _by_residue(q, k, v, options.stride), k.shape[2] // options.stride
    if causal:
        return _from_residues(causal_band(lines, 1, rows, options.scale), q)
    if counts is not None:
        residue = torch.arange(options.stride, device=q.device)
        counts = _per_line((counts[:, None] - residue + options.stride - 1) // options.stride, k.shape[1])
    return _from_residues(symmetric_band(lines, rows, counts, options.scale, skip_self=True), q)


def past_columns(options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, first: Tensor, most: int) -> Part:
    """The columns of tokens that continue a sequence: q begins `first` `[B]` strides after k and v, at most `most`."""
    stride, rows = options.stride, q.shape[2] // options.stride
    q_place = first[:, None] + torch.arange(rows, device=q.device)
    k_place = torch.arange(k.shape[2] // stride, device=q.device)[None]
    lines = _by_residue(q, k, v, stride)
    return _from_residues(cross(lines, q_place, k_place, Bounds(1), options.scale, lambda row: most + row), q)


def _by_residue(q: Tensor, k: Tensor, v: Tensor, stride: int) -> Lines:
    """A line for each batch, key head and residue of the position."""
    q = _grouped(q, k).unflatten(3, (-1, stride)).permute(0, 1, 4, 2, 3, 5).flatten(0, 2)
    k, v = (x.unflatten(2, (-1, stride)).transpose(2, 3).flatten(0, 2) for x in (k, v))
    return Lines(q, k, v)


def _from_residues(part: Part, q: Tensor) -> Part:
    def tokens(x: Tensor) -> Tensor:
        groups, rows = x.shape[1:3]
        x = x.reshape(q.shape[0], q.shape[1] // groups, -1, groups, rows, *x.shape[3:])
        return x.permute(0, 1, 3, 4, 2, *range(5, x.dim())).reshape(*q.shape[:3], *x.shape[5:])

    return Part(tokens(part.out), tokens(part.log_normaliser))


# The fixed pattern ----------------------------------------------------------------------------------------------------


def own_block(options: StridedOptions, tokens: Tokens, causal: bool) -> Part:
    """The tokens of the own block: a line for each."""
    q, k, v, counts = tokens
    blocks, reach = k.shape[2] // options.stride, options.stride - 1
    of_q = _grouped(q, k).unflatten(3, (blocks, -1)).transpose(2, 3).flatten(0, 2)
    lines = Lines(of_q, *(x.unflatten(2, (blocks, -1)).flatten(0, 2) for x in (k, v)))
    if causal:
        part = causal_band(lines, 0, reach, options.scale)
    else:
        if counts is not None:
            start = options.stride * torch.arange(blocks, device=q.device)
            counts = _per_line((counts[:, None] - start).clamp(0, options.stride), k.shape[1])
        part = symmetric_band(lines, reach, counts, options.scale)
    return _of_tokens(Part(*(x.unflatten(0, (-1, blocks)).transpose(1, 2) for x in part)), q)


def _summaries(options: StridedOptions, tokens: Tokens, causal: bool) -> Part:
    """The summaries of all blocks, or of earlier ones, but not of the own block, which is seen as a whole."""
    q, k, v, counts = tokens
    position = torch.arange(k.shape[2], device=k.device)[None]
    block = position // options.stride
    of_keys = block
    if counts is not None and not causal:  # when causal, the mask hides them already
        of_keys = torch.where(position < counts[:, None], block, ABSENT_KEY)
    k, v, of_keys = (summaries(options, x) for x in (k, v, of_keys[:, None, :, None]))
    return to_summaries(options, q, k, v, block, of_keys.flatten(1), causal)


def to_summaries(
    options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, q_block: Tensor, k_block: Tensor, causal: bool
) -> Part:
    """k and v: summaries of past blocks, if any, and of those of q. q_block `[B or 1, T]`, k_block `[B or 1, S]`."""
    stride, summary, keys = options.stride, options.summary, k.shape[2]
    past = keys - q.shape[2] // stride * summary
    bounds = Bounds(1) if causal else Bounds(-keys, keys, skip_self=True)
    seen = (lambda token: past + token // stride * summary) if causal else (lambda _: keys)
    return _of_tokens(cross(_whole(q, k, v), q_block, k_block, bounds, options.scale, seen), q)


def summaries(options: StridedOptions, x: Tensor) -> Tensor:
    """The last `summary` places of every block: `[B, K, T, D] -> [B, K, blocks * summary, D]`."""
    return x.unflatten(2, (-1, options.stride))[:, :, :, -options.summary :].flatten(2, 3)


# Shared ---------------------------------------------------------------------------------------------------------------


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """`[B, H, T, D] -> [B, K, G, T, D]`."""
    return q.unflatten(1, (k.shape[1], -1))


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Lines:
    """A line for each batch and key head."""
    return Lines(_grouped(q, k).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))


def _of_tokens(part: Part, q: Tensor) -> Part:
    """Lines that stand in the order of the tokens, as tokens."""
    return Part(part.out.reshape(*q.shape[:3], -1), part.log_normaliser.reshape(q.shape[:3]))


def _per_line(counts: Tensor, heads: int) -> Tensor:
    """`[B, n] -> [B * heads * n]`."""
    return counts[:, None].expand(-1, heads, -1).flatten()
