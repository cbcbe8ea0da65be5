"""Checks and errors of `subquad.kernel_approximation`."""

import math
from numbers import Integral, Real
from typing import Any

from subquad.checks import count
from subquad.errors import ConfigError, DataError, DtypeError


def components(value: Any) -> int:
    """numpy's whole numbers count too: grids of parameters are made of them."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return count("FavorSampler", "n_components", int(value) if whole else value)


def gamma(value: Any) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value != "scale" and not (number and 0 < float(value) < math.inf):
        raise ConfigError(f"FavorSampler: gamma must be 'scale' or a positive finite number, got {value!r}")


def proposal(value: Any, features: str) -> None:
    if value not in (None, "fitted"):
        raise ConfigError(f"FavorSampler: proposal must be None or 'fitted', got {value!r}")
    if value == "fitted" and features != "positive":
        raise ConfigError(f"FavorSampler: proposal='fitted' needs features='positive', got {features!r}")


# Errors to raise ------------------------------------------------------------------------------------------------------


def no_sparse(given: Any) -> DtypeError:
    return DtypeError(
        f"FavorSampler: takes dense arrays only, as its features are dense; got a sparse {type(given).__name__}; "
        "use X.toarray()"
    )


def overflow(row: int, dtype: Any) -> DataError:
    ways = ", lower gamma or pass float64" if str(dtype) == "float32" else " or lower gamma"
    return DataError(f"FavorSampler: the features of row {row} are beyond {dtype}; scale the data down{ways}")
