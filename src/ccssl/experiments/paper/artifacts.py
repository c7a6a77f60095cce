"""Every table and figure of the paper, declared once: what it shows, of which runs, and what was printed.

A table is rows times columns of *settings*, names and values of a run's configuration. A cell is the runs whose
settings are those of the paper (``SETTINGS``), of the data set (``DATASETS``), of the row and of the column together,
one run a seed; and a figure of their results. Figures of the paper are described in the same way: a column is a
panel, a row a line. What a scale (``scales``) changes about the settings it changes for all.

Runs belong to nothing: cells with equal settings, in whatever table, are the same runs.

Each table that compares methods has a row the paper lacks, supervised-only: the same network, labels and steps without
any unlabeled item. Where the printed values have no place for a row or column, it was not in the paper.

The link predictors of the paper were divided by slicing a list of triples, which is an artefact
(``ccssl.graphs.splits``). Their tables hold every column twice, as two *variants*: divided as it should be, and as it
was published; the printed values stand beside both. ``links`` says how the settings of a cell become runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ccssl.experiments.paper import printed
from ccssl.experiments.paper.printed import Printed

Settings = Mapping[str, Any]

SEEDS = 3

# What holds for every run of the paper unless a data set, a table or the search for hyperparameters says otherwise.
SETTINGS: Settings = {
    "steps": 2**18,
    "batch": 32,
    "mu": 7,
    "lambda_u": 1.0,
    "lr": 0.03,
    "momentum": 0.9,
    "weight_decay": 0.0005,
    "ema": 0.999,
    "model": "wrn-28-2",
}


@dataclass(frozen=True)
class Dataset:
    """A data set of the paper: its name in print, and what its runs change."""

    title: str
    settings: Settings = field(default_factory=dict)


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset("CIFAR-10"),
    "cifar100": Dataset("CIFAR-100", {"model": "wrn-28-8"}),
    "svhn": Dataset("SVHN"),
    "stl10": Dataset("STL-10"),
    "emnist-byclass": Dataset("EMNIST-ByClass", {"steps": 2**15}),
}

# The knowledge graphs, and what holds for every link predictor unless the grid or a scale says otherwise: all of it,
# for the defaults of ``GraphConfig`` are there to predict well and may change. The paper tells the loss (1vsAll) and
# the grid, but no dimension: 32 is the default of DICE Embeddings, a library of one of its authors. It averages no
# weights, raises no weight of the unlabeled loss over time, and stops after the epochs of the grid.
GRAPHS = {"umls": "UMLS", "kinship": "KINSHIP"}
LINK_SETTINGS: Settings = {
    "dim": 32,
    "normalize": "none",
    "input_dropout": 0.0,
    "dropout": 0.0,
    "init_scale": 0.1,
    "loss": "ce",
    "batch_of": "facts",
    "optimizer": "adam",
    "schedule": "constant",
    "n3": 0.0,
    "ema": 0.0,
    "lambda_u": 1.0,
    "ramp_up": 0,
    "mu": 4.0,
    "teacher": "own",
    "calibrate_every": 1,
    "per_relation": False,
    "min_p_value": 0.0,
    "temperature": 1.0,
    "reuse_calibration": False,
    "align": False,
    "patience": 0,
    "select": "last",
    "eval_unlabeled": 2000,
    "deterministic": False,
    "options": {},
}
GRID: Mapping[str, tuple[Any, ...]] = {"lr": (0.01, 0.1, 0.001), "batch": (512, 1024), "epochs": (5, 50)}

METHODS = {
    "Supervised only": "supervised",
    "UDA": "uda",
    "FixMatch": "fixmatch",
    "FixMatch DA": "fixmatch-da",
    "FlexMatch": "flexmatch",
    "CSSL": "cssl",
    "CCSSL-diff": "ccssl-diff",
    "CCSSL-prop": "ccssl-prop",
}
CREDAL = ("CSSL", "CCSSL-diff", "CCSSL-prop")
CONFORMAL = ("CCSSL-diff", "CCSSL-prop")


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table, or a line of a figure."""

    head: str
    settings: Settings = field(default_factory=dict)
    printed: tuple[Printed, ...] = ()  # one for each printed column; none for rows that the paper lacks
    group: str = ""  # rows of a group stand together between two rules


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table, or a panel of a figure."""

    heads: tuple[str, ...]  # the last is the column's own, those before it span several
    settings: Settings = field(default_factory=dict)
    figure: str = "accuracy"
    printed: bool = True  # False: the paper lacks it
    scales: tuple[str, ...] = ("smoke", "reduced", "paper")  # at which it is run
    variant: str = ""  # what ours differs in from other columns with the same heads

    @property
    def name(self) -> str:
        """Heads and variant in a line."""
        return ", ".join(filter(None, (*self.heads, self.variant)))


@dataclass(frozen=True)
class Table:
    """A table; with ``plot`` also a figure that has the columns along its axis of that name."""

    title: str
    place: str  # in the paper
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    source: str = ""  # label in the paper's LaTeX source; empty for a figure whose numbers were not printed
    corner: str = ""  # what the paper writes above the row heads
    phase: str = "test"  # the part of the data whose figures are shown
    factor: float = 1.0  # times a figure is what is printed
    deviation_factor: float = 1.0  # times a figure's deviation is what is printed
    digits: int = 2
    deviation_digits: int = 2
    lower_is_better: bool = False
    best_in_group: bool = False  # the best of each group is bold, not the best of all
    tuned: bool = False  # hyperparameters were searched for
    kind: str = "images"  # of run, or "graphs"; "counts": ours are counted, nothing is run
    plot: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curves:
    """A figure of the course of training: a panel for each column, a line for each row."""

    title: str
    place: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    axis: str
    phase: str = "test"
    factor: float = 1.0
    tuned: bool = False
    kind: str = "images"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchSpaces:
    """The table of the values that are searched: rows of methods, parameter in print, name in ``SPACES``."""

    title: str
    place: str
    source: str
    rows: tuple[tuple[str, tuple[str, ...], str, str], ...]  # heading, methods, parameter, name


@dataclass(frozen=True)
class CredalSets:
    """Pictures of credal sets, each of a possibility distribution."""

    title: str
    place: str
    possibilities: tuple[tuple[float, ...], ...]


Artifact = Table | Curves | SearchSpaces | CredalSets


def _methods(names: Sequence[str], values: Mapping[str, str]) -> tuple[Row, ...]:
    """Return a row for each method, with supervised-only first."""
    groups = {"Supervised only": "supervised", "CSSL": "CSSL", "CCSSL-diff": "CCSSL", "CCSSL-prop": "CCSSL"}
    return tuple(
        Row(name, {"method": METHODS[name]}, printed.cells(values.get(name, "")), groups.get(name, ""))
        for name in ("Supervised only", *names)
    )


def _counts(dataset: str, *labels: int, figure: str = "accuracy") -> tuple[Column, ...]:
    """Return a column for each number of labels."""
    return tuple(
        Column((DATASETS[dataset].title, f"{n} lab."), {"dataset": dataset, "labels": n}, figure) for n in labels
    )


def _variants(variants: Mapping[str, Settings]) -> tuple[Column, ...]:
    """Return columns of settings that are compared with 250 labels; at the reduced scale on EMNIST-ByClass instead."""
    return tuple(
        Column(
            (DATASETS[dataset].title, head),
            {"dataset": dataset, "labels": 250, **settings},
            printed=dataset != "emnist-byclass",
            scales=("reduced",) if dataset == "emnist-byclass" else ("smoke", "paper"),
        )
        for dataset in ("cifar10", "svhn", "emnist-byclass")
        for head, settings in variants.items()
    )


def _imbalanced(*numbers: int) -> Iterator[Column]:
    """Yield columns of EMNIST-ByClass: with as many labels of each class and, at the reduced scale, with any."""
    for labels in numbers:
        settings: Settings = {"dataset": "emnist-byclass", "labels": labels}
        yield Column((f"{labels} lab.",), settings)
        settings = {**settings, "label_sampling": "iid"}
        yield Column((f"{labels} lab. at random",), settings, printed=False, scales=("reduced",))


def _panels(*places: tuple[str, int]) -> tuple[Column, ...]:
    return tuple(
        Column((f"{DATASETS[dataset].title}, {labels} labels",), {"dataset": dataset, "labels": labels})
        for dataset, labels in places
    )


_BENCHMARKS = (("cifar10", (40, 250, 4000)), ("cifar100", (400, 2500, 10000)), ("svhn", (40, 250, 1000)))
_SEVEN = tuple(METHODS)[1:]
_CALIBRATION = {f"{share:g}": {"calibration_fraction": share} for share in (0.1, 0.25, 0.5, 0.9)}
_NORMALIZATIONS = {
    "Norm. 1": {"options": {"normalization": "proportional"}},
    "Norm. 2": {"options": {"normalization": "top"}},
}
_LINK_FIGURES = {"MRR": "mrr", "H@1": "hits@1", "H@3": "hits@3"}
_LINK_VARIANTS: dict[str, Settings] = {
    "split in pairs": {"split_mode": "paired", "exclude_known": True},
    "sliced as published": {"split_mode": "paper", "exclude_known": False},
}
_LINK_NOTES = (
    "Split in pairs: the facts are shuffled and divided, then each gets its inverse; tails known from labeled facts "
    "are no candidates for unlabeled queries.",
    "Sliced as published, an artefact: the list of triples, with their inverses after them, is cut in order. Its first "
    "half holds no inverse, so no head query is learned from a label, and test asks for both heads and tails. No "
    "candidate is left out. Seeds differ in initial weights and batches only.",
    "Ours has 32 parameters a vector unless the title says otherwise (the paper tells no dimension), Adam, 1vsAll "
    "cross-entropy, no averaged weights, and an unlabeled weight of 1 from the first epoch on; the weights after the "
    "last epoch count. Filtered ranks of both directions, ties at their mean.",
    "Supervised-only rows, which the paper lacks, learn from the labeled facts alone, of which they name the share.",
)
_NO_CREDAL_SETS = "Supervised-only is missing here because it makes no pseudo-labels."


def _accuracy(title: str, place: str, **rest: Any) -> Table:
    return Table(title, place, factor=100, deviation_factor=100, **rest)


def _link_prediction(split: str, against: str, place: str, source: str, values: Mapping[str, str]) -> Table:
    return Table(
        f"Link prediction on UMLS and KINSHIP: CCSSL-diff with the split {split}, pseudo-labels with {against}",
        place,
        tuple(_link_rows(split, against, values)),
        tuple(
            Column((graph, head), {"dataset": dataset, **settings}, figure, variant=variant)
            for dataset, graph in GRAPHS.items()
            for variant, settings in _LINK_VARIANTS.items()
            for head, figure in _LINK_FIGURES.items()
        ),
        source,
        digits=3,
        deviation_digits=3,
        best_in_group=True,
        kind="graphs",
        notes=_LINK_NOTES,
    )


def _link_rows(split: str, against: str, values: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of each model: supervised-only with the labels of the others, then the paper's."""
    shares = sorted({int(ratio.split(":")[0]) for ratio in (split, against)})
    methods = {"PL": ("pseudo-label", against), "CCSSL": ("ccssl-diff", split)}
    for model in ("DistMult", "ComplEx", "QMult"):
        name = model.lower()
        for share in shares:
            settings = {"model": name, "method": "supervised", "split": f"{share}:{100 - share}"}
            yield Row(f"{model}, supervised only, {share}%", settings, group=model)
        for head, (method, ratio) in methods.items():
            settings = {"model": name, "method": method, "split": ratio}
            yield Row(f"{model}-{head}", settings, printed.cells(values[f"{model}-{head}"]), model)


