"""Methods of learning from unlabeled items: each says what such an item's target and weight are.

The names below are loaded when they are first used: hyperparameters (``ccssl.methods.config``) need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ccssl.methods.base import Method, Target, unlabeled_loss
    from ccssl.methods.table import METHODS

__all__ = ["METHODS", "Method", "Target", "unlabeled_loss"]

_HOMES = {"METHODS": "table", "Method": "base", "Target": "base", "unlabeled_loss": "base"}


def __getattr__(name: str) -> object:
    """Load a public name on its first use (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ccssl.methods.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
