"""Comparing the times of functions on a machine that others use, too.

The competitors take turns in short slices, A B A B ..., so that whatever disturbs the machine disturbs them all.
A *slice* calls one function often enough to last a few milliseconds and gives its time a call. Where all work is
done by one thread of this process, its CPU time is taken (``clock=time.process_time``): whatever others run at the
same time then costs no more than some of the cache. Two figures are made from the slices:

* the *ratio of minima*: each competitor's least disturbed slice. It judges, because what disturbs only adds time;
* the *paired ratio*: slices of the same round, one beside the other; its median and quartiles tell how far the
  first figure can be trusted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Function = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times as long one competitor takes as another."""

    minima: float
    median: float
    low: float  # lower quartile of the paired ratios
    high: float  # upper quartile


@dataclass(frozen=True)
class Timings:
    """Seconds a call of every competitor, one number a round."""

    seconds: dict[str, list[float]]

    def minimum(self, name: str) -> float:
        """Return the seconds a call of the least disturbed slice."""
        return min(self.seconds[name])

    def median(self, name: str) -> float:
        """Return the median seconds a call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> Ratio:
        """Compare a competitor with another one of the same run."""
        paired = [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]
        low, median, high = statistics.quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
        return Ratio(self.minimum(name) / self.minimum(base), median, low, high)


def compare(
    competitors: Mapping[str, Function],
    *,
    rounds: int = 60,
    slice_seconds: float = 0.004,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time the competitors in turns; every other round in reverse order, so that none always comes first."""
    calls = {}
    for name, function in competitors.items():
        for _ in range(warmup):
            function()
        calls[name] = max(1, round(slice_seconds / _seconds(function, 1, clock)))
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    order = list(competitors)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                seconds[name].append(_seconds(competitors[name], calls[name], clock))
            order.reverse()
    finally:
        if collecting:
            gc.enable()
    return Timings(seconds)


def _seconds(function: Function, calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls
