"""Conformal prediction: from scores to guarantees. Knows tensors, no models."""

from ccssl.conformal.calibration import Calibration, CalibrationConfig
from ccssl.conformal.scores import SCORES
from ccssl.conformal.validity import Audit, Efficiency, audit, efficiency, validity_error

__all__ = [
    "SCORES",
    "Audit",
    "Calibration",
    "CalibrationConfig",
    "Efficiency",
    "audit",
    "efficiency",
    "validity_error",
]
