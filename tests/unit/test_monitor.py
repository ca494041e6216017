"""The monitor's conclusions from snapshots of ranks: which end a job, which are warnings, and which are neither."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from paceline.errors import ConfigError
from paceline.runtime.faults import monitor as monitor_module
from paceline.runtime.faults import pulse
from paceline.runtime.faults.monitor import (
    HangDetector,
    Monitor,
    RankSnapshot,
    Suspicion,
    Verdict,
    find_hang_timeout,
    why_not,
)
from paceline.runtime.faults.processes import describe_end, describe_frames, find_frames, is_importing, is_in_collective
from paceline.runtime.faults.pulse import BACKWARD, BETWEEN, FORWARD, LEFT, OPTIMIZER, SLOW, START, WAIT
from tests.conftest import wait_until

STEP_S, TIMEOUT_S = 0.05, 100.0


class Scene:
    """Two ranks that have trained for a while and then behave as the test specifies, second by second."""

    def __init__(self, num_steps: int = 100, step_s: float = STEP_S, has_others: bool = False, ranks: int = 2) -> None:
        self.detector, self.now_s = HangDetector(has_others, TIMEOUT_S), 0.0
        first = RankSnapshot("R", 10.0, 1, num_steps + 1, FORWARD, -1, 1, num_steps, step_s, 0.01)
        self.snapshots, self.warnings = [first] * ranks, list[Suspicion]()
        for _ in range(50):  # busy: a beat and a step at every poll
            self.run(0.1, *(dict(cpu=0.5, beats=True, steps=2) for _ in range(ranks)))

    def run(self, seconds: float, *ranks: dict) -> Suspicion | None:
        """Feed `state`, `phase`, `cpu` (fraction of a core), and `beats` and `steps` per poll for each rank, until the
        detector must act or needs a stack. Warnings are recorded. After ten seconds, polls are as far apart as the
        monitor allows."""
        until_s = self.now_s + seconds - 0.05
        closely_s = self.now_s + 10.0
        while self.now_s < until_s:
            look_s = 0.1 if self.now_s < closely_s else 0.25
            self.now_s += look_s
            for rank, given in enumerate(ranks):
                before = self.snapshots[rank]
                phase, steps = given.get("phase", before.phase), given.get("steps", 0)
                self.snapshots[rank] = before._replace(
                    state=given.get("state", "R"), cpu_s=before.cpu_s + look_s * given.get("cpu", 0.0),
                    serial=before.serial + (phase != before.phase or steps > 0), phase=phase,
                    bucket=given.get("bucket", -1), beat_ns=before.beat_ns + given.get("beats", True),
                    most_s=given.get("most_s", math.inf),
                    step=before.step + steps, num_steps=before.num_steps + steps, is_busy=given.get("is_busy", False),
                )  # fmt: skip
            found = self.detector.look(self.now_s, dict(enumerate(self.snapshots)))
            if found is not None and (found.ends or not found.is_certain):
                return found
            if found is not None:
                self.detector.note_named(found.rank)
                self.warnings.append(found)
        return None


WAITS = dict(state="S", phase=WAIT, bucket=2)


@pytest.mark.parametrize(
    ("culprit", "kind", "named_s", "ended_s"),
    [
        (dict(state="S", phase=FORWARD, beats=False), "gil", 3.0, TIMEOUT_S),
        (dict(state="R", phase=BACKWARD, beats=False, cpu=1.0), "gil", 3.0, TIMEOUT_S),
        (dict(state="R", phase=FORWARD, cpu=0.9), "loop", 3.0, TIMEOUT_S),
        (dict(state="R", phase=OPTIMIZER, cpu=0.9), "loop", 3.0, TIMEOUT_S),
        (dict(state="S", phase=BACKWARD), "blocked", 3.0, TIMEOUT_S),
        (dict(state="D", phase=FORWARD), "disk", 3.0, TIMEOUT_S),
        (dict(state="S", phase=WAIT, is_busy=True), "kernel", 3.0, TIMEOUT_S),
        (dict(state="S", phase=BETWEEN, beats=False), "gil", 600.0, 1800.0),
        (dict(state="D", phase=BETWEEN), "disk", None, 1800.0),
        (dict(state="R", phase=SLOW, cpu=1.0, most_s=40.0), "loop", None, 40.0),
    ],
)
def test_a_slow_rank_is_named_at_once_and_ended_after_the_hang_timeout(culprit, kind, named_s, ended_s):
    scene = Scene()
    found = scene.run(2000.0, WAITS, culprit)
    while found is not None and not found.is_certain:  # the stack is needed and shows no collective
        found = scene.run(2000.0, WAITS, culprit)
    assert found is not None and (found.kind, found.rank, found.end_s) == (kind, 1, ended_s)
    assert ended_s < found.since_s <= ended_s + 1.0
    # The warning appears once, although ranks are checked ten times a second.
    assert [(one.kind, one.rank) for one in scene.warnings] == ([(kind, 1)] if named_s else [])
    assert all(named_s < one.since_s <= named_s + 1.0 for one in scene.warnings)


@pytest.mark.parametrize(
    ("rank", "num_steps", "named"),
    [
        (dict(state="R", phase=BETWEEN, cpu=1.0), 100, ["loop"]),  # an evaluation or a loop
        (dict(state="S", phase=START), -100, ["blocked"]),
        (dict(state="R", phase=START, cpu=1.0), -100, []),  # inference: there is never a step
    ],
)
def test_possibly_healthy_ranks_are_not_ended_for_hours(rank, num_steps, named):
    scene = Scene(num_steps, has_others=True)
    assert scene.run(2000.0, dict(state="S", phase=WAIT), rank) is None
    assert [one.kind for one in scene.warnings] == named


def test_a_rank_that_is_slow_once_is_named_again_when_it_is_slow_again():
    scene, slow = Scene(), dict(state="R", phase=FORWARD, cpu=1.0)
    for number in range(1, 4):
        assert scene.run(15.0, WAITS, slow) is None and len(scene.warnings) == number
        assert scene.run(1.0, *(dict(cpu=0.5, steps=2, phase=FORWARD) for _ in range(2))) is None


def test_a_rank_is_ended_no_sooner_than_it_is_named():
    scene, slow = Scene(step_s=50.0), dict(state="R", phase=FORWARD, cpu=1.0)
    found = scene.run(1000.0, WAITS, slow)
    assert found is not None and (found.kind, found.end_s) == ("loop", 200.0)  # and not after 100 s


@pytest.mark.parametrize("named", [[], [0, 1]])
def test_a_rank_that_is_suspended_ends_the_job_at_once(named):
    scene = Scene(ranks=3)
    for rank in named:
        scene.detector.note_named(rank)
    found = scene.run(100.0, WAITS, dict(state="T", phase=FORWARD, beats=False), WAITS)
    assert found is not None and (found.kind, found.rank, found.end_s) == ("stopped", 1, None)
    assert 1.5 <= found.since_s <= 2.0 and not scene.warnings


@pytest.mark.parametrize(
    "pause",
    [
        dict(state="S", phase=BETWEEN),  # a stalled data loader; its stack shows no collective
        dict(state="D", phase=BETWEEN),  # disk I/O
        dict(state="R", phase=BETWEEN, cpu=1.0),  # an evaluation on one rank
        dict(state="R", phase=SLOW, cpu=1.0),  # a marked section, or a compilation
        dict(state="S", phase=SLOW, beats=False),  # a checkpoint save
        dict(state="R", phase=FORWARD, cpu=0.01),  # an overloaded machine on which the rank gets no core
        dict(state="R", phase=FORWARD, cpu=0.01, beats=False),
        dict(state="t", phase=FORWARD, beats=False),  # a debugger
    ],
)
def test_a_pause_is_not_a_hang(pause):
    scene = Scene()
    for _ in range(80):
        found = scene.run(0.1, WAITS, pause)
        assert found is None or not found.is_certain
    assert scene.run(2.0, *(dict(cpu=0.5, steps=1, phase=FORWARD) for _ in range(2))) is None
    assert not scene.warnings


def test_a_marked_pause_has_no_time_limit():
    for pause in (dict(state="R", cpu=1.0), dict(state="S"), dict(state="S", beats=False), dict(state="D")):
        scene = Scene()
        assert scene.run(700.0 if "cpu" in pause else 200.0, WAITS, dict(phase=SLOW) | pause) is None
        assert not scene.warnings


def test_a_rank_that_waits_in_a_step_for_one_between_two_steps_is_not_to_blame():
    """A rank waits in forward while torch's wrapper synchronizes buffers, as the rank's stack shows."""
    waits, pause = dict(state="S", phase=FORWARD), dict(state="R", phase=BETWEEN, cpu=1.0)
    scene = Scene()
    assert scene.run(20.0, waits, pause) is None
    assert [(one.kind, one.rank) for one in scene.warnings] == [("blocked", 0)]
    scene.detector.seen[0].is_in_collective = True
    assert scene.run(1000.0, waits, pause) is None
    # The rank is to blame once the other one waits for a collective that it never starts.
    found = scene.run(100.0, waits, WAITS)
    assert found is not None and (found.kind, found.rank, found.is_certain) == ("collective", 0, True)
    # In the next phase, the rank's stack is unknown again.
    assert scene.run(1.0, dict(state="R", phase=BACKWARD), WAITS) is None
    assert scene.run(10.0, dict(state="S", phase=BACKWARD), WAITS) is None
    assert [(one.kind, one.rank) for one in scene.warnings] == [("blocked", 0)] * 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "train.py"), True),
        (("torch/nn/parallel/distributed.py", "torch/nn/modules/module.py"), True),  # buffers, synchronized in C++
        (("model.py", "torch/nn/modules/module.py", "torch/nn/parallel/distributed.py"), False),
        (("upload.py", "torch/distributed/checkpoint/state_dict_saver.py", "train.py"), False),
        (("my_channel.py", "train.py"), False),
        (("paceline/parallel/channel.py", "train.py"), True),
        (("a.py",) * 6 + ("torch/distributed/distributed_c10d.py",), False),
        ((), False),
    ],
)
def test_a_stack_is_in_a_collective_or_not(files, expected):
    frames = "".join(f'  File "/x/{file}", line 3 in call\n' for file in files)
    assert is_in_collective(f"Current thread 0x2 (most recent call first):\n{frames}") is expected


def test_an_out_of_memory_kill_is_blamed_on_a_rank_only_at_that_time(monkeypatch):
    kills, now_s = [7], [100.0]
    monkeypatch.setattr(monitor_module, "count_oom_kills", lambda: kills[0])
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now_s[0])
    with Monitor([0], 1) as found:
        for _ in range(30):
            now_s[0] += 0.1
            assert found.look() is None
        kills[0] += 1
        assert "out of memory" in found.describe_end(0, -signal.SIGKILL)
        for _ in range(30):
            now_s[0] += 0.1
            assert found.look() is None
        assert "manually" in found.describe_end(0, -signal.SIGKILL)


def test_a_suspended_job_is_not_a_hang():
    stopped = dict(state="T", phase=FORWARD, beats=False)
    assert Scene().run(100.0, stopped, stopped) is None
    # A rank that has left its world is alive and not suspended, so the job was not suspended as a whole.
    left = Scene().run(100.0, dict(state="S", phase=LEFT), stopped)
    assert left is not None and (left.kind, left.rank) == ("stopped", 1)
    assert Scene().run(100.0, dict(state="T", phase=LEFT), stopped) is None


def test_a_long_step_that_nobody_waits_for_has_more_time():
    scene, busy = Scene(), dict(state="R", phase=FORWARD, cpu=1.0)
    assert scene.run(50.0, busy, busy) is None
    assert [(one.kind, one.since_s > 15.0) for one in scene.warnings] == [("loop", True)] * 2


def test_limits_follow_the_steps():
    blocked = dict(state="S", phase=FORWARD)
    for scene, limit_s in ((Scene(step_s=2.0), 8.0), (Scene(num_steps=-97), 30.0)):  # three steps so far
        assert scene.run(50.0, WAITS, blocked) is None
        assert [limit_s < one.since_s < limit_s + 0.5 for one in scene.warnings] == [True]


def test_time_counts_only_while_the_monitor_runs():
    scene = Scene()
    blocked = dict(state="S", phase=FORWARD)
    assert scene.run(1.0, WAITS, blocked) is None
    scene.now_s += 1000.0  # the machine was asleep
    assert scene.run(1.0, WAITS, blocked) is None and not scene.warnings


def test_a_mismatch_ends_the_job_at_once():
    scene = Scene()
    found = scene.run(100.0, WAITS, dict(state="S", phase=BETWEEN))
    assert found is not None and (found.kind, found.rank, found.is_certain) == ("collective", 1, False)
    for other, kind, rank in (
        (dict(state="", phase=BETWEEN), "left", 1), (dict(state="S", phase=WAIT, bucket=1), "all-wait", None)
    ):  # fmt: skip
        found = Scene().run(50.0, WAITS, other)
        assert found is not None and (found.kind, found.rank, found.end_s) == (kind, rank, None)


def test_ranks_that_wait_for_the_same_message_may_only_wait_for_a_large_one():
    scene = Scene()
    found = scene.run(1000.0, WAITS, WAITS)
    assert found is not None and (found.kind, found.rank, found.end_s) == ("all-wait", None, TIMEOUT_S)
    assert [(one.kind, one.rank) for one in scene.warnings] == [("all-wait", None)]


@pytest.mark.parametrize("other", [dict(state="", phase=BETWEEN), dict(state="S", phase=BETWEEN)])
@pytest.mark.parametrize("slow", [dict(state="R", phase=BETWEEN, cpu=1.0), dict(state="R", phase=FORWARD, cpu=1.0)])
def test_nothing_is_certain_while_a_rank_computes(slow, other):
    """One of three ranks has left or is in a separate collective, which it may share with the slow rank but not with
    the first."""
    scene = Scene(ranks=3)
    for _ in range(100):
        found = scene.run(0.5, WAITS, other, slow)
        assert found is None or not found.is_certain
        scene.detector.seen[1].is_in_collective = True  # as its stack shows
    # Once that rank waits as well, the fault is certain.
    found = scene.run(20.0, WAITS, other, WAITS)
    assert found is not None and (found.rank, found.ends) == (1, True) and found.kind in ("left", "collective")


def test_the_awaited_rank_may_be_on_another_host():
    scene = Scene(has_others=True)
    assert scene.run(1000.0, WAITS, WAITS) is None and not scene.warnings


def test_before_the_first_step_ranks_have_minutes():
    scene = Scene(num_steps=-100)
    assert scene.run(250.0, dict(state="S", phase=START), dict(state="R", phase=START, cpu=1.0)) is None
    assert not scene.warnings


def test_the_verdict_is_one_paragraph():
    stack = 'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in beat\n\nCurrent thread 0x2 (most recent '
    stack += 'call first):\n  File "/a/model.py", line 12 in forward\n  File "/a/train.py", line 40 in <module>'
    assert find_frames(stack)[0] == ("/a/model.py", "12", "forward")
    place = describe_frames(stack)
    verdict = Verdict("gil", 1, "holds", "in step 4, in forward", 3.25, "rank 0 waits", place, stack)
    said = verdict.summary
    assert "\n" not in said and "3.2 s" in said and "forward (model.py:12) < <module> (train.py:40)" in said
    assert "Paceline ended it" in said  # explains the kill
    warning = dataclasses.replace(verdict, ends=False, limit="600 s (the hang timeout)").summary
    assert "Paceline ends it only if this lasts longer than 600 s" in warning
    assert "Paceline" not in dataclasses.replace(verdict, kind="ended").summary
    assert find_frames("") == []
    assert "SIGSEGV" in describe_end(-signal.SIGSEGV) and "code 3" in describe_end(3, "in step 4")
    assert "by the kernel: out" in describe_end(-signal.SIGKILL, is_oom=True)
    assert "manually" in describe_end(-signal.SIGKILL)


def test_a_crash_reports_its_location():
    stack = 'Aborted\n\nThread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in beat\n\nThread 0x2 (most '
    stack += (
        'recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 9 in call\n\nExtension modules'
    )
    said = describe_end(-signal.SIGABRT, "in step 4", stack=stack)
    assert "it was at call (distributed_c10d.py:9)" in said and "unexpected size" in said
    assert "unexpected size" not in describe_end(-signal.SIGSEGV, stack=stack)
    assert "unexpected size" not in describe_end(-signal.SIGABRT, stack=stack.replace("torch/distributed", "mine"))


RANK = """
import sys, time
from paceline.runtime.faults import pulse
pulse.open_page(*sys.argv[1:3])
pulse.enter(pulse.FORWARD)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_pages_stacks_and_ends_of_real_processes():
    with Monitor([0, 1], 2) as monitor:
        assert monitor.look() is None and not monitor.pids()
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, *monitor.find_pages(rank)], stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == b"ready\n"
            assert monitor.look() is None
            assert monitor.pids() == {number: rank.pid for number, rank in enumerate(ranks)}
            assert "step 1, in forward" in monitor.describe(0)
            assert any(name == "<module>" for _, _, name in find_frames(monitor._processes[1].read_stack(10.0)))
            ranks[1].kill()
            ended = wait_until(lambda: monitor.wait(0.1) or monitor.find_ended())
            assert "SIGKILL" in ended[1][0] and "in step 1, in forward" in ended[1][0] and not ended[1][1]
            ranks[0].send_signal(signal.SIGABRT)
            wait_until(lambda: monitor.wait(0.1) or 0 in monitor.find_ended())
            ended = monitor.find_ended()
            assert "SIGABRT" in ended[0][0] and "it was at <module>" in ended[0][0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        monitor.look()
        assert monitor.are_all_gone() and monitor.have_all_left()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_launcher_with_many_open_files_sees_its_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("no more than 1024 files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200 if hard == resource.RLIM_INFINITY else min(hard, 1200), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in (os.dup(2) for _ in range(1100)):
            stack.callback(os.close, descriptor)
        monitor = stack.enter_context(Monitor([0], 1))
        rank = subprocess.Popen([sys.executable, "-c", RANK, *monitor.find_pages(0)], stdout=subprocess.PIPE)
        stack.callback(rank.communicate)
        stack.callback(rank.kill)
        assert rank.stdout.readline() == b"ready\n"
        assert monitor.look() is None and monitor._processes[0].handle.fd > 1024
        monitor.wait(0.01)
        assert not monitor.are_all_gone()
        rank.kill()
        wait_until(lambda: monitor.wait(0.1) or monitor.are_all_gone())
        assert "SIGKILL" in monitor.find_ended()[0][0]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_announcements_are_in_every_ranks_log_once(tmp_path, capfd):
    """Two ranks with their own logs; one writes to another rank's log, and one to this process's outputs."""
    logs = [tmp_path / "0", tmp_path / "1", tmp_path / "0", None]
    with Monitor(range(4), 4) as monitor, contextlib.ExitStack() as stack:
        for rank, log in enumerate(logs):
            output = None if log is None else stack.enter_context(log.open("ab"))
            command = [sys.executable, "-c", RANK, *monitor.find_pages(rank)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout.readline() == b"ready\n"
        monitor.look()
        at = 'Thread 0x2 (most recent call first):\n  File "/a/model.py", line 12 in forward\n'
        monitor.announce("warning: rank 1 is slow", 1, at)
        wait_until(lambda: all(log.read_text() for log in logs if log is not None))
        time.sleep(0.5)
    assert [log.read_text() for log in logs[:2]] == ["paceline: warning: rank 1 is slow\n"] * 2
    assert capfd.readouterr().err == "paceline: warning: rank 1 is slow\n  forward (/a/model.py:12)\n"


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, "", 600.0), (None, "90s", 90.0), ("2min", "90s", 120.0), ("0s", "", None), (None, "soon", None)],
)
def test_the_hang_timeout_is_that_of_the_option_or_of_the_environment(monkeypatch, given, variable, expected):
    monkeypatch.setenv("PACELINE_HANG_TIMEOUT", variable)
    with pytest.raises(ConfigError, match=r"timeout|TIMEOUT") if expected is None else contextlib.nullcontext():
        assert find_hang_timeout(given) == expected


