"""Commands in the documents parse, make targets and programs exist, and links have targets."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer.main

from paceline.cli.main import _join_lists, app
from paceline.records.store import load_run
from paceline.report.result import load_result
from paceline.workloads.registry import _OTHERS, NAMES

from .reading import REPOSITORY as ROOT
from .reading import expect_none, load_script
from .test_house_rules import MACHINE_PATHS
from .test_public_api import check_call, find_calls

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PLACEHOLDERS = {"FILE": "file.csv", "FOLDER": "folder"}


def find_commands(text: str, program: str) -> list[str]:
    """Lines of console blocks and inline code that call this program, also through torchrun."""
    joined = re.sub(r"\\\n\s*", "", text)  # a trailing backslash continues the line
    blocks = [line for block in re.findall(r"```console\n(.*?)```", joined, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.split("#")[0].strip().removeprefix("$ ") for line in (*blocks, *inline)]
    found = [re.search(rf"^{program} .*|(?<=-m ){program} .*", line) for line in lines]
    return [match[0] for match in found if match]


build_app = functools.cache(lambda: typer.main.get_command(app))


def parse_command(line: str) -> None:
    """Parse one of our command lines without running it; raises the error that the user would see."""
    arguments = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
    arguments = _join_lists(arguments[arguments.index("paceline") + 1 :])
    if not arguments or arguments == ["--help"]:
        return
    command, context = build_app(), None
    while hasattr(command, "get_command"):
        context = command.make_context("paceline", [], parent=context, resilient_parsing=True)
        if not arguments:
            return
        if arguments[0].startswith("-"):  # options of the group
            break
        name, arguments = arguments[0], arguments[1:]
        command = command.get_command(context, name)
        assert command is not None, f"no such command: {name}"
    command.make_context(command.name, arguments, parent=context)


ALL_COMMANDS = sorted({c for path in DOCUMENTS for c in find_commands(path.read_text(), "paceline")})


def find_markers(text: str) -> list[str]:
    """Conflict markers left by a merge."""
    return [line for line in text.splitlines() if re.match(r"(<{7}|={7}|>{7})( |$)", line)]


def test_there_are_no_conflict_markers():
    expect_none([f"{path.name}: {line}" for path in DOCUMENTS for line in find_markers(path.read_text())])


def test_a_conflict_marker_is_found():
    assert find_markers("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> main\n") == ["<<<<<<< HEAD", "=======", ">>>>>>> main"]


def find_wrong_commands(commands: Iterable[str]) -> list[str]:
    """The commands that do not parse, each with its error."""
    wrong = []
    for command in commands:
        try:
            parse_command(command)
        except Exception as error:
            wrong.append(f"{command}: {error}")
    return wrong


def test_every_command_in_the_documents_parses():
    assert any("bench allreduce" in command for command in ALL_COMMANDS) and "paceline doctor" in ALL_COMMANDS
    expect_none(find_wrong_commands(ALL_COMMANDS))


@pytest.mark.parametrize("command", ["paceline bench allreduce --no-such-flag", "paceline bench nothing --x"])
def test_a_command_that_does_not_exist_is_found(command):
    assert len(find_wrong_commands([command, "paceline doctor"])) == 1


def find_wrong_calls(text: str) -> list[str]:
    """Calls of the public API in inline code with an unknown function or argument."""
    wrong = []
    for code in re.findall(r"`(paceline\.[^`\n]+\))`", text):
        try:
            for words, call in find_calls(code):
                check_call(words, call)
        except (SyntaxError, AttributeError, TypeError) as error:
            wrong.append(f"{code}: {error}")
    return wrong


def test_every_call_in_the_documents_has_arguments_that_exist():
    expect_none([f"{path.name}: {wrong}" for path in DOCUMENTS for wrong in find_wrong_calls(path.read_text())])


def test_a_call_that_does_not_exist_is_found():
    assert (
        len(find_wrong_calls("`paceline.no_such_call()` `paceline.DDP(net, no_such_option=1)` `paceline.init()`")) == 2
    )


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {c.split()[1] for path in DOCUMENTS for c in find_commands(path.read_text(), "make")}
    assert {"demo", "test"} <= named <= targets


def find_missing_programs(text: str) -> list[str]:
    """Missing examples and benchmarks that a text names."""
    named = re.findall(r"\b(?:examples|benchmarks)/[\w/]+\.(?:py|sh)\b", text)
    return [name for name in named if not (ROOT / name).is_file()]


def test_the_programs_that_a_document_names_exist():
    expect_none([f"{path.name}: {name}" for path in DOCUMENTS for name in find_missing_programs(path.read_text())])


def test_a_program_that_does_not_exist_is_found():
    assert find_missing_programs("`examples/quick_start.py` examples/none.py") == ["examples/none.py"]


@functools.cache
def find_anchors(path: Path) -> set[str]:
    """The anchors that GitHub creates for a document's headings."""
    text = path.read_text()
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_dead_links(path: Path, text: str) -> list[str]:
    """Links in a text of the document at `path` without an existing file or heading."""
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            dead.append(link)
    return dead


