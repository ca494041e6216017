"""Sphinx configuration of the documentation site (`make docs`).

The site mirrors the tree of the repository, so links between files work unchanged: README.md is its first page.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import latex2mathml.converter  # noqa: E402
from docutils.nodes import SkipNode  # noqa: E402

import paceline  # noqa: E402
from paceline.verbs.predict import predict  # noqa: E402

paceline.predict = predict  # the callable package has no signature; the function does

NAVIGATION = {
    "Start here": (
        "docs/your-own-script", "From torch's DDP <docs/from-ddp>", "docs/notebooks", "docs/faq",
        "docs/troubleshooting",
    ),
    "Tutorial": tuple(
        f"docs/tutorial/{path.stem}"
        for pattern in ("*.md", "*.ipynb")
        for path in sorted(ROOT.glob(f"docs/tutorial/{pattern}"))
    ),
    "Guides": (
        "Training <docs/training>", "docs/report-page", "Where the time goes <docs/profiling>", "docs/bucket-size",
        "docs/scaling", "docs/strategies", "docs/several-hosts", "docs/faults",
        "Measuring collectives <docs/measuring>",
    ),
    "How it works": (
        "docs/ddp", "docs/performance-model", "docs/transport", "docs/trust", "docs/architecture", "docs/decisions",
        "docs/scoreboard", "Source documents <docs/sources>",
    ),
    "Reference": ("docs/api", "docs/glossary", "docs/results-format", "CHANGELOG", "CONTRIBUTING"),
}  # fmt: skip


def find_results() -> list[str]:
    """The tables in results/ that documents link to, directly or through other tables."""
    found, files = set(), [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    while files:
        file = files.pop()
        for link in re.findall(r"\]\(([^)#:]+\.md)", file.read_text(encoding="utf-8")):
            target = (file.parent / link).resolve()
            if target not in found and target.is_relative_to(ROOT / "results") and target.is_file():
                found.add(target)
                files.append(target)
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


project, author, version = "Paceline", "", paceline.__version__
html_title = f"Paceline {version}"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/tutorial/*.md", "docs/tutorial/*.ipynb", *find_results()]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "benchmarks", "examples"]
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # browsers refuse to fetch excerpts from local files
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
html_theme_options = {
    "light_css_variables": {"color-api-name": "#1d4ed8", "color-code-background": "#f6f8fa"},
    "dark_css_variables": {"color-api-name": "#93c5fd", "color-code-background": "#1c2128"},
}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 6
nb_execution_mode = "off"
suppress_warnings = ["myst.header"]  # tables in results/ start at any heading level

default_role = "code"  # docstrings use Markdown backticks
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 90
add_module_names = False
toc_object_entries = False  # the headings of docs/api.md name them
python_use_unqualified_type_names = True


def write_toctrees() -> str:
    lines = []
    for caption, pages in NAVIGATION.items():
        lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
    return "\n".join(lines)


def write_entries(names: list[str]) -> str:
    """The docstrings of these public names."""
    lines = ["", "```{eval-rst}"]
    for name in names:
        found = getattr(paceline, name)
        if isinstance(found, type):
            lines += [f".. autoclass:: paceline.{name}", "   :members:" * (not issubclass(found, Exception)), ""]
        elif name in ("bench", "scale"):
            public = [part for part, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
            lines += [f".. autofunction:: paceline.{name}.{part}" for part in public if not part.startswith("_")]
        else:
            lines += [f".. autofunction:: paceline.{name}"]
    return "\n".join([*lines, "```", ""])


def read_source(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += write_toctrees()
    elif page == "docs/api":  # append the docstrings of its names to each section
        parts = re.split(r"^(?=##)", source[0], flags=re.MULTILINE)
        headings = [re.findall(r"`(\w+)`", part.split("\n")[0]) * part.startswith("### ") for part in parts]
        source[0] = "".join(p + (write_entries(n) if n else "") + "\n" for p, n in zip(parts, headings, strict=True))
    elif page.startswith("results/"):
        source[0] = "---\norphan: true\nnosearch: true\n---\n\n" + source[0]


def mark_formulas(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Mark lines that are indented like code as code."""
    for k in range(len(lines) - 1, 0, -1):
        if lines[k].startswith("    ") and not lines[k - 1] and lines[k - 2].endswith("."):
            lines[k:k] = ["::", ""]


def write_math(writer: Any, node: Any) -> None:
    display = "inline" if node.tagname == "math" else "block"
    writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise SkipNode


def copy_first_page(app: Any, error: Exception | None) -> None:
    if not error and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", mark_formulas)
    app.connect("build-finished", copy_first_page)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
