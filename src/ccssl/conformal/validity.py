r"""Is the promise kept? Validity error, efficiency, and a statistical audit of a calibration.

A possibility distribution is *valid* if the true label is rarely deemed implausible::

    P( pi(Y) <= delta ) <= delta        for every delta in (0, 1)

``validity_error`` measures the left side. Validity alone is cheap, pi = 1 everywhere has it; ``efficiency``,
the mean possibility, says how much pi leaves open: the less, the better.

A measured error above delta is no proof of a fault, for two reasons: the fresh items are a sample, and so is
the calibration set, drawn once and shared by all of them. ``audit`` accounts for both.

*The law of the errors.* Let the scores be continuous, L calibration items and n fresh ones, all exchangeable.
With R = #{alpha_i >= alpha(Y)} + 1 the p-value R / (L + 1) is at most delta exactly if R <= k, where
k = floor(delta (L + 1)): if the score lies above the k-th largest calibration score. *Given* the calibration
set the fresh items do so independently, each with the probability B that the distribution of scores has
beyond that order statistic; and what lies beyond the k-th largest of L draws has a Beta law (Vovk, 2012)::

    B ~ Beta(k, L + 1 - k)          errors ~ Binomial(n, B) = BetaBinomial(n, k, L + 1 - k)

B has mean k / (L + 1) <= delta and a standard deviation near sqrt(delta (1 - delta) / L), whatever n is.

*Ties* make p-values larger: breaking them at random gives p-values that are no larger, item by item, and
follow the law above. Hence the number of errors is stochastically at most beta-binomial and the one-sided
test, P(BetaBinomial >= errors), keeps its level. Normalised possibilities are at least as large as the
p-values, pi >= p: whatever passes here is valid for both normalisations as well.

*All p-values together.* The L + 1 cells between calibration scores catch the n fresh items with probabilities
drawn from Dirichlet(1, ..., 1). The distribution of the p-values is compared with the uniform one in
Kolmogorov's way, by the largest excess (too many small p-values: not valid) and by the largest distance
(either way: not valid or overly cautious). The calibration set is shared, so the textbook law of these
statistics is wrong here; their law is simulated, with a seed. Of thousands of cells neighbours are taken together: the
probability of g of them is the sum of g Dirichlet variables, so that the g's take the place of the ones, and the
statistics are those of the thresholds in between, observed and simulated alike.

*Class-conditional calibrations* (``group="label"``) obey the law in every class, with n_y in place of L,
independently between classes given the labels. The audit takes the sum over classes: exactly, by convolution,
for errors, by simulation for the rest. To audit one class, pass its items alone.

*Smoothed p-values* fall inside cells; a delta inside a cell counts as its upper end, on the safe side.

Shapes: N items, K classes, n fresh items, G groups.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ccssl.conformal.calibration import Calibration, check_delta, check_labels, check_probabilities
from ccssl.credal.faults import looks
from ccssl.credal.possibility import Levels, Possibility, as_dense, check_possibility, widest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The simulated law is that of so many cells, over all classes; and of so many thresholds at least.
SIMULATED_CELLS = 2048
FEWEST_THRESHOLDS = 16


def validity_error(pi: Possibility, labels: Tensor, delta: float, *, validate: bool | None = None) -> Tensor:
    """Return the share of items with pi(label) <= delta, a number on the device of pi.

    ``Levels`` are compared in float64, so that 1/10 <= 0.1 holds; a tensor in its own precision, with delta
    rounded to it. ``validate`` looks at values, by default on the CPU only.

    >>> pi = torch.tensor([[1.0, 0.2], [0.1, 1.0], [1.0, 0.05]])
    >>> validity_error(pi, torch.tensor([0, 0, 1]), delta=0.1)
    tensor(0.6667)
    """
    check_possibility(pi, validate)
    check_labels(labels, pi.counts if isinstance(pi, Levels) else pi, looks(pi.device, validate))
    check_delta(delta)
    labels = labels.long()
    at_label = _levels_at(pi, labels) if isinstance(pi, Levels) else _entry(pi, labels)
    return (at_label <= delta).float().mean()


class Efficiency(NamedTuple):
    """Mean possibility: how much the degrees leave open."""

    overall: Tensor  # ()   between 1/K, one class alone is possible, and 1, anything is
    per_class: Tensor  # (K,)


def efficiency(pi: Possibility, *, validate: bool | None = None) -> Efficiency:
    """Return the mean possibility over all items and classes, and that of each class.

    >>> efficiency(torch.tensor([[1.0, 0.5], [1.0, 0.0]]))
    Efficiency(overall=tensor(0.6250), per_class=tensor([1.0000, 0.2500]))
    """
    check_possibility(pi, validate)
    dense = as_dense(pi)
    rows_NK = dense.reshape(-1, dense.shape[-1])
    per_class_K = rows_NK.mean(0, dtype=torch.promote_types(dense.dtype, torch.float32))
    return Efficiency(per_class_K.mean(), per_class_K)


@dataclass(frozen=True)
class AuditRow:
    """The errors at one significance level: fresh items whose true label has a p-value of at most delta."""

    delta: float
    errors: int
    error: float  # their share
    band: tuple[float, float]  # where it lies in 95% of cases for a calibration without ties
    long_run: tuple[float, float]  # the same for unlimited fresh items: what the calibration set alone does
    p_value: float  # probability of so many errors if the calibration is valid
    reachable: bool  # False: no p-value can be so small with so few calibration items


@dataclass(frozen=True)
class Uniformity:
    """The p-values of the true labels against the uniform distribution."""

    excess: float  # largest excess of P(p <= t) over t
    excess_p_value: float  # small: too many small p-values, not valid
    distance: float  # largest distance either way
    distance_p_value: float  # small with a large excess_p_value: valid, but more cautious than needed


@dataclass(frozen=True)
class Curve:
    """The distribution function of the p-values of the true labels, with the band of a valid calibration."""

    threshold: tuple[float, ...]
    error: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Audit:
    """What fresh labeled items say about a calibration. ``valid`` is the outcome of all tests together."""

    valid: bool
    verdict: str
    calibration_items: int
    fresh_items: int
    level: float  # probability of a false alarm
    rows: tuple[AuditRow, ...]
    uniformity: Uniformity
    curve: Curve

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain dicts, lists and numbers, ready for JSON."""
        return asdict(self)

    def figure(self) -> Figure:
        """Draw the distribution of p-values and the error at each delta, each with its band."""
        return _draw(self)

    def svg(self) -> str:
        """Return the picture as SVG, the same bytes for the same audit."""
        import matplotlib as mpl

        buffer = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": "ccssl"}):
            self.figure().savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    def plot(self, path: str | Path) -> Path:
        """Write the picture to ``path``, in the format of its ending."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial{path.suffix}")
        try:
            if path.suffix == ".svg":
                partial.write_text(self.svg(), encoding="utf-8")
            else:
                self.figure().savefig(partial, dpi=160)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return path


def audit(
    calibration: Calibration,
    probabilities: Tensor,
    labels: Tensor,
    deltas: Sequence[float] = (0.05, 0.1, 0.25),
    *,
    level: float = 0.05,
    simulations: int = 2000,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> Audit:
    """Test a calibration on fresh labeled items: ``probabilities`` (n, K), ``labels`` (n,).

    Fresh means: neither trained on nor calibrated with, from the same source, prepared the same way. One test
    for each delta and one for all p-values together; the calibration is called invalid if one of them has a
    p-value below ``level`` / (number of tests) (Bonferroni), which happens to a valid one with probability at
    most ``level``. ``generator`` is for calibrations that draw at random.

    >>> from ccssl.conformal import Calibration
    >>> draw = torch.Generator().manual_seed(0)
    >>> p = torch.softmax(torch.randn(600, 4, generator=draw), -1)
    >>> y = p.multinomial(1, generator=draw).squeeze(-1)
    >>> result = audit(Calibration().fit(p[:200], y[:200]), p[200:], y[200:])
    >>> result.valid
    True
    """
    if not isinstance(calibration, Calibration):
        raise ValueError(f"calibration must be a Calibration, got {type(calibration).__name__}")
    check_probabilities(probabilities, look=True)
    check_labels(labels, probabilities, look=True)
    listed = tuple(deltas) if isinstance(deltas, Iterable) else ()
    if not listed or not all(isinstance(delta, Real) and 0 < delta < 1 for delta in listed):
        raise ValueError(f"deltas must be significance levels in (0, 1), a sequence of one or more, got {deltas!r}")
    tests = len(listed) + 1
    if not (isinstance(level, Real) and 0 < level < 1 and isinstance(simulations, int)) or (
        simulations < 1 or 1 / (simulations + 1) >= level / tests
    ):
        raise ValueError(
            f"level must be in (0, 1) and simulations, an int, more than {tests}/level so that the simulated test "
            f"can reject, got level {level!r} and simulations {simulations!r}"
        )
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an int, at least 0, got {seed!r}")
    p_n, group_n, sample = _true_label_p_values(calibration, probabilities, labels, generator)
    rows = tuple(_row(delta, p_n, sample) for delta in listed)
    uniformity, curve = _uniformity(p_n, group_n, sample, simulations, seed)
    smallest = min([row.p_value for row in rows] + [uniformity.excess_p_value])
    valid = smallest >= level / tests
    return Audit(
        valid=valid,
        verdict=_verdict(valid, rows, uniformity, level / tests, calibration.size, len(p_n)),
        calibration_items=calibration.size,
        fresh_items=len(p_n),
        level=level,
        rows=rows,
        uniformity=uniformity,
        curve=curve,
    )


def _entry(rows: Tensor, labels: Tensor) -> Tensor:
    return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _levels_at(pi: Levels, labels: Tensor) -> Tensor:
    """Return pi(label) in float64 (where there is one), without the degrees of the other classes."""
    count = _entry(pi.counts, labels)
    numerator = (count + 1).to(widest(count.device))
    if pi.normalization == "proportional":
        return numerator / (pi.counts.amax(-1) + 1)
    at_top = count == pi.counts.amax(-1) if pi.top is None else labels == pi.top
    return (numerator / (pi.size + 1)).masked_fill(at_top, 1.0)


class _Sample(NamedTuple):
    """What the law of the p-values depends on: sizes, one entry a group (all items, or a class each)."""

    items: np.ndarray  # (G,) fresh items
    cells: np.ndarray  # (G,) calibration items + 1
    smooth: bool


def _true_label_p_values(
    calibration: Calibration, probabilities: Tensor, labels: Tensor, generator: torch.Generator | None
) -> tuple[np.ndarray, np.ndarray, _Sample]:
    """Return the p-values of the labels (n,), the group of each item (n,), and the sizes."""
    at_label = []
    for p_NK, label_N in zip(probabilities.split(1024), labels.split(1024), strict=True):
        p_value_NK = calibration.p_values(p_NK, generator=generator)
        at_label.append(_entry(p_value_NK, label_N.long()))
    p_n = torch.cat(at_label).cpu().double().numpy()
    if calibration.config.group == "label":
        present, group_n = np.unique(labels.cpu().numpy(), return_inverse=True)
        cells = calibration.class_counts.cpu().numpy()[present] + 1
    else:
        group_n = np.zeros(len(p_n), dtype=np.int64)
        cells = np.array([calibration.size + 1])
    if not calibration.config.smooth:
        p_n = np.rint(p_n * cells[group_n]) / cells[group_n]  # float64 from here on, to compare with delta
    return p_n, group_n, _Sample(np.bincount(group_n), cells, calibration.config.smooth)


def _row(delta: float, p_n: np.ndarray, sample: _Sample) -> AuditRow:
    errors = int((p_n <= delta).sum())
    below = np.array([_cells_within(delta, int(cells), sample.smooth) for cells in sample.cells])
    law = reduce(
        law_of_sum, (law_of_errors(*sizes) for sizes in zip(sample.items, below, sample.cells, strict=True))
    )
    low, high = np.searchsorted(law.cumsum(), [0.025, 0.975]) / len(p_n)
    return AuditRow(
        delta=float(delta),
        errors=errors,
        error=errors / len(p_n),
        band=(float(low), float(high)),
        long_run=_long_run(sample, below),
        p_value=float(min(1.0, law[errors:].sum())),
        reachable=bool(below.any()),
    )


def _cells_within(delta: float, cells: int, smooth: bool) -> int:
    """Return how many of the levels 1/cells, 2/cells, ... are at most delta in float64."""
    k = math.floor(delta * cells)
    # The product may be rounded across an integer; the quotient decides.
    if (k + 1) / cells <= delta:
        k += 1
    elif k and k / cells > delta:
        k -= 1
    return k + 1 if smooth and k / cells < delta else k


def law_of_errors(items: int, below: int, cells: int) -> np.ndarray:
    """Return the probabilities of 0, ..., items errors: BetaBinomial(items, below, cells - below)."""
    from scipy.special import betaln  # scipy.stats has the law, and takes a second to import

    errors = np.arange(items + 1)
    if below in (0, cells):  # an error is impossible, or certain
        return (errors == (items if below else 0)).astype(float)
    above = cells - below
    log_ways = -np.log(items + 1) - betaln(items - errors + 1, errors + 1)
    return np.exp(log_ways + betaln(errors + below, items - errors + above) - betaln(below, above))


def law_of_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the probabilities of the sum of two independent numbers of errors.

    What is less probable by thirty orders of magnitude than the most probable number is left out: of a hundred
    thousand numbers a few thousand remain.
    """
    law = np.zeros(len(first) + len(second) - 1)
    (first_at, first), (second_at, second) = _likely(first), _likely(second)
    start = first_at + second_at
    law[start : start + len(first) + len(second) - 1] = np.convolve(first, second)
    return law


