"""Every command in docs/sources.md for the five documents runs, on small jobs and data.

Each command keeps its options, with smaller numbers and models. gloo replaces NCCL, and the CPU a GPU.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_models_and_data import save_cifar_batches, save_mrpc
from tests.cli.test_train import save_mnist, type_alone, type_command
from tests.cli.test_train_bad_input import LAUNCH_VARIABLES
from tests.policy.test_docs import ROOT, find_commands

SOURCES = (ROOT / "docs" / "sources.md").read_text()
COMMANDS = sorted(set(find_commands(SOURCES, "paceline")))
EXAMPLES = ROOT / "examples"
CNN = {"--channels": ["2", "4"], "--hidden": ["8"]}
MODELS = {
    "resnet18": CNN,
    "gpt2-mini": {"--model": ["gpt2-tiny"]},
    "gpt2-large": {"--model": ["gpt2-tiny"]},
    "hf:HuggingFaceTB/SmolLM2-360M-Instruct": {"--model": [f"{EXAMPLES / 'paraphrase.py'}:build"]},
}
NUMBERS = {"--iters": ["2"], "--warmup": ["1"]}
SAMPLES = {"--samples": ["32"]}
# For each verb: options added to each of its commands, and options that replace existing ones.
GIVEN = {
    "bench allreduce": NUMBERS | {"--sizes": ["4B,64KiB"]},
    "bench chunks": NUMBERS,
    "bench wrappers": NUMBERS | {"--hidden": ["8"]},
    "profile layers": NUMBERS | SAMPLES,
    "profile phases": NUMBERS | SAMPLES,
    "profile trace": {"--steps": ["2"]} | SAMPLES,
    "profile comm-table": NUMBERS | SAMPLES,
    "scale batch": SAMPLES | {"--epochs": ["2"], "--batch-size": ["4,8"]},
    "scale ranks": SAMPLES | {"--iters": ["2"], "--batch-size": ["4,8"]},
    "scale large-batch": SAMPLES
    | {"--test-samples": ["16"], "--base-batch-size": ["4"], "--global-batch-size": ["16"], "--seeds": ["1"]}
    | {"--epochs": ["2"], "--evaluations": ["2"], "--updates": ["2"]},
    "train": SAMPLES | {"--test-samples": ["16"]},
    "tune": SAMPLES | {"--quick": []},
}
SMALLER = {
    "-e": ["64KiB"],
    "--total": ["1MB"],
    "--batch-size": ["4"],
    "--global-batch-size": ["8"],
    "--epochs": ["1"],
}
# these options measure nothing, so nothing needs to be made smaller
FROM_A_RUN = {"--model-profile", "--csv", "--trace", "--compare"}


def group_options(words: list[str]) -> dict[str, list[str]]:
    """Each option with its values; a repeated option keeps all of them."""
    options: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[a-z]", word):
            name = word
            options.setdefault(name, [])
        else:
            options[name].append(word)
    return options


def find_file(word: str) -> str:
    return str(ROOT / word) if re.match("(results|examples)/", word) else word


def limit_ranks(text: str) -> str:
    return ",".join(sorted({str(min(int(count), 2)) for count in text.split(",")}))


def shorten(command: str) -> list[str]:
    """The arguments of a small version of a documented command."""
    words = shlex.split(command)[1:]
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    verb, options = words[:first], group_options(words[first:])
    if verb[0] == "report":  # otherwise the page is written to the run's folder
        return [*map(find_file, words), "--page", "page.html"]
    options = {name: [find_file(value) for value in values] for name, values in options.items()}
    if (FROM_A_RUN & set(options) and verb[0] != "bench") or " ".join(verb) not in GIVEN:
        return [find_file(word) for word in words]
    given = GIVEN[" ".join(verb)]
    smaller = {name: values for name, values in (SMALLER | given).items() if name in options}
    model = options.get("--model", ["cnn"] if verb[0] in ("train", "tune", "scale", "profile") else [""])[0]
    if model == "resnet18":
        del options["--model"]
    changed = MODELS.get(model, CNN if model == "cnn" else {})
    options = {**options, **given, **smaller, **changed}
    if "-e" in options:
        del options["--sizes"]
    if "--ranks" in options:
        options["--ranks"] = [limit_ranks(options["--ranks"][0])]
    if options.get("--data") == ["mrpc:FOLDER"]:
        options |= {"--samples": ["12"], "--test-samples": ["4"]}
    options.pop("--device", None)
    if "--backend" in options:
        names = options["--backend"][0].replace("nccl", "gloo").split(",")
        options["--backend"] = [",".join(dict.fromkeys(names))]
    if options.get("--wrapper") == ["dp"]:  # refused without a GPU
        options["--wrapper"] = ["none"]
    options = {name: [value.replace("FOLDER", value.split(":")[0]) for value in options[name]] for name in options}
    return [*verb, *(word for name, values in sorted(options.items()) for word in (name, *values))]


VERDICTS = ("done", "confirmed", "**in part**", "**contradicted**", "answered", "not checkable here", "not measured")


def find_unfinished_rows(text: str) -> list[str]:
    """Rows of the documents without a valid verdict, command, page or result."""
    sections = re.split(r"^## \d{3}: .*$", text, flags=re.MULTILINE)[1:]
    rows = [line for section in sections for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if not row.startswith("| the doc")]
    return [
        row[0] for row in cells
        if len(row) != 5 or not all(row) or not row[1].startswith(VERDICTS) or "`" not in row[2] or "](" not in row[3]
    ]  # fmt: skip


def test_every_row_has_a_verdict_a_command_a_page_and_a_result():
    assert len(COMMANDS) > 80
    assert find_unfinished_rows(SOURCES) == []


@pytest.mark.parametrize("gap", ["| done |", "| `paceline train` |", "| [page](a.md) |", "| [test](b.py) |"])
def test_a_row_with_a_gap_is_found(gap):
    text = "## 000: A\n| a claim | done | `paceline train` | [page](a.md) | [test](b.py) |\n"
    assert find_unfinished_rows(text) == []
    assert find_unfinished_rows(text.replace(gap, "| |")) == ["a claim"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with small files of each dataset and the file that a command names."""
    folder = tmp_path_factory.mktemp("sources")
    save_cifar_batches(folder / "cifar10")
    save_mnist(folder / "mnist")
    save_mrpc(folder / "mrpc")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    page = (ROOT / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(# my_model\.py.*?)```", page, re.DOTALL)
    (folder / "my_model.py").write_text(code)
    return folder


# Several commands have the same small version. tests/dist/test_slurm.py runs the jobs of `paceline run --slurm`.
SHORT = sorted({tuple(shorten(command)) for command in COMMANDS if not command.startswith("paceline run")})


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SHORT, ids=" ".join)
def test_a_command_of_the_sources_runs(arguments, place, monkeypatch):
    monkeypatch.chdir(place)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # A one-rank job runs in this process, so nothing has to start.
    is_alone = "--ranks" not in arguments and arguments[0] in ("train", "profile", "scale")
    answer = (type_alone if is_alone else type_command)(*arguments)
    assert answer.code == 0, answer.err
    assert answer.out


@pytest.mark.parametrize(
    ("command", "short"),
    [
        ("paceline bench allreduce --ranks 2,4,6 --backend gloo,nccl", "allreduce --backend gloo --iters 2 --ranks 2"),
        ("paceline predict --csv FOLDER --ranks 8", "predict --csv FOLDER --ranks 8"),
        ("paceline train --model resnet18 --data cifar10:FOLDER", "--data cifar10:cifar10 --hidden 8 --samples 32"),
    ],
)
def test_a_command_is_shortened(command, short):
    assert short in shlex.join(shorten(command))