def test_links_have_targets():
    expect_none([f"{path.name}: {link}" for path in DOCUMENTS for link in find_dead_links(path, path.read_text())])


def test_a_dead_link_is_found():
    text = "[a](no-such-page.md) [b](api.md#no-such-heading) [c](api.md#set_seed) [d](#no-such-heading) [e](#api)"
    dead = ["no-such-page.md", "api.md#no-such-heading", "#no-such-heading"]
    assert find_dead_links(ROOT / "docs" / "api.md", text) == dead


def test_the_table_of_models_is_complete():
    (table,) = re.findall(r"\| `--model` \|.*?\n\n", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    named = [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == sorted((*NAMES, *_OTHERS))


RECORDER = load_script(ROOT / "docs" / "record.py")
CASTS = sorted((ROOT / "docs" / "recordings").glob("*.cast"))


def test_recordings_are_drawn_from_their_casts_and_their_commands_parse():
    assert CASTS
    for path in CASTS:
        cast = RECORDER.load_cast(path)
        assert RECORDER.render_svg(cast) == path.with_suffix(".svg").read_text()
        parse_command(cast[0]["command"])
        assert not any(place in path.read_text() for place in MACHINE_PATHS)


def test_a_recorded_screen_keeps_the_last_state_of_a_line_that_moves():
    screen = RECORDER.Screen()
    screen.write("one\r\n 10 %\r 20 %\x1b[K\r\nthree\r\n\x1b[1A\x1b[2Knew\x1b[?25l\x1b[31m!\x1b[0m")
    assert screen.shown == ["one", " 20 %", "new!"]


def find_stale_output(text: str) -> list[str]:
    """The commands in this document with output that differs from the following text: `paceline report RUN`, and
    `paceline profile -- COMMAND` where the results have a run of it."""
    blocks = re.findall(r"^\$ paceline (report|profile --) (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    profiles = {shlex.join(load_run(run).config["command"]): run for run in (ROOT / "results").glob("*/profile-*")}
    printed = {of: load_result(ROOT / of if verb == "report" else profiles[of]).text(80) for verb, of, _ in blocks}
    return [of for _, of, shown in blocks if not printed[of].startswith(shown.rstrip())]


def test_the_readme_is_short_and_shows_what_is_printed():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120 and "$ paceline report " in text and "$ paceline profile -- " in text
    expect_none(find_stale_output(text))


def test_stale_output_is_found():
    text = (ROOT / "README.md").read_text()
    changed = text.replace("alternating", "interleaved").replace("Verdict:", "Result:")
    named = ["torchrun --nproc-per-node 2 train.py", "results/neoverse-n1-2-cores/tune-1Gb-link-torch"]
    assert find_stale_output(changed) == named
