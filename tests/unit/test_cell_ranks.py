"""How a notebook shows the output of its ranks: lines prefixed with the rank, one error, cells for selected ranks."""

from __future__ import annotations

import types

import pytest

from paceline import ConfigError
from paceline.integrations import notebook
from paceline.runtime.faults.processes import Failure
from paceline.runtime.notebooks.cell_ranks import (
    CellError,
    CellInterrupted,
    RankLines,
    describe_end,
    parse_ranks,
    runs_on_ranks,
)
from paceline.runtime.notebooks.cells import Ended


def mix(*pieces: tuple[int, str]) -> str:
    written: list[str] = []
    lines = RankLines(lambda stream, text: written.append(text))
    for rank, text in pieces:
        lines.add(rank, "stdout", text)
    lines.close()
    return "".join(written)


def test_every_line_names_its_rank():
    assert mix((0, "a\nb\n"), (1, "c\n")) == "[0] a\n[0] b\n[1] c\n"
    assert mix((0, "one "), (0, "line\n")) == "[0] one line\n"
    assert mix((0, "a\n\nb\n")) == "[0] a\n[0]\n[0] b\n"


def test_ranks_do_not_write_into_each_others_lines():
    assert mix((0, "half"), (1, "other\n"), (0, "rest\n")) == "[0] half\n[1] other\n[0] rest\n"
    assert mix((0, "unfinished")) == "[0] unfinished\n"


def test_a_progress_bar_overwrites_its_own_line_and_others_show_their_last_state():
    pieces = [(rank, f"\r{share} %") for share in (0, 50, 100) for rank in (0, 1)]
    text = mix(*pieces, (0, "\n"), (1, "\n"))
    assert text == "[0] 0 %\r[0] 50 %\r[0] 100 %\n[1] 100 %\n"


def fail(rank: int, when_s: float, text: str, trace: str = "trace", secondary: bool = False, **more) -> Ended:
    return Ended(1, Failure(rank, when_s, f"failed: {text}", trace, is_secondary=secondary), "In[1], line 2: x", **more)


def test_the_same_failure_on_all_ranks_is_one():
    error = describe_end({0: fail(0, 2.0, "NameError: x"), 1: fail(1, 1.0, "NameError: x")}, 2, False)
    assert isinstance(error, CellError) and error.others == ()
    assert "ranks 0, 1 of 2" in str(error) and error._render_traceback_() == ["trace", "(on ranks 0, 1 of 2)"]


def test_the_rank_that_only_waited_is_not_the_culprit():
    ends = {0: fail(0, 1.0, "closed", "a", was_aborted=True), 1: fail(1, 2.0, "ValueError: planted", "b")}
    error = describe_end(ends, 2, False)
    assert error.rank == 1 and error.rank_traceback == "b"
    assert error.others == ("rank 0: waited for rank 1 (In[1], line 2: x)",)
    lost = describe_end({0: fail(0, 1.0, "lost", "a", secondary=True), 1: fail(1, 2.0, "KeyError", "b")}, 2, False)
    assert lost.rank == 1


def test_different_failures_are_all_named_and_the_first_has_its_traceback():
    error = describe_end({0: fail(0, 2.0, "KeyError: 1", "a"), 2: fail(2, 1.0, "KeyError: 2", "b")}, 3, False)
    assert error.rank == 2 and error.others == ("rank 0: KeyError: 1 (In[1], line 2: x)",)


def test_an_interrupt_reports_the_location_of_every_rank():
    error = describe_end({1: fail(1, 1.0, "KeyboardInterrupt")}, 2, True)
    assert isinstance(error, CellInterrupted) and "rank 1 was at In[1], line 2: x" in str(error)
    assert describe_end({}, 2, False) is None


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", [0]), ("[1,2]", [1, 2]), (" [0] ", [0]), ("0-2, 4", [0, 1, 2, 4]), ("[1, 3]", [1, 3])]
)
def test_ranks_as_they_are_typed(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["one", "[0", "-1", "0;1"])
def test_invalid_ranks_are_refused(text):
    if text == "[0":  # a missing bracket is tolerated
        assert parse_ranks(text) == [0]
        return
    with pytest.raises(ConfigError) as caught:
        parse_ranks(text)
    assert caught.value.code == "rank"


@pytest.mark.parametrize("source", ["x = 1", "await f()", "def f(:", "x % 2", "s = '%d!' % 3", "ok = a != b"])
def test_python_with_a_mistake_also_runs_on_ranks(source):
    assert runs_on_ranks(source)


@pytest.mark.parametrize("source", ["", "# words", "%time x", "!ls", "x = !ls", "x?", "a = 1\n%time f()", "%%time\nx"])
def test_ipython_syntax_stays_in_the_notebook(source):
    assert not runs_on_ranks(source)


def test_an_ipython_that_is_too_old_is_refused_and_the_extra_named(monkeypatch):
    monkeypatch.setattr(notebook.IPython, "version_info", (7, 34, 0, ""))
    with pytest.raises(ConfigError, match=r"paceline\[notebook\]") as caught:
        notebook.load(types.SimpleNamespace())
    assert caught.value.code == "missing-extra"
