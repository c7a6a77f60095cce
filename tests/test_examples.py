"""Every example runs, and what it claims is true; so does every Python block of the README."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def ten_lines(printed: str) -> None:
    """Credal pseudo-labels beat the labels alone on average and in nearly all runs."""
    rows = [line.split() for line in printed.splitlines() if re.match(r" *(\d+|mean) ", line)]
    runs = [(float(supervised), float(credal)) for name, supervised, credal in rows if name != "mean"]
    assert len(runs) == 5
    assert all(0.6 < accuracy <= 1 for run in runs for accuracy in run)
    better = [credal > supervised for supervised, credal in runs]
    assert sum(better) >= 4
    mean_supervised, mean_credal = (sum(column) / len(runs) for column in zip(*runs, strict=True))
    assert mean_credal > mean_supervised + 0.015
    assert rows[-1] == ["mean", f"{mean_supervised:.3f}", f"{mean_credal:.3f}"]


CLAIMS = {"loss_in_ten_lines.py": ten_lines}


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_claim():
    assert list(CLAIMS) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_claim_of_an_example_holds(name):
    CLAIMS[name](run(f"examples/{name}"))


def test_the_ten_lines_are_ten():
    source = (ROOT / "examples" / "loss_in_ten_lines.py").read_text(encoding="utf-8")
    essential = source.split("# ---- the ten lines ----\n")[1].split("    # ---- end ----")[0]
    assert len(essential.splitlines()) <= 10


@pytest.mark.parametrize("block", README_BLOCKS, ids=lambda block: block.split("\n")[1])
def test_the_readme_runs(block):
    assert run("-c", block).strip()


def test_the_readme_shows_both_parts():
    assert len(README_BLOCKS) == 2
