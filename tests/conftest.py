"""Fixtures for all tests: warm ranks, the command line, and a check for leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from paceline.report import plots
from paceline.report.plots import render_png, render_svg
from paceline.runtime.ranks import launch
from paceline.runtime.ranks.launch import RankPool
from paceline.transport import why_not
from paceline.verbs.train import JOB_MODULES

# `nohup make test &` starts this process with signals ignored, and its children would inherit that. They do not inherit
# Python handlers, so the tests and their processes get signals as from a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# Tests do not depend on a terminal; pytest-xdist sets the width of one.
os.environ.pop("COLUMNS", None)
# Idle threads of OpenMP sleep: with more processes than cores, spinning takes time from the threads that compute.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# torch sets it when the first optimizer is created, and leaves it set; a changed environment needs another fork server.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor"))

# Enough ranks for a 2 x 2 mesh.
MAX_RANKS = 4
ASKED_BACKEND = os.environ.get("PACELINE_TEST_BACKEND", "")
assert ASKED_BACKEND in ("", "gloo", "shm"), f"PACELINE_TEST_BACKEND={ASKED_BACKEND}: gloo or shm"
# The default backend for several CPU ranks on one host.
BACKEND = ASKED_BACKEND or ("gloo" if why_not() else "shm")

# Variables that tests change, and that no library reads when it is imported.
NOT_IMPORTED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

# A deadline per example would fail tests on a busy machine.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries a few fixed examples of each property; `make test-all` draws many at random."""
    hypothesis.settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Thousands of tests and the modules they import stay until the end: searching them for garbage takes longer than
    most tests, and training and measuring collect garbage many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_server() -> Iterator[None]:
    """All pools of this process fork their ranks from one server, which has already imported the usual modules: torch's
    optimizers import its compiler. A test with other environment variables gets its own server, and the next test gets
    the first server again."""
    find, first = launch._find_server, list[Any]()

    def find_server(modules: Sequence[str] = ()) -> Any:
        if launch._describe_imports() != environment:
            return find(modules)
        launch._server = first.pop() if first else None
        first.append(find((*modules, *JOB_MODULES)))
        return first[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_HARMLESS", launch._HARMLESS | NOT_IMPORTED)
        environment = launch._describe_imports()
        patch.setattr(launch, "_find_server", find_server)
        yield


@pytest.fixture(scope="session")
def warm_pool() -> Iterator[RankPool]:
    with RankPool(MAX_RANKS) as pool:
        yield pool


@pytest.fixture
def on_ranks(warm_pool: RankPool) -> Callable[..., list[Any]]:
    """`on_ranks(num_ranks, fn, *args)`: run a function of the test's module on warm ranks, with a timeout.

    With PACELINE_TEST_BACKEND=gloo, or shm, CPU worlds use that backend unless they name one.
    """

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        if ASKED_BACKEND:
            fn, args = run_on_backend, (ASKED_BACKEND, fn, *args)
        return warm_pool.run(run_as_if_fresh, (fn, *args), num_ranks=num_ranks, timeout_s=timeout_s)

    return run


def run_as_if_fresh(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank that uses the kernels of a fresh process.

    On a CPU without bf16, torch disables oneDNN permanently at the first bf16 product, so later tests would compute
    different bits. Accelerate keeps the first world it sees.
    """
    import torch

    torch._C._set_mkldnn_enabled(True)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return fn(*args)


def run_on_backend(backend: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank where `auto` means this backend on the CPU."""
    from paceline.runtime.ranks import world

    choose = world._choose_backend
    world._choose_backend = lambda device, *rest: backend if device.type == "cpu" else choose(device, *rest)
    try:
        return fn(*args)
    finally:
        world._choose_backend = choose


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`command("bench", ...)`: the command line in this process, run the way `main()` does."""

    def run(*arguments: str) -> Answer:
        from paceline.cli.main import main

        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session", autouse=True)
def _sketched() -> Iterator[None]:
    """Figures are built but not rendered, because rendering takes longer than the rest of a small run.

    Tests of figures use `render_png` and `render_svg`; tests of files use `rendered`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "render_png", lambda figure: b"\x89PNG")
        patch.setattr(plots, "render_svg", lambda figure: b"<svg/>")
        yield


@pytest.fixture(scope="module")
def rendered() -> Iterator[None]:
    """Saved figures are rendered in this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "render_png", render_png)
        patch.setattr(plots, "render_svg", render_svg)
        yield


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process in its own session, in tmp_path; it is killed if it still runs at the end of the test."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=options.pop("cwd", tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=100)


def descendants(pid: int) -> list[psutil.Process]:
    """The descendants of this process that are still running."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
            found += [child] if child.is_running() and child.status() != psutil.STATUS_ZOMBIE else []
    return found


def list_below(pid: int, recursive: bool = True) -> set[int]:
    """The ids of the descendants of this process; they may have ended. Every test calls this, so it uses the kernel's
    lists of children if available, which takes a hundredth of psutil's time."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return {child.pid for child in psutil.Process(pid).children(recursive)}
    found, ask = set[int](), [pid]
    while ask:
        threads = f"/proc/{ask.pop()}/task"
        with contextlib.suppress(OSError):  # the process has just ended
            for thread in os.listdir(threads):
                with contextlib.suppress(OSError), open(f"{threads}/{thread}/children", "rb", buffering=0) as file:
                    below = [int(one) for one in file.read().split()]
                    ask += below if recursive else []
                    found.update(below)
    return found


def find_ranks(pid: int) -> list[psutil.Process]:
    """The local ranks that a process has launched, in order."""
    named = [(Path(f"/proc/{process.pid}/comm").read_text().strip(), process) for process in descendants(pid)]
    return [process for name, process in sorted(named, key=lambda item: item[0]) if name.startswith("paceline-rank-")]


def wait_until(condition: Callable[[], Any], timeout_s: float = 100.0) -> Any:
    """Poll until the condition is true and return it; fail the test if it never is."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {condition}")


def _read_environment() -> dict[str, str]:
    # Libraries that transformers imports set the KMP variables.
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST" and not k.startswith("KMP_")}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks an environment variable, a thread, a child process or a process group."""
    import torch.distributed as dist

    pools = [request.getfixturevalue(name) for name in ("warm_pool", "nccl_pool") if name in request.fixturenames]
    environment = _read_environment()
    threads = set(threading.enumerate())
    # Searching below warm ranks is slow, because they have many threads; only tests that use them need it.
    children = list_below(os.getpid(), recursive=bool(pools))
    yield
    assert _read_environment() == environment
    assert not dist.is_initialized()
    left = [thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not left, f"threads left behind: {left}"
    allowed = children | {rank.process.pid for pool in pools for rank in pool._ranks}  # including idle ones

    def find_new() -> set[int]:
        return list_below(os.getpid(), recursive=bool(pools)) - allowed

    def strangers() -> list[str]:
        new = find_new()
        new = new.union(*map(list_below, new)) - allowed
        lines = list[tuple[int, str]]()
        for child in descendants(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):  # includes ZombieProcess
                if child.pid in new:
                    lines.append((child.ppid(), " ".join(child.cmdline())))
        # These live as long as this process; children of the fork server have the same command line.
        return [
            line
            for parent, line in lines
            if "resource_tracker" not in line and not ("serve_forks" in line and parent == os.getpid())
        ]

    if not find_new():
        return
    deadline = time.monotonic() + 60
    while strangers() and time.monotonic() < deadline:  # a killed process takes a moment to disappear
        time.sleep(0.05)
    assert not strangers(), "processes left behind"
