"""Killed, suspended and hung ranks are reported and terminated; slow ones are only reported; pauses are ignored."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from paceline.errors import CollectiveError, ConfigError, LaunchError
from paceline.parallel import DDP
from paceline.runtime.faults import monitor, monitored, pulse
from paceline.runtime.faults.monitored import Links
from paceline.runtime.faults.pulse import slow
from paceline.runtime.ranks import store_server
from paceline.runtime.ranks.launch import RankPool
from paceline.runtime.ranks.world import init
from paceline.studies.fault_job import Asked, Net, inject
from paceline.studies.fault_trials import FAULTS, Trial, measure_fault, parse_faults, why_not
from tests.conftest import BACKEND, descendants, wait_until

pytestmark = pytest.mark.skipif(bool(monitor.why_not()), reason=monitor.why_not() or "-")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_AT_LEAST_S", 0.5)
    monkeypatch.setattr(monitor, "_CPU_S", 0.2)
    monkeypatch.setattr(monitor, "_STOPPED_S", 0.5)


class Warnings:
    """Warnings of the launcher's monitor. Each warning creates a file that a slow rank waits for; with `then_end`, the
    hang timeout expires after the warning."""

    def __init__(self, folder: Path) -> None:
        self.mark, self.texts, self.then_end = folder / "named", list[str](), False

    def note(self, found: monitor.Monitor, text: str, rank: int | None = None, stack: str = "") -> None:
        self.texts.append("\n".join((text, stack)))
        self.mark.touch()
        if self.then_end:
            found._detector.hang_timeout_s = 0.0


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Warnings:
    found = Warnings(tmp_path)
    monkeypatch.setattr(monitor.Monitor, "announce", lambda *args: found.note(*args))
    return found


def go_slowly(fault: str, mark: Path) -> None:
    """Compute or sleep until the monitor has noticed."""
    until_s = time.monotonic() + 50
    while not mark.exists() and time.monotonic() < until_s:
        torch.ones(1000).sum() if fault == "slow-compute" else time.sleep(0.1)


def train(folder: str, backend: str, fault: str, place: str, steps: int = 30) -> int:
    asked = Asked(folder=folder, fault=fault, place=place, rank=1, step=20, steps=steps)
    with init(backend, announce=None):
        net = Net(asked)
        if fault.startswith("slow-"):
            net._inject = lambda fault: go_slowly(fault, Path(folder) / "named")  # type: ignore[method-assign]
        model, optimizer = DDP(net, check_replicas_every=25), torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            model(torch.randn(2, 784)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "busy" and net.num_steps == 20 and os.environ["RANK"] == "1":
                pulse.watch_device(lambda: False)  # like a GPU with an endless kernel
                with pulse.within(pulse.WAIT):
                    time.sleep(60.0)
            if fault == "slow" and net.num_steps == 20:
                with slow("evaluate"):
                    time.sleep(1.5 if os.environ["RANK"] == "1" else 0.0)
        return net.num_steps


def run(pool: RankPool, folder: Path, *args: object, hang_timeout_s: float = 600.0) -> list[int]:
    return pool.run(train, (str(folder), *args), num_ranks=2, timeout_s=150.0, hang_timeout_s=hang_timeout_s)


@pytest.mark.parametrize(
    ("backend", "fault", "place", "words", "code"),
    [
        ("gloo", "kill", "forward", "was killed by SIGKILL", "killed"),
        ("gloo", "stop", "backward", "has been stopped (SIGSTOP)", "hung"),
        ("gloo", "gil", "forward", "has held Python's lock", "hung"),
        pytest.param("gloo", "loop", "optimizer", "has been computing", "hung", marks=pytest.mark.slow),
        pytest.param("gloo", "deadlock", "backward", "has been blocked", "hung", marks=pytest.mark.slow),
    ],
)
def test_the_rank_the_step_and_the_phase_are_named(warm_pool, tmp_path, warnings, backend, fault, place, words, code):
    warnings.then_end = True
    with pytest.raises(LaunchError) as caught:
        run(warm_pool, tmp_path, backend, fault, place)
    text = str(caught.value).splitlines()[0]
    assert text.startswith("rank 1 of 2 ") and words in text and f"in step 20, in {place}" in text, text
    assert (caught.value.rank, caught.value.code) == (1, code)
    assert ("Paceline ended it" in text) is (fault != "kill"), text  # ranks killed by the monitor are told why
    said = [one for one in warnings.texts if "rank 1" in one.partition(";")[0]]
    assert len(said) == (fault in ("gil", "loop", "deadlock"))  # a certain fault needs no warning
    for one in said:
        assert one.startswith("warning: rank 1 of 2 ") and words in one and "fault_job.py" in one, one
        assert "fault_job.py" in text and "rank 0 waits for bucket" in text and "the hang timeout" in text, text


@pytest.mark.parametrize(
    ("fault", "place", "words"),
    [
        ("slow-compute", "forward", "has been computing"),
        pytest.param("slow-sleep", "backward", "has been blocked", marks=pytest.mark.slow),
        pytest.param("slow-compute", "optimizer", "has been computing", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_slow_once_is_named_and_continues(warm_pool, tmp_path, warnings, fault, place, words):
    assert run(warm_pool, tmp_path, "gloo", fault, place) == [30, 30]
    said = warnings.texts[0]
    assert said.startswith("warning: rank 1 of 2 ") and words in said and "Paceline ended" not in said, said
    assert f"in step 20, in {place}; rank 0 waits for bucket" in said and "go_slowly" in said, said


def test_the_launcher_monitors_where_the_environment_asks_for_it(warm_pool, tmp_path, monkeypatch, capfd):
    """Otherwise a monitor started by the ranks would kill a rank without telling the launcher."""
    monkeypatch.setenv("PACELINE_MONITOR", "1")
    monkeypatch.setenv("PACELINE_HANG_TIMEOUT", "1s")
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .*computing") as caught:
        warm_pool.run(train, (str(tmp_path), "gloo", "loop", "forward"), num_ranks=2, timeout_s=60.0)
    assert caught.value.code == "hung" and "SIGKILL" not in str(caught.value)


def test_the_step_of_an_exception_is_named(warm_pool, tmp_path):
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .*step 20.*a bad sample"):
        run(warm_pool, tmp_path, "gloo", "exception", "optimizer")


def test_a_gpu_that_does_not_finish_is_named(warm_pool, tmp_path, warnings):
    warnings.then_end = True
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .*GPU"):
        run(warm_pool, tmp_path, "gloo", "busy", "")


def test_a_collective_of_one_rank_is_named(warm_pool, tmp_path):
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .*collective"):
        run(warm_pool, tmp_path, "gloo", "extra-collective", "between")


@pytest.mark.skipif(BACKEND != "shm", reason="no shm here")
def test_the_step_of_a_failed_collective_is_named(warm_pool, tmp_path):
    with pytest.raises(CollectiveError, match=r"step (19|20)"):
        run(warm_pool, tmp_path, "shm", "extra-collective", "between")


@pytest.mark.parametrize(
    ("fault", "place"),
    [("flipped-weight", "between"), pytest.param("skipped-step", "optimizer", marks=pytest.mark.slow)],
)
def test_replicas_that_differ_are_named(warm_pool, tmp_path, fault, place):
    with pytest.raises(CollectiveError, match=r"step 26.*layers\.0\.weight.*rank 1"):
        run(warm_pool, tmp_path, "gloo", fault, place)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow", "stall"])
def test_a_pause_is_not_a_fault(warm_pool, tmp_path, fault):
    assert run(warm_pool, tmp_path, "gloo", fault, "between", hang_timeout_s=1.0) == [30, 30]


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "shm", reason="no shm here")
@pytest.mark.parametrize(
    ("fault", "words"), [("stop", "has been stopped"), ("gil", "has held Python's lock"), ("kill", "SIGKILL")]
)
def test_the_same_in_shared_memory(warm_pool, tmp_path, warnings, fault, words):
    warnings.then_end = True
    with pytest.raises(LaunchError, match=f"rank 1 of 2 .*{words}.*in step 20"):
        run(warm_pool, tmp_path, "shm", fault, "forward")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["train", "script"])
@pytest.mark.parametrize("fault", [name for name in FAULTS if not name.startswith("exception-")])
def test_the_study_identifies_every_fault(fault, system):
    if (why := why_not(fault, "cpu", 2)) or system not in FAULTS[fault].systems:
        pytest.skip(why or "not of this system")
    record = measure_fault(Trial(fault, system, "gloo", limit_s=20.0 if fault == "noise" else 60.0))
    assert record.is_right and not record.left_over and record.ended_s is not None, record


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "gil", "loop", "deadlock", "extra-collective", "stall", "noise"])
def test_a_script_that_knows_nothing_of_the_monitor(fault):
    record = measure_fault(Trial(fault, "attached", "gloo", limit_s=20.0 if fault == "noise" else 60.0))
    assert record.is_right and not record.left_over and record.ended_s is not None, record


BUFFERS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    if step in (20, 30) and dist.get_rank() == step // 10 - 2:
        time.sleep(5)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_buffers_of_torchs_wrapper_wait_for_a_rank_that_pauses(tmp_path):
    """Buffers are synchronized in forward."""
    (tmp_path / "train.py").write_text(BUFFERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    variables = os.environ | {"PACELINE_MONITOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "paceline:" not in done.stderr, done.stderr


SLOW = """
import os, time, torch, torch.distributed as dist

