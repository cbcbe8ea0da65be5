"""Errors about the exact part of FAVOR attention."""

from typing import Any

from subquad.errors import ConfigError


def reach(near: int, value: int) -> int:
    """Near blocks on either side of a query's own, which there must be."""
    if not near and value != 1:
        raise ConfigError(f"favor: reach counts near blocks, and near=0 has none; use reach=1, got reach={value}")
    return value


def far(value: Any, near: int, sinks: int) -> bool:
    """Whether there is a far field; without one something must be exact."""
    if not isinstance(value, bool):
        raise ConfigError(f"favor: far must be True or False, got {value!r}")
    if not value and not near and not sinks:
        raise ConfigError(
            "favor: far=False attends to near blocks and sinks alone, and with near=0, sinks=0 there are none; "
            "use near > 0 or sinks > 0"
        )
    return value
