"""The commands of ``ccssl graph``: parse and call, nothing else.

As in ``ccssl.cli``, a command adds its arguments to a parser and returns what to call with the parsed ones, and imports
what is heavy when it is called.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

Run = Callable[[argparse.Namespace], int | None]
Command = Callable[[argparse.ArgumentParser], Run]


def train(parser: argparse.ArgumentParser) -> Run:
    """Train a link predictor on few facts and on queries without answers, into a folder that can be resumed."""
    from ccssl.experiments.flags import add_flags, values_of
    from ccssl.graphs.config import METHODS, GraphConfig

    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, from its last checkpoint"
    )
    parser.add_argument("--quiet", action="store_true", help="show neither progress nor evaluations")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser, GraphConfig, METHODS)

    def run(args: argparse.Namespace) -> int | None:
        from ccssl.experiments import graph_run
        from ccssl.experiments.graph_tables import result_table

        try:
            config = graph_run.config_from(values_of(args, GraphConfig))
            result = graph_run.train(config, args.out, resume=args.resume, quiet=args.quiet)
        except graph_run.Stopped as stopped:
            parser.exit(128 + stopped.number, f"ccssl: {stopped}\n")
        print_figures(result, result_table(result), args.json)

    return run


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """Rank the test facts of a run once more: MRR and hits, for heads and tails, for each relation."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--device", default=None, help="device (default: that of the run)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments import graph_run
        from ccssl.experiments.graph_tables import relation_table, result_table

        figures = graph_run.evaluate(graph_run.load_run(args.run_folder, device=args.device))
        tables = [result_table(figures), relation_table(figures)]
        print_figures(figures, "\n\n".join(table for table in tables if table), args.json)

    return run


def predict(parser: argparse.ArgumentParser) -> Run:
    """Predict new facts, with probability, p-value and possibility, and sets of tails with their coverage."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--queries",
        type=Path,
        metavar="FILE",
        help="file of queries, HEAD RELATION ? or ? RELATION TAIL a line (default: the tail queries of all heads)",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="K", help="new facts a query, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--delta",
        type=float,
        default=0.1,
        metavar="X",
        help="sets miss with this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--per-relation",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="calibrate each relation and direction by itself (default: as in the run)",
    )
    parser.add_argument(
        "--min-p-value", type=float, default=0.0, metavar="X", help="leave out facts below (default: none)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the facts to a .csv or .parquet file (default: print them)"
    )
    parser.add_argument("--sets", type=Path, metavar="FILE", help="write each query's prediction set, too")
    parser.add_argument("--device", default=None, help="device (default: that of the run)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments.graph_run import load_run
        from ccssl.experiments.graph_tables import links_table, sets_table
        from ccssl.graphs.export import check_ending, write_links, write_sets
        from ccssl.graphs.files import read_queries
        from ccssl.graphs.predictor import CALIBRATED, UNCALIBRATED, LinkPredictor, check_options

        options = {"top": args.top, "delta": args.delta, "min_p_value": args.min_p_value}
        check_options(**options)
        for path in filter(None, (args.out, args.sets)):
            check_ending(path)
        training = load_run(args.run_folder, device=args.device)
        predictor = LinkPredictor.of(training, per_relation=args.per_relation)
        queries = None if args.queries is None else read_queries(args.queries, training.graph)
        figures: dict[str, object] = {"sets": predictor.coverage(args.delta)}
        text, unsaid = sets_table(figures), ()
        if predictor.tails is None:
            text, unsaid = UNCALIBRATED, CALIBRATED
            figures["note"] = text
        if args.out is not None:
            figures["facts"] = write_links(args.out, predictor.chunks(queries, **options), empty=unsaid)
            text += f"\n\n{figures['facts']:,} facts written to {args.out}"
        elif queries is None:
            text += (
                "\n\nName a file of --queries to see new facts here, or --out FILE to write those of all queries."
            )
        else:
            links = predictor.predict(queries, **options)
            figures["facts"] = [
                {name: None if name in unsaid else value for name, value in link._asdict().items()}
                for link in links
            ]
            text += "\n\n" + links_table(links, calibrated=not unsaid)
        if args.sets is not None:
            figures["queries"] = write_sets(args.sets, predictor.set_chunks(queries, args.delta), empty=unsaid)
            text += f"\n\n{figures['queries']:,} prediction sets written to {args.sets}"
        print_figures(figures, text, args.json)

    return run


COMMANDS: dict[str, Command] = {"train": train, "evaluate": evaluate, "predict": predict}


def print_figures(figures: Mapping[str, object], table: str, as_json: bool) -> None:
    """Print figures as JSON, or what was made of them for readers."""
    print(json.dumps(figures, indent=2, allow_nan=False) if as_json else table)
