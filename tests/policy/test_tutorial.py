"""The tutorial notebooks have no outputs, valid links, and an answer and a check for each exercise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .test_docs import ROOT, find_commands, find_dead_links, parse_command

CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))


def find_faults(path: Path, notebook: dict[str, Any]) -> list[str]:
    cells, faults = notebook["cells"], []
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    if len({cell.get("id") for cell in cells}) < len(cells):
        faults.append("two cells have one id")
    faults += [f"outputs in {cell['id']}" for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    for link in find_dead_links(path, "\n".join(texts)):
        faults.append(f"dead link: {link}")
    for command in {one for text in texts for one in find_commands(text, "paceline")}:
        try:
            parse_command(command)
        except Exception as error:
            faults.append(f"{command}: {error}")
    tags = [set(cell["metadata"].get("tags", [])) for cell in cells]
    for number in re.findall(r"^### Exercise (\d+)", "\n".join(texts), re.MULTILINE):
        for kind in ("answer", "check"):
            if sum({kind, f"exercise-{number}"} <= one for one in tags) != 1:
                faults.append(f"exercise {number} needs one cell with the tag {kind}")
        if f"answer to exercise {number}</summary>" not in "\n".join(texts):
            faults.append(f"exercise {number} has no answer")
    return faults


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_complete(path):
    assert find_faults(path, json.loads(path.read_text())) == []


def test_faults_are_found():
    cell = {
        "cell_type": "markdown",
        "id": "a",
        "metadata": {},
        "source": ["### Exercise 1\n", "[x](no-such-page.md)\n"],
    }
    code = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["1"], "outputs": [{}], "execution_count": 1}
    faults = find_faults(ROOT / "docs" / "tutorial" / "1-made.ipynb", {"cells": [cell, code]})
    assert len(faults) == 6
