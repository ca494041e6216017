"""Generated malformed commands, configurations, checkpoints, traces and data: one line, exit code 2, no traceback.

Every case is determined by its number, so a failing case can be rerun separately. Nothing is started: a command that
would start ranks exits with its own code, which is right for unusual but valid input.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.main import app, main
from paceline.errors import ConfigError, PacelineError, RecordError
from paceline.records.training import CONFIG_FILE
from tests.unit import made_runs

RESULTS = Path(__file__).parents[2] / "results"
STARTS = 77
REFUSED, REFUSED_OR_STARTS, ANY = {2}, {2, STARTS}, {0, 1, 2, STARTS}

LONG, DEEP, WIDE = "9" * 5000, "x/" * 3000, "/tmp/" + "n" * 300
NO_NUMBERS = ("", " ", "x", "nan", "1e3", "0x10", "1.5", "--", "1,", LONG, "1_0_", "٣x", "-")
ABSURD = {
    "--batch-size": 10**12, "--hidden": 10**9, "--samples": 10**12, "--context": 10**8, "--iters": 10**24,
    "--steps": 10**24, "--epochs": 10**24, "--accumulate": 10**15, "--warmup": 10**24, "--threads": 10**9,
    "--global-batch-size": 10**17, "--ranks": 10**9, "--workers": 10**12, "--seeds": 10**12, "--channels": 10**9,
    "--evaluations": 10**18, "--trials": 10**12,
}  # fmt: skip
COMMON = {"--batch-size", "--ranks", "--hidden", "--samples", "--iters", "--steps"}  # the others are slow
PREDICTED = {
    (("predict",), "--ranks"),
    (("predict", "scale"), "--ranks"),
    (("profile", "comm-table"), "--ranks"),
}  # none of these starts ranks
NEEDS = {"--hidden": ("--model", "mlp"), "--context": ("--model", "gpt2-tiny"), "--warmup": ("--iters", "5")}


def list_commands() -> list[tuple[tuple[str, ...], Any]]:
    """Every command that measures, as a tuple of words."""
    root: Any = typer.main.get_command(app)
    found = []
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            found += [((name, inner), one) for inner, one in command.commands.items()]
        elif name not in ("watch", "run", "doctor", "demo"):  # these do not measure, or have nothing to refuse
            found.append(((name,), command))
    return found


COMMANDS = list_commands()
Case = tuple[tuple[str, ...], set[int]]


def find_kind(option: Any) -> str:
    """One of "integer", "float" and "text", in any version of typer."""
    found = getattr(option, "type", None) or option.type_descriptor.annotation
    text = f"{getattr(found, 'name', '')} {found}"
    return "integer" if "int" in text else "float" if "float" in text else "text"


def draw_invocation(draw: random.Random) -> Case:
    """An option of a command with an invalid value."""
    words, command = draw.choice(COMMANDS)
    options = [one for one in command.params if one.opts and one.opts[0].startswith("--") and not one.is_flag]
    absurd = [one for one in options if one.opts[0] in ABSURD and (words, one.opts[0]) not in PREDICTED]
    if absurd and draw.random() < 0.4:
        flag = draw.choice(absurd).opts[0]
        value = ABSURD[flag] * draw.choice((1, 1, 7, 10))
        return (*words, *draw_more(draw, words, flag), flag, str(value)), REFUSED
    option = draw.choice(options)
    flag, kind = option.opts[0], find_kind(option)
    if kind in ("integer", "float"):
        value = draw.choice([text for text in NO_NUMBERS if kind == "integer" or text not in ("nan", "1e3", "1.5")])
        value = "x" * 5000 if value == LONG and kind == "float" else value
        with contextlib.suppress(ValueError):
            float(value.replace("_", "")) if kind == "float" else int(value)
            return (*words, flag, "nothing"), REFUSED
        return (*words, f"{flag}={value}"), REFUSED
    value = draw.choice((LONG, DEEP, WIDE, "\x00", "{", "é" * 3000, "", ",", ":", "../" * 2000))
    return (*words, f"{flag}={value}"), REFUSED_OR_STARTS if len(value) < 400 and "\x00" not in value else REFUSED


def draw_more(draw: random.Random, words: tuple[str, ...], flag: str) -> tuple[str, ...]:
    more = NEEDS.get(flag, ())
    return more if words[0] in ("train", "profile", "scale", "tune") else ()


JUNK = (None, True, -1, 0, 10**30, 1e308, "8", "", "x" * 3000, [], {}, [[1]], {"a": {"b": 1}}, [None], "\x00")


def spoil(draw: random.Random, document: Any) -> Any:
    """A JSON document with one value replaced."""
    document = copy.deepcopy(document)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw.choice(list(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            place = inner
            continue
        action = draw.random()
        if action < 0.75:
            place[key] = copy.deepcopy(draw.choice([junk for junk in JUNK if type(junk) is not type(inner)]))
        elif action < 0.9 or isinstance(place, list):
            del place[key]
        else:
            place[str(key) + "x"] = place.pop(key)
        return document


def spoil_text(draw: random.Random, text: str) -> str:
    """Text that was replaced, truncated or modified."""
    return draw.choice((
        lambda: "", lambda: "[" * 100_000, lambda: '{"a":' * 50_000, lambda: "null", lambda: "[]", lambda: f"[{LONG}]",
        lambda: text[: draw.randrange(len(text))], lambda: "\ufeff" + text[:50], lambda: "\x00" * 64,
        lambda: text.replace(":", "", 1), lambda: json.dumps({"format": "paceline-run", "version": 10**40}),
    ))()  # fmt: skip


def load_small() -> list[tuple[str, Any]]:
    """The paths and documents of the smallest runs."""
    names = ("allreduce-gloo-2-ranks", "layers-cnn-tiny", "trace-gpt2-mini-gloo-2-ranks")
    files = [RESULTS / "neoverse-n1-2-cores" / name / "run.json.gz" for name in names]
    files += sorted(RESULTS.glob("*/*/run.json.gz"), key=lambda file: (file.stat().st_size, str(file)))[:3]
    return [(str(file), json.loads(gzip.decompress(file.read_bytes()))) for file in files]


def draw_file(draw: random.Random, folder: Path, small: list[tuple[str, Any]]) -> Case:
    """A run, or a damaged one, for a command that reads it."""
    _, document = draw.choice(small)
    is_text = draw.random() < 0.4
    text = spoil_text(draw, json.dumps(document)) if is_text else json.dumps(spoil(draw, document))
    name = draw.choice(("run.json", "run.json", "table.csv", "table.md", "table.json")) if is_text else "run.json"
    place = folder / "given"
    place.mkdir(exist_ok=True)
    (place / name).write_text(text, encoding="utf-8")
    given = str(place / name) if name != "run.json" or draw.random() < 0.5 else str(place)
    return draw.choice((
        (("bench", "allreduce", "--compare", given), ANY),
        (("predict", "--model-profile", given, "--network", "10gbe"), ANY),
        (("predict", "--csv", str(place)), ANY),
        (("predict", "--model-profile", str(RESULTS / "none"), "--allreduce", given), REFUSED),
        (("profile", "--compare", given, given), ANY),
        (("report", given, "--page", str(folder / "page.html")), ANY),
        (("train", "--plan", given), REFUSED),
        (("train", "--compare", given, given), ANY),
        (("scale", "report", given), ANY),
        (("scale", "ranks", "--resume", str(place)), REFUSED),
        (("predict", "--trace", given, "--network", "10gbe"), ANY),
    ))  # fmt: skip


def draw_config(draw: random.Random, folder: Path) -> Case:
    """A training run with an edited configuration."""
    run = made_runs.make_folder(folder / "run", made_runs.make_rows(steps=3))
    document = json.loads((run / CONFIG_FILE).read_text())
    if draw.random() < 0.7:
        name = draw.choice(list(document["settings"]))
        kind = type(document["settings"][name])
        document["settings"][name] = draw.choice([junk for junk in JUNK if type(junk) is not kind])
    else:
        document = spoil(draw, document)
    text = json.dumps(document) if draw.random() < 0.9 else spoil_text(draw, json.dumps(document))
    (run / CONFIG_FILE).write_text(text, encoding="utf-8")
    verb = draw.choice((("train", "--resume"), ("train", "--resume"), ("report",)))
    return (*verb, str(run)), ANY if verb == ("report",) else REFUSED_OR_STARTS


def run_command(monkeypatch, arguments: tuple[str, ...]) -> tuple[int, str]:
    """The exit code and stderr of a command; ranks are not started."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return code, err.getvalue()


