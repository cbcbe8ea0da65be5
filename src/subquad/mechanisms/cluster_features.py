"""FAVOR+ within clusters: every query attends to all keys of its cluster by random features.

Each cluster of each sequence and key head becomes a sequence of its own, as long as the largest of them: tokens that
have their query or their key there, in order. Then it is FAVOR attention without near blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels.favor.inputs import FavorOptions
from subquad.kernels.favor.operator import favor_attention


class FieldState(NamedTuple):
    """The keys of each cluster, summed up: maxima `[B, K, clusters, M]`, sums `[B, K, clusters, M, Dv + 1]`."""

    far_max: Tensor
    far_sum: Tensor


class _ClusterRows:
    """Where tokens go. q_cluster `[B, H, T]`, k_cluster `[B, K, S]`; masked keys go nowhere."""

    def __init__(self, q_cluster: Tensor, k_cluster: Tensor, key_mask: Tensor | None, clusters: int) -> None:
        batch, key_heads, keys = k_cluster.shape
        queries = q_cluster.shape[2]
        length = max(queries, keys)
        of_q = q_cluster * length + torch.arange(queries, device=q_cluster.device)
        of_k = k_cluster * length + torch.arange(keys, device=k_cluster.device)
        self.real = torch.ones_like(of_k, dtype=torch.bool) if key_mask is None else key_mask[:, None].expand_as(of_k)
        of_k = of_k.masked_fill(~self.real, clusters * length)
        of_q = of_q.reshape(batch, key_heads, -1)  # all heads that share a key head
        line = torch.cat([of_q, of_k], 2).sort(-1).values
        fresh = torch.ones_like(line)
        fresh[..., 1:] = line[..., 1:] != line[..., :-1]
        self.number = torch.nn.functional.pad(fresh.cumsum(-1), (1, 0))  # different addresses before a place in line
        self.line, self.rows = line, batch * key_heads * clusters
        borders = (torch.arange(clusters + 1, device=line.device) * length).expand(batch, key_heads, -1).contiguous()
        self.starts = self._number(borders)
        self.width = int(self.starts.diff().max())
        self.q_row, self.q_slot = self._place(q_cluster.reshape(batch, key_heads, -1), of_q)
        self.k_row, self.k_slot = self._place(k_cluster, of_k)
        self.groups = q_cluster.shape[1] // key_heads

    def _number(self, address: Tensor) -> Tensor:
        return self.number.gather(-1, torch.searchsorted(self.line, address))

    def _place(self, cluster: Tensor, address: Tensor) -> tuple[Tensor, Tensor]:
        owner = torch.arange(cluster.shape[0] * cluster.shape[1], device=cluster.device)
        row = owner.view(*cluster.shape[:2], 1) * (self.starts.shape[-1] - 1) + cluster
        return row, self._number(address) - self.starts.gather(-1, cluster)

    def keys(self, x: Tensor) -> Tensor:
        """x `[B, K, S, D] -> [rows, 1, width, D]`, zeros in empty slots."""
        place = (self.k_row * self.width + self.k_slot)[self.real]
        return (
            x.new_zeros(self.rows * self.width, x.shape[3])
            .index_copy(0, place, x[self.real])
            .view(self.rows, 1, self.width, -1)
        )

    def alive(self) -> Tensor:
        """`[rows, width]`: slots that hold a real key."""
        alive = self.line.new_zeros(self.rows, self.width, dtype=torch.bool)
        alive[self.k_row[self.real], self.k_slot[self.real]] = True
        return alive

    def _q_place(self) -> Tensor:
        head = torch.arange(self.groups, device=self.line.device).repeat_interleave(self.q_row.shape[2] // self.groups)
        return ((self.q_row * self.groups + head) * self.width + self.q_slot).flatten()

    def queries(self, x: Tensor) -> Tensor:
        """x `[B, H, T, D] -> [rows, heads of a group, width, D]`."""
        packed = x.new_zeros(self.rows * self.groups * self.width, x.shape[3])
        return packed.index_copy(0, self._q_place(), x.flatten(0, 2)).view(self.rows, self.groups, self.width, -1)

    def outputs(self, x: Tensor, like: Tensor) -> Tensor:
        """Back again, `[B, H, T, Dv]`."""
        return x.flatten(0, 2).index_select(0, self._q_place()).view(*like.shape[:3], -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clusters: tuple[Tensor, Tensor, int],
    map: FeatureMap,
    *,
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
    state: FieldState | None = None,
) -> tuple[Tensor, FieldState]:
    """Output `[B, H, T, Dv]`, and when causal the state after the last token. clusters: of q, of k, how many."""
    q_cluster, k_cluster, count = clusters
    rows = _ClusterRows(q_cluster, k_cluster, key_mask, count)
    keys, values = rows.keys(k), rows.keys(v)
    far = {} if state is None else {name: x.flatten(0, 2)[:, None] for name, x in state._asdict().items()}
    options = FavorOptions(near=0, sinks=0, scale=scale, gaussian=False, chunk=0, backend="auto")
    tensors = rows.queries(q), keys, values
    out, *far = favor_attention(*tensors, map, options, causal=causal, alive=rows.alive(), **far)
    if causal:
        far = [x.view(*k.shape[:2], count, *x.shape[2:]) for x in far]
    return rows.outputs(out, q), FieldState(*far)
