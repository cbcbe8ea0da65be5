"""Linformer (Wang et al. 2020): keys and values are projected from their S positions to `rank` slots first."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import checks
from subquad.checks import linformer as linformer_checks
from subquad.features.elementwise import ELEMENTWISE, at_least_tiny, by_largest
from subquad.kernels.precision import without_autocast
from subquad.mechanism import Mechanism, RandomFeatures, State, masked_softmax, repeat_heads

SHARINGS = ("none", "headwise", "key_value", "layerwise")
PROJECTIONS = ("learned", "convolution", "mean", "gaussian")
BLOCKWISE = ("convolution", "mean")  # a slot holds one block of max_length / rank tokens; other slots mix all tokens
KERNELS = ("softmax", "linear")


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q (E k)^T) (F v). Bidirectional: E and F mix all positions.

    Cost: O((T + S) rank D) time, O((T + S) D) memory.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, S, D]`; v: `[B, K, S, Dv]`, H a multiple of K.
        e, f: `[rank, N]` for all heads or `[K, rank, N]`, N >= S: the first S columns are used.
        key_mask: bool `[B, S]`, True where the key is real; columns belong to positions, so padding on the right only.
        scale: `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`; zeros for a sequence without keys.
    Example:
        >>> linformer_attention(*torch.randn(3, 1, 2, 50, 4), *torch.randn(2, 8, 64)).shape
        torch.Size([1, 2, 50, 4])
    """
    name = LinformerAttention.name
    checks.qkv(name, q, k, v)
    checks.key_mask(name, key_mask, k)
    checks.right_padding(name, key_mask)
    linformer_checks.matrices(e, f, k)
    scale = checks.scale(name, scale, q.shape[-1])
    k, v = (_real_only(x, key_mask) for x in (k, v))
    return _attend(q, _project(k, e), _project(v, f), scale)


phi = ELEMENTWISE["elu1"].phi  # of kernel="linear"


