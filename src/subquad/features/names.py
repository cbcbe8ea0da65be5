"""Estimators that had another name once. The old one still loads, with one warning in a process."""

import functools
import warnings
from typing import Any

from subquad import checks
from subquad.errors import RenamedWarning

FORMER = {"softmax": "hedgehog"}  # "softmax" is exact attention and a kernel; the map is the one of Hedgehog


def current_name(estimator: str) -> str:
    """What an estimator is called now.

    Example:
        >>> current_name("positive")
        'positive'
    """
    if not isinstance(estimator, str) or estimator not in FORMER:  # what is no name is refused where it is used
        return estimator
    _warn(estimator)
    return FORMER[estimator]


def current_options(options: Any) -> Any:
    """Options of one mechanism, of its parts, or a list of them, with the current name of their estimators."""
    if isinstance(options, list):
        return [current_options(each) for each in options]
    if isinstance(options, dict) and "parts" in options:
        return {**options, "parts": current_options(options["parts"])}
    if not isinstance(options, dict) or "estimator" not in options:
        return options
    return {**options, "estimator": current_name(options["estimator"])}


@functools.cache  # a model has many layers, and its config, its run and its layers all hold the name
def _warn(estimator: str) -> None:
    warnings.warn(checks.renamed_estimator(estimator, FORMER[estimator]), RenamedWarning, stacklevel=3)
