"""Do unlabeled queries help a link predictor that already makes the best of its labels? UMLS and KINSHIP, 40:40:20.

    python studies/links.py --out studies/links [--runs FOLDER] [--workers 2]

Three stages; whatever is finished is not run again, and every choice is made on *validation* MRR, the mean over both
graphs, so that one setting serves both:

1. *The base.* Supervised-only, with every network and regulariser of ``BASES``, seed 0. The best is the base of all
   methods, supervised-only among them.
2. *The methods.* Each with the settings of ``METHODS`` on top of the base, seeds 0 and 1: equally many settings for
   pseudo-labels and for each score of CCSSL, whether it reuses calibration queries or not.
3. *The comparison.* The chosen setting of each method with seeds 0 to 4, judged on test triples. Paired differences
   within seeds (the same division of facts, the same initial weights), with Student's interval and test.

The page (README.md) shows all three. The coverage of prediction sets is that of ``ccssl graph predict`` at delta 0.1
on test triples, with the band in which it lies in 95% of cases if calibration and test triples are exchangeable.
Pseudo-labels make use of no calibration facts, whose answers they do not need: these are unlabeled for them (40:60).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ccssl.experiments import graph_run
from ccssl.experiments.study import Job, run_study
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.predictor import LinkPredictor

GRAPHS = ("umls", "kinship")
Settings = Mapping[str, Any]

# What no line below changes: all of it is said, for the defaults of GraphConfig follow from this study.
PLAIN: Settings = {
    "split": "40:40:20",
    "split_mode": "paired",
    "normalize": "none",
    "input_dropout": 0.0,
    "dropout": 0.0,
    "init_scale": 0.1,
    "loss": "ce",
    "optimizer": "adam",
    "schedule": "constant",
    "n3": 0.0,
    "ramp_up": 50,
    "calibrate_every": 1,
    "per_relation": False,
    "min_p_value": 0.0,
    "temperature": 1.0,
    "reuse_calibration": False,
    "align": False,
    "exclude_known": True,
    "select": "best",
}
# What all runs have in common beside it.
COMMON: Settings = {
    "model": "complex",
    "batch_of": "queries",
    "batch": 256,
    "lr": 0.01,
    "epochs": 200,
    "eval_every": 10,
    "patience": 6,
    "ema": 0.995,
    "mu": 2.0,
    "teacher": "ema",
}
BASES: dict[str, Settings] = {
    "dim 256, no dropout": {"dim": 256},
    "dim 256, n3 0.01": {"dim": 256, "n3": 0.01},
    "dim 256, dropout 0.4, input 0.4": {"dim": 256, "dropout": 0.4, "input_dropout": 0.4},
    "dim 256, dropout 0.4, input 0.6": {"dim": 256, "dropout": 0.4, "input_dropout": 0.6},
    "dim 256, dropout 0.5, input 0.5": {"dim": 256, "dropout": 0.5, "input_dropout": 0.5},
    "dim 256, dropout 0.6, input 0.5": {"dim": 256, "dropout": 0.6, "input_dropout": 0.5},
    "dim 256, dropout 0.6, input 0.6": {"dim": 256, "dropout": 0.6, "input_dropout": 0.6},
    "dim 512, dropout 0.6, input 0.5": {"dim": 512, "dropout": 0.6, "input_dropout": 0.5},
    "dim 256, dropout 0.6, input 0.5, lr 0.003": {"dim": 256, "dropout": 0.6, "input_dropout": 0.5, "lr": 0.003},
}
# The settings that each method is tried with: seven for pseudo-labels, seven for each score of CCSSL.
_WEIGHTS: dict[str, Settings] = {
    "weight 0.1": {"lambda_u": 0.1},
    "weight 0.3": {"lambda_u": 0.3},
    "weight 0.1, aligned": {"lambda_u": 0.1, "align": True},
    "weight 0.3, aligned": {"lambda_u": 0.3, "align": True},
}
# Calibration queries as pseudo-labels have them, asked and not answered: their answers calibrate, and do no more. But
# the network has then learned from these queries and not from those of test facts: no coverage of the latter follows.
_REUSED: dict[str, Settings] = {
    f"weight {weight}, aligned, calibration queries too": {
        "lambda_u": weight,
        "align": True,
        "reuse_calibration": True,
    }
    for weight in (0.1, 0.3, 0.5)
}
_CAREFUL: dict[str, Settings] = {
    "weight 0.03, aligned": {"lambda_u": 0.03, "align": True},
    "weight 0.06, aligned": {"lambda_u": 0.06, "align": True},
    "weight 0.1, aligned, confidence from 0.5": {"lambda_u": 0.1, "align": True, "options": {"threshold": 0.5}},
}
METHODS: dict[str, dict[str, Settings]] = {
    "supervised": {"": {"method": "supervised"}},
    "pseudo-label": {
        name: {"method": "pseudo-label", "split": "40:60", **settings}
        for name, settings in {**_WEIGHTS, **_CAREFUL}.items()
    },
    **{
        method + reused: {name: {"method": method, **settings} for name, settings in variants.items()}
        for method in ("ccssl-diff", "ccssl-prop")
        for reused, variants in (("", _WEIGHTS), (" reused", _REUSED))
    },
}
BASE_SEEDS, METHOD_SEEDS, FINAL_SEEDS = (0,), (0, 1), (0, 1, 2, 3, 4)
FIGURES = ("mrr", "hits@1", "hits@3", "hits@10")
DELTA = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: OUT/runs, which is not committed)")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    runs = args.runs or args.out / "runs"

    bases = {name: {**COMMON, **settings, "method": "supervised"} for name, settings in BASES.items()}
    base_scores = validation(bases, BASE_SEEDS, runs, args.workers)
    base = best(base_scores)

    tried = {
        f"{method}, {name}" if name else method: {**COMMON, **BASES[base], **settings}
        for method, variants in METHODS.items()
        for name, settings in variants.items()
    }
    method_scores = validation(tried, METHOD_SEEDS, runs, args.workers)
    chosen = {}
    for method in METHODS:
        own = {name: scores for name, scores in method_scores.items() if name.split(",")[0] == method}
        chosen[method] = best(own)

    final = {method: tried[name] for method, name in chosen.items()}
    make(final, FINAL_SEEDS, runs, args.workers)
    figures = {
        method: {graph: [judged(settings, graph, seed, runs) for seed in FINAL_SEEDS] for graph in GRAPHS}
        for method, settings in final.items()
    }
    found = {
        "base": {"chosen": base, "validation": base_scores},
        "methods": {"chosen": chosen, "validation": method_scores},
        "settings": {method: settings_told(settings) for method, settings in final.items()},
        "test": figures,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    discussion = args.out / "discussion.md"
    told = discussion.read_text() if discussion.exists() else ""
    (args.out / "README.md").write_text("\n".join(page(found, final)) + "\n" + ("\n" + told if told else ""))


def config(settings: Settings, graph: str, seed: int) -> GraphConfig:
    return GraphConfig(**{**PLAIN, **settings, "dataset": graph, "seed": seed, "device": "cpu"})


def name_of(settings: Settings, graph: str, seed: int) -> str:
    """Return the stable name of a run: what it does not have in common with all others."""
    usual = {**PLAIN, **COMMON}
    told = {name: value for name, value in settings.items() if usual.get(name) != value and name != "options"}
    told |= {**settings.get("options", {}), "seed": seed}
    return ",".join([graph, *(f"{name}={value}".replace(":", "-") for name, value in told.items())])


def make(tried: Mapping[str, Settings], seeds: Sequence[int], runs: Path, workers: int) -> None:
    """Make the runs that are missing."""
    jobs = {
        name_of(settings, graph, seed): Job(graph_run.train, config(settings, graph, seed))
        for settings in tried.values()
        for seed in seeds
        for graph in GRAPHS
    }
    outcome = run_study(jobs, runs, workers=workers, threads=1)
    if outcome.broken:
        sys.exit("\n".join(f"{name}: {why}" for name, why in outcome.broken.items()))


def validation(
    tried: Mapping[str, Settings], seeds: Sequence[int], runs: Path, workers: int
) -> dict[str, dict[str, float]]:
    """Return the mean validation MRR of settings on each graph."""
    make(tried, seeds, runs, workers)
    return {
        name: {
            graph: statistics.mean(
                graph_run.read_result(runs / name_of(settings, graph, seed))["validation"]["mrr"] for seed in seeds
            )
            for graph in GRAPHS
        }
        for name, settings in tried.items()
    }


def best(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Return the name with the largest mean over the graphs."""
    return max(scores, key=lambda name: statistics.mean(scores[name].values()))


