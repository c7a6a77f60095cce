"""``python -m benchmarks [NAME ...] [--json] [--quick]``: measure, print tables, write RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.table import Table

NAMES = ("loss", "memory", "p_values", "augment", "training", "graphs", "imports", "cuda")
RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("ccssl", "torch", "numpy", "numba", "crepes", "torchcp", "entmax", "pykeen")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks that were named, or all of them; only then, and at full size, write RESULTS.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that they run, not to measure")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}: choose from {', '.join(NAMES)}")

    os.environ.update(dict.fromkeys(THREADS, "1"))  # before torch is loaded, and for the processes to come
    tables: list[Table] = []
    for name in args.names or NAMES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        tables += import_module(f"benchmarks.{name}").run(quick=args.quick)
    page = report(tables, args.names, args.quick)
    if args.json:
        print(
            json.dumps(
                {"machine": machine(), "versions": versions(), "tables": [t.data() for t in tables]}, indent=2
            )
        )
    else:
        print(page)
    if not args.names and not args.quick:
        RESULTS.write_text(page, encoding="utf-8")
        print(f"wrote {RESULTS.name}", file=sys.stderr)
    return 0


def report(tables: list[Table], names: list[str], quick: bool) -> str:
    """Return the page: what was run where, how to read it, the tables."""
    command = " ".join(["python -m benchmarks", *names, *(["--quick"] if quick else [])])
    judged = [row.met for table in tables for row in table.rows if row.met is not None]
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    head = f"""# Benchmark results

- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC
- command: `{command}` (`make bench` installs the peers first)
- machine: {machine()}
- versions: Python {platform.python_version()}, {used}
- limits met: {sum(judged)} of {len(judged)}

Absolute times differ from machine to machine; ratios are what counts. Competitors take turns in slices of a few
milliseconds. A time is that of the fastest slice, the *ratio of minima* is judged. The *paired ratio* compares slices
of the same round and gives the median and, in brackets, the quartiles: where it lies far from the ratio of minima, or
its quartiles far apart, the machine was busy with something else.
"""
    return "\n".join([head, *(table.markdown() for table in tables)])


def machine() -> str:
    """Say what the figures come from."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB memory"
    return f"{model}, {os.cpu_count()} cores{memory}, {platform.system()} {platform.machine()}{accelerator()}"


def accelerator() -> str:
    """Name the CUDA device, if there is one."""
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


def versions() -> dict[str, str]:
    """Return the versions of what was measured, as far as it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
