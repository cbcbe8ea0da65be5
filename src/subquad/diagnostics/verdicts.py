"""What measured errors mean, in words."""

import copy
from collections.abc import Sequence

import torch

from subquad.features.drawn import PLAIN
from subquad.features.learned import LEARNED
from subquad.mechanisms.favor import FavorAttention

FINE = "fine"
CALIBRATE = "needs calibration"
SHARP = "too sharp for random features: keep exact or learn"
VERDICTS = (FINE, CALIBRATE, SHARP)  # from good to bad
SHORT = {FINE: "fine", CALIBRATE: "needs calibration", SHARP: "too sharp"}  # for tables

CLEARLY = 1.25  # times another error; less may be the luck of a draw
HARMLESS = 1 / 3  # of the tolerance: fine even if an average does better still


def good(error: float, baselines: Sequence[float], tolerance: float) -> bool:
    """Small enough, and not clearly worse than both baselines."""
    return error <= tolerance and error <= max(HARMLESS * tolerance, CLEARLY * max(baselines))


def helps(error: float, present: float, baselines: Sequence[float], tolerance: float) -> bool:
    """A calibrated draw is good, or clearly better than the present features and both baselines."""
    return good(error, baselines, tolerance) or CLEARLY * error <= min(present, *baselines)


def settled(mechanism: FavorAttention) -> bool:
    """Whether its features have been calibrated or learned, so that calibrating them is no advice.

    "optimal" and "sharp" are never settled: "calibrated" is better. Features that are not fitted yet are as their
    constructor made them.
    """
    if mechanism.estimator in (*PLAIN, "optimal", "sharp"):
        return False
    names = [name for name, _ in mechanism.features.named_parameters()]
    names = names if mechanism.estimator in LEARNED else ["mean", "root"]
    fresh = copy.deepcopy(mechanism.features)
    fresh.reset_parameters()
    return not all(torch.equal(getattr(fresh, name), getattr(mechanism.features, name)) for name in names)
