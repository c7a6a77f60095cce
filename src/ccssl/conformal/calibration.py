r"""From scores to guarantees: p-values, possibility degrees and prediction sets by conformal prediction.

Held-out labeled items, the *calibration set*, tell which scores true labels have. With their scores alpha_1,
..., alpha_L a candidate class y of a new item gets the p-value (eq. pvalue of the paper)::

    p(y) = ( #{ i : alpha_i >= alpha(y) } + 1 ) / (L + 1)

If the calibration items and the new one are exchangeable (in whatever order they come, they are equally
likely), the rank of alpha(Y) among the L + 1 scores is uniform; ties only raise p(Y). Therefore, for every
delta, whatever the model, the score and the distribution::

    P( p(Y) <= delta ) <= delta

where the calibration set is drawn anew as well. Possibility degrees (``ccssl.credal.possibility``) are raised
p-values and inherit the bound; so do the prediction sets Gamma_delta = { y : p(y) >= delta }, which miss Y
with probability at most delta. What makes it void: calibration items that the model was trained on, that come
from another source, or that went through another preprocessing.

The p-values cannot fall below the floor 1 / (L + 1): with 9 calibration items no class can be excluded at
delta = 0.1. Without any item every p-value is 1: nothing is known (smoothed ones, below, are then mere draws).

*The top class.* Normalisation "top" sets 1 at the class that the model finds most probable. Where several tie, as
happens often in half precision, none is preferred by its index: all of them get 1.

*Computation.* The scores are sorted once. A count #{alpha_i >= alpha} is then L minus one binary search, for
all items and classes at once. Counts are integers; p-values, ``Levels`` and sets are read off them, each with
at most one rounding. Scores are computed in float64 where the calibration probabilities were float64, else
in float32, always the same way, so that an item equal to a calibration item ties with it.

*Class-conditional* (``group="label"``, "Mondrian"). Class y is compared with the calibration items of label y
alone, n_y of them, and the bound holds given Y = y, for every class y::

    p(y) = ( #{ i : y_i = y, alpha_i >= alpha(y) } + 1 ) / (n_y + 1)

The floor is now 1 / (n_y + 1), and classes without a calibration item always have the p-value 1. All classes
are searched at once: with r(a) = #{ i : alpha_i < a } among *all* items, alpha_i < a holds exactly if
r(alpha_i) < r(a). The integers y_i (L + 1) + r(alpha_i), sorted, hold one ascending stretch for each class,
in which y (L + 1) + r(alpha(y)) is looked up.

*Smoothing* (``smooth=True``). Ties, and the item's tie with itself, count with the weight u, uniform on
(0, 1], one draw an item; then P( p(Y) <= delta ) = delta exactly, and there is no floor::

    p(y) = ( #{ i : alpha_i > alpha(y) } + u (#{ i : alpha_i = alpha(y) } + 1) ) / (L + 1)

Where a class has nothing to be compared with, its p-value is u: excluded with probability delta for no reason in the
item, but excluded it can be.

Shapes: N items, K classes, L calibration items.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal, Self, TypeGuard

import torch
from torch import Tensor, nn

from ccssl.conformal.scores import SCORES, Score
from ccssl.credal.faults import Fault, check_indices, check_tensor, check_validate, looks, refuse
from ccssl.credal.possibility import Levels, Normalization, possibility, widest

# Entries worked on at once, which bounds the extra memory. On the CPU a small chunk stays in its cache; on
# other devices each chunk costs the launch of a dozen kernels.
_CPU_CHUNK = 2**13
_DEVICE_CHUNK = 2**20


@dataclass(frozen=True)
class CalibrationConfig:
    """How a ``Calibration`` computes: what its constructor was given."""

    score: str | Score = "proportion"  # a name in SCORES, or a function like those there
    options: Mapping[str, Any] = field(default_factory=dict)  # parameters of the score, such as gamma
    group: Literal["label"] | None = None  # "label": each class has its own calibration items
    smooth: bool = False  # break ties at random
    validate: bool | None = None  # look at values; None: where that needs no read from another device
    chunk_size: int | None = None  # entries of an (N, K) array worked on at once; None: by device

    def __post_init__(self) -> None:
        """Refuse what no calibration can be made of."""
        if not callable(self.score) and not (isinstance(self.score, str) and self.score in SCORES):
            raise ValueError(f"score must be one of {', '.join(SCORES)}, or a function, got {self.score!r}")
        if self.group is not None and self.group != "label":
            raise ValueError(f"group must be None or 'label', got {self.group!r}")
        if not isinstance(self.smooth, bool):
            raise ValueError(f"smooth must be True or False, got {self.smooth!r}")
        check_validate(self.validate)
        if self.chunk_size is not None and (not _is_int(self.chunk_size) or self.chunk_size < 1):
            raise ValueError(f"chunk_size must be at least 1, an int, got {self.chunk_size!r}")
        known = inspect.signature(self.score_function).parameters.keys() - _NO_OPTIONS
        for name in self.options:
            if name not in known:
                takes = f"takes {', '.join(sorted(known))}" if known else "takes no options"
                raise ValueError(f"score {self.score_name!r} {takes}, got {name!r}")

    @property
    def score_function(self) -> Score:
        """The score as a function."""
        return SCORES[self.score] if isinstance(self.score, str) else self.score

    @property
    def score_name(self) -> str:
        """The name under which the score is known; that of the table for a function of the table."""
        for name, function in SCORES.items():
            if self.score == name or self.score is function:
                return name
        name = _describe(self.score)
        return f"{getattr(self.score, '__module__', '')}.{name}" if name in SCORES else name

    def to_json(self) -> str:
        """Write down what a fitted state depends on: with another score it would mean something else.

        The same for equal configurations, however they were written and in whatever process.
        """
        parameters = inspect.signature(self.score_function).parameters
        options = {
            name: self.options.get(name, parameter.default)
            for name, parameter in parameters.items()
            if name not in _NO_OPTIONS and (name in self.options or parameter.default is not parameter.empty)
        }
        options = {name: float(value) if _is_number(value) else value for name, value in options.items()}
        state = {"score": self.score_name, "options": options, "group": self.group, "smooth": self.smooth}
        return json.dumps(state, sort_keys=True, default=_describe)


class Calibration(nn.Module):
    """Conformal calibration of a classifier.

    >>> calibration = Calibration(score="difference")
    >>> held_out = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.125, 0.875]])
    >>> calibration.fit(held_out, torch.tensor([0, 0, 1, 0]))
    Calibration(score='difference', size=4, classes=2)
    >>> calibration.p_values(torch.tensor([[0.25, 0.75], [0.75, 0.25]]))
    tensor([[0.4000, 1.0000],
            [1.0000, 0.4000]])
    >>> calibration.possibility(torch.tensor([[0.375, 0.625]]))
    tensor([[0.6667, 1.0000]])
    >>> calibration.predict_set(torch.tensor([[0.375, 0.625]]), delta=0.5)
    tensor([[False,  True]])

    Everything calibrated is in the ``state_dict`` and can be loaded into a fresh ``Calibration`` of the same
    configuration; a state of another score, option, group or smoothing is refused. Nothing here has a gradient.
    With ``validate=False`` nothing reads from the device, ``fit`` included, and nothing is said about scarce classes.

    Scores with draws of their own and ``smooth=True`` ask for an explicit ``generator``.
    """

    scores: Tensor  # (L,) ascending
    class_counts: Tensor  # (K,) calibration items of each label; (0,) before fit
    keys: Tensor | None  # (L,) ascending, for group="label": label (L + 1) + rank of the score
    recipe: Tensor  # uint8: the configuration as JSON, a tensor because some checkpoints hold nothing else

    def __init__(
        self,
        score: str | Score = "proportion",
        *,
        group: Literal["label"] | None = None,
        smooth: bool = False,
        validate: bool | None = None,
        chunk_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = CalibrationConfig(score, options, group, smooth, validate, chunk_size)
        self._score = partial(self.config.score_function, **options)
        self._draws = "uniform" in inspect.signature(self.config.score_function).parameters
        # A dry run: a bad option is refused here, not at the first batch.
        trial = torch.tensor([[0.625, 0.375]], device="cpu"), torch.tensor([1], device="cpu")
        check = self._check_score if callable(score) else self._alpha
        check(*trial, torch.ones(1, device="cpu"))
        self.register_buffer("recipe", torch.tensor(list(self.config.to_json().encode()), dtype=torch.uint8))
        self.register_buffer("scores", torch.empty(0))
        self.register_buffer("class_counts", torch.empty(0, dtype=torch.int64))
        self.register_buffer("keys", torch.empty(0, dtype=torch.int64) if group == "label" else None)

    @property
    def size(self) -> int:
        """L, the number of calibration items."""
        return self.scores.shape[0]

    @property
    def fitted(self) -> bool:
        """Whether there is something to compare with: ``fit`` was called or a state was loaded."""
        return self.class_counts.shape[0] > 0

    @torch.no_grad()
    def fit(self, probabilities: Tensor, labels: Tensor, *, generator: torch.Generator | None = None) -> Self:
        """Take the scores of the calibration items: ``probabilities`` (L, K), ``labels`` (L,).

        What was fitted before is forgotten. The items must not have been trained on.
        """
        check_tensor(probabilities, "probabilities")
        check_probabilities(probabilities, self._looks_at(probabilities), may_be_empty=True)
        check_labels(labels, probabilities, self._looks_at(probabilities))
        L, K = probabilities.shape
        uniform_L = self._uniform(L, generator, probabilities.device) if self._draws else None
        dtype = torch.float64 if probabilities.dtype == torch.float64 else torch.float32
        labels = labels.long()
        if callable(self.config.score) and self._looks_at(probabilities):
            for rows in self._rows(probabilities):
                uniform = None if uniform_L is None else uniform_L[rows]
                self._check_score(probabilities[rows].to(dtype), labels[rows], uniform)
        alpha_L = torch.empty(L, dtype=dtype, device=probabilities.device)
        for rows in self._rows(probabilities):
            uniform = None if uniform_L is None else uniform_L[rows]
            alpha_L[rows] = self._alpha(probabilities[rows].to(dtype), labels[rows], uniform)
        return self._take(alpha_L, labels, K)

    @torch.no_grad()
    def fit_scores(self, scores: Tensor, labels: Tensor, classes: int) -> Self:
        """Take the scores of the calibration items (L,) at their labels (L,), computed elsewhere: piece by piece, say.

        They must be what the score gives, in float32, or float64 where probabilities will be; +-infinity is a score,
        NaN is none.

        >>> from ccssl.conformal.scores import hinge
        >>> held_out, labels = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1])
        >>> Calibration("hinge").fit_scores(hinge(held_out, labels), labels, classes=2)
        Calibration(score='hinge', size=2, classes=2)
        """
        check_tensor(scores, "scores")
        check_tensor(labels, "labels")
        if not _is_int(classes) or classes < 2:
            raise ValueError(f"classes must be the number of classes, an int of at least 2, got {classes!r}")
        if scores.dtype not in _DTYPES["scores"] or scores.ndim != 1 or scores.shape != labels.shape:
            raise ValueError(
                f"scores must be float32 or float64, one a label, {tuple(labels.shape)}, "
                f"got {scores.dtype} of shape {tuple(scores.shape)}"
            )
        look = self._looks_at(scores)
        check_labels(labels, scores.unsqueeze(-1).expand(-1, classes), look)
        if look:
            scores_1 = scores.unsqueeze(-1)
            refuse([Fault(scores_1.isnan(), scores_1, "scores must be numbers")])
        return self._take(scores, labels.long(), classes)

    def _take(self, alpha_L: Tensor, labels: Tensor, classes: int) -> Self:
        self.scores, order_L = alpha_L.sort()
        self.class_counts = labels.new_zeros(classes).scatter_add_(0, labels, torch.ones_like(labels))
        if self.config.group == "label":
            rank_L = torch.searchsorted(self.scores, self.scores)
            self.keys = (labels[order_L] * (len(alpha_L) + 1) + rank_L).sort().values
        self._warn_of_scarcity()
        return self

    @torch.no_grad()
    def counts(self, probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return #{alpha_i >= alpha(y)}, int32 (N, K); with ``group="label"`` among the items of label y.

        >>> held_out = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> calibration = Calibration("hinge").fit(held_out, torch.tensor([0, 1]))
        >>> calibration.counts(torch.tensor([[0.625, 0.375]]))
        tensor([[1, 0]], dtype=torch.int32)
        """
        self._check_items(probabilities)
        counts_NK = torch.empty(probabilities.shape, dtype=torch.int32, device=probabilities.device)
        for rows, alpha in self._scored(probabilities, generator):
            counts_NK[rows] = self._group_sizes() - self._below(alpha)
        return counts_NK

    @torch.no_grad()
    def p_values(self, probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the p-values of all classes (N, K), in the precision of the scores."""
        return self._p_values(probabilities, generator, self.scores.dtype)

    @torch.no_grad()
    def possibility(
        self,
        probabilities: Tensor,
        normalization: Normalization = "proportional",
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the possibility degrees (N, K): p-values with the maximum raised to 1.

        ``"top"`` sets 1 at the most probable class of ``probabilities``, at all of them where several tie. A degree
        is rounded once.
        """
        if self.config.group is None and not self.config.smooth:
            levels = self.levels(probabilities, normalization, generator=generator)
            return levels.dense(self.scores.dtype, validate=False)
        p_NK = self._p_values(probabilities, generator, widest(self.scores.device))
        if normalization == "top":
            p_NK.masked_fill_(_most_probable(probabilities), 1)
        return possibility(p_NK, normalization, validate=False).to(self.scores.dtype)

    @torch.no_grad()
    def levels(
        self,
        probabilities: Tensor,
        normalization: Normalization = "proportional",
        *,
        generator: torch.Generator | None = None,
    ) -> Levels:
        """Return the same degrees as integer counts: what the projection takes in O(K + L).

        They need one grid for all classes, which class-conditional and smoothed p-values do not have. With
        ``"top"`` the counts of the most probable classes are raised to L, so that ``Levels.p_values`` says 1 there;
        what they were is in ``counts`` and ``p_values`` of the calibration.
        """
        if self.config.group == "label":
            raise ValueError(
                "levels needs one grid of p-values for all classes; with group='label' class y has steps of "
                "1/(n_y + 1): call possibility()"
            )
        if self.config.smooth:
            raise ValueError(
                "levels needs p-values on a grid, with smooth=True they are continuous: call possibility()"
            )
        counts_NK = self.counts(probabilities, generator=generator)
        if normalization == "top":
            counts_NK.masked_fill_(_most_probable(probabilities), self.size)
        return Levels(counts_NK, self.size, normalization)

    @torch.no_grad()
    def predict_set(
        self, probabilities: Tensor, delta: float, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return Gamma_delta as a mask (N, K): the classes with p-value >= delta.

        The p-value is compared as the float64 nearest to the fraction, so that 1/10 >= 0.1 holds.
        """
        check_delta(delta)
        if self.config.smooth:
            return self.p_values(probabilities, generator=generator) >= delta
        counts_NK = self.counts(probabilities, generator=generator)
        self._warn_of_floor(delta)
        return counts_NK >= _least_count(delta, self._group_sizes())

    def extra_repr(self) -> str:
        """Tell the configuration and what was fitted."""
        config = self.config
        parts = [f"score={config.score_name!r}"] + [f"{name}={value}" for name, value in config.options.items()]
        if config.group is not None:
            parts.append(f"group={config.group!r}")
        if config.smooth:
            parts.append("smooth=True")
        parts.append(f"size={self.size}, classes={len(self.class_counts)}" if self.fitted else "not fitted")
        return ", ".join(parts)

    def _alpha(self, probabilities: Tensor, labels: Tensor | None, uniform: Tensor | None) -> Tensor:
        if self._draws:
            return self._score(probabilities, labels, uniform=uniform)
        return self._score(probabilities, labels)

    def _check_score(self, probabilities: Tensor, labels: Tensor, uniform: Tensor | None) -> None:
        """Refuse a score that gives something else than a number for each class, or for each label the same."""
        every, own = self._alpha(probabilities, None, uniform), self._alpha(probabilities, labels, uniform)
        name, shape = self.config.score_name, probabilities.shape
        for alpha, expected, what in ((every, shape, "without labels"), (own, shape[:1], "with labels")):
            check_tensor(alpha, f"score {name!r}")
            if alpha.shape != expected or not alpha.is_floating_point():
                raise ValueError(
                    f"score {name!r} must give numbers of shape {tuple(expected)} {what}, "
                    f"got {alpha.dtype} of shape {tuple(alpha.shape)}"
                )
            if bool(alpha.isnan().any()):
                raise ValueError(f"score {name!r} must give numbers, got NaN {what}")
        if not torch.allclose(every.gather(-1, labels.unsqueeze(-1)).squeeze(-1), own):
            raise ValueError(f"score {name!r} must give for labels the numbers that it gives for their classes")

    def _p_values(self, probabilities: Tensor, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
        sizes = self._group_sizes()
        if not self.config.smooth:
            return self.counts(probabilities, generator=generator).add_(1).to(dtype).div_(sizes + 1)
        self._check_items(probabilities)
        p_NK = torch.empty(probabilities.shape, dtype=dtype, device=probabilities.device)
        uniform_N = self._uniform(len(probabilities), generator, probabilities.device)
        for rows, alpha in self._scored(probabilities, generator):
            below, not_above = self._below(alpha), self._below(alpha, or_equal=True)
            draw = uniform_N[rows, None] * (not_above - below + 1)
            p_NK[rows] = (sizes - not_above + draw) / (sizes + 1)
        return p_NK

    def _check_items(self, probabilities: Tensor) -> None:
        if not self.fitted:
            raise RuntimeError(
                "this Calibration has nothing to compare with: call fit(probabilities, labels) first"
            )
        check_tensor(probabilities, "probabilities")
        check_probabilities(probabilities, self._looks_at(probabilities))
        if len(self.class_counts) != probabilities.shape[1]:
            raise ValueError(
                f"probabilities must have {len(self.class_counts)} classes as in fit, "
                f"got shape {tuple(probabilities.shape)}"
            )
        if probabilities.device != self.scores.device:
            raise ValueError(
                f"probabilities must be on {self.scores.device} like the calibration scores, "
                f"got {probabilities.device}"
            )

    def _scored(self, probabilities: Tensor, generator: torch.Generator | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores of all classes, a chunk of rows at a time."""
        uniform_N = self._uniform(len(probabilities), generator, probabilities.device) if self._draws else None
        for rows in self._rows(probabilities):
            uniform = None if uniform_N is None else uniform_N[rows]
            yield rows, self._alpha(probabilities[rows].to(self.scores.dtype), None, uniform)

    def _below(self, alpha: Tensor, or_equal: bool = False) -> Tensor:
        """Return #{alpha_i < alpha}, or <=; with ``group="label"`` among the items of the column's label."""
        alpha = alpha.contiguous()
        if self.keys is None:
            return torch.searchsorted(self.scores, alpha, right=or_equal, out_int32=True)
        # Items with alpha_i <= alpha are those with r(alpha_i) < #{alpha_j <= alpha}: both cases look left.
        first_key_K = torch.arange(alpha.shape[-1], device=alpha.device) * (self.size + 1)
        start_K = self.class_counts.cumsum(0) - self.class_counts
        key = torch.searchsorted(self.scores, alpha, right=or_equal).add_(first_key_K)
        return torch.searchsorted(self.keys, key, out_int32=True) - start_K

    def _group_sizes(self) -> Tensor:
        """Return how many items a class is compared with: (K,), or a single number on the host."""
        return torch.tensor(self.size) if self.keys is None else self.class_counts

    def _rows(self, probabilities: Tensor) -> Iterator[slice]:
        """Yield the chunks, whole rows each."""
        rows, classes = probabilities.shape
        size = self.config.chunk_size or (_CPU_CHUNK if probabilities.device.type == "cpu" else _DEVICE_CHUNK)
        step = max(1, size // classes)
        return (slice(start, start + step) for start in range(0, rows, step))

    def _uniform(self, n: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw from (0, 1], one number an item, whatever the chunks."""
        if not isinstance(generator, torch.Generator):
            what = "smooth=True" if self.config.smooth else f"score {self.config.score_name!r}"
            raise ValueError(f"generator must be a torch.Generator, for {what} draws at random; got {generator!r}")
        uniform = 1 - torch.rand(n, dtype=torch.float64, generator=generator, device=generator.device)
        return uniform.to(widest(device)).to(device)

    def _looks_at(self, tensor: Tensor) -> bool:
        return looks(tensor.device, self.config.validate)

    # Warnings skip the frames between them and the caller: their own, the method's, and one of torch.no_grad's wrapper.

    def _warn_of_scarcity(self) -> None:
        smooth = self.config.smooth
        if self.size == 0:
            nothing = "the item's draw" if smooth else "1"
            warnings.warn(f"the calibration set is empty: every p-value is {nothing}", stacklevel=5)
        elif self.config.group == "label" and self._looks_at(self.class_counts):
            n_K = self.class_counts
            without, fewest = int((n_K == 0).sum()), int(n_K[n_K > 0].min())
            if smooth and without:
                warnings.warn(
                    f"with group='label' and smooth=True the p-value of a class without a calibration item is the "
                    f"item's draw, which knows nothing: {without} of {len(n_K)} classes have none",
                    stacklevel=5,
                )
            elif not smooth and (without or fewest < 9):  # fewer than 9 cannot even reach 0.1
                warnings.warn(
                    f"with group='label' a p-value cannot fall below 1/(calibration items of the class + 1): "
                    f"{without} of {len(n_K)} classes have no item (p-value always 1), "
                    f"the scarcest other class has {fewest} (at least 1/{fewest + 1})",
                    stacklevel=5,
                )

    def _warn_of_floor(self, delta: float) -> None:
        if self.keys is None:
            if delta <= 1 / (self.size + 1):
                warnings.warn(
                    f"delta {delta} excludes no class: with {self.size} calibration items no p-value "
                    f"is below 1/{self.size + 1}",
                    stacklevel=4,
                )
        elif self._looks_at(self.class_counts):
            stuck = int((_least_count(delta, self.class_counts) <= 0).sum())
            if stuck:
                warnings.warn(
                    f"delta {delta} never excludes {stuck} of {len(self.class_counts)} classes: their "
                    f"p-values are at least 1/(calibration items of the class + 1)",
                    stacklevel=4,
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move, but never cast: rounded scores would no longer compare with those of new items."""
        exact = self.scores
        super()._apply(fn, recurse)
        if self.scores.dtype != exact.dtype:
            self.scores = exact.to(self.scores.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuse a state that is not of this configuration, or broken; give the buffers its sizes and types."""
        loaded = {name: state_dict[prefix + name] for name in self._buffers if prefix + name in state_dict}
        if problem := self._problem(loaded):
            error_msgs.append(f"{prefix or 'the state '}cannot be loaded: {problem}")
            return
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor) and buffer is not None:
                setattr(self, name, buffer.new_empty(loaded.shape, dtype=loaded.dtype))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _problem(self, state: Mapping[str, Any]) -> str | None:
        """Say what is wrong with a state, if anything."""
        recipe = state.get("recipe")
        own = self.config.to_json()
        if isinstance(recipe, Tensor) and not recipe.is_meta:
            found = bytes(recipe.tolist()).decode(errors="replace") if recipe.dtype == torch.uint8 else repr(recipe)
            if not _same(found, own):
                return f"it was made by {found}, this calibration is {own}"
        for name, dtypes in _DTYPES.items():
            tensor = state.get(name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.ndim != 1:
                return f"{name} must be a list of numbers of {' or '.join(map(str, dtypes))}, got {tensor!r}"
            if tensor.is_meta or name == "class_counts":
                continue
            if bool(tensor.isnan().any()):
                return f"{name} must be numbers, and are not"
            if not bool((tensor[1:] >= tensor[:-1]).all()):
                return f"{name} must ascend, and do not"
        return _disagreement(*(state.get(name) for name in ("scores", "class_counts", "keys")))


_DTYPES = {
    "scores": (torch.float32, torch.float64),
    "keys": (torch.int64,),
    "class_counts": (torch.int64,),
}


_NO_OPTIONS = {"probabilities", "labels", "uniform"}  # parameters of scores that are filled otherwise


def _describe(value: object) -> str:
    """Name a function or whatever else is no plain value, without its place in memory."""
    if isinstance(value, partial):
        arguments = [_describe(argument) for argument in value.args]
        arguments += [f"{name}={_describe(argument)}" for name, argument in sorted(value.keywords.items())]
        return f"partial({', '.join([_describe(value.func), *arguments])})"
    if _is_number(value):
        return repr(float(value))
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _same(found: str, own: str) -> bool:
    """Tell whether two descriptions of a configuration mean the same: 1 is 1.0."""
    try:
        return json.loads(found) == json.loads(own)
    except ValueError:
        return False


def _disagreement(scores: Tensor | None, class_counts: Tensor | None, keys: Tensor | None) -> str | None:
    """Say where the parts of a state, each in order by itself, do not belong together."""
    if scores is None or class_counts is None or scores.is_meta or class_counts.is_meta:
        return None
    L, K = len(scores), len(class_counts)
    if K == 1 or (class_counts < 0).any() or int(class_counts.sum()) != L:
        return f"class_counts must be the numbers of labels, {L} in sum, and are not"
    if keys is None or keys.is_meta:
        return None
    label_L = keys.div(L + 1, rounding_mode="floor")
    if len(keys) != L or (L and bool((keys[0] < 0) | (label_L[-1] >= K))):
        return f"keys must be one for each of {L} scores, of {K} classes, and are not"
    if not torch.equal(label_L.bincount(minlength=K), class_counts.to(keys.device)):
        return "keys must hold as many items of each label as class_counts, and do not"
    return None


def check_delta(delta: float) -> None:
    """Refuse what is no significance level."""
    if not (isinstance(delta, Real) and 0 <= delta <= 1):
        raise ValueError(f"delta must be a significance level in [0, 1], got {delta!r}")


def check_probabilities(probabilities: Tensor, look: bool, *, may_be_empty: bool = False) -> None:
    """Refuse what is not a batch of distributions (N, K); ``look`` at the values, too."""
    check_tensor(probabilities, "probabilities")
    shape = tuple(probabilities.shape)
    if probabilities.ndim != 2 or shape[1] < 2:
        raise ValueError(f"probabilities must have shape (items, classes) with at least 2 classes, got {shape}")
    if shape[0] == 0 and not may_be_empty:
        raise ValueError(f"probabilities is an empty batch: it has shape {shape}, expected a row or more")
    if not probabilities.is_floating_point():
        raise ValueError(f"probabilities must be floating point, got {probabilities.dtype}")
    if look:
        least_N, sum_N = probabilities.amin(-1), probabilities.sum(-1, dtype=widest(probabilities.device))
        bad_N = ~((least_N >= 0) & ((sum_N - 1).abs() <= 0.01))  # wide enough for bfloat16; NaN is bad
        if bad_N.any():
            row = int(bad_N.nonzero()[0])
            raise ValueError(
                f"probabilities must be distributions, rows of numbers >= 0 with sum 1; row {row} has the "
                f"least value {float(least_N[row]):.4g} and the sum {float(sum_N[row]):.4g}"
            )


def check_labels(labels: Tensor, rows: Tensor, look: bool) -> None:
    """Refuse what is not one class index for each row of (..., K); ``look`` at the values, too."""
    check_indices(labels, rows, "labels")
    if look and labels.numel():
        classes = rows.shape[-1]
        least, most = (int(bound) for bound in labels.aminmax())
        if least < 0 or most >= classes:
            raise ValueError(f"labels must be class indices in 0..{classes - 1}, got {least}..{most}")


def _least_count(delta: float, sizes: Tensor) -> Tensor:
    """Return the least integer c with (c + 1) / (n + 1) >= delta in float64, for every n of ``sizes``."""
    total = (sizes + 1).to(widest(sizes.device))
    numerator = (delta * total).ceil()
    # The quotient decides: the product may be rounded across an integer, 0.07 * 100 > 7 but 7 / 100 is 0.07.
    numerator = numerator - ((numerator - 1) / total >= delta).to(total.dtype)
    numerator = numerator + (numerator / total < delta).to(total.dtype)
    return numerator.int() - 1


def _most_probable(probabilities: Tensor) -> Tensor:
    """Return the mask of the classes that attain the maximum of their row."""
    return probabilities == probabilities.amax(-1, keepdim=True)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[Real]:
    return isinstance(value, Real) and not isinstance(value, bool)
