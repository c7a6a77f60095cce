"""The comparison with the paper's LaTeX source: its parser sees what is there, and a cell that differs is found."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ccssl.experiments.paper.artifacts import ARTIFACTS, SearchSpaces, Table
from ccssl.experiments.paper.views import printed_cell, printed_columns

ROOT = Path(__file__).parents[2]

SOURCE = r"""
\begin{table}[htbp]
    \caption{Accuracies $\pm$ deviations.} % \begin{table}
    \centering
    \begin{tabular}{lcc}
      \toprule
       $\gamma$ & CIFAR-10    & SVHN\\
      \midrule
      $0.01$ & \textbf{93.64} {\small $\pm${0.33}} & 95.60 {\small $\pm${2.17}} \\
      $0.1$ & 93.24 {\small $\pm${1.16}} & 95.91 {\small $\pm${1.76}} \\ % 0.2 & 1 & 2 \\
      $0.5$ & 93.19 {\small $\pm${1.02}} & \textbf{96.82} {\small $\pm${0.10}} \\
      \midrule
      $1$ & 93.01 {\small $\pm${1.23}} & 96.61 {\small $\pm${0.08}} \\
      $10$ & 92.29 {\small $\pm${1.94}} & 95.41 {\small $\pm${2.07}} \\
    \bottomrule
\label{table:abl:sensitivity}
\end{tabular}
\end{table}
"""

GRAPHS = r"""
\begin{table}
    \begin{tabular}{l c c c c c}
    \toprule
     & \# Entities &  \# Relations & $|\mathcal{D}_{\text{train}}|$ &
       $|\mathcal{D}_{\text{val}}|$ &  $|\mathcal{D}_{\text{test}}|$\\
    \midrule
    UMLS             &  136    &     93  &    10,432  &  1,304 &  1,965 \\
    KINSHIP          &  105    &     51  &    17,088  &  2,136 &  3,210 \\
    \bottomrule
    \end{tabular}
    \label{table:kge_dataset}
\end{table}
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_paper", ROOT / "tools" / "compare_paper.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def different(tool, monkeypatch, source, *names):
    monkeypatch.setattr(tool, "ARTIFACTS", {name: ARTIFACTS[name] for name in names})
    return [line for same, line in tool.compare(source) if not same]


def test_the_parser_keeps_numbers_deviations_bold_type_and_heads(tool):
    (tabular,) = tool.tables(SOURCE).values()
    assert tabular.heads == (("CIFAR-10",), ("SVHN",))
    assert [head for head, _ in tabular.rows] == ["0.01", "0.1", "0.5", "1", "10"]
    assert tabular.rows[0][1] == (tool.Cell("93.64", "0.33", True), tool.Cell("95.60", "2.17", False))


def test_heads_that_span_columns_are_spread_over_them(tool):
    source = r"""
    \begin{table}\begin{tabular}{lccc}\toprule
     & \multicolumn{2}{c}{\textbf{UMLS}} & \multicolumn{1}{c}{KINSHIP~$\mu$} \\ \cmidrule(lr){2-3} \cmidrule{4-4}
     & MRR & H@1 & MRR \\ \midrule
    \multirow{2}{*}{DistMult-\ccssl} & .25 & \textbf{ 1,304 } & -- \\ \bottomrule
    \end{tabular}\label{tab:x}\end{table}
    """
    tabular = tool.tables(source)["tab:x"]
    assert tabular.heads == (("UMLS", "MRR"), ("UMLS", "H@1"), ("KINSHIP μ", "MRR"))
    assert tabular.rows == (
        ("DistMult-CCSSL", (tool.Cell(".25"), tool.Cell("1,304", None, True), tool.Cell("--"))),
    )


def test_equal_tables_are_equal(tool, monkeypatch):
    assert different(tool, monkeypatch, SOURCE + GRAPHS, "gamma", "graph-data") == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("93.24", "93.25", "gamma | 0.1 | CIFAR-10: 93.24 ± 1.16, but 93.25 ± 1.16 in the source"),
        ("{1.16}", "{1.61}", "93.24 ± 1.16, but 93.24 ± 1.61"),
        (r"\textbf{96.82}", "96.82", "96.82 ± 0.10 (bold), but 96.82 ± 0.10 in"),
        (r"{\small $\pm${2.17}}", "", "95.60 ± 2.17, but 95.60 in"),
        ("$10$", "$100$", "gamma | rows: "),
        ("SVHN", "STL-10", "gamma | columns: "),
        (r"$10$ & 92.29 {\small $\pm${1.94}} & 95.41 {\small $\pm${2.07}} \\", "", "gamma | rows: "),
        ("SVHN", r"SVHN & STL-10", "the source has 3 columns, we have 2"),
        ("table:abl:sensitivity", "table:else", "no artifact shows the table table:else of the source"),
    ],
)
def test_what_differs_is_told(old, new, told, tool, monkeypatch):
    assert SOURCE.count(old) == 1
    found = different(tool, monkeypatch, SOURCE.replace(old, new), "gamma")
    assert any(told in line for line in found), found


def test_the_exit_code_and_the_log(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "ARTIFACTS", {"gamma": ARTIFACTS["gamma"]})
    for text, code, summary in (
        (SOURCE, 0, "12 comparisons, 12 equal, 0 different"),
        (SOURCE.replace("93.24", "1"), 1, "12 comparisons, 11 equal, 1 different"),
    ):
        (tmp_path / "paper.tex").write_text(text)
        argv = ["compare_paper.py", str(tmp_path / "paper.tex"), "--log", str(tmp_path / "log")]
        monkeypatch.setattr(sys, "argv", argv)
        assert tool.main() == code
        assert capsys.readouterr().out.splitlines()[-1] == summary
        log = (tmp_path / "log").read_text().splitlines()
        assert log[-1] == summary
        assert sum(line.startswith("DIFFERENT") for line in log) == code


def test_the_committed_log_tells_every_printed_cell_of_ours_once(tool):
    log = (ROOT / "studies" / "paper_cells.log").read_text(encoding="utf-8").splitlines()
    assert log[-1].endswith(" equal, 0 different"), "make it anew with tools/compare_paper.py"
    for name, artifact in ARTIFACTS.items():
        if isinstance(artifact, SearchSpaces):
            assert sum(line.startswith(f"equal      {name} | ") for line in log) == len(artifact.rows) + 1
        if not (isinstance(artifact, Table) and artifact.source):
            continue
        for row in artifact.rows:
            for column in printed_columns(artifact):
                ours = printed_cell(artifact, row, column)
                if ours:
                    told = tool._told(ours.value, ours.deviation, ours.bold)
                    place = f"{name} | {row.head} | {', '.join(column.heads)}"
                    assert log.count(f"equal      {place}: {told}") == 1