@pytest.fixture
def starts_nothing(monkeypatch, tmp_path):
    def refuse(*_: Any, **__: Any) -> None:
        raise SystemExit(STARTS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.machine.count_gpus", lambda: 0)
    monkeypatch.setattr("paceline.runtime.ranks.launch.RankPool.start", refuse)
    monkeypatch.setattr("paceline.runtime.ranks.launch.RankPool.run", refuse)
    monkeypatch.setattr("paceline.studies.fault_trials.measure_fault", refuse)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def check_case(monkeypatch, arguments: tuple[str, ...], allowed: set[int]) -> None:
    shown = [word if len(word) < 200 else f"{word[:60]}...({len(word)})" for word in arguments]
    code, err = run_command(monkeypatch, arguments)
    assert code in allowed, (shown, code, err[-500:])
    assert "Traceback" not in err, (shown, err[-2000:])
    if code == 2 and "Usage:" not in err:  # the option parser also prints usage
        lines = [line for line in err.splitlines() if line.startswith("paceline: error: ")]
        assert len(lines) == 1, (shown, err[-500:])


def run_cases(monkeypatch, folder: Path, numbers: range) -> None:
    small, failed = load_small(), []
    for number in numbers:
        draw = random.Random(number)
        place = folder / str(number)
        place.mkdir()
        kind = draw.random()
        if kind < 0.5:
            case = draw_invocation(draw)
        elif kind < 0.8:
            case = draw_file(draw, place, small)
        else:
            case = draw_config(draw, place)
        try:
            check_case(monkeypatch, *case)
        except Exception as error:
            failed.append(
                f"case {number}: {[word[:100] for word in case[0]]}: {type(error).__name__}: {str(error)[:600]}"
            )
    assert not failed, "\n".join([f"{len(failed)} of {len(numbers)}:", *failed[:40]])


def test_a_sample_of_malformed_commands_and_files(monkeypatch, tmp_path, starts_nothing):
    run_cases(monkeypatch, tmp_path, range(80))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 1700, 50))