def _likely(law: np.ndarray) -> tuple[int, np.ndarray]:
    """Return where the probabilities begin that matter, and these."""
    at = np.flatnonzero(law >= 1e-30 * law.max())
    return int(at[0]), law[at[0] : at[-1] + 1]


def _long_run(sample: _Sample, below: np.ndarray) -> tuple[float, float]:
    """Return the central 95% of the error given unlimited items: a mean of Beta variables, one a group."""
    from scipy.special import betaincinv

    inside = (below > 0) & (below < sample.cells)
    if len(below) == 1 and inside[0]:
        low, high = betaincinv(below[0], sample.cells[0] - below[0], [0.025, 0.975])
    else:
        draws = np.repeat((below == sample.cells)[None].astype(float), 4000, axis=0)
        draws[:, inside] = np.random.default_rng(0).beta(
            below[inside], (sample.cells - below)[inside], size=(4000, int(inside.sum()))
        )
        low, high = np.quantile(draws @ sample.items / sample.items.sum(), [0.025, 0.975])
    return float(low), float(high)


def _uniformity(
    p_n: np.ndarray, group_n: np.ndarray, sample: _Sample, simulations: int, seed: int
) -> tuple[Uniformity, Curve]:
    """Compare the distribution of the p-values with those of simulated exchangeable ranks."""
    n = len(p_n)
    level_GC = [np.arange(1, cells + 1) / cells for cells in sample.cells]
    threshold = np.unique(np.concatenate(level_GC))  # groups may share a level
    most = max(FEWEST_THRESHOLDS, SIMULATED_CELLS // len(level_GC))
    if len(threshold) > most:
        threshold = threshold[np.linspace(0, len(threshold) - 1, most).astype(np.int64)]
    # The cells of a group between two thresholds are taken together: at which threshold they end, and how many are.
    at_G, size_G = zip(
        *(np.unique(threshold.searchsorted(level), return_counts=True) for level in level_GC), strict=True
    )
    at = np.concatenate(at_G)
    order = at.argsort(kind="stable")
    last = np.flatnonzero(np.append(np.diff(at[order]) > 0, True))

    def distribution(count: np.ndarray) -> np.ndarray:
        return count[..., order].cumsum(-1)[..., last] / n

    shares = zip(sample.items, size_G, sample.cells, strict=True)
    expected = distribution(np.concatenate([items * size / cells for items, size, cells in shares]))
    # Smoothed p-values lie inside their cell, and rounding must not put others into the next one.
    cells_n = sample.cells[group_n]
    level_n = np.ceil(p_n * cells_n - 1e-6).clip(1) / cells_n
    observed = np.bincount(threshold.searchsorted(level_n), minlength=len(threshold)).cumsum() / n
    drawn = np.unique(np.linspace(0, len(threshold) - 1, 400).astype(np.int64))

    rng = np.random.default_rng(seed)
    excess, distance, curves = [], [], []
    batch = max(1, 2**21 // len(at))
    for runs in [batch] * (simulations // batch) + [simulations % batch]:
        simulated = distribution(
            np.concatenate(
                [
                    rng.multinomial(items, rng.dirichlet(size, size=runs))
                    for items, size in zip(sample.items, size_G, strict=True)
                ],
                axis=-1,
            )
        )
        excess.append((simulated - expected).max(-1))
        distance.append(np.abs(simulated - expected).max(-1))
        curves.append(simulated[:, drawn])

    def compare(statistic: float, null: list[np.ndarray]) -> tuple[float, float]:
        as_large = int((np.concatenate(null) >= statistic - 1e-12).sum())
        return float(statistic), (as_large + 1) / (simulations + 1)

    low, high = np.quantile(np.concatenate(curves), [0.025, 0.975], axis=0)
    uniformity = Uniformity(
        *compare((observed - expected).max(), excess), *compare(np.abs(observed - expected).max(), distance)
    )
    lines = (threshold[drawn], observed[drawn], low, high)
    return uniformity, Curve(*(tuple(line.tolist()) for line in lines))


def _verdict(
    valid: bool, rows: tuple[AuditRow, ...], uniformity: Uniformity, least: float, size: int, items: int
) -> str:
    """Say it in one sentence."""
    if not valid:
        rejected = [row for row in rows if row.p_value < least]
        if rejected:
            row = min(rejected, key=lambda row: row.delta)
            finding = (
                f"at delta {row.delta:g} the true label is deemed implausible for {row.error:.1%} of "
                f"{items:,} fresh items, where a sound calibration would rarely exceed {row.band[1]:.1%}"
            )
        else:
            finding = f"the {items:,} fresh items have more small p-values than chance explains"
        return (
            f"Not valid: {finding}; look for calibration items that were trained on, or that differ from the "
            "fresh ones in source or preprocessing."
        )
    unreachable = [f"{row.delta:g}" for row in rows if not row.reachable]
    shares = ", ".join(f"{row.error:.1%} at delta {row.delta:g}" for row in rows if row.reachable)
    sentence = f"No sign against validity in {items:,} fresh items with {size:,} calibration items"
    if shares:
        sentence += f": the true label is deemed implausible for {shares}"
    if uniformity.distance_p_value < least:
        sentence += "; the p-values are larger than they need to be, so the sets could be smaller"
    if unreachable:
        sentence += f"; delta {', '.join(unreachable)} is out of reach for so few calibration items"
    return sentence + "."


_INK, _FAINT, _ALARM = "#333a45", "#9aa3ad", "#c1440e"
_OBSERVED, _LONG_RUN, _BAND = "#1f6f8b", "#8fb8c4", "#d6e6ea"


def _draw(audit: Audit) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.0), facecolor="white", layout="constrained")
    verdict = textwrap.fill(audit.verdict, 112)
    figure.suptitle(verdict, x=0.012, ha="left", fontsize=10.5, color=_INK if audit.valid else _ALARM)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    _draw_distribution(left, audit)
    _draw_errors(right, audit)
    for axes, columns in ((left, 3), (right, 2)):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(_FAINT)
        axes.tick_params(color=_FAINT, labelcolor=_INK, labelsize=9)
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.02, -0.13), ncols=columns, frameon=False, fontsize=8.5,
            labelcolor=_INK, columnspacing=1.4, handlelength=1.8, borderaxespad=0,
        )  # fmt: skip
    return figure


