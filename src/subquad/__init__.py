"""Sub-quadratic attention for PyTorch, behind one contract."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from subquad import waiting

if waiting.is_command():  # a library leaves such choices to the program; torch is imported below
    waiting.let_threads_sleep()

from subquad import errors, features, functional
from subquad.errors import SubquadError
from subquad.features import FeatureMap, draw_feature_map
from subquad.mechanism import Mechanism, State, reorder_state, state_bytes
from subquad.mechanisms import MECHANISMS, attention
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

if TYPE_CHECKING:
    from subquad.calibration import calibrate
    from subquad.conversion import convert, load
    from subquad.diagnostics import diagnose

__version__ = version("subquad")

__all__ = [
    "MECHANISMS",
    "ClusterAttention",
    "FavorAttention",
    "FeatureMap",
    "IdentityAttention",
    "LinearAttention",
    "LinformerAttention",
    "LshAttention",
    "Mechanism",
    "MixedAttention",
    "PagesAttention",
    "SoftmaxAttention",
    "State",
    "StridedAttention",
    "SubquadError",
    "WindowAttention",
    "attention",
    "calibrate",
    "convert",
    "diagnose",
    "draw_feature_map",
    "errors",
    "features",
    "functional",
    "load",
    "reorder_state",
    "state_bytes",
]


def __getattr__(name: str) -> Any:
    """What few programs use is imported when it is first asked for."""
    if name == "calibrate":
        from subquad.calibration import calibrate

        return calibrate
    if name == "convert":
        from subquad.conversion import convert

        return convert
    if name == "diagnose":
        from subquad.diagnostics import diagnose

        return diagnose
    if name == "load":
        from subquad.conversion import load

        return load
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")
