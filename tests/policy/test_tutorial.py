"""The tutorial notebooks have the outputs of their code, valid links, and an answer and a check for each exercise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .reading import load_script
from .test_docs import ROOT, find_commands, find_dead_links, parse_command
from .test_house_rules import MACHINE_PATHS

CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))
MOST_BYTES = 1_000_000
SCRIPT = load_script(ROOT / "docs" / "tutorial" / "execute.py")


def find_stale_outputs(notebook: dict[str, Any]) -> list[str]:
    """What is wrong with the outputs of a notebook, which `docs/tutorial/execute.py` stores."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    faults = [f"{cell['id']} was not run" for cell in code if not cell.get("execution_count")]
    if notebook["metadata"].get("paceline", {}).get("outputs_of") != SCRIPT.compute_checksum(notebook):
        faults.append("the code changed after its outputs were stored: run docs/tutorial/execute.py")
    for cell in code:
        failed = any(output["output_type"] == "error" for output in cell.get("outputs", []))
        if failed != ("raises-exception" in cell["metadata"].get("tags", [])):
            faults.append(f"{cell['id']} {'failed' if failed else 'did not fail'}")
        said = json.dumps(cell.get("outputs", []))
        faults += [f"{cell['id']} names a path of a machine" for path in MACHINE_PATHS if path in said]
    if len(json.dumps(notebook)) > MOST_BYTES:
        faults.append(f"larger than {MOST_BYTES:,} bytes")
    return faults


def find_faults(path: Path, notebook: dict[str, Any]) -> list[str]:
    cells, faults = notebook["cells"], []
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    if len({cell.get("id") for cell in cells}) < len(cells):
        faults.append("two cells have one id")
    faults += [f"dead link: {link}" for link in find_dead_links(path, "\n".join(texts))]
    for command in {one for text in texts for one in find_commands(text, "paceline")}:
        try:
            parse_command(command)
        except Exception as error:
            faults.append(f"{command}: {error}")
    tags = [set(cell["metadata"].get("tags", [])) for cell in cells]
    for number in re.findall(r"^### Exercise (\d+)", "\n".join(texts), re.MULTILINE):
        counts = {kind: sum({kind, f"exercise-{number}"} <= one for one in tags) for kind in ("answer", "check")}
        faults += [f"exercise {number} needs one cell with the tag {kind}" for kind, n in counts.items() if n != 1]
        if f"answer to exercise {number}</summary>" not in "\n".join(texts):
            faults.append(f"exercise {number} has no answer")
    return faults


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_complete(path):
    assert find_faults(path, json.loads(path.read_text())) == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_the_outputs_of_its_code(path):
    assert find_stale_outputs(json.loads(path.read_text())) == []


def test_stale_outputs_are_found():
    notebook = json.loads(CHAPTERS[0].read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code[1]["source"] = ["print('changed')"]
    code[2]["execution_count"] = None
    code[3]["outputs"] = [{"output_type": "error", "traceback": ["/" + "home/someone/train.py"]}]
    assert len(find_stale_outputs(notebook)) == 4


def test_faults_are_found():
    cell = {
        "cell_type": "markdown",
        "id": "a",
        "metadata": {},
        "source": ["### Exercise 1\n", "[x](no-such-page.md)\n"],
    }
    code = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["1"]}
    faults = find_faults(ROOT / "docs" / "tutorial" / "1-made.ipynb", {"cells": [cell, code]})
    assert len(faults) == 5
