"""FAVOR attention as a torch operator.

Letters as in `blocks.py`.
"""

from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels import arguments
from subquad.kernels.favor.inputs import MAP_TENSORS, FavorInputs, FavorOptions
from subquad.kernels.operator import Operation
from subquad.kernels.problem import Gradients


class _FavorOperation(Operation):
    """Sinks that are the first tokens of k and v are cut off here: to add two gradients of all keys would take as long
    as to read and write them three times."""

    def needs(self, options: FavorOptions) -> dict[str, bool]:
        return {"reach": options.reach > 1, "without_far": not options.far}

    def keeps_state(self, options: FavorOptions) -> bool:
        return options.far

    def with_all_inputs(self, inputs: FavorInputs, options: FavorOptions) -> FavorInputs:
        if inputs.sink_k is not None:
            return inputs
        sinks = options.sinks
        return inputs._replace(sink_k=inputs.k[:, :, :sinks], sink_v=inputs.v[:, :, :sinks])

    def with_own_gradients(self, gradients: Gradients, inputs: FavorInputs, options: FavorOptions) -> Gradients:
        if inputs.sink_k is None and options.sinks:
            gradients["k"][:, :, : options.sinks] += gradients["sink_k"]
            gradients["v"][:, :, : options.sinks] += gradients["sink_v"]
        return gradients


_OPERATION = _FavorOperation(
    "favor",
    FavorInputs,
    FavorOptions,
    of_map=MAP_TENSORS,
    sizes=arguments.favor,
    saved=arguments.FAVOR_SAVED,
    normalisers=(2,),  # logarithms, on the scales of the far field and of the exact logits
)


def favor_attention(
    q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, options: FavorOptions, *, causal: bool, **others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, T, Dv]` and, when causal, the far field after the last token (max, sum), if there is one.

    others: the tensors of `FavorInputs` that may be left out, by name.
    """
    offset = {"offset_weight": map.offset_weight, "offset_bias": map.offset_bias}
    inputs = FavorInputs(q, k, v, map.query, map.key, map.key_bias, **offset, **others)
    options = options._replace(causal=causal, rule=map.rule, groups=map.groups)
    return _OPERATION.run(inputs, options, near=options.near > 0)
