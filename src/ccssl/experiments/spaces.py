"""Where the paper looks for hyperparameters: the values of its search, as data.

``SPACES`` names, for each method, the parameters that are searched and the values that each may take. Names are those
of the fields of ``RunConfig`` and of the method's own options. ``ccssl tune`` searches these values and ``ccssl paper
show search-spaces`` prints them. Supervised-only is not in the paper: it has no unlabeled part of the loss to tune,
so that two parameters remain.
"""

from __future__ import annotations

from collections.abc import Mapping

Value = float | int | bool
Space = Mapping[str, tuple[Value, ...]]

LEARNING: Space = {"lr": (0.005, 0.01, 0.03, 0.05, 0.1), "weight_decay": (0.0005, 0.0001)}
ALL: Space = {**LEARNING, "mu": (3, 7), "lambda_u": (1.0,)}
CONFIDENCE: Space = {"threshold": (0.7, 0.8, 0.9, 0.95), "temperature": (0.5, 1.0)}
CALIBRATION: Space = {"calibration_fraction": (0.1, 0.25, 0.5)}

SPACES: dict[str, Space] = {
    "supervised": LEARNING,
    "uda": {**ALL, **CONFIDENCE},
    "fixmatch": {**ALL, **CONFIDENCE},
    "fixmatch-da": {**ALL, **CONFIDENCE},
    "flexmatch": {**ALL, "threshold": (0.8, 0.9, 0.95), "warmup": (True, False)},
    "cssl": ALL,
    "ccssl-diff": {**ALL, **CALIBRATION},
    "ccssl-prop": {**ALL, **CALIBRATION, "gamma": (0.01, 0.1, 1.0)},
}
