#!/usr/bin/env python
"""Run chapters of the tutorial and store their outputs: docs/tutorial/execute.py [--only 2,6]

Needs the extra `notebook` and about three minutes on two idle cores. Stores a checksum of the code with the outputs, so
that `tests/policy/test_tutorial.py` finds outputs of older code.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def compute_checksum(notebook: dict[str, Any]) -> str:
    """The checksum of the code cells."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def shrink_png(encoded: str) -> str:
    """The picture with a palette of 256 colors."""
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB").quantize(256).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def clean(output: dict[str, Any], place: str) -> None:
    """Shrink the pictures of an output, and remove paths of this machine."""
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = shrink_png(data["image/png"])
    if "text/html" in data:
        text = "".join(data["text/html"])
        data["text/html"] = re.sub(r"(?<=base64,)[A-Za-z0-9+/=]+", lambda found: shrink_png(found[0]), text)
    holders = [(output, "text"), (data, "text/plain"), (data, "text/html"), (output, "traceback")]
    for holder, key in holders:
        if key in holder:
            whole = holder[key]
            parts = [whole] if isinstance(whole, str) else whole
            found = [part.replace(place, ".").replace(str(ROOT), "paceline") for part in parts]
            found = [re.sub(r"/[\w./-]*/(?=site-packages/|lib/python3)", "", part) for part in found]
            holder[key] = found[0] if isinstance(whole, str) else found


def execute(path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"PYTHONPATH": str(ROOT / "src"), "IPYTHONDIR": place, "JUPYTER_RUNTIME_DIR": place}
        resources = {"metadata": {"path": place}}
        client = nbclient.NotebookClient(notebook, timeout=200, resources=resources, record_timing=False)
        client.execute()
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                clean(output, place)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "paceline": {"outputs_of": compute_checksum(notebook)},
    }
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="numbers of chapters: 2,6")
    asked = parser.parse_args()
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not asked.only or path.name.partition("-")[0] in asked.only.split(","):
            print(path.name, flush=True)
            execute(path)


if __name__ == "__main__":
    main()
