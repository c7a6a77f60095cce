"""The commands of ``ccssl paper`` that make runs: parse and call, nothing else. ``ccssl.reports`` adds what shows them.

As in ``ccssl.cli``, a command adds its arguments to a parser and returns what to call with the parsed ones, and imports
what is heavy when it is called.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ccssl.errors import InputError

Run = Callable[[argparse.Namespace], int | None]
Command = Callable[[argparse.ArgumentParser], Run]

SCALES = ("smoke", "reduced", "paper")
ENGINES = ("processes", "ray")


def list_(parser: argparse.ArgumentParser) -> Run:
    """Show the paper's tables and figures, and how many runs each needs at each scale."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments.paper.artifacts import ARTIFACTS
        from ccssl.experiments.paper.formats import aligned
        from ccssl.experiments.paper.plan import count_runs

        told = [
            {
                "name": name,
                "place": artifact.place,
                "title": artifact.title,
                "runs": {scale: count_runs([name], scale) for scale in SCALES},
            }
            for name, artifact in ARTIFACTS.items()
        ]
        every = {scale: count_runs(list(ARTIFACTS), scale) for scale in SCALES}
        if args.json:
            print(json.dumps({"artifacts": told, "runs of all": every}, indent=2))
            return
        rows = [(a["name"], a["place"], *(str(a["runs"][scale]) for scale in SCALES), a["title"]) for a in told]
        rows.append(("all", "", *(str(every[scale]) for scale in SCALES), "runs that several share are run once"))
        print(aligned([("name", "in the paper", *SCALES, "what it shows"), *rows]))
        print("\nThe numbers are those of runs at each scale.")

    return run


def run_(parser: argparse.ArgumentParser) -> Run:
    """Make the runs of tables and figures that are missing; what was begun goes on where it stopped."""
    add_names(parser)
    parser.add_argument(
        "--scale", choices=SCALES, required=True, help="how large: ccssl paper list shows how many runs"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the study")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of data sets, NAME.npz or packed (default: those fetched)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds 0 to N - 1 (default: 3, at the scale smoke 2)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a run (default: cores by workers)")
    parser.add_argument(
        "--engine", choices=ENGINES, default="processes", help="what computes (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="device of the runs, which may share it (default: auto)")

    def run(args: argparse.Namespace) -> int:
        from ccssl.experiments.paper.plan import RUNS, choose, chosen_runs, missing_data, plan
        from ccssl.experiments.paper.scales import SCALES as known_scales
        from ccssl.experiments.study import StudyStopped, is_finished, run_study

        seeds = known_scales[args.scale].seeds if args.seeds is None else args.seeds
        names = choose(args.names)
        planned = plan(names, args.scale, args.out, seeds, args.data, args.device)
        lacking = missing_data(planned)
        if lacking and not planned.study:
            raise InputError(lacking)
        if lacking:
            print(f"note: {lacking}", file=sys.stderr)
        how = {"workers": args.workers, "threads": args.threads, "engine": args.engine}
        try:
            outcome = run_study(planned.study, args.out / RUNS, **how)
            chosen = chosen_runs(names, args.scale, args.out, seeds, args.device)
            further = {name: job for name, job in chosen.items() if name not in planned.study}
            if any(not is_finished(args.out / RUNS / name) for name in further):
                print(f"settings are chosen by validation: {len(further)} runs with other seeds", file=sys.stderr)
            outcome += run_study(further, args.out / RUNS, **how)
        except StudyStopped as stopped:
            print(f"ccssl: {stopped}", file=sys.stderr)
            return 128 + stopped.number
        print(f"{len(outcome.made)} runs made, {outcome.skipped} were there, {len(outcome.broken)} broken")
        for name, why in outcome.broken.items():
            print(f"{name}: {why}", file=sys.stderr)
        return 1 if outcome.broken else 0

    return run


COMMANDS: dict[str, Command] = {"list": list_, "run": run_}


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the names of artifacts."""
    parser.add_argument("names", metavar="NAME", nargs="+", help="a table or figure (ccssl paper list), or all")