class Net(torch.nn.Linear):
    num_calls = 0

    def forward(self, inputs):
        self.num_calls += 1
        if dist.get_rank() == 1 and self.num_calls == 20:
            fill_cache()
        return super().forward(inputs)

def fill_cache():
    while not os.path.exists("named"):
        sum(range(1000))

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Net(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
print("done", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


@contextlib.contextmanager
def open_slow(folder: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program without the monitor. One forward is slow, until a file `named` exists."""
    (folder / "train.py").write_text(SLOW)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    variables = os.environ | {"PACELINE_MONITOR": "1", "OMP_NUM_THREADS": "1"} | variables
    with (folder / "output").open("wb") as output:
        program = subprocess.Popen([*command, "train.py"], cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        yield program
    finally:
        (folder / "named").touch()
        program.terminate()
        program.wait(100)


def read_notices(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("paceline: ")]


@pytest.mark.slow
def test_a_forward_that_is_slow_once_is_named_on_all_ranks_and_goes_on(tmp_path):
    def find_logs() -> dict[str, Path]:
        return {path.parent.name: path for path in tmp_path.glob("logs/**/stderr.log")}

    with open_slow(tmp_path, "--redirects", "3", "--log-dir", str(tmp_path / "logs")) as program:
        wait_until(lambda: len(find_logs()) == 2 and all(map(read_notices, find_logs().values())))
        (tmp_path / "named").touch()
        assert program.wait(100) == 0, (tmp_path / "output").read_text()
    for path in find_logs().values():
        said, *_ = read_notices(path)
        assert "warning: rank 1 of 2 " in said and "has been computing" in said and "fill_cache (train.py" in said, said
        assert (path.parent / "stdout.log").read_text().startswith("done"), said


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_after_the_hang_timeout_and_torchrun_says_who_did_it(tmp_path):
    with open_slow(tmp_path, PACELINE_HANG_TIMEOUT="5s") as program:
        assert program.wait(100) == 1
    said = (tmp_path / "output").read_text()
    verdict = read_notices(tmp_path / "output")[-1]
    assert "rank 1 of 2 " in verdict and "has been computing" in verdict and "fill_cache (train.py" in verdict, verdict
    assert "Paceline ended it because this lasted longer than" in verdict, verdict
    assert "ended by Paceline: rank 1 of 2" in said.partition("Root Cause")[2] and "done" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("system", ["train", "script"])
def test_the_job_of_a_fault_study_ends_with_it(tmp_path, system, number):
    command = [sys.executable, "-m", "paceline", "faults", "--faults", "noise", "--backend", "gloo"]
    laboratory = subprocess.Popen(
        [*command, "--systems", system, "--patience", "120", "--out", str(tmp_path)], stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: any(tmp_path.glob("paceline-fault-*/injected")))
        job = descendants(laboratory.pid)
        laboratory.send_signal(number)
        laboratory.wait(100)
    finally:
        if laboratory.poll() is None:
            laboratory.kill()
    assert len(job) >= 3
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in job))


@pytest.mark.slow
def test_a_run_that_may_recover_still_stops_by_sigterm():
    record = measure_fault(Trial("term", "train", "gloo", limit_s=60.0, policy="spare"))
    assert record.is_right and record.policy == "stop" and record.ended_s is not None, record


def test_every_fault_is_known():
    assert {one.place for one in FAULTS.values()} == {"forward", "backward", "optimizer", "between", "start"}
    with pytest.raises(ValueError, match="a bad sample"):
        inject("exception")


def test_faults_that_cannot_be_injected_here_are_refused_or_skipped(monkeypatch):
    with pytest.raises(ConfigError, match="endless-kernel"):
        parse_faults("kill,endless-kernel")
    with pytest.raises(ConfigError, match="flood"):
        parse_faults("flood")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen, skipped = parse_faults("all")
    assert set(chosen) | set(skipped) == set(FAULTS) and {"link-down", "host-lost"} <= set(skipped)
    assert "kill" in chosen and "endless-kernel" in skipped


def open_links(place: str, hub: str = "", token: str = "1" * 32) -> Links:
    """The connections of one of two hosts, each with one rank; rank 0's host is the hub."""
    asked = {"token": token, "address": "127.0.0.1", "hub": hub, "ranks": [int(place == "b")]}
    return Links({"a net": [0], "b net": [1]}, asked)


def dial(hub: Links) -> socket.socket:
    host, _, port = hub.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60.0)


def test_a_lost_host_is_named(monkeypatch):
    with open_links("a") as hub:
        with pytest.raises(LaunchError) as caught:
            open_links("b", hub.address, token="2" * 32)
        assert caught.value.code == "stranger" and (hub.look() or hub.find_lost()) is None
        with open_links("b", hub.address) as other:
            other.send({"verdict": "rank 1 is stopped"})
            assert wait_until(lambda: hub.look() or hub.find_lost()) == "rank 1 is stopped"
            other.send({"warning": "rank 1 is slow"})
            assert wait_until(hub.take_warnings) == ["rank 1 is slow"] and hub.take_warnings() == []
            assert (hub.look() or hub.find_lost()) is None
            monkeypatch.setattr(monitored, "_SILENT_S", 0.0)
            assert "the host b (rank 1) is lost" in (hub.find_lost() or "")
            monkeypatch.setattr(monitored, "_SILENT_S", 60.0)
            other.leave()
            wait_until(lambda: 1 in hub._left)
            monkeypatch.setattr(monitored, "_SILENT_S", 0.0)
            assert (hub.look() or hub.find_lost()) is None


def test_a_host_whose_monitor_was_killed_is_lost_at_once(monkeypatch):
    monkeypatch.setattr(monitored, "_AFTERMATH_S", 0.05)
    with open_links("a") as hub:
        with open_links("b", hub.address) as other:
            other.look()
            wait_until(lambda: hub._peers)
            assert (hub.look() or hub.find_lost()) is None
        heard = wait_until(lambda: hub.look() or hub.find_lost())
    assert "the host b (rank 1) is lost: its monitor has exited" in heard


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n", b"SSH-2.0-scan\r\n", b'"x"\n', b"[1]\n", b"\xff\n", b"[" * 4000 + b"\n",
        b"x" * 100_000, b'{"host": 1}\n', b"",
    ],
    ids=range(9),
)  # fmt: skip
def test_connections_without_the_monitors_secret_are_not_read(said):
    with open_links("a") as hub:
        with dial(hub) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1024):  # a nonce, then the connection closes
                    pass
            wait_until(lambda: not hub._gate.list_links())
            assert hub.look() is None and not hub._peers
        with open_links("b", hub.address) as other:
            other.send({"verdict": "rank 1 is stopped"})
            assert wait_until(lambda: hub.look() or hub.find_lost()) == "rank 1 is stopped"


