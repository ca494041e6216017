"""`paceline train --watch` with real ranks: steps arrive, and a killed run is reported as killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cli.test_train_stops import TRAIN, the_run
from tests.conftest import wait_until
from tests.unit.test_page import read_data
from tests.unit.test_watch import ask, read_event


@pytest.mark.slow  # and only in the foreground: a watcher also ignores SIGINT if it is ignored here
def test_a_live_run_is_followed_and_reported_as_killed(start: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    out, said = tmp_path / "runs", tmp_path / "said"
    command = (*TRAIN, "--epochs", "2000", "--ranks", "2", "--out", str(out), "--watch")
    said.touch()
    job = start("-c", _RUN, str(said), *command)
    words = wait_until(lambda: [word for word in said.read_text().split() if word.startswith("http://")])
    watcher = next(process for process in psutil.process_iter() if _is_watcher(process, out))
    try:
        events = f"/events?{words[0].partition('?')[2]}&from={wait_until(lambda: _find_place(words[0]), 60)}"
        with ask(words[0], events) as viewer:
            while not (event := read_event(viewer))["rows"]:
                pass
            assert len(json.loads(event["rows"][-1])["ranks"]["step_s"]) == 2 and "Running" in event["status"]
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            until_s = time.monotonic() + 100
            while not (event := read_event(viewer))["reload"] or event["rows"]:
                assert time.monotonic() < until_s
            assert "Killed" in event["status"]
        with ask(words[0]) as answer:
            assert "Killed, or its machine stopped" in answer.read().decode()
        assert not (the_run(out) / "weights.safetensors").exists()
    finally:
        watcher.send_signal(signal.SIGINT)
        watcher.wait(100)
        job.wait(100)
    assert (the_run(out) / "report.html").exists()


@pytest.mark.slow
def test_a_program_has_a_live_page_until_it_is_killed(start: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    out, said = tmp_path / "runs", tmp_path / "said"
    said.touch()
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "program.pid")]
    job = start("-c", _RUN, str(said), "watch", "--no-browser", "--out", str(out), "--", *program)
    words = wait_until(lambda: [word for word in said.read_text().split() if word.startswith("http://")])
    with ask(words[0], "/") as answer:
        assert answer.status == 403
    place = wait_until(lambda: _find_place(words[0]))
    with ask(words[0], f"/events?{words[0].partition('?')[2]}&from={place}") as viewer:
        while not (event := read_event(viewer))["rows"]:
            pass
        assert "Running" in event["status"] and "ms per step" in event["status"]
        os.kill(int((tmp_path / "program.pid").read_text()), signal.SIGKILL)
        while not (event := read_event(viewer))["reload"] or event["rows"]:
            pass
    assert "Killed by signal 9" in event["status"]
    with ask(words[0]) as answer:  # the page that the browser then loads
        assert "Killed by signal 9" in answer.read().decode()
    job.wait(100)
    assert (the_run(out) / "report.html").exists() and "exit code -9" in said.read_text()


_PROGRAM = """
import os, sys, time, torch
open(sys.argv[1], "w").write(str(os.getpid()))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""
# Its stderr goes to a file: the watching process holds it, too, and keeps running.
_RUN = """
import os, subprocess, sys
with open(sys.argv[1], "w") as file:
    job = subprocess.Popen([sys.executable, "-m", "paceline", *sys.argv[2:]], stderr=file, stdout=file)
    open(os.path.join(os.path.dirname(sys.argv[1]), "pid"), "w").write(str(job.pid))
    job.wait()
"""


def _find_place(address: str) -> int:
    """The number of bytes of rows in a page loaded now, during the run."""
    with ask(address) as answer:
        live = read_data(answer.read().decode())["live"]
    assert live["how"] == "running"
    return int(live["from"])


def _is_watcher(process: psutil.Process, out: Path) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return words[-2:-1] == ["watch"] and words[-1].startswith(str(out))
