"""What attention does in a model, and whether features can do it too."""

from subquad.diagnostics.diagnose import diagnose
from subquad.diagnostics.diagnosis import Diagnosis, HeadDiagnosis, LayerDiagnosis
from subquad.diagnostics.spectrum import SpectrumResult, spectrum

__all__ = ["Diagnosis", "HeadDiagnosis", "LayerDiagnosis", "SpectrumResult", "diagnose", "spectrum"]
