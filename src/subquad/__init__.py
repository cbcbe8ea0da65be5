"""Sub-quadratic attention for PyTorch, behind one contract."""

from importlib.metadata import version

from subquad import errors, features, functional
from subquad.errors import SubquadError
from subquad.features import FeatureMap, draw_feature_map
from subquad.mechanism import Mechanism, State, reorder_state, state_bytes
from subquad.mechanisms import MECHANISMS, attention
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.identity import IdentityAttention
from subquad.mechanisms.linear import LinearAttention
from subquad.mechanisms.softmax import SoftmaxAttention
from subquad.mechanisms.strided import StridedAttention

__version__ = version("subquad")

__all__ = [
    "MECHANISMS",
    "FavorAttention",
    "FeatureMap",
    "IdentityAttention",
    "LinearAttention",
    "Mechanism",
    "SoftmaxAttention",
    "State",
    "StridedAttention",
    "SubquadError",
    "attention",
    "draw_feature_map",
    "errors",
    "features",
    "functional",
    "reorder_state",
    "state_bytes",
]
