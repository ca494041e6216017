"""The tutorial chapters run, and their exercises accept the chapters' solutions but not empty cells."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
import nbformat  # noqa: E402

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))
# One in `make test`; all of them in `make test-all`.
CASES = [pytest.param(path, id=path.stem) for path in CHAPTERS]


def get_tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def fill_in(notebook: nbformat.NotebookNode) -> int:
    """Check each exercise twice, empty and with the chapter's solution, then empty it again: the cells that follow
    must run without solutions. Return the number of exercises."""
    text = "\n".join(cell.source for cell in notebook.cells)
    answers = re.findall(r"answer to exercise (\d+)</summary>\n\n```python\n(.*?)\n```", text, re.DOTALL)
    for number, answer in answers:
        empty, check = (
            next(i for i, cell in enumerate(notebook.cells) if {kind, f"exercise-{number}"} <= get_tags(cell))
            for kind in ("answer", "check")
        )
        again = [copy.deepcopy(notebook.cells[i]) for i in (empty, check, empty)]
        again[0].source = answer
        for place, cell in enumerate(again):
            cell.id = f"again-{number}-{place}"
        notebook.cells[check + 1 : check + 1] = again
    return len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_a_chapter_runs_and_its_solutions_are_accepted(path, tmp_path, monkeypatch):
    for name, value in (("JUPYTER_RUNTIME_DIR", tmp_path), ("IPYTHONDIR", tmp_path), ("PYTHONPATH", ROOT / "src")):
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(path, as_version=4)
    count = fill_in(notebook)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert count >= 4
    for number in range(1, count + 1):
        assert text.count(f"exercise {number}: right") == text.count(f"exercise {number}: not answered yet") > 0
    for cell in notebook.cells:
        failed = any(out.output_type == "error" for out in cell.get("outputs", []))
        assert failed == ("raises-exception" in get_tags(cell)), cell.source
