"""What went wrong because of what was asked for, not because of a mistake in the program."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A file, an argument or a setting is not what it must be; the message is a sentence for the user.

    The command line shows the sentence alone and ends with exit code 2. Every other exception is a mistake in
    the program and keeps its traceback.
    """


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return a hint at the nearest name, or nothing.

    >>> did_you_mean("kinshp", ["umls", "kinship"])
    ' Did you mean kinship?'
    """
    near = difflib.get_close_matches(wrong, names, 1)
    return f" Did you mean {near[0]}?" if near else ""
