"""Mathematics of possibility distributions and credal sets: tensors in, tensors out."""

from ccssl.credal.loss import credal_loss, relaxation_loss
from ccssl.credal.polytope import extreme_points
from ccssl.credal.possibility import Levels, contains, lower_probability, possibility, upper_probability
from ccssl.credal.projection import project, project_logits

__all__ = [
    "Levels",
    "contains",
    "credal_loss",
    "extreme_points",
    "lower_probability",
    "possibility",
    "project",
    "project_logits",
    "relaxation_loss",
    "upper_probability",
]
