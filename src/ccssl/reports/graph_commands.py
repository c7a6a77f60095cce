"""All commands of ``ccssl graph``: those that run something (``ccssl.experiments.graph_commands``), and the report."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccssl.experiments.graph_commands import COMMANDS as RUNNING
from ccssl.experiments.graph_commands import Command, Run, print_figures


def report(parser: argparse.ArgumentParser) -> Run:
    """Compare runs: a table here, and one page with curves, prediction sets, relations and new facts."""
    parser.add_argument(
        "run_folders", type=Path, nargs="+", metavar="RUN", help="folders of finished runs on one graph"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE.html",
        help="the page (default: report.html in the folder of a single run)",
    )
    parser.add_argument("--device", default=None, help="device (default: that of the runs)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.reports.graph_report import report as read_runs
        from ccssl.reports.graph_report import write_page
        from ccssl.reports.report import page_for

        page = page_for(args.run_folders, args.out)
        found = read_runs(args.run_folders, args.device)
        write_page(found, page)
        table = f"{found.table()}\n\nThe page with figures, sets and new facts: {page}"
        print_figures({"page": str(page), **found.figures()}, table, args.json)

    return run


COMMANDS: dict[str, Command] = {**RUNNING, "report": report}