ARTIFACTS: dict[str, Artifact] = {
    "accuracies": _accuracy(
        "Test accuracy (%)",
        "Table 1",
        source="tab:misclassification",
        rows=_methods(_SEVEN, printed.ACCURACY),
        columns=tuple(c for dataset, labels in _BENCHMARKS for c in _counts(dataset, *labels))
        + _counts("stl10", 1000),
        tuned=True,
    ),
    "validity": Table(
        "Validity: share of unlabeled images whose true label has a possibility of at most δ",
        "Table 2",
        source="tab:validity",
        corner="δ",
        rows=_methods(CREDAL, printed.VALIDITY)[1:],
        columns=tuple(
            Column(
                (DATASETS[dataset].title, f"{labels} lab.", f"{delta:g}"),
                {"dataset": dataset, "labels": labels},
                f"validity_error@{delta:g}",
            )
            for dataset in ("cifar10", "svhn")
            for labels in (250, 1000)
            for delta in (0.05, 0.1, 0.25)
        ),
        phase="unlabeled",
        deviation_factor=1000,
        digits=3,
        deviation_digits=1,
        lower_is_better=True,
        tuned=True,
        notes=(_NO_CREDAL_SETS,),
    ),
    "search-spaces": SearchSpaces(
        "Values considered in the search for hyperparameters",
        "Table 3",
        "table:hyperparameters",
        (
            ("All", _SEVEN, "Initial learning rate", "lr"),
            ("All", _SEVEN, "Unlabeled batch multiplicity μ", "mu"),
            ("All", _SEVEN, "Weight decay", "weight_decay"),
            ("All", _SEVEN, "Unlabeled loss weight λ_u", "lambda_u"),
            ("FixMatch (DA), UDA", ("FixMatch", "FixMatch DA", "UDA"), "Confidence threshold τ", "threshold"),
            ("FixMatch (DA), UDA", ("FixMatch", "FixMatch DA", "UDA"), "Temperature", "temperature"),
            ("FlexMatch", ("FlexMatch",), "Cutoff threshold", "threshold"),
            ("FlexMatch", ("FlexMatch",), "Threshold warmup", "warmup"),
            ("CCSSL-diff", ("CCSSL-diff",), "Calibration split", "calibration_fraction"),
            ("CCSSL-prop", ("CCSSL-prop",), "Calibration split", "calibration_fraction"),
            ("CCSSL-prop", ("CCSSL-prop",), "Non-conf. sensitivity γ", "gamma"),
        ),
    ),
    "ece": Table(
        "Expected calibration error with 15 bins",
        "Table 4",
        source="tab:ece",
        rows=_methods(_SEVEN, printed.ECE),
        columns=tuple(c for dataset, labels in _BENCHMARKS for c in _counts(dataset, *labels, figure="ece"))
        + _counts("stl10", 1000, figure="ece"),
        deviation_factor=100,
        digits=3,
        deviation_digits=1,
        lower_is_better=True,
        tuned=True,
    ),
    "imbalance": _accuracy(
        "Test accuracy (%) on EMNIST-ByClass, whose classes are imbalanced",
        "Table 5",
        source="table:conf_bias:emnist",
        rows=_methods(_SEVEN, printed.IMBALANCE),
        columns=tuple(_imbalanced(250, 500)),
        notes=(
            "Labels drawn at random follow the imbalanced pool, so that the conformal guarantee holds; as many of each "
            "class, as the others are, do not.",
        ),
    ),
    "normalization": _accuracy(
        "Test accuracy (%) by normalisation with 250 labels",
        "Table 6",
        source="table:abl:normalization",
        rows=_methods(CONFORMAL, printed.NORMALIZATION),
        columns=_variants(_NORMALIZATIONS),
        notes=("Norm. 1 divides p-values by their maximum, norm. 2 raises the predicted class to 1.",),
    ),
    "gamma": _accuracy(
        "Test accuracy (%) of CCSSL-prop by sensitivity γ with 250 labels",
        "Table 7",
        source="table:abl:sensitivity",
        corner="γ",
        rows=(
            Row("Supervised only", {"method": "supervised"}, group="supervised"),
            *(
                Row(
                    head,
                    {"method": "ccssl-prop", "options": {"gamma": float(head)}},
                    printed.cells(row),
                )
                for head, row in printed.GAMMA.items()
            ),
        ),
        columns=tuple(
            Column(
                (DATASETS[dataset].title,),
                {"dataset": dataset, "labels": 250},
                printed=dataset != "emnist-byclass",
                scales=("reduced",) if dataset == "emnist-byclass" else ("smoke", "paper"),
            )
            for dataset in ("cifar10", "svhn", "emnist-byclass")
        ),
    ),
    "graph-data": Table(
        "Knowledge graphs: entities, relations and triples",
        "Table 8",
        source="table:kge_dataset",
        rows=tuple(
            Row(graph, {"dataset": dataset}, printed.cells(printed.GRAPH_DATA[graph]))
            for dataset, graph in GRAPHS.items()
        ),
        columns=tuple(
            Column((head,), figure=figure)
            for head, figure in {
                "# Entities": "entities",
                "# Relations": "relations",
                "|D_train|": "train",
                "|D_val|": "valid",
                "|D_test|": "test",
            }.items()
        ),
        digits=0,
        kind="counts",
        notes=(
            "Ours is counted in the graphs of this package, as in the paper with the inverse of each relation and of "
            "each triple.",
            "The paper prints one entity and one relation more than each graph has, and 643 (UMLS) and 1,062 (KINSHIP) "
            "test triples more than the published test files hold with their inverses; it does not say why.",
        ),
    ),
    "link-prediction": _link_prediction(
        "40:40:20", "40:60", "Table 9", "table:umls_kinship_1vsall", printed.LINKS_40_40_20
    ),
    "link-prediction-40-10-50": _link_prediction(
        "40:10:50", "40:60", "Table 10", "table:umls_kinship_1vsall_40_10_split", printed.LINKS_40_10_50
    ),
    "link-prediction-30-20-50": _link_prediction(
        "30:20:50", "50:50", "Table 11", "table:umls_kinship_1vsall_30_20_split", printed.LINKS_30_20_50
    ),
    "curves-cifar100": Curves(
        "Test accuracy over training on CIFAR-100 with 400 labels",
        "Figure 2",
        _methods(_SEVEN, {}),
        _panels(("cifar100", 400)),
        "test accuracy (%)",
        factor=100,
        tuned=True,
    ),
    "efficiency": Curves(
        "Size of the credal sets over training: mean possibility of a class",
        "Figure 3",
        _methods(CREDAL, {})[1:],
        tuple(
            Column(panel.heads, panel.settings, "efficiency")
            for panel in _panels(("cifar10", 250), ("cifar10", 1000), ("svhn", 250), ("svhn", 1000))
        ),
        "mean possibility",
        phase="unlabeled",
        tuned=True,
        notes=(_NO_CREDAL_SETS,),
    ),
    "curves-250": Curves(
        "Test accuracy over training on CIFAR-10 and SVHN with 250 labels",
        "Figure 4",
        _methods(_SEVEN, {}),
        _panels(("cifar10", 250), ("svhn", 250)),
        "test accuracy (%)",
        factor=100,
        tuned=True,
    ),
    "curves-emnist": Curves(
        "Test accuracy over training on EMNIST-ByClass",
        "Figure 5",
        _methods(_SEVEN, {}),
        _panels(("emnist-byclass", 250), ("emnist-byclass", 500)),
        "test accuracy (%)",
        factor=100,
    ),
    "calibration-size": _accuracy(
        "Test accuracy (%) by share of the labels that calibrates, with 250 labels",
        "Figure 6",
        rows=_methods(CONFORMAL, {}),
        columns=tuple(Column(c.heads, c.settings, c.figure, False, c.scales) for c in _variants(_CALIBRATION)),
        plot="share of the labels that calibrates",
    ),
    "credal-sets": CredalSets(
        "Credal sets as polytopes, for three and four classes",
        "Figure 7",
        ((1.0, 0.7, 0.4), (1.0, 0.75, 0.5, 0.25)),
    ),
}
