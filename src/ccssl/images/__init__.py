"""Images: where they come from, how they lie on disk, how they are split and varied, and networks that read them.

The names below are loaded when they are first used: the command line imports this room to learn its commands.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ccssl.images.dataset import ImageData
    from ccssl.images.packed import open_packed, pack
    from ccssl.images.sources import SOURCES, Source, load

__all__ = ["SOURCES", "ImageData", "Source", "load", "open_packed", "pack"]

_HOMES = {
    "ImageData": "dataset",
    "SOURCES": "sources",
    "Source": "sources",
    "load": "sources",
    "open_packed": "packed",
    "pack": "packed",
}


def __getattr__(name: str) -> object:
    """Load a public name on its first use (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ccssl.images.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