@pytest.mark.parametrize("at_most", [0, -1.0, math.nan])
def test_a_pause_of_no_time_is_refused(at_most):
    with pytest.raises(ConfigError, match="at_most"), pulse.slow("evaluate", at_most=at_most):
        pytest.fail("it began")


def test_marks_without_a_monitor_do_nothing():
    pulse.enter(FORWARD)
    pulse.begin_step(3)
    pulse.close_page()
    with pulse.slow("evaluate"):
        assert pulse.waits(lambda value: value)(4) == 4
    assert not pulse.is_open()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_compilation_is_a_pause_whatever_a_program_does_with_the_compiler():
    importlib.import_module("paceline.torch_internals")  # as in every program with a wrapper
    callback = importlib.import_module("torch._dynamo.callback")
    with Monitor([0], 1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        try:
            for _ in range(2):
                pulse.enter(FORWARD)
                with callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "0/0"):
                    await_text(monitor, "in 'torch.compile'")  # recorded by the heartbeat thread
                    pulse.enter(BACKWARD)
                    assert "in 'torch.compile'" in monitor.describe(0) and monitor.is_busy(0)
                await_text(monitor, "in backward")
                importlib.import_module("torch._dynamo").reset()  # removes all callbacks
            with callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "0/0"):
                await_text(monitor, "in 'torch.compile'")
                pulse.close_page()
            assert "after 0 steps" in monitor.describe(0)
        finally:
            pulse.close_page()