def _draw_distribution(axes: Axes, audit: Audit) -> None:
    """Draw the distribution function of the p-values of the true labels."""
    threshold, error, low, high = (
        (0.0, *line) for line in (audit.curve.threshold, audit.curve.error, audit.curve.low, audit.curve.high)
    )
    axes.fill_between(threshold, low, high, step="post", color=_BAND, lw=0, label="95% band if valid")
    axes.plot([0, 1], [0, 1], color=_INK, lw=0.8, ls=(0, (4, 3)), label="uniform")
    color = _OBSERVED if audit.valid else _ALARM
    axes.step(threshold, error, where="post", color=color, lw=1.8, label="observed")
    for row in audit.rows:
        axes.axvline(row.delta, color=_FAINT, lw=0.8, ls=":", zorder=0)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_ylabel("share of fresh items", fontsize=9, color=_INK)
    axes.set_title("True labels with a p-value of at most ...", loc="left", fontsize=10, color=_INK)


def _draw_errors(axes: Axes, audit: Audit) -> None:
    """Draw one line a delta: the bands of a valid calibration, delta itself, and what was found."""
    rows = audit.rows[::-1]
    heights = range(len(rows))
    for half, color, bands, name in (
        (0.18, _BAND, [row.band for row in rows], f"95% band for {audit.fresh_items:,} items"),
        (0.05, _LONG_RUN, [row.long_run for row in rows], "for unlimited items"),
    ):
        low, high = zip(*bands, strict=True)
        width = [end - start for start, end in bands]
        axes.barh(heights, width, 2 * half, left=low, color=color, label=name)
        axes.vlines(high, [h - half for h in heights], [h + half for h in heights], color=color, lw=0.8)
    deltas = [row.delta for row in rows]
    axes.vlines(deltas, [h - 0.26 for h in heights], [h + 0.26 for h in heights], color=_INK, lw=1.2, label="delta")
    colors = [_ALARM if row.error > row.band[1] else _OBSERVED for row in rows]
    found = [row.error for row in rows]
    axes.scatter(found, heights, 52, color=colors, zorder=3, clip_on=False, label="observed share of errors")
    ends = [max(row.delta, row.error, row.band[1]) for row in rows]
    widest = min(1.0, 1.2 * max(ends))
    for height, row, end, color in zip(heights, rows, ends, colors, strict=True):
        note = f"{row.error:.1%}" if row.reachable else "out of reach"
        beside = end < 0.85 * widest  # else it goes above
        axes.annotate(
            note, (end, height), (8, 0) if beside else (4, 11), textcoords="offset points", va="center",
            ha="left" if beside else "right", fontsize=9, color=color,
        )  # fmt: skip
    axes.set_yticks(heights, [f"delta {delta:g}" for delta in deltas])
    axes.set(xlim=(0, widest), ylim=(-0.6, len(rows) - 0.4))
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    sizes = f"{audit.fresh_items:,} fresh and {audit.calibration_items:,} calibration items"
    axes.set_title(f"Errors, {sizes}", loc="left", fontsize=10, color=_INK)