def test_unauthenticated_connections_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(store_server, "MOST_UNKNOWN", 3)
    monkeypatch.setattr(store_server, "HELLO_S", 1000.0)
    listener, said = socket.create_server(("127.0.0.1", 0)), list[str]()
    monkeypatch.setattr(store_server, "report", said.append)
    address = listener.getsockname()[:2]
    with contextlib.ExitStack() as stack:
        gate = store_server.Gate(listener, b"the secret", lambda link: None)
        stack.callback(gate.close)
        for _ in range(10):
            stack.enter_context(socket.create_connection(address))
        wait_until(lambda: len(said) == store_server._MOST_REPORTED)
        assert "too many unauthenticated connections" in said[0]
        monkeypatch.setattr(store_server, "HELLO_S", 0.5)
        for _ in range(3):  # occupy the places reserved for connections that may stay silent
            stack.enter_context(socket.create_connection(address))
        wait_until(lambda: not gate.list_links())
        assert not gate._unknown


def test_a_monitor_connects_among_unauthenticated_connections(monkeypatch):
    monkeypatch.setattr(store_server, "MOST_UNKNOWN", 3)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(open_links("a"))
        for _ in range(10):
            stack.enter_context(dial(hub))
        stack.enter_context(open_links("b", hub.address))
        wait_until(lambda: 1 in hub._peers)


@pytest.mark.parametrize("line", [b'{"x": 1}', b"[1]", b'{"host": 7}', b'{"host": [1]}'])
def test_a_monitor_that_does_not_name_its_host_is_not_read(line):
    with open_links("a") as hub:
        with dial(hub) as link:
            assert store_server.check_server(link, b"1" * 32)
            link.sendall(line + b"\n")
            link.settimeout(60.0)
            assert link.recv(1) == b""
        wait_until(lambda: not hub._gate.list_links())
        assert not hub._peers and hub.find_lost() is None


def test_the_monitor_imports_no_torch():
    source = "import sys, paceline.runtime.faults.monitored; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0