def await_text(monitor, text):
    wait_until(lambda: text in monitor.describe(0))


def test_an_import_in_a_step_is_not_a_hang_but_a_step_in_an_import_may_be():
    wait, module = 'File "/x/hang.py", line 3 in wait', 'File "/x/torch/nn/modules/module.py", line 9 in _call_impl'
    loading = 'File "<frozen importlib._bootstrap>", line 1176 in _find_and_load'
    for frames, wanted in (((wait, loading, module), True), ((wait, module, loading), False), ((wait, module), False)):
        assert is_importing("Thread 0x1 (most recent call first):\n  " + "\n  ".join(frames)) == wanted


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_the_step_of_a_fault_is_that_of_the_failed_rank():
    with Monitor([0, 1], 2) as monitor:
        for rank, step in ((0, 14), (1, 15)):
            pulse.open_page(*monitor.find_pages(rank))
            pulse.begin_step(step)
            pulse.close_page()
        assert [monitor.find_step(rank) for rank in (0, 1, None)] == [(14, 14), (15, 14), (15, 14)]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_rank_that_ends_by_its_error_is_waited_for_and_one_that_handled_it_is_not(monkeypatch):
    monkeypatch.setattr(monitor_module, "_HANDLED_S", 0.0)
    with Monitor([0], 1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        monitor.look()
        pulse.fail("failed: ValueError", is_secondary=False)
        pulse.close_page()
        monitor.look()
        monitor.have_all_left()  # counted from now
        time.sleep(0.01)
        assert monitor.have_all_left()  # this process keeps running
        pulse.note_exit()
        assert not monitor.have_all_left()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_rank_whose_exit_hangs_after_an_error_is_ended(monkeypatch):
    """Closing an NCCL group, for example, may wait for a collective that never ends."""
    monkeypatch.setattr(monitor_module, "_EXIT_S", 0.0)
    monkeypatch.setattr(monitor_module, "_HANDLED_S", 0.0)
    with Monitor([0], 1, hang_timeout_s=0.1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        monitor.look()
        pulse.fail("failed: CollectiveError", is_secondary=False)
        pulse.close_page()
        pulse.note_exit()
        monitor.look()
        assert monitor.find_ended() == {} and not monitor.have_all_left()
        (text, is_secondary) = wait_until(lambda: monitor.look() or monitor.find_ended())[0]
        assert text.startswith("failed: CollectiveError") and "does not exit" in text and not is_secondary
        assert not monitor.have_all_left()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_marks_on_a_page():
    with Monitor([0], 1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        try:
            assert monitor.find_step() is None
            pulse.begin_step(7)
            assert monitor.find_step() == (7, 6) and monitor.is_busy(0)
            pulse.complete_step()
            assert monitor.find_step() == (7, 7)
            pulse.enter(WAIT, 3)
            assert not monitor.is_busy(0)
            assert monitor.look() is None and monitor.pids() == {0: os.getpid()}
            assert "step 7" in monitor.describe(0) and "bucket 3" in monitor.describe(0)
            with pulse.slow("evaluate"):
                assert "'evaluate'" in monitor.describe(0) and monitor.is_busy(0)
                assert monitor._processes[0].look().most_s == math.inf
                with pulse.slow("download", at_most=90):
                    before = monitor._processes[0].look()
                    pulse.progress()
                    after = monitor._processes[0].look()
                    assert before.most_s == after.most_s == 90.0 and after.serial > before.serial
                with pulse.slow("download", at_most=math.inf):
                    assert monitor._processes[0].look().most_s > 1e8
                assert monitor._processes[0].look().most_s == math.inf
            assert "bucket 3" in monitor.describe(0)
            before = monitor._processes[0].look().serial
            pulse.progress()  # without a pause
            assert monitor._processes[0].look().serial == before
            pulse.begin_step(8)
            pulse.fail("failed: ValueError: no", is_secondary=False)
            pulse.fail("later", is_secondary=True)
            assert pulse.read_text(monitor._processes[0].page, pulse.ERROR) == "failed: ValueError: no"
        finally:
            pulse.close_page()
        snapshot = monitor._processes[0].look()
        assert snapshot is not None and snapshot.phase == LEFT and snapshot.num_steps == 1
        assert monitor.look() is None and not monitor.have_all_left()  # the rank failed
        assert monitor.describe(0) == "in step 8"
        with Monitor([0], 1) as other:
            pulse.open_page(*other.find_pages(0))
            pulse.close_page()
        assert monitor.have_all_left()  # and continues in another world
