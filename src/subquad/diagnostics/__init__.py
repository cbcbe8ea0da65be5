"""What attention does in a trained model."""

from subquad.diagnostics.spectrum import SpectrumResult, spectrum

__all__ = ["SpectrumResult", "spectrum"]
