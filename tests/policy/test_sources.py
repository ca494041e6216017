"""Every promise of the five source documents has a command or call, a page and, where there is one, a result."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from typing import NamedTuple

import pytest

import paceline

from .test_docs import ROOT, find_dead_links, parse_command

SOURCES = ROOT / "docs" / "sources.md"
# Finished in seconds, without ranks: these run. `paceline predict` with tables is run by tests/cli/test_predict.py.
RUN = ("paceline profile --compare results/", "paceline predict --model-profile results/", "paceline.load_result(")


class Line(NamedTuple):
    document: str
    promise: str
    here: str
    page: str
    result: str


def read_lines(text: str) -> list[Line]:
    """The lines of all tables, without headers; a line with another number of cells raises."""
    lines, document = [], ""
    for row in text.splitlines():
        if heading := re.match(r"## (\d+): ", row):
            document = heading[1]
        elif row.startswith("| ") and not row.startswith("| the document |"):
            lines.append(Line(document, *(cell.strip() for cell in row.strip()[1:-1].split("|"))))
    return lines


def resolve(code: str) -> None:
    """Raise unless what is in backticks can be typed: a command, a call of the public API, or a program of ours."""
    if re.match(r"paceline |.* -m paceline ", code):
        parse_command(code)
    elif code.startswith("paceline."):
        expression = ast.parse(code, mode="eval").body
        call = expression if isinstance(expression, ast.Call) else None
        target = paceline
        for name in ast.unparse(call.func if call else expression).split(".")[1:]:
            target = getattr(target, name)
        assert callable(target) or (call is None and isinstance(target, property))
        if call is not None:
            inspect.signature(target).bind_partial(*call.args, **{str(word.arg): None for word in call.keywords})
    elif code.startswith("make "):
        assert f"\n{code.split()[1]}:" in (ROOT / "Makefile").read_text(), "no such target"
    else:
        known = code.startswith(("examples/", "docs/tutorial/")) and (ROOT / code).is_file()
        assert known, f"{code} is neither a command nor an example"


def find_faults(line: Line) -> list[str]:
    codes = re.findall(r"`([^`]+)`", line.here)
    faults = [] if codes or line.here.startswith("not yet") else ["neither a command nor `not yet`"]
    for code in codes:
        try:
            resolve(code)
        except Exception as error:
            faults.append(f"{code}: {type(error).__name__}: {error}")
    faults += [] if "](" in line.page else ["no page"]
    return faults + [f"nothing is at {link}" for link in find_dead_links(SOURCES, line.page + line.result)]


LINES = read_lines(SOURCES.read_text())


def test_every_document_is_there():
    assert sorted({line.document for line in LINES}) == ["000", "001", "002", "003", "004"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.document}: {line.promise}")
def test_a_line_leads_somewhere(line):
    assert find_faults(line) == []


@pytest.mark.slow  # the commands themselves have tests of their own
def test_what_is_quick_also_runs(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    codes = {code for line in LINES for code in re.findall(r"`([^`]+)`", line.here) if code.startswith(RUN)}
    assert {code.split()[1] for code in codes if " " in code} == {"profile", "predict"}
    for code in sorted(codes):
        if code.startswith("paceline."):
            assert paceline.load_result(ast.literal_eval(code.split("(")[1].rstrip(")"))).records
        else:
            words = shlex.split(code)[1:] + (["--out", str(tmp_path)] if "predict" in code else [])
            answer = command(*words)
            assert answer.code == 0 and answer.out, f"{code}: {answer.err}"


@pytest.mark.parametrize(
    ("here", "page", "words"),
    [
        ("`paceline bench allreduce --no-such-option 3`", "[a](api.md)", "No such option"),
        ("`paceline bench nothing --ranks 2`", "[a](api.md)", "no such command"),
        ("`torchrun --nproc-per-node 2 -m paceline train --no-such-option`", "[a](api.md)", "No such option"),
        ("`paceline.no_such_call()`", "[a](api.md)", "AttributeError"),
        ("`paceline.DDP(net, no_such_option=1)`", "[a](api.md)", "TypeError"),
        ("`make nothing`", "[a](api.md)", "no such target"),
        ("`examples/no_such_program.py`", "[a](api.md)", "neither a command nor an example"),
        ("later", "[a](api.md)", "neither a command nor `not yet`"),
        ("`paceline doctor`", "", "no page"),
        ("`paceline doctor`", "[a](no_such_page.md)", "nothing is at no_such_page.md"),
        ("`paceline doctor`", "[a](api.md#no-such-heading)", "nothing is at api.md#no-such-heading"),
    ],
)
def test_a_line_that_leads_nowhere_is_found(here, page, words):
    (fault,) = find_faults(Line("000", "a promise", here, page, ""))
    assert words in fault


def test_a_missing_result_and_a_missing_cell_are_found():
    line = Line("000", "a promise", "not yet", "[a](api.md)", "[b](../results/no-such-machine/table.md)")
    assert find_faults(line) == ["nothing is at ../results/no-such-machine/table.md"]
    with pytest.raises(TypeError):
        read_lines("## 000: a document\n| a promise | not yet | [a](api.md) |\n")
