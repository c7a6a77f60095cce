"""Conformal credal self-supervised learning: learn from unlabeled data as far as the predictions deserve it.

The names below are loaded when they are first used, so that ``import ccssl`` itself costs next to nothing.
"""

from typing import TYPE_CHECKING

from ccssl._version import __version__

if TYPE_CHECKING:
    from ccssl import conformal, credal
    from ccssl.conformal import Calibration, audit
    from ccssl.credal import Levels, credal_loss, possibility, project, project_logits

__all__ = [
    "Calibration",
    "Levels",
    "__version__",
    "audit",
    "conformal",
    "credal",
    "credal_loss",
    "possibility",
    "project",
    "project_logits",
]

# Which room a public name lives in; a room itself is named with None.
_HOMES = {
    "conformal": None,
    "credal": None,
    "Calibration": "conformal",
    "audit": "conformal",
    "Levels": "credal",
    "credal_loss": "credal",
    "possibility": "credal",
    "project": "credal",
    "project_logits": "credal",
}


def __getattr__(name: str) -> object:
    """Load a public name on its first use (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    value = import_module(f"ccssl.{name}") if home is None else getattr(import_module(f"ccssl.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
