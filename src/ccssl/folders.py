"""Where ccssl keeps what it downloads and caches, and whether a folder can take it."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """Return where downloaded data is kept: $CCSSL_HOME, else ccssl under the user's cache folder."""
    if home := os.environ.get("CCSSL_HOME"):
        return Path(home).expanduser()
    return user_cache() / "ccssl"


def user_cache() -> Path:
    """Return the user's cache folder; the convention of XDG takes no notice of relative paths."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if Path(named).is_absolute() else Path.home() / ".cache"


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())


def writable(folder: Path) -> bool:
    """Tell whether the folder is one that can be written, or could be made."""
    nearest = existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
