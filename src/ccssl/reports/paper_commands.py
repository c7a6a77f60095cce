"""All commands of ``ccssl paper``: those that make runs (``ccssl.experiments.commands``), and what shows them."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccssl.experiments.commands import COMMANDS as RUNNING
from ccssl.experiments.commands import SCALES, Command, Run, add_names

FORMATS = ("text", "markdown", "latex", "csv", "html")


def show(parser: argparse.ArgumentParser) -> Run:
    """Print tables, ours beside the paper's, with figures as SVG and CSV files; or write all of it as one page."""
    add_names(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the study")
    parser.add_argument("--scale", choices=SCALES, help="at which scale (default: the one that was run)")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="of what is printed; html writes the page DIR/paper.html instead (default: %(default)s)",
    )
    parser.add_argument(
        "--figure",
        choices=("last", "median20"),
        default="last",
        help="of test data: after the last step, or the median of the last 20 evaluations (default: %(default)s)",
    )

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments.paper.plan import choose
        from ccssl.experiments.paper.show import scale_of, shown
        from ccssl.reports.paper_page import write_page

        names = choose(args.names)
        phase = "test" if args.figure == "last" else args.figure
        scale = args.scale or scale_of(names, args.out)
        if args.format == "html":
            print(write_page(names, args.out, scale, phase))
            return
        for i, part in enumerate(shown(names, args.out, scale, args.format, phase)):
            print("\n" * (i > 0) + part, end="")

    return run


COMMANDS: dict[str, Command] = {**RUNNING, "show": show}
