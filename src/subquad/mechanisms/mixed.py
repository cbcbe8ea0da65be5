"""Several mechanisms in one layer, each on key heads of its own.

Some heads of a trained model attend so sharply that no features follow them, others so evenly that a few features do.
Here the former can stay exact while the latter pay nothing that grows with the length, in one layer with one state.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from subquad import checks
from subquad.checks import mixed as mixed_checks
from subquad.kernels.precision import without_autocast
from subquad.mechanism import Mechanism, State
from subquad.mechanisms.mixed_heads import Partition
from subquad.mechanisms.mixed_state import Owner, joined_state, parts_of_state

OURS = ("attention", "heads")  # entries of a part that are no options of its mechanism


class MixedAttention(Mechanism):
    """Each key head, and the query heads that share it, have the mechanism of their part.

    If one part compares positions, rows of masked tokens are zero in all of them. Every fact and every call is put
    together from those of the parts, hence more methods than other mechanisms.

    Args:
        head_dim: D of the queries and keys.
        parts: a dict for each part: "attention", the name of its mechanism; "heads", its key heads; everything else is
            an option of that mechanism. Each of the key heads 0, 1, ... is in one part. What an option says of each
            head goes by the order of "heads"; parts stay in the order in which they are given.

    Example:
        >>> import torch
        >>> favor = {"attention": "favor", "heads": [0, 2], "num_features": 32, "near": 8}
        >>> attention = MixedAttention(head_dim=4, parts=[favor, {"attention": "softmax", "heads": [1]}])
        >>> attention(*torch.randn(3, 1, 3, 50, 4), causal=True).shape
        torch.Size([1, 3, 50, 4])
    """

    name = "mixed"
    parts: nn.ModuleDict

    def __init__(self, head_dim: int, parts: Sequence[dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        given = checked_parts(parts)
        names = [f"{part['attention']}{number}" for number, part in enumerate(given)]
        made = (_made(number, part, head_dim) for number, part in enumerate(given))
        self.parts = nn.ModuleDict(dict(zip(names, made, strict=True)))
        self.partition = Partition(part["heads"] for part in given)
        self.owners = tuple(Owner(*owner) for owner in zip(names, self.partition.heads, strict=True))
        self._take_facts()

    def _take_facts(self) -> None:
        parts = dict(zip(self.owners, self.mechanisms(), strict=True))
        self.supports_causal = all(part.supports_causal for part in parts.values())
        self.supports_state = all(part.supports_state for part in parts.values())
        self.state_grows = any(part.state_grows for part in parts.values())
        self.float32_floor = max(part.float32_floor for part in parts.values())
        self.of_inner_products = all(part.of_inner_products for part in parts.values())
        self.mask_kinds = tuple(
            kind for kind in Mechanism.mask_kinds if all(kind in part.mask_kinds for part in parts.values())
        )
        reasons = [f"{part.why_not_causal} ({owner})" for owner, part in parts.items() if not part.supports_causal]
        self.why_not_causal = "; ".join(reasons)
        advice = {owner: part.cross_attention_advice for owner, part in parts.items() if part.positional}
        if all(advice.values()):  # or else a part would remain that takes no other keys
            self.cross_attention_advice = "; ".join(f"{words} ({owner})" for owner, words in advice.items())

    def mechanisms(self) -> list[Mechanism]:
        """Those of the parts, in their order."""
        return cast(list[Mechanism], list(self.parts.values()))

    @property
    def key_heads(self) -> int:
        """Heads of k that it is made for."""
        return self.partition.key_heads

    @property
    def positional(self) -> bool:
        return any(part.positional for part in self.mechanisms())

    @property
    def convex(self) -> bool:
        return all(part.convex for part in self.mechanisms())

    @property
    def supports_join(self) -> bool:
        return all(part.supports_join for part in self.mechanisms())

    @classmethod
    def layer_options(cls, options: dict[str, Any], *, key_heads: int, max_length: int | None) -> dict[str, Any]:
        parts = checked_parts(options.get("parts"))
        mixed_checks.heads_of_layer(sum(len(part["heads"]) for part in parts), key_heads)
        return options | {"parts": [_of_layer(part, max_length) for part in parts]}

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, {', '.join(map(str, self.owners))}"

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        mixed_checks.key_heads(self.key_heads, k)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        outs = [part(*qkv, causal=causal, key_mask=key_mask) for part, *qkv in self._shares(q, k, v)]
        return self._joined(outs, key_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        self.check_extend(q, k, v, key_mask)
        pasts = parts_of_state(self.owners, state)
        shares = zip(self._shares(q, k, v), pasts, strict=True)
        done = [part.extend(*qkv, past, key_mask=key_mask) for (part, *qkv), past in shares]
        return self._joined([out for out, _ in done], key_mask), joined_state(self.owners, [new for _, new in done])

    def join_states(self, states: Sequence[State]) -> State:
        by_part = zip(*(parts_of_state(self.owners, state) for state in states), strict=True)
        joined = (part.join_states(cast(Any, given)) for part, given in zip(self.mechanisms(), by_part, strict=True))
        return joined_state(self.owners, list(joined))

    def _shares(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Each part with its heads of the tensors."""
        return zip(self.mechanisms(), *map(self.partition.split, tensors), strict=True)

    def _joined(self, outs: list[Tensor], key_mask: Tensor | None) -> Tensor:
        """`[B, H, T, Dv]`, with zeros in rows of masked tokens in all parts if one of them has zeros there."""
        if key_mask is not None and self.positional:
            masked = ~key_mask[:, None, :, None]
            zipped = zip(self.mechanisms(), outs, strict=True)
            outs = [out if part.positional else out.masked_fill(masked, 0) for part, out in zipped]
        return self.partition.join(outs)

    # The definition ---------------------------------------------------------------------------------------------------

    @without_autocast
    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The matrices of the parts, not their `dense_weights`: a part may see fewer pairs than those it is given."""
        self.check_matrix(q, k, causal, key_mask, rows)
        options = {"causal": causal, "key_mask": key_mask, "rows": rows}
        matrices = [part.attention_matrix(*qk, **options) for part, *qk in self._shares(q, k)]
        return self._joined(matrices, key_mask if key_mask is None or rows is None else key_mask[:, rows])

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        shares = self._shares(q, k)
        return self.partition.join([part.dense_weights(*qk, seen, q_index, k_index) for part, *qk in shares])


def checked_parts(given: Any) -> list[dict[str, Any]]:
    """The option `parts`, if it is what it must be."""
    return mixed_checks.parts(given, tuple(_kinds()))


def _kinds() -> dict[str, type[Mechanism]]:
    """What a part may be."""
    from subquad.mechanisms import MECHANISMS  # which has this one among them

    return {kind.name: kind for kind in MECHANISMS if kind is not MixedAttention}


def options_of(part: dict[str, Any]) -> dict[str, Any]:
    """Those of its mechanism."""
    return {name: value for name, value in part.items() if name not in OURS}


def _made(number: int, part: dict[str, Any], head_dim: int) -> Mechanism:
    kind, options = _kinds()[part["attention"]], options_of(part)
    known = [option for option in inspect.signature(kind).parameters if option != "head_dim"]
    mixed_checks.part_options(number, kind.name, list(options), known)
    return kind(head_dim=head_dim, **options)


def _of_layer(part: dict[str, Any], max_length: int | None) -> dict[str, Any]:
    kind, heads = _kinds()[part["attention"]], len(part["heads"])
    return part | kind.layer_options(options_of(part), key_heads=heads, max_length=max_length)