def _real_only(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros for masked tokens. As projections have no bias, they then contribute nothing."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def _project(x: Tensor, matrix: Tensor) -> Tensor:
    """x `[B, K, S, D]` -> `[B, K, rank, D]`; one matrix for all heads is one product, whose gradient needs no sum."""
    matrix = matrix[..., : x.shape[2]].to(x.dtype)
    if matrix.dim() == 3 and matrix.shape[0] > 1:
        return torch.einsum("krs,bksd->bkrd", matrix, x)
    return torch.einsum("rs,bksd->bkrd", matrix.reshape(matrix.shape[-2:]), x)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, slots: Tensor | None = None) -> Tensor:
    """Softmax attention to all slots, or to those in slots `[B, rank]`; without any, values and so outputs are zero."""
    mask = None if slots is None else (slots | ~slots.any(-1, keepdim=True))[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


class LinformerAttention(RandomFeatures, Mechanism):
    """softmax(scale * q (E k)^T) (F v), E and F `[rank, max_length]`, cut to the length of the keys.

    Beside the contract it makes, shares and applies four kinds of projection, hence more methods than other mechanisms.

    Args:
        head_dim: D of the queries and keys.
        rank: slots that keys and values are projected to.
        max_length: the longest sequence; more keys are an error.
        sharing: "none" (an E and an F for each of `num_heads` key heads), "headwise" (for all heads; the default),
            "key_value" (E = F) or "layerwise" (E = F, and `subquad.models` has one for all layers).
        projection: "learned" matrices; "convolution", a learned kernel over each block of max_length / rank tokens;
            "mean" of such blocks; "gaussian", fixed and N(0, 1 / rank), drawn from `seed`.
        kernel: "softmax", or "linear": phi(q) (E phi(k))^T (F v) over phi(q).sum(phi(k)), phi = elu + 1. It saves
            nothing over `LinearAttention`; see the documentation before use.
        num_heads: heads of k it is made for; only sharing="none" needs it.
        scale: `1 / sqrt(head_dim)` unless given; softmax only.

    Example:
        >>> attention = LinformerAttention(head_dim=4, rank=8, max_length=64)
        >>> attention(*torch.randn(3, 1, 2, 50, 4)).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "linformer"
    supports_causal = False
    supports_state = False
    why_not_causal = "its projections mix the keys of all positions"
    mask_kinds = ("right",)
    of_inner_products = False
    float32_floor = 1e-5  # of torch's softmax kernel, as in SoftmaxAttention
    e: nn.Parameter | None
    f: nn.Parameter | None
    weight: Tensor | None

    def __init__(
        self,
        head_dim: int,
        rank: int = 256,
        *,
        max_length: int | None = None,
        sharing: str | None = None,
        projection: str = "learned",
        kernel: str = "softmax",
        num_heads: int | None = None,
        scale: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if max_length is None:
            raise linformer_checks.no_max_length()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.rank = checks.count(self.name, "rank", rank)
        self.max_length = checks.count(self.name, "max_length", max_length)
        self.num_heads = checks.optional_count(self.name, "num_heads", num_heads)
        linformer_checks.choices(projection=(projection, PROJECTIONS), kernel=(kernel, KERNELS))
        linformer_checks.choices(sharing=(sharing or "headwise", SHARINGS))
        linformer_checks.options(projection, sharing, num_heads, seed)
        self.projection, self.kernel, self.sharing = projection, kernel, sharing or "headwise"
        if projection in BLOCKWISE:
            linformer_checks.whole_blocks(projection, rank, max_length)
        if kernel == "linear":
            linformer_checks.no_scale_in_linear(scale)
        self.scale = checks.scale(self.name, scale, head_dim)
        self.seed = checks.seed(self.name, seed or 0)
        self._make_projections()
        self.reset_parameters()

    def _make_projections(self) -> None:
        """Of E and F: learned matrices or kernels in `e` and `f` (None where F is E), drawn ones in `weight`."""
        heads = self.num_heads or 1 if self.sharing == "none" else 1
        two = self.sharing in ("none", "headwise")
        learned = {"learned": (heads, self.rank, self.max_length), "convolution": (heads, self.block)}
        shape = learned.get(self.projection)
        self.register_parameter("e", nn.Parameter(torch.empty(shape)) if shape else None)
        self.register_parameter("f", nn.Parameter(torch.empty(shape)) if shape and two else None)
        drawn = torch.empty(1 + two, heads, self.rank, self.max_length, dtype=torch.float32)
        self.register_buffer("weight", drawn if self.projection == "gaussian" else None)

    @property
    def block(self) -> int:
        """Tokens per slot of a blockwise projection."""
        return self.max_length // self.rank

    @property
    def convex(self) -> bool:
        return self.projection == "mean"  # the others have both signs

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        return ("e",) if self.sharing == "layerwise" else ()

    @classmethod
    def layer_options(cls, options: dict[str, Any], *, key_heads: int, max_length: int | None) -> dict[str, Any]:
        known = {"num_heads": key_heads} if max_length is None else {"num_heads": key_heads, "max_length": max_length}
        return known | options

    def extra_repr(self) -> str:
        shared = "" if self.projection == "mean" else f", sharing={self.sharing!r}"
        scale = f", scale={self.scale:.4g}" if self.kernel == "softmax" else ""
        return (
            f"head_dim={self.head_dim}, rank={self.rank}, max_length={self.max_length}{shared}, "
            f"projection={self.projection!r}, kernel={self.kernel!r}{scale}, num_heads={self.num_heads}"
        )

    def reset_parameters(self) -> None:
        """Fresh learned projections; the drawn one of the constructor's seed.

        A slot that sums N tokens starts with weights of variance 1 / N, so that projected keys and values are as large
        as keys and values, whatever `max_length` is. (The authors' code has 1 / (N + rank).) The variance 1 / rank of
        the Johnson-Lindenstrauss matrix would make logits sqrt(N / rank) times larger: a softmax that sees one slot.
        """
        for weight in (self.e, self.f):
            if weight is not None:
                bound = (3 / weight.shape[-1]) ** 0.5  # a uniform variable up to b has the variance b^2 / 3
                nn.init.uniform_(weight, -bound, bound)
        if self.weight is not None:
            self.redraw(self.seed)

    def redraw(self, seed: int) -> None:
        """Another Gaussian projection, in place."""
        if self.weight is None:
            raise linformer_checks.nothing_to_redraw(self.projection)
        generator = torch.Generator("cpu").manual_seed(checks.seed(self.name, seed))
        drawn = torch.randn(self.weight.shape, generator=generator, dtype=torch.float64, device="cpu")
        self.weight.copy_(drawn * self.rank**-0.5)

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        linformer_checks.heads(self.num_heads, k)
        linformer_checks.length(self.max_length, k)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        k, v = (_real_only(x, key_mask) for x in (k, v))
        if self.kernel == "linear":
            return self._linear(q, k, v, key_mask)
        e, f = self._weights()
        projected_k, projected_v = self._slots(k, e, key_mask), self._slots(v, f, key_mask)
        blockwise_padding = self.projection in BLOCKWISE and key_mask is not None
        slots = self._tokens_per_slot(k, key_mask) > 0 if blockwise_padding else None
        return _attend(q, projected_k, projected_v, self.scale, slots)

    @without_autocast
    def _linear(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        e, f = self._weights()
        dtype = torch.promote_types(q.dtype, torch.float32)
        phi_q, phi_k = by_largest(phi(q.to(dtype))), _real_only(phi(k.to(dtype)), key_mask)  # phi(0) is 1
        projected_k, projected_v = self._slots(phi_k, e, key_mask), self._slots(v.to(dtype), f, key_mask)
        total = (projected_k if self.convex else phi_k).sum(2, keepdim=True)
        summary = torch.cat([projected_k.mT @ projected_v, total.mT], -1)  # [B, K, D, Dv + 1]
        rows = phi_q.reshape(*k.shape[:2], -1, q.shape[3])  # the query heads that share a key head
        out, normaliser = (rows @ summary).split([v.shape[3], 1], -1)
        out = out / torch.where(at_least_tiny(normaliser), normaliser, torch.inf)
        return out.reshape(*q.shape[:3], -1).to(q.dtype)

    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        """What makes E and F: matrices `[K or 1, rank, max_length]`, kernels `[K or 1, block]`, nothing for means."""
        if self.weight is not None:
            return self.weight[0], self.weight[-1]
        return self.e, self.e if self.f is None else self.f

    def _slots(self, x: Tensor, weight: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """x `[B, K, S, D]` -> `[B, K, rank, D]`; blockwise only slots that tokens reach. Masked tokens are zeros."""
        if self.projection not in BLOCKWISE:
            assert weight is not None
            return _project(x, weight)
        blocks = F.pad(x, (0, 0, 0, -x.shape[2] % self.block)).unflatten(2, (-1, self.block))
        if weight is not None:
            kernel = weight.to(x.dtype).expand(x.shape[1], -1)
            return torch.einsum("ks,bknsd->bknd", kernel, blocks)
        return blocks.sum(3) / self._tokens_per_slot(x, key_mask).clamp(min=1)[:, None, :, None]

    def _tokens_per_slot(self, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """Real tokens in each block, `[B or 1, slots]`."""
        real = k.new_ones(1, k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        return F.pad(real, (0, -real.shape[1] % self.block)).unflatten(1, (-1, self.block)).sum(-1)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        real = seen.any(2, keepdim=True)  # [B or 1, 1, 1, S]: all queries see the same keys
        e, f, slots = self._dense_projections(q, real)
        if self.kernel == "softmax":
            return masked_softmax(self.scale * q @ (e @ k).mT, slots) @ f
        phi_q, phi_k = by_largest(phi(q)), phi(k)
        similarity = phi_q @ (e @ phi_k).mT
        # Row sums of what has both signs may vanish: those of linear attention, before the projection, cannot.
        total = (similarity if self.convex else phi_q @ phi_k.mT * real).sum(-1, keepdim=True)
        return similarity @ f / torch.where(at_least_tiny(total), total, torch.inf)

    def _dense_projections(self, q: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E and F `[B or 1, H or 1, rank, S]`, zero at masked keys; slots that hold a key `[B or 1, 1, 1, rank]`."""
        position = torch.arange(real.shape[-1], device=q.device)
        slot = torch.arange(self.rank, device=q.device)[:, None]
        holds = real & (position // self.block == slot if self.projection in BLOCKWISE else slot >= 0)
        matrices = []
        for weight in self._weights():
            if weight is None:
                matrix = holds.to(q.dtype) / holds.sum(-1, keepdim=True).clamp(min=1)
            else:
                column = position % weight.shape[-1]  # of a kernel: the place in its block
                rows = weight[..., column] if weight.dim() == 3 else weight[:, None, column]
                matrix = repeat_heads(rows[None], q.shape[1] if len(rows) > 1 else 1) * holds
            matrices.append(matrix.to(q.dtype))
        return matrices[0], matrices[1], holds.any(-1)[:, :, None]

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        raise checks.cannot_extend(self.name)
