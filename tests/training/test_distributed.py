"""Two processes with the same global batch follow the single process; all ranks hold the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(command, *arguments):
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def noted(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("method", ["ccssl-prop", "fixmatch-da", "flexmatch", "cssl"])
def test_two_processes_follow_one(tmp_path, method):
    script = str(HERE / "distributed_run.py")
    launch([sys.executable], script, method, "flat", str(tmp_path / "one"))
    launch(LAUNCH, script, method, "flat", str(tmp_path / "two"))
    single, first, second = (noted(tmp_path / name) for name in ("one-0.json", "two-0.json", "two-1.json"))
    assert (single["world"], first["world"]) == (1, 2)
    assert len(single["losses"]) == 50
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(single["losses"]), rtol=0, atol=1e-6)
    for one, two in zip(single["weights"], first["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=0, atol=1e-6)
    for key in ("losses", "weights", "state", "scores", "figures", "fault", "spoiled"):
        assert first[key] == second[key], key
    assert "not finite at step 5," in first["fault"]
    assert "the weights were not finite" in first["spoiled"]
    if method == "ccssl-prop":
        assert first["resumed"] == pytest.approx(first["whole"], rel=1e-12)
        assert first["resumed"] == pytest.approx(single["resumed"], abs=1e-6)
    for phase, figures in single["figures"].items():
        for name, figure in figures.items():
            assert first["figures"][phase][name] == pytest.approx(figure, abs=1e-6), (phase, name)


def test_ranks_agree_with_batch_norm(tmp_path):
    """Each process normalises its own share, so the single process is not followed; but the ranks stay together."""
    launch(LAUNCH, str(HERE / "distributed_run.py"), "ccssl-diff", "normed", str(tmp_path / "two"))
    first, second = (noted(tmp_path / f"two-{rank}.json") for rank in (0, 1))
    assert first == second


def test_the_command_trains_with_two_processes_and_one_writer(tmp_path):
    out = tmp_path / "run"
    arguments = [
        "-m",
        "ccssl",
        "train",
        "--dataset",
        "digits",
        "--labels",
        "40",
        "--steps",
        "4",
        "--eval-every",
        "2",
    ]
    told = launch(LAUNCH, *arguments, "--device", "cpu", "--out", str(out)).stderr
    assert "Warning" not in told, told
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert len(steps) == 6
    assert json.loads((out / "result.json").read_text())["cost"]["processes"] == 2
