"""Notebook cells on persistent ranks: live output, one error, interrupts, and working collectives afterward."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from paceline import ConfigError, LaunchError
from paceline.runtime.notebooks import cell_ranks
from paceline.runtime.notebooks.cell_ranks import CellError, CellInterrupted, CellRanks, RankLines
from paceline.runtime.notebooks.cells import CellSettings, Output, Shown
from paceline.transport import why_not
from tests.conftest import BACKEND, find_ranks, wait_until

BACKENDS = [
    pytest.param("gloo", marks=[pytest.mark.slow] * (BACKEND != "gloo")),
    pytest.param("shm", marks=pytest.mark.skipif(bool(why_not()), reason=why_not() or "")),
]
SUM = "x = torch.ones(2) * (rank + 1)\ndist.all_reduce(x)\nx.tolist()"


class Notebook:
    """Ranks and their output."""

    def __init__(self, backend: str, num_ranks: int = 2) -> None:
        self.text, self.shown, self.notices = "", [], []
        self._lines = RankLines(self._write)
        self.ranks = CellRanks(CellSettings(num_ranks, backend, "cpu"), self._show, self.notices.append)

    def _write(self, stream: str, text: str) -> None:
        self.text += text

    def _show(self, rank: int, message: object) -> None:
        if isinstance(message, Output):
            self._lines.add(rank, message.stream, message.text)
        elif isinstance(message, Shown):
            self.shown.append((rank, message.data))
            self.text_before = self.text

    def run(self, source: str, ranks: list[int] | None = None) -> str:
        """The output of the cell."""
        self.text = ""
        self.shown.clear()
        self.notices.clear()
        self.ranks.run(source, ranks)
        self._lines.close()
        return self.text

    def show(self, source: str, ranks: list[int] | None = None) -> list[str]:
        """The text that each rank shows for the last line."""
        self.run(source, ranks)
        return [data["text/plain"] for _, data in sorted(self.shown, key=lambda one: one[0])]


@pytest.fixture(scope="module", params=BACKENDS)
def notebook(request: pytest.FixtureRequest) -> Iterator[Notebook]:
    notebook = Notebook(request.param)
    with notebook.ranks as ranks:
        ranks.start()
        yield notebook


def test_cells_share_a_namespace_and_find_the_names_of_their_world(notebook):
    notebook.run("y = 10 * rank")
    assert notebook.show("y + world_size, get('ws'), get('rank'), str(device), gpu_id") == [
        "(2, 2, 0, 'cpu', None)", "(12, 2, 1, 'cpu', None)",
    ]  # fmt: skip
    assert notebook.show("_[0]", [1]) == ["12"]


def test_ranks_reduce(notebook):
    assert notebook.show(SUM) == ["[3.0, 3.0]"] * 2


def test_output_names_its_rank_whoever_writes_it(notebook):
    text = notebook.run(
        "import os, sys\nprint('hello', rank)\nprint('bad', file=sys.stderr)\nos.system('echo from a child');"
    )
    for rank in (0, 1):
        assert f"[{rank}] hello {rank}\n" in text and f"[{rank}] bad\n" in text and f"[{rank}] from a child\n" in text


def test_output_appears_while_the_cell_runs(notebook, tmp_path):
    def let_go() -> None:
        wait_until(lambda: "[0] before" in notebook.text)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=let_go)
    thread.start()
    source = (
        f"import os, time\nprint('before')\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "print('after')"
    )
    assert "[0] after\n" in notebook.run(source)
    thread.join()


def test_a_cell_for_some_ranks_runs_only_there(notebook):
    assert notebook.run("print('only here')", [1]) == "[1] only here\n"
    for ranks in ([2], [], [-1]):
        with pytest.raises(ConfigError) as caught:
            notebook.run("1", ranks)
        assert caught.value.code == "rank"


def test_functions_and_classes_of_cells_can_be_inspected_and_pickled(notebook):
    notebook.run("import pickle\nclass Point:\n    x = 1\n\ndef f(a):\n    return a + 1  # the source\n")
    assert "# the source" in notebook.show("import inspect\ninspect.getsource(f)", [0])[0]
    assert notebook.show("pickle.loads(pickle.dumps([Point(), f]))[1](2)") == ["3", "3"]


def test_the_last_line_may_await_and_a_semicolon_hides_it(notebook):
    assert notebook.show("import asyncio\nawait asyncio.sleep(0, rank)") == ["0", "1"]
    assert notebook.show("5;") == [] and notebook.show("None") == []


def test_figures_come_back_at_show_and_at_the_end_of_the_cell(notebook):
    notebook.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.plot([2, 1])\nNone", [0])
    assert [set(data) for _, data in notebook.shown] == [{"image/png", "text/plain"}] * 2
    assert notebook.show("plt.get_fignums()", [0]) == ["[]"]


RICH = """
class Rich:
    def _repr_html_(self): return "<b>1</b>"
    def _repr_png_(self): return b"png"
    def _repr_svg_(self): raise RuntimeError("cannot draw")
    def __repr__(self): return "rich"

