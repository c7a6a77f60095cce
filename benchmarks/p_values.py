"""Conformal p-values of all classes, against crepes and TorchCP.

crepes' ``ConformalClassifier.predict_p`` takes scores; TorchCP's ``SplitPredictor.predict_p`` takes what its model
takes and scores it itself. Ours, ``Calibration.p_values``, takes probabilities, checks and scores them; the
calibration scores were sorted once by ``fit``, which has a row of its own.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss import plausible_logits
from benchmarks.table import Row, Table, duration, spread
from benchmarks.timing import Function, compare
from ccssl.conformal import SCORES, Calibration

ITEMS, CALIBRATION, CLASSES = 448, 5_000, 100
LIMITS = {"crepes": 20.0, "torchcp": 100.0}
NAMES = {"crepes": "crepes", "torchcp": "TorchCP"}


def run(quick: bool = False) -> list[Table]:
    """Measure the table; ``quick`` makes it tiny."""
    items, size, classes = (8, 50, 5) if quick else (ITEMS, CALIBRATION, CLASSES)
    table = Table(
        "p-values against crepes and TorchCP",
        f"{items} items, {size:,} calibration items, {classes} classes, float32, one thread, the difference score. "
        "Ours is the whole of `Calibration.p_values`: checks, scores, p-values. crepes gets its scores for "
        "nothing: timed is `ConformalClassifier.predict_p(scores, smoothing=False)` alone, and once more with "
        "its own `margin` score. TorchCP is `SplitPredictor.predict_p`, its score included. All of them were "
        "compared before they were timed: the p-values are equal to the last bit in float32.",
        ("peer", "what it computes", "ours", "peer's time", "paired ratio"),
        "peer / ours",
    )
    generator = torch.Generator().manual_seed(4)
    held_out, labels = plausible_logits(size, classes, generator)
    logits, _ = plausible_logits(items, classes, generator)
    held_out, probabilities = held_out.softmax(-1), logits.softmax(-1)
    calibration = Calibration(score="difference").fit(held_out, labels)
    expected = calibration.p_values(probabilities)
    competitors: dict[str, Function] = {"ours": lambda: calibration.p_values(probabilities)}
    what: dict[str, tuple[str, str]] = {}
    for peer, make in PEERS.items():
        if find_spec(peer) is None:
            continue
        for computes, function in make(held_out, labels, probabilities).items():
            got = torch.as_tensor(function()).to(torch.float32)
            if not torch.equal(got, expected):
                raise AssertionError(f"{NAMES[peer]} and ccssl disagree by up to {(got - expected).abs().max():g}")
            name = f"{peer}: {computes}"
            competitors[name] = function
            what[name] = (peer, computes)
    competitors["fit"] = lambda: Calibration(score="difference").fit(held_out, labels)
    times = compare(competitors, rounds=3 if quick else 5, clock=time.process_time)
    for name, (peer, computes) in what.items():
        ratio = times.ratio(name, "ours")
        cells = (
            f"{NAMES[peer]} {version(peer)}",
            computes,
            duration(times.minimum("ours")),
            duration(times.minimum(name)),
            spread(ratio),
        )
        table.rows.append(Row(cells, ratio.minima, LIMITS[peer], "at least"))
    ratio = times.ratio("fit", "ours")
    cells = ("ccssl", "`fit`, once", duration(times.minimum("ours")), duration(times.minimum("fit")), spread(ratio))
    table.rows.append(Row(cells, ratio.minima, None))
    return [table]


def crepes(held_out: Tensor, labels: Tensor, probabilities: Tensor) -> dict[str, Callable[[], Any]]:
    """Return crepes' p-values: from given scores, and with its own scores."""
    classifier = import_module("crepes").ConformalClassifier()
    margin = import_module("crepes.extras").margin
    score = SCORES["difference"]
    classifier.fit(score(held_out, labels).numpy())
    scores, rows = score(probabilities).numpy(), probabilities.numpy()
    return {
        "p-values": lambda: classifier.predict_p(scores, smoothing=False),
        "scores and p-values": lambda: classifier.predict_p(margin(rows), smoothing=False),
    }


def torchcp(held_out: Tensor, labels: Tensor, probabilities: Tensor) -> dict[str, Callable[[], Any]]:
    """Return TorchCP's p-values of a model that hands its input on."""
    package("torchcp")
    package("torchcp.classification")
    split = import_module("torchcp.classification.predictor.split")
    margin = import_module("torchcp.classification.score.margin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own default argument is deprecated
        score = margin.Margin(score_type="identity")
        predictor = split.SplitPredictor(score, model=torch.nn.Identity(), device="cpu")
    predictor.calculate_threshold(held_out.clone(), labels, alpha=0.1)
    return {"scores and p-values": lambda: predictor.predict_p(probabilities)}


PEERS = {"crepes": crepes, "torchcp": torchcp}


def package(name: str) -> None:
    """Enter a package without running its ``__init__``; its modules are found on disk as always.

    TorchCP's ``__init__`` asks for torchvision, transformers, torch_geometric and torchsort, which its
    predictors do not use and which would bring another build of torch along.
    """
    if name in sys.modules:
        return
    parent, _, last = name.rpartition(".")
    if parent:
        folder = f"{sys.modules[parent].__path__[0]}/{last}"
    else:
        found = find_spec(name)
        assert found is not None, f"{name} is not installed"
        assert found.submodule_search_locations, f"{name} is not a package"
        folder = found.submodule_search_locations[0]
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder]
    sys.modules[name] = module_from_spec(spec)
