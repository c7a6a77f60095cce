"""How these pages are built: ``make docs``, without a network and with warnings as errors."""

import sys
from pathlib import Path
from typing import Any, Literal

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from ccssl import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "ccssl"
author = "The ccssl developers"
project_copyright = "The ccssl developers, MIT licence"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"ccssl {version}"
html_static_path = ["_static"]
html_css_files = ["math.css"]
html_math_renderer = "mathml"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Examples in docstrings run under pytest, in their own module; here run those of the pages.
doctest_test_doctest_blocks = ""


def _formula(node: nodes.Node, display: Literal["inline", "block"]) -> str:
    formula = convert(node.astext(), display=display)
    if "\\" in formula or "<mi>&</mi>" in formula:
        raise ExtensionError(f"latex2mathml does not know something in: {node.astext()}")
    return formula


def _inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(_formula(node, "inline"))
    raise nodes.SkipNode


def _display_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{_formula(node, "block")}</div>\n')
    raise nodes.SkipNode


def _draw_figures(app: Sphinx) -> None:
    from figures import draw_all

    draw_all(HERE / "_build" / "figures")


def setup(app: Sphinx) -> None:
    """Formulas become MathML, which browsers draw by themselves: no script, nothing to load."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.connect("builder-inited", _draw_figures)
