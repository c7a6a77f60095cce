"""Compare methods on one data set over several seeds: train what is missing, then write a page with the results.

    python studies/compare.py DATASET --labels N --steps T --seeds 0 1 2 --methods A B ... --out FOLDER

Runs go to ``FOLDER/runs`` (not committed), one process each, one thread a process, as many at once as ``--workers``
says. A run that was interrupted goes on where it was. The page, ``FOLDER/README.md``, shows each method's mean and
deviation over seeds, and for pairs of methods the mean of the differences *within* seeds (the same labels, the same
initial weights, the same order of batches) with a 95% interval of Student's t. ``FOLDER/results.json`` holds the
figures of every run; ``FOLDER/discussion.md``, if there is one, is put below them. Networks are those after the last
step; nothing is chosen by test accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAIRS = [
    ("ccssl-prop", "supervised"),
    ("ccssl-diff", "supervised"),
    ("cssl", "supervised"),
    ("fixmatch", "supervised"),
    ("ccssl-prop", "cssl"),
    ("ccssl-diff", "cssl"),
    ("ccssl-prop", "fixmatch"),
]
FIGURES = ("accuracy", "ece", "nll")
CREDAL = ("accuracy", "validity_error@0.05", "validity_error@0.1", "validity_error@0.25", "efficiency")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--labels", type=int, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu", help="device of all runs; several share an accelerator")
    parser.add_argument(
        "--with", dest="flags", nargs="*", default=[], metavar="FLAG=VALUE", help="more flags of train"
    )
    args = parser.parse_args()
    jobs = [(method, seed) for seed in args.seeds for method in args.methods]
    with ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(lambda job: run(args, *job), jobs))
    found = {method: {} for method in args.methods}
    for (method, seed), result in zip(jobs, results, strict=True):
        found[method][seed] = result
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    discussion = args.out / "discussion.md"
    told = "\n" + discussion.read_text() if discussion.exists() else ""
    (args.out / "README.md").write_text(page(args, found) + told)


def run(args: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Train one method with one seed, unless that is done; return its figures."""
    out = args.out / "runs" / f"{method}-{seed}"
    flags = [f"--{flag}" for flag in args.flags]
    command = [
        sys.executable, "-m", "ccssl", "train", "--dataset", args.dataset, "--labels", str(args.labels),
        "--method", method, "--steps", str(args.steps), "--eval-every", str(min(args.steps, 250)),
        "--seed", str(seed), "--out", str(out), "--resume", "--quiet", "--device", args.device, *flags,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{method}, seed {seed}: {done.stderr.strip()}")
    result = json.loads((out / "result.json").read_text())
    seconds = result["cost"]["seconds"]
    print(f"{method}, seed {seed}: {result['test']['accuracy']:.4f} {seconds:.0f} s", file=sys.stderr, flush=True)
    return result


def page(args: argparse.Namespace, found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Return the page."""
    some = next(iter(next(iter(found.values())).values()))
    split = some["split"]
    command = " ".join(["python studies/compare.py", *map(_quiet, sys.argv[1:])])
    lines = [
        f"# {Path(args.dataset).stem}, {args.labels} labels, {args.steps:,} steps, small CNN",
        "",
        f"Seeds {', '.join(map(str, args.seeds))}. Test: {split['test']:,} images; unlabeled pool of "
        f"{split['unlabeled']:,} (supervised: unused). Machine: {some['cost']['device']} ({some['cost']['machine']}), "
        "one thread a run.",
        f"Command: `{command}`",
        "",
        "## Test accuracy after the last step, averaged network",
        "",
        "| method | labels to train on + to calibrate | accuracy | ECE | NLL | seconds a run |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, runs in found.items():
        sizes = next(iter(runs.values()))["split"]
        cells = [spread([result["test"][figure] for result in runs.values()]) for figure in FIGURES]
        seconds = statistics.mean(result["cost"]["seconds"] for result in runs.values())
        lines.append(
            f"| {method} | {sizes['labeled']} + {sizes['calibration']} | {' | '.join(cells)} | {seconds:.0f} |"
        )
    lines += [
        "",
        "Mean ± standard deviation over seeds.",
        "",
        *along(args, list(found)),
        "## Paired differences in test accuracy",
        "",
        "| pair | mean of differences | 95% interval | each seed |",
        "|---|---:|---:|---|",
    ]
    for ours, theirs in PAIRS:
        if ours in found and theirs in found:
            gaps = [found[ours][s]["test"]["accuracy"] - found[theirs][s]["test"]["accuracy"] for s in args.seeds]
            half = half_width(gaps)
            mean = statistics.mean(gaps)
            each = ", ".join(f"{gap:+.4f}" for gap in gaps)
            lines.append(f"| {ours} − {theirs} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} | {each} |")
    lines += [
        "",
        "## Pseudo-labels of the unlabeled pool at the end",
        "",
        "| method | accuracy | error at 0.05 | at 0.1 | at 0.25 | efficiency |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, runs in found.items():
        parts = [result["unlabeled"] for result in runs.values() if result.get("unlabeled")]
        if parts:
            cells = [spread([part[n] for part in parts]) if n in parts[0] else "" for n in CREDAL]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def along(args: argparse.Namespace, methods: list[str]) -> list[str]:
    """Return a table of the mean test accuracy at a half, a quarter, ... of the steps."""
    curves = {method: [curve(args.out / "runs" / f"{method}-{seed}") for seed in args.seeds] for method in methods}
    evaluated = sorted(next(iter(curves.values()))[0])
    wanted = [args.steps / 2**k for k in range(4, -1, -1) if args.steps / 2**k >= evaluated[0]]
    steps = sorted({min(evaluated, key=lambda step: abs(step - some)) for some in wanted})
    lines = ["## On the way", "", "| mean accuracy after | " + " | ".join(f"{step:,}" for step in steps) + " |"]
    lines.append("|---|" + "---:|" * len(steps))
    for method, runs in curves.items():
        means = (statistics.mean(run[step] for run in runs) for step in steps)
        lines.append(f"| {method} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    return [*lines, ""]


def curve(run: Path) -> dict[int, float]:
    """Return a run's test accuracy by step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["accuracy"] for record in records if record["phase"] == "test"}


def spread(values: list[float]) -> str:
    return (
        f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"
    )


def half_width(gaps: list[float]) -> float:
    """Return half of the 95% interval of the mean, by Student's t."""
    from scipy.stats import t

    if len(gaps) < 2:
        return float("nan")
    return float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5


def _quiet(argument: str) -> str:
    """Return an argument without the folder that this machine keeps the data in."""
    return Path(argument).name if argument.endswith(".npz") else argument


if __name__ == "__main__":
    main()
