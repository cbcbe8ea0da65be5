"""All mechanisms. Adding one: its file, and a line in MECHANISMS."""

import inspect
from typing import Any

from subquad import checks
from subquad.mechanism import Mechanism
from subquad.mechanisms.cluster import ClusterAttention
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.identity import IdentityAttention
from subquad.mechanisms.linear import LinearAttention
from subquad.mechanisms.linformer import LinformerAttention
from subquad.mechanisms.lsh import LshAttention
from subquad.mechanisms.mixed import MixedAttention
from subquad.mechanisms.pages import PagesAttention
from subquad.mechanisms.softmax import SoftmaxAttention
from subquad.mechanisms.strided import StridedAttention
from subquad.mechanisms.window import WindowAttention

MECHANISMS: tuple[type[Mechanism], ...] = (
    SoftmaxAttention,
    IdentityAttention,
    LinearAttention,
    FavorAttention,
    LinformerAttention,
    WindowAttention,
    StridedAttention,
    PagesAttention,
    LshAttention,
    ClusterAttention,
    MixedAttention,
)


def mechanism_class(name: str) -> type[Mechanism]:
    """The class of the mechanism called `name`."""
    by_name = {mechanism.name: mechanism for mechanism in MECHANISMS}
    checks.mechanism_name(name, tuple(by_name))
    return by_name[name]


def attention(name: str, *, head_dim: int, **options: Any) -> Mechanism:
    """The mechanism called `name`, for heads of `head_dim`.

    Example:
        >>> attention("favor", head_dim=64, num_features=128, near=32).name
        'favor'
    """
    made = mechanism_class(name)
    known = [option for option in inspect.signature(made).parameters if option != "head_dim"]
    checks.option_names(name, options, known)
    return made(head_dim=head_dim, **options)