class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None): return {"text/html": "<i>2</i>"}, {}
"""


def test_an_object_shows_every_representation_that_it_has(notebook):
    notebook.run(RICH, [0])
    assert notebook.run("display(Rich(), Bundle(), Rich)", [0]) == ""
    rich, bundle, kind = [data for _, data in notebook.shown]
    assert rich.keys() == {"text/html", "image/png", "text/plain"} and rich["text/plain"] == "rich"
    assert bundle["text/html"] == "<i>2</i>" and kind.keys() == {"text/plain"}


def test_ipython_shows_clears_and_runs_magics_in_a_rank(notebook):
    notebook.run("from IPython.display import HTML, clear_output\nclear_output()\ndisplay(HTML('<i>x</i>'))", [1])
    assert [(rank, data["text/html"]) for rank, data in notebook.shown] == [(1, "<i>x</i>")]
    assert "from the shell" in notebook.run("there = !echo from the shell\nprint(there)", [0])


def test_a_figure_without_pyplot_is_an_image(notebook):
    notebook.run("from matplotlib.figure import Figure\nfigure = Figure()\nfigure.subplots()\nfigure", [1])
    assert [set(data) for _, data in notebook.shown] == [{"image/png", "text/plain"}]


def test_long_output_arrives_whole_and_before_what_is_shown_later(notebook):
    text = notebook.run("print('é1' * 300_000)\ndisplay(5)\nprint('after')", [0])
    assert text == "[0] " + "é1" * 300_000 + "\n[0] after\n"
    assert notebook.shown == [(0, {"text/plain": "5"})] and notebook.text_before == text.removesuffix("[0] after\n")


def test_an_error_names_its_rank_and_line_and_keeps_the_ranks(notebook):
    notebook.run("kept = 7")
    with pytest.raises(CellError, match=r"rank 1 of 2 .*ZeroDivisionError") as caught:
        notebook.run("def f(n):\n    return 1 / n\nf(1 - rank)")
    assert caught.value.rank == 1 and caught.value.others == ()
    assert "    return 1 / n\n" in caught.value.rank_traceback and "interactiveshell" not in caught.value.rank_traceback
    assert notebook.show("kept") == ["7", "7"] and notebook.notices == []
    assert notebook.show(SUM) == ["[3.0, 3.0]"] * 2


@pytest.mark.parametrize(
    ("source", "words"), [("x = (", "SyntaxError"), ("exit(3)", "SystemExit"), ("nowhere", "NameError")]
)
def test_the_same_error_on_all_ranks_is_one(notebook, source, words):
    with pytest.raises(CellError, match=f"ranks 0, 1 of 2 .*{words}"):
        notebook.run(source)
    assert notebook.show("1") == ["1", "1"]


@pytest.mark.parametrize("call", ["dist.all_reduce(torch.ones(1))", "world.barrier()", "dist.recv(torch.ones(1), 1)"])
def test_a_rank_that_waits_for_one_that_failed_is_freed_and_a_new_world_opened(notebook, monkeypatch, call):
    monkeypatch.setattr(cell_ranks, "_STUCK_S", 0.3)
    with pytest.raises(CellError, match=r"rank 1 of 2 .*planted") as caught:
        notebook.run(f"if rank == 1:\n    raise ValueError('planted')\n{call}")
    assert len(caught.value.others) == 1 and "waited for rank 1 (In[" in caught.value.others[0]
    assert call in caught.value.others[0]
    assert any("new process group" in line for line in notebook.notices)
    assert notebook.show(SUM) == ["[3.0, 3.0]"] * 2


def test_collectives_started_by_only_some_ranks_are_detected_even_if_no_rank_waits(notebook):
    with pytest.raises(CellError, match="rank 1 of 2"):
        notebook.run(
            "if rank == 1:\n    raise ValueError('planted')\nwork = dist.all_reduce(torch.ones(1), async_op=True)"
        )
    assert any("new process group" in line for line in notebook.notices)
    assert notebook.show(SUM) == ["[3.0, 3.0]"] * 2


def interrupt_when(notebook: Notebook, text: str) -> threading.Thread:
    """Ctrl-C once the cell has written this, sent only to this process, as in a notebook."""

    def act() -> None:
        wait_until(lambda: text in notebook.text)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("wait", "is_broken"),
    [
        ("import time\ntime.sleep(60)", False),
        ("while True: pass", False),
        ("dist.all_reduce(torch.ones(1)) if rank else time.sleep(60)", True),
        ("dist.recv(torch.ones(1), 1 - rank)", True),
    ],
)
def test_an_interrupt_reaches_all_ranks_and_keeps_them(notebook, wait, is_broken):
    notebook.run("import time\nkept = 7")
    thread = interrupt_when(notebook, "[1] now")
    with pytest.raises(CellInterrupted) as caught:
        notebook.run(f"print('now')\n{wait}")
    thread.join()
    assert [f"rank {rank} was at In[" in str(caught.value) for rank in (0, 1)] == [True, True]
    assert any("new process group" in line for line in notebook.notices) == is_broken
    assert notebook.show("kept") == ["7", "7"] and notebook.show(SUM) == ["[3.0, 3.0]"] * 2


def test_a_deadlock_is_named(notebook, monkeypatch):
    monkeypatch.setattr(cell_ranks, "_NOTICE_S", 1.0)
    notices = notebook.notices

    def act() -> None:
        wait_until(lambda: any("deadlock" in line for line in notices))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(CellInterrupted):
        notebook.run("dist.all_reduce(torch.ones(1))", [0])
    thread.join()
    (notice,) = [line for line in notices if "deadlock" in line]
    assert "rank 0 waits at In[" in notice and "dist.all_reduce" in notice and "rank 1 does not run this cell" in notice


def test_the_status_of_every_rank(notebook):
    status = notebook.ranks.status()
    assert [(one.rank, one.state) for one in status] == [(0, "idle"), (1, "idle")]
    assert {one.pid for one in status} <= {process.pid for process in find_ranks(os.getpid())}
    assert all((one.memory_bytes or 0) > 2**20 for one in status)


def test_a_stopped_rank_is_reported_and_a_killed_one_ends_the_others():
    notebook = Notebook("gloo")
    with notebook.ranks as ranks:
        ranks.start()
        first, second = ranks.status()
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: [one.state for one in ranks.status()] == ["suspended", "idle"])
        os.kill(first.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(LaunchError, match=r"SIGKILL[^\n]*\n%dist_reset") as caught:
                ranks.run("1")
            assert (caught.value.code, caught.value.rank) == ("ranks-gone", 0)
        assert "killed" in ranks.status()[0].state and not ranks.is_alive
    assert not os.path.exists(f"/proc/{second.pid}")


def test_a_world_that_cannot_be_opened_is_one_error_and_leaves_nothing():
    before = set(find_ranks(os.getpid()))  # ranks of other tests
    for settings in (CellSettings(2, "no-such-backend", "cpu"), CellSettings(2, gpu_ids=(0,))):
        with pytest.raises(ConfigError):
            CellRanks(settings, lambda *_: None, lambda _: None).start()
    assert set(find_ranks(os.getpid())) <= before


def test_a_second_interrupt_ends_ranks_that_do_not_react(monkeypatch):
    notebook = Notebook("gloo")
    monkeypatch.setattr(cell_ranks, "_UNRESPONSIVE_S", 0.2)
    with notebook.ranks as ranks:
        ranks.start()

        def act() -> None:
            wait_until(lambda: "[0] now" in notebook.text)
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: any("interrupt again" in line for line in notebook.notices))
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=act)
        thread.start()
        source = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('now')\nwhile True: pass"
        with pytest.raises(CellInterrupted, match="twice"):
            notebook.run(source)
        thread.join()
        assert not ranks.is_alive
