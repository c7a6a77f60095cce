"""What it costs to import ccssl and to ask its command for help, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.table import Row, Table, duration, spread
from benchmarks.timing import compare

LIMIT_IMPORT = 1.3
LIMIT_HELP = 0.5


def run(quick: bool = False) -> list[Table]:
    """Measure both tables; ``quick`` starts each process once."""
    rounds = 1 if quick else 9
    imports = Table(
        "Import",
        f"`python -c '...'` in a fresh process, {rounds} times in turns with `import torch`. `import ccssl` loads a "
        "name on its first use; the other rows load what they say, torch included.",
        ("statement", "time", "import torch", "paired ratio"),
        "ratio of minima",
    )
    statements = {
        "import ccssl": LIMIT_IMPORT,
        "from ccssl.credal import credal_loss": LIMIT_IMPORT,
        "from ccssl.conformal import Calibration": LIMIT_IMPORT,
        "pass": None,
    }
    times = compare({code: python("-c", code) for code in ("import torch", *statements)}, rounds=rounds)
    for code, limit in statements.items():
        ratio = times.ratio(code, "import torch")
        seconds = times.minimum(code), times.minimum("import torch")
        cells = (f"`{code}`", duration(seconds[0]), duration(seconds[1]), spread(ratio))
        imports.rows.append(Row(cells, ratio.minima, limit))

    command = Table(
        "Help on the command line",
        f"`ccssl --help` and `ccssl --version` in a fresh process, {rounds} times.",
        ("command", "median"),
        "seconds",
    )
    options = ("--help", "--version")
    times = compare({option: python("-m", "ccssl", option) for option in options}, rounds=rounds)
    for option in options:
        command.rows.append(
            Row((f"`ccssl {option}`", duration(times.median(option))), times.minimum(option), LIMIT_HELP)
        )
    return [imports, command]


def python(*arguments: str) -> Callable[[], object]:
    """Return a function that runs Python once and waits for it."""
    return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
