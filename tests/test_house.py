"""The house itself: who may import whom, what importing costs, and that every public name is where it should be."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_rooms_import_in_one_direction():
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "ccssl.credal",
            "possibility contains upper_probability lower_probability project project_logits credal_loss Levels "
            "relaxation_loss extreme_points",
        ),
        ("ccssl.credal.reference", "credal_loss_reference project_reference"),
        ("ccssl.conformal", "SCORES Calibration validity_error efficiency audit"),
    ],
)
def test_the_public_contract(module, names):
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_importing_the_rooms_compiles_and_loads_no_kernel():
    script = """
import sys
import ccssl.credal, ccssl.conformal
heavy = {"numba", "llvmlite", "triton", "matplotlib", "scipy"} & {name.partition(".")[0] for name in sys.modules}
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith("ccssl.credal.kernels.")]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_extra_that_a_text_names_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set()
    for path in (ROOT / "README.md", *(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md")):
        for extras in re.findall(r"\bccssl\[([\w, -]+)\]", path.read_text(encoding="utf-8")):
            named |= {extra.strip() for extra in extras.split(",")}
    assert {"tune", "ray"} <= named <= set(project["optional-dependencies"])