def judged(settings: Settings, graph: str, seed: int, runs: Path) -> dict[str, Any]:
    """Return what a run of the comparison came to on test triples."""
    folder = runs / name_of(settings, graph, seed)
    result = graph_run.read_result(folder)
    found = {figure: result["test"][figure] for figure in FIGURES}
    found |= {"seed": seed, "validation": result["validation"]["mrr"], "seconds": result["cost"]["seconds"]}
    if settings["method"].startswith("ccssl"):
        sets = LinkPredictor.of(graph_run.load_run(folder)).coverage(DELTA)
        found["sets"] = {name: sets[name] for name in ("coverage", "band", "size", "calibration", "queries")}
    return found


def settings_told(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if PLAIN.get(name) != value}


def page(found: Mapping[str, Any], final: Mapping[str, Settings]) -> list[str]:
    """Return the lines of the page."""
    lines = [
        "# Link prediction: do unlabeled queries help a good base model?",
        "",
        "ComplEx, UMLS and KINSHIP, training facts 40:40:20 (labeled : calibration : unlabeled), split mode `paired`; "
        "pseudo-labels 40:60. All weights are averaged (EMA). Every choice was made on validation triples.",
        f"Command: `{shlex.join(['python', 'studies/links.py', '--out', 'studies/links'])}`. One thread a run.",
        "",
        "## 1. The base, chosen on validation (supervised-only, seed 0)",
        "",
        "| network and regulariser | UMLS | KINSHIP | mean |",
        "|---|---:|---:|---:|",
        *choices(found["base"]["validation"], [found["base"]["chosen"]]),
        "",
        "Common to all: " + ", ".join(f"{name} {value}" for name, value in COMMON.items()) + ".",
        "",
        f"## 2. The methods on this base, chosen on validation (seeds {_listed(METHOD_SEEDS)})",
        "",
        "| method and setting | UMLS | KINSHIP | mean |",
        "|---|---:|---:|---:|",
        *choices(found["methods"]["validation"], list(found["methods"]["chosen"].values())),
        "",
        f"## 3. Test triples, seeds {_listed(FINAL_SEEDS)}",
        "",
        "| graph | method | MRR | H@1 | H@3 | H@10 | each seed's MRR |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for graph in GRAPHS:
        for method in final:
            rows = found["test"][method][graph]
            cells = " | ".join(_spread([row[figure] for row in rows]) for figure in FIGURES)
            each = ", ".join(f"{row['mrr']:.4f}" for row in rows)
            lines.append(f"| {graph.upper()} | {method} | {cells} | {each} |")
    lines += [
        "",
        "### Paired differences in MRR",
        "",
        "| graph | pair | mean | 95% interval | p (paired t-test) | seeds ahead |",
        "|---|---|---:|---:|---:|---:|",
    ]
    pairs = [
        (ours, theirs) for ours in final for theirs in ("supervised", "pseudo-label") if _compared(ours, theirs)
    ]
    for graph in GRAPHS:
        for ours, theirs in pairs:
            gaps = [
                mine["mrr"] - other["mrr"]
                for mine, other in zip(found["test"][ours][graph], found["test"][theirs][graph], strict=True)
            ]
            lines.append(f"| {graph.upper()} | {ours} − {theirs} | {_tested(gaps)} |")
    lines += [
        "",
        f"### Prediction sets of tails and heads at δ = {DELTA}",
        "",
        "| graph | method | coverage, each seed | band | mean size |",
        "|---|---|---|---|---:|",
    ]
    for graph in GRAPHS:
        for method in final:
            sets = [row["sets"] for row in found["test"][method][graph] if "sets" in row]
            if sets:
                each = ", ".join(f"{s['coverage']:.3f}" for s in sets)
                low, high = sets[0]["band"]
                size = statistics.mean(s["size"] for s in sets)
                lines.append(f"| {graph.upper()} | {method} | {each} | {low:.3f} to {high:.3f} | {size:.1f} |")
    return lines


def choices(scores: Mapping[str, Mapping[str, float]], chosen: Sequence[str]) -> list[str]:
    lines = []
    for name, by_graph in scores.items():
        cells = [*(by_graph[graph] for graph in GRAPHS), statistics.mean(by_graph.values())]
        mark = "**" if name in chosen else ""
        lines.append(f"| {mark}{name}{mark} | " + " | ".join(f"{value:.4f}" for value in cells) + " |")
    return lines


def _compared(ours: str, theirs: str) -> bool:
    return ours != theirs and ours != "supervised"


def _tested(gaps: Sequence[float]) -> str:
    """Return mean, interval, p-value and seeds ahead of paired differences."""
    from scipy.stats import t, ttest_1samp

    mean = statistics.mean(gaps)
    half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    p = float(ttest_1samp(gaps, 0).pvalue)
    ahead = sum(gap > 0 for gap in gaps)
    return f"{mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} | {p:.4f} | {ahead} of {len(gaps)}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _listed(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])


if __name__ == "__main__":
    main()
