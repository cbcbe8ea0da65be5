"""Checks of strided attention."""

from typing import Any

from subquad.checks import count
from subquad.errors import ConfigError


def summary(pattern: str, stride: int, value: Any) -> None:
    if value is None:
        return
    if pattern != "fixed":
        raise ConfigError(f"strided: summary belongs to pattern='fixed', got pattern={pattern!r}; leave it out")
    if count("strided", "summary", value) > stride:
        raise ConfigError(f"strided: summary must be at most the stride of {stride}, got {value}")
