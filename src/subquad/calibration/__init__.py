"""Features fitted to data: what attention is asked in a model, its statistics, drawn and learned maps made for them."""

from subquad.calibration.fitting import calibrate
from subquad.calibration.report import CalibrationReport, LayerReport

__all__ = ["CalibrationReport", "LayerReport", "calibrate"]
