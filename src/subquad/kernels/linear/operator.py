"""Linear attention as a torch operator.

Letters as in `blocks.py`.
"""

from torch import Tensor

from subquad.kernels import arguments
from subquad.kernels.linear.inputs import LinearInputs, LinearOptions
from subquad.kernels.operator import Operation

_OPERATION = Operation(
    "linear",
    LinearInputs,
    LinearOptions,
    of_map=("weight",),
    sizes=arguments.linear,
    saved=arguments.LINEAR_SAVED,
    normalisers=(),
)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, *, causal: bool, **others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, T, Dv]` and, when causal, the state after the last token (max, sum).

    others: the tensors of `LinearInputs` that may be left out, by name.
    """
    inputs = LinearInputs(q, k, v, **others)
    return _OPERATION.run(inputs, options._replace(causal=causal), signed=inputs.log_weight is not None)
