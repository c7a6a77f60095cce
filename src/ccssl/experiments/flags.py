"""A flag on the command line for every field of a run's configuration, and for every hyperparameter of a method."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from ccssl.experiments.config import RunConfig, config_from, read_config
from ccssl.methods.config import CONFIGS

FIELDS = {f.name: f for f in fields(RunConfig) if f.name != "options"}


def method_options(methods: Iterable[str] = CONFIGS) -> dict[str, tuple[Field[Any], dict[str, Any]]]:
    """Return the hyperparameters of methods, each with the methods that take it and their defaults."""
    found: dict[str, tuple[Field[Any], dict[str, Any]]] = {}
    for name in methods:
        for option in fields(CONFIGS[name]):
            found.setdefault(option.name, (option, {}))[1][name] = option.default
    return found


def add_flags(parser: argparse.ArgumentParser, kind: type = RunConfig, methods: Iterable[str] = CONFIGS) -> None:
    """Add the flags of a kind of configuration; only those that are given stand in the parsed arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="take the fields that this file sets")
    run = parser.add_argument_group("the run")
    for f in fields(kind):
        if f.name != "options":
            _add(run, f, "" if f.default is None else f"default: {_said(f.default)}")
    group = parser.add_argument_group("hyperparameters of the method")
    for option, takers in method_options(methods).values():
        _add(group, option, ", ".join(f"{name}: {_said(default)}" for name, default in takers.items()))


def config_of(args: argparse.Namespace) -> RunConfig:
    """Return the configuration that a file and flags make; a run to be resumed brings its own."""
    return config_from(values_of(args, RunConfig))


def values_of(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the fields of a kind of configuration that a file and flags set."""
    from ccssl.experiments.folder import CONFIG

    own = args.out / CONFIG
    values: dict[str, Any] = {}
    if args.config is not None:
        values = read_config(args.config)
    elif args.resume and own.exists():
        values = read_config(own)
    given = vars(args)
    options = dict(values.get("options") or {})
    if given.get("method", values.get("method")) != values.get("method"):
        options = {}  # they were another method's
    options |= {name: given[name] for name in method_options() if name in given}
    names = [f.name for f in fields(kind) if f.name != "options"]
    return {**values, **{name: given[name] for name in names if name in given}, "options": options}


def _said(default: Any) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number in digits, such as 1000, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, such as 0.03 or 3e-2, got {text!r}") from None


def _add(group: Any, f: Field[Any], defaults: str) -> None:
    flag, kind = "--" + f.name.replace("_", "-"), str(f.type)
    text = (f.metadata["help"] + (f" ({defaults})" if defaults else "")).replace("%", "%%")
    if "bool" in kind:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    convert: Callable[[str], Any] = _whole if "int" in kind else _number if "float" in kind else str
    metavar = {_whole: "N", _number: "X", str: "NAME"}[convert]
    group.add_argument(flag, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