def test_malformed_commands_and_files(monkeypatch, tmp_path, starts_nothing, start):
    run_cases(monkeypatch, tmp_path, range(start, start + 50))


@pytest.mark.parametrize(
    "flag", [pytest.param(flag, marks=[pytest.mark.slow] * (flag not in COMMON)) for flag in ABSURD]
)
def test_an_absurd_request_is_refused_by_its_memory_or_time(monkeypatch, tmp_path, starts_nothing, flag):
    for words, command in COMMANDS:
        if any(flag in one.opts for one in command.params) and (words, flag) not in PREDICTED:
            more = draw_more(random.Random(0), words, flag)
            check_case(monkeypatch, (*words, *more, flag, str(ABSURD[flag])), REFUSED)


def spoil_bytes(draw: random.Random, content: bytes) -> bytes:
    """Truncated, modified or replaced bytes."""
    damaged = bytearray(content)
    action = draw.random()
    if action < 0.2:
        return bytes(damaged[: draw.randrange(len(damaged))])
    if action < 0.3:
        return draw.choice((b"", b"\x00" * 100, b"\xff" * 1000, b"[" * 100_000, content + b"x"))
    for _ in range(draw.choice((1, 1, 4))):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def spoil_checkpoints(folder: Path, numbers: range) -> int:
    """Damage a checkpoint in these ways and check that it never loads; returns the number of pure bit flips."""
    import torch

    from paceline.training.checkpoint_files import CheckpointStore, load_checkpoint

    store = CheckpointStore(folder / "checkpoints")
    state = {"optimizer": {"state": {0: torch.ones(3)}, "lr": 0.1}, "random": [torch.arange(4)]}
    store.save(1, {"weight": torch.randn(4, 3), "bias": torch.randn(3)}, state, {"step": 1, "epoch": 0})
    store.wait()
    path = store.path(1)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    load_checkpoint(path)
    num_flipped = 0
    for number in numbers:
        draw = random.Random(number)
        name = draw.choice(sorted(whole))
        damaged = spoil_bytes(draw, whole[name])
        if damaged == whole[name]:
            continue
        num_flipped += len(damaged) == len(whole[name])
        (path / name).write_bytes(damaged)
        try:
            with pytest.raises((RecordError, ConfigError)) as caught:
                load_checkpoint(path)
            assert "\n" not in str(caught.value), number
        finally:
            (path / name).write_bytes(whole[name])
    return num_flipped


def test_a_sample_of_damaged_checkpoints(tmp_path):
    spoil_checkpoints(tmp_path, range(40))


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints(tmp_path):
    assert spoil_checkpoints(tmp_path, range(1500)) >= 1000


def spoil_data(folder: Path, numbers: range) -> None:
    """Files of datasets, read as a rank reads them: either one of our one-line errors, or samples."""
    import numpy

    from paceline.workloads.data import DataRequest
    from paceline.workloads.data.sets import load_data

    draw_pixels = numpy.random.default_rng(1)
    images, labels = draw_pixels.integers(256, size=(6, 28, 28), dtype="u1"), numpy.arange(6, dtype="u1")
    names = {"images-idx3": images, "labels-idx1": labels}
    whole = {
        f"{split}-{name}-ubyte": struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        for split in ("train", "t10k")
        for name, array in names.items()
    }
    whole["text.txt"] = b"once upon a time there was a byte. " * 20
    for number in numbers:
        draw = random.Random(number)
        place = folder / str(number)
        place.mkdir()
        bad = draw.choice([name for name in sorted(whole) if not name.startswith("t10k")])
        for name, content in whole.items():
            (place / name).write_bytes(spoil_bytes(draw, content) if name == bad else content)
        name, path = ("text", place / "text.txt") if bad == "text.txt" else ("mnist", place)
        context = 16 if name == "text" else None
        try:
            load_data(DataRequest(name=name, path=str(path), context=context), "train")
        except PacelineError as error:
            assert "\n" not in str(error), number


def test_a_sample_of_damaged_data(tmp_path):
    spoil_data(tmp_path, range(30))


@pytest.mark.slow
def test_many_damaged_data_files(tmp_path):
    spoil_data(tmp_path, range(400))
