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
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ccssl._version import __version__
from ccssl.errors import InputError

Run = Callable[[argparse.Namespace], int | None]
Command = Callable[[argparse.ArgumentParser], Run]


def demo(parser: argparse.ArgumentParser) -> Run:
    """See conformal credal labels at work on a small problem: a table here, a page with pictures."""
    parser.add_argument(
        "--out", type=Path, default=Path("ccssl-demo"), help="folder of the page (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_whole_number, default=0, help="another draw of the data (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.demo import run_demo, terminal_table

        result = run_demo(args.out, args.seed)
        _print_figures(result.figures(), terminal_table(result), args.json)

    return run


def doctor(parser: argparse.ArgumentParser) -> Run:
    """Show what this machine has: device, kernels, threads, cached data; and what to do where it lacks."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.doctor import examine, terminal_table

        findings = examine()
        _print_figures(findings, terminal_table(findings), args.json)

    return run


COMMANDS: dict[str, Command] = {
    "demo": demo,
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
    """Give a parser the commands of a table; return what runs when none of them is named."""
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    for name, command in table.items():
        text = inspect.getdoc(command) or ""
        sub = commands.add_parser(name, help=text.split("\n")[0], description=text, allow_abbrev=False)
        sub.set_defaults(run=command(sub), parser=sub)

    def run(args: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


_DESCRIPTION = """Conformal credal self-supervised learning: few labels, many unlabeled items, and
pseudo-labels that say how far they deserve trust."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers bad input with a sentence, not with a page, and names what was probably meant."""

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            place, wrong, allowed = choice.groups()
            names = [name.strip("'") for name in allowed.split(", ")]
            message = f"{place} must be one of {', '.join(names)}, got {wrong!r}.{_did_you_mean(wrong, names)}"
        else:
            message = message.removeprefix("argument ")
            message += "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message} See {self.prog} --help.\n")

    def refuse(self, unknown: str) -> NoReturn:
        """End because of an argument that the command does not have."""
        options = re.findall(r"(?<![\w-])--[\w-]+", self.format_help())
        name = unknown.split("=")[0]
        self.error(f"there is no argument {name}.{_did_you_mean(name, options)}")


def _did_you_mean(wrong: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(wrong, names, 1)
    return f" Did you mean {near[0]}?" if near else ""


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
