"""The chapters of the tutorial run, as they are and with the answers that they give to their exercises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
import nbformat  # noqa: E402

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))
# One in `make test`; all of them in `make test-all`.
CASES = [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path != CHAPTERS[0])) for path in CHAPTERS]


def run(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text that each cell wrote."""
    for name, value in (("JUPYTER_RUNTIME_DIR", folder), ("IPYTHONDIR", folder), ("PYTHONPATH", ROOT / "src")):
        monkeypatch.setenv(name, str(value))
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    return ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells]


def fill_in(notebook: nbformat.NotebookNode) -> int:
    """Put the answers into the cells of the exercises, and return how many there are."""
    text = "\n".join(cell.source for cell in notebook.cells)
    answers = re.findall(r"answer to exercise (\d+)</summary>\n\n```python\n(.*?)\n```", text, re.DOTALL)
    for number, answer in answers:
        (cell,) = [c for c in notebook.cells if {"answer", f"exercise-{number}"} <= set(c.metadata.get("tags", []))]
        cell.source = answer
    return len(answers)


@pytest.mark.parametrize("path", CASES)
def test_a_chapter_runs_and_its_answers_are_right(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    count = fill_in(notebook)
    text = "".join(run(notebook, tmp_path, monkeypatch))
    assert count >= 2
    for number in range(1, count + 1):
        assert f"exercise {number}: right" in text
    assert "not answered" not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs_without_answers_and_fails_where_it_says_so(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    text = "".join(run(notebook, tmp_path, monkeypatch))
    assert "exercise 1: not answered yet" in text and ": right" not in text
    for cell in notebook.cells:
        failed = any(out.output_type == "error" for out in cell.get("outputs", []))
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
