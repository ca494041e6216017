"""The published runs under results/ stay small and contain no machine-specific paths."""

import gzip
import json
import re
from pathlib import Path

from .reading import REPOSITORY

RESULTS = REPOSITORY / "results"
MOST_BYTES = 10_000_000
LINK = re.compile(r"\]\(([^)#\s]+\.(?:png|svg))")
ABSOLUTE = re.compile(r"(?<![\w.:/])/\w[\w.-]*/")


def list_files():
    return [path for path in RESULTS.rglob("*") if path.is_file()]


def list_texts(value):
    """Every string in a JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from list_texts(inner)
    elif isinstance(value, str):
        yield value


def test_results_are_small():
    assert sum(path.stat().st_size for path in list_files()) < MOST_BYTES


def test_raw_files_are_compressed_reproducibly():
    assert [path for path in list_files() if path.name in ("run.json", "metrics.jsonl", "overview.json")] == []
    packed = [path for path in list_files() if path.suffix == ".gz"]
    assert packed
    # Bytes 4 to 7 of a gzip header are a timestamp, which would make equal contents differ.
    assert [path for path in packed if path.read_bytes()[4:8] != bytes(4)] == []


def test_pictures_are_those_that_a_document_shows():
    documents = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *RESULTS.rglob("*.md")]
    linked = {(file.parent / link).resolve() for file in documents for link in LINK.findall(file.read_text())}
    pictures = {path.resolve() for path in list_files() if path.suffix in (".png", ".svg")}
    assert pictures and pictures <= linked


def test_no_command_line_or_configuration_names_a_path_of_the_machine():
    found = {}
    for path in list_files():
        if path.name in ("run.json.gz", "config.json"):
            content = path.read_bytes()
            document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
            settings = document.get("config") or document.get("settings")
            texts = [document["environment"]["command_line"], *list_texts(settings)]
            found |= {str(path): text for text in texts if ABSOLUTE.search(text) or Path(text).is_absolute()}
    assert found == {}
