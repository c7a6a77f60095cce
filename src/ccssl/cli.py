"""The command line: parse and call, nothing else.

A command is a function in ``COMMANDS``. It adds its arguments to the parser it is given and returns what to
call with the parsed ones; the first line of its docstring is its help. A command with commands of its own
returns ``add_commands(parser, TABLE)``. Whatever is heavy is imported where it is called: ``ccssl --help``
loads neither torch nor numpy.

Exit codes: 0 done, 2 bad input (with a sentence that says what to change), 130 stopped by Ctrl-C, 141 nobody
reads the output any more.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ccssl._version import __version__
from ccssl.errors import InputError, did_you_mean

Run = Callable[[argparse.Namespace], int | None]
Command = Callable[[argparse.ArgumentParser], Run]


def demo(parser: argparse.ArgumentParser) -> Run:
    """See what unlabeled images bring on real digits: trains for a minute, then a table here, a page with pictures."""
    parser.add_argument(
        "--out", type=Path, default=Path("ccssl-demo"), help="folder of the page (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_whole_number, default=0, help="another draw of the labels (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.demo import run_demo
        from ccssl.experiments.run import Stopped

        try:
            result = run_demo(args.out, args.seed)
        except Stopped as stopped:
            raise SystemExit(_fail("stopped; the same command goes on", 128 + stopped.number)) from None
        _print_figures(result.figures(), result.table(), args.json)

    return run


def doctor(parser: argparse.ArgumentParser) -> Run:
    """Show what this machine has: device, kernels, threads, cached data; and what to do where it lacks."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.doctor import examine, terminal_table

        findings = examine()
        _print_figures(findings, terminal_table(findings), args.json)

    return run


def train(parser: argparse.ArgumentParser) -> Run:
    """Train a network on few labeled and many unlabeled images, into a folder that can be repeated and resumed."""
    from ccssl.experiments.flags import add_flags, config_of

    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, from its last checkpoint"
    )
    parser.add_argument("--quiet", action="store_true", help="show neither progress nor evaluations")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser)

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments.run import Stopped
        from ccssl.experiments.run import train as run_training
        from ccssl.experiments.tables import result_table

        try:
            result = run_training(config_of(args), args.out, resume=args.resume, quiet=args.quiet)
        except Stopped as stopped:
            raise SystemExit(_fail(str(stopped), 128 + stopped.number)) from None
        if int(os.environ.get("RANK", "0")) == 0:
            _print_figures(result, result_table(result), args.json)

    return run


def tune(parser: argparse.ArgumentParser) -> Run:
    """Search a method's hyperparameters by validation accuracy; the best go into a file that train and paper take."""
    from ccssl.experiments.flags import add_flags, config_of

    parser.add_argument("--out", type=Path, required=True, metavar="STUDY", help="folder of the study")
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="trials that end (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes on this machine (default: %(default)s)"
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="PostgreSQL database that machines share, postgresql://USER@HOST/DATABASE (default: a file in --out)",
    )
    parser.add_argument(
        "--sampler",
        default="tpe",
        metavar="NAME",
        help="tpe, with Hyperband; or gp, for fewer than 20 trials, with none stopped early (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(resume=False)
    add_flags(parser)

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments import tune as tuning

        config = config_of(args)
        search = tuning.Search(
            base=config,
            space=tuning.space_of(config.method, fixed=list(vars(args))),
            trials=args.trials,
            sampler=args.sampler,
        )
        try:
            result = tuning.tune(search, args.out, workers=args.workers, storage=args.storage, quiet=args.quiet)
        except tuning.Interrupted as stopped:
            raise SystemExit(_fail(str(stopped), 128 + stopped.number)) from None
        _print_figures(result, tuning.result_table(result), args.json)

    return run


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """Evaluate the network of a run on its test images once more."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--device", default=None, help="device (default: that of the run)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.experiments.run import load_run
        from ccssl.experiments.tables import result_table

        figures = load_run(args.run_folder, device=args.device).evaluate()
        _print_figures(figures, result_table(figures), args.json)

    return run


def report(parser: argparse.ArgumentParser) -> Run:
    """Compare runs: a table here, and one page with curves, validity, classes and unlabeled images."""
    parser.add_argument(
        "run_folders", type=Path, nargs="+", metavar="RUN", help="folders of finished runs on one data set"
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
        from ccssl.reports.report import page_for, write_page
        from ccssl.reports.report import report as read_runs

        page = page_for(args.run_folders, args.out)
        found = read_runs(args.run_folders, args.device)
        write_page(found, page)
        table = f"{found.table()}\n\nThe page with figures and images: {page}"
        _print_figures({"page": str(page), **found.figures()}, table, args.json)

    return run


def graph(parser: argparse.ArgumentParser) -> Run:
    """Learn the missing links of a knowledge graph from few facts: train, evaluate, predict, report."""
    from ccssl.reports.graph_commands import COMMANDS as graph_commands

    return add_commands(parser, graph_commands)


def data(parser: argparse.ArgumentParser) -> Run:
    """List, fetch, verify and pack data sets."""
    from ccssl.images.commands import COMMANDS as data_commands

    return add_commands(parser, data_commands)


def paper(parser: argparse.ArgumentParser) -> Run:
    """List, run and show the tables and figures of the paper, ours beside the printed ones."""
    from ccssl.reports.paper_commands import COMMANDS as paper_commands

    return add_commands(parser, paper_commands)


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "report": report,
    "graph": graph,
    "paper": paper,
    "data": data,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _Parser(prog="ccssl", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ccssl {__version__}")
    parser.set_defaults(run=add_commands(parser, COMMANDS), parser=parser)
    args, unknown = parser.parse_known_args(argv)
    try:
        if unknown:
            args.parser.refuse(unknown[0])
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except InputError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:
        # The reader is gone; what is still buffered must not raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}", 2)


def add_commands(parser: argparse.ArgumentParser, table: Mapping[str, Command]) -> Run:
    """Give a parser the commands of a table; return what runs when none of them is named.

    A command adds its arguments when it is the one that was named: others load nothing.
    """
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    for name, command in table.items():
        text = inspect.getdoc(command) or ""
        sub = commands.add_parser(name, help=text.split("\n")[0], description=text, allow_abbrev=False)
        sub.fill = command

    def run(args: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


_DESCRIPTION = """Conformal credal self-supervised learning: few labels, many unlabeled items, and
pseudo-labels that say how far they deserve trust."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers bad input with a sentence, not with a page, and names what was probably meant."""

    fill: Command | None = None  # adds the arguments of a command

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Parse; a command's parser gets its arguments only now."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            self.set_defaults(run=fill(self), parser=self)
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            place, wrong, allowed = choice.groups()
            names = [name.strip("'") for name in allowed.split(", ")]
            message = f"{place} must be one of {', '.join(names)}, got {wrong!r}.{did_you_mean(wrong, names)}"
        else:
            message = message.removeprefix("argument ")
            message += "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message} See {self.prog} --help.\n")

    def refuse(self, unknown: str) -> NoReturn:
        """End because of an argument that the command does not have."""
        options = re.findall(r"(?<![\w-])--[\w-]+", self.format_help())
        name = unknown.split("=")[0]
        self.error(f"there is no argument {name}.{did_you_mean(name, options)}")


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)


def _print_figures(figures: Mapping[str, object], table: str, as_json: bool) -> None:
    if as_json:
        import json

        table = json.dumps(figures, indent=2, allow_nan=False)
    print(table)


def _fail(message: str, code: int) -> int:
    print(f"ccssl: {message}", file=sys.stderr)
    return code
