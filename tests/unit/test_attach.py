"""The observer in a user's program: it records, stops on request, changes nothing, and never breaks torch."""

from __future__ import annotations

import gc
import json
import math
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline import autoload
from paceline.measure import observer
from paceline.measure.observer import Observer, Settings
from paceline.verbs import attach

VARIABLES = ("PACELINE_ATTACH", "PACELINE_WRAPPER")


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch) -> Iterator[None]:
    """Undo the observer's hooks, which otherwise persist in the test process."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizers, name, type(getattr(optimizers, name))(getattr(optimizers, name)))
    monkeypatch.setattr(observer.atexit, "register", lambda *_: None)
    monkeypatch.setattr(observer.multiprocessing.util, "Finalize", lambda *_, **__: None)
    for owner, name in ((torch, "save"), (torch.nn.Module, "train")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    callbacks = [*gc.callbacks]
    init, fetch = DistributedDataParallel.__init__, _BaseDataLoaderIter.__next__
    yield
    DistributedDataParallel.__init__, _BaseDataLoaderIter.__next__ = init, fetch
    gc.callbacks[:] = callbacks


class Program:
    """A plain loop in this process."""

    def __init__(self, count: int = 1) -> None:
        torch.manual_seed(0)
        self.models = [torch.nn.Linear(4, 4) for _ in range(count)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.loader = DataLoader(torch.randn(64, 4), batch_size=2)

    def train(self, steps: int) -> None:
        for _, inputs in zip(range(steps), iter(self.loader), strict=False):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()


def observe(folder: Path, **settings: object) -> Observer:
    observer = Observer(Settings(str(folder), **settings))
    observer.install()
    return observer


def read(folder: Path) -> dict:
    (path,) = folder.glob("rank-0-*.jsonl")
    found: dict = {"steps": []}
    for line in path.read_text().splitlines():
        part = json.loads(line)
        found |= part | {"steps": [*found["steps"], *part.get("steps", [])]}
    return found


class MadeGpu:
    """A GPU and a host with separate clocks: the host launches work and continues; it waits only when told to.

    Its events have the interface of `paceline.runtime.ranks.moments`.
    """

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0
        self.num_waits = 0

    def launch(self, took_s: float, host_s: float) -> None:
        self.host_s += host_s
        self.free_s = max(self.free_s, self.host_s) + took_s

    def mark(self, _: torch.device) -> MadeEvent:
        return MadeEvent(self, max(self.free_s, self.host_s))

    def sleep(self, seconds: float) -> None:
        self.num_waits += 1
        self.host_s += seconds


class MadeEvent:
    def __init__(self, gpu: MadeGpu, done_s: float) -> None:
        self._gpu, self.done_s = gpu, done_s

    def query(self) -> bool:
        return self.done_s <= self._gpu.host_s

    def elapsed_time(self, end: MadeEvent) -> float:
        assert self.query() and end.query(), "torch refuses events that are not done"
        return (end.done_s - self.done_s) * 1e3


@pytest.fixture
def gpu(monkeypatch) -> MadeGpu:
    made = MadeGpu()
    clock = SimpleNamespace(perf_counter=lambda: made.host_s, monotonic=lambda: made.host_s, sleep=made.sleep)
    monkeypatch.setattr(observer, "time", clock)
    monkeypatch.setattr(observer, "mark", made.mark)
    return made


class GpuProgram:
    """GPU steps of 156 ms that the host launches in 7 ms after waiting for data."""

    def __init__(self, gpu: MadeGpu) -> None:
        self.gpu, self.optimizer = gpu, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)

    def train(self, steps: int, data_s: float = 0.0, gpu_s: float = 0.156, most_ahead_s: float = math.inf) -> None:
        def fetch() -> Iterator[torch.Tensor]:
            for _ in range(steps):
                self.gpu.host_s += data_s
                yield torch.zeros(1)

        class Data(torch.utils.data.IterableDataset):
            def __iter__(self) -> Iterator[torch.Tensor]:
                return fetch()

        for _ in DataLoader(Data(), batch_size=None):
            self.gpu.launch(gpu_s, 0.007)
            self.optimizer.step()
            self.gpu.host_s = max(self.gpu.host_s, self.gpu.free_s - most_ahead_s)


def test_steps_of_a_gpu_have_its_times_and_not_those_of_the_host_that_runs_ahead(tmp_path, gpu):
    observe(tmp_path, steps=12)
    program = GpuProgram(gpu)
    program.train(12)
    assert gpu.num_waits == 0 and not list(tmp_path.glob("rank-*"))  # the GPU is still on its first step
    program.train(40, most_ahead_s=0.5)
    found = read(tmp_path)
    assert gpu.num_waits == 0 and found["num_steps"] == 12
    assert [step[0] for step in found["steps"]] == list(range(2, 13))
    assert [step[1] for step in found["steps"]] == pytest.approx([0.156] * 11)
    assert [step[3] for step in found["steps"]] == pytest.approx([0.007] * 11)


def test_a_wait_for_data_counts_only_while_the_gpu_has_nothing_to_do(tmp_path, gpu):
    observe(tmp_path, steps=10)
    program = GpuProgram(gpu)
    program.train(5, data_s=0.1)  # loading is hidden: the GPU is slower, and the host runs ahead
    program.train(6, data_s=0.5)
    program.train(30, most_ahead_s=0.0)
    steps = {number: times for number, *times in read(tmp_path)["steps"]}
    assert [steps[number][1] for number in range(2, 6)] == pytest.approx([0.0] * 4)
    # The GPU is idle from the end of a step until the host has loaded the next batch.
    for number in range(7, 11):
        assert steps[number][0] == pytest.approx(0.507) and steps[number][1] == pytest.approx(0.5 - 0.156)


def test_what_the_observer_does_between_two_steps_is_in_none_on_a_gpu_that_waits_for_it(tmp_path, gpu, monkeypatch):
    observer = observe(tmp_path, steps=8)
    advance = observer._advance

    def advance_slowly() -> None:
        gpu.host_s += 2.0
        advance()

    monkeypatch.setattr(observer, "_advance", advance_slowly)
    GpuProgram(gpu).train(10)
    times = [step[1] for step in read(tmp_path)["steps"]]
    # includes the launch, which the GPU waits for from the second step on
    assert times == pytest.approx([0.156, *[0.163] * 6])


def test_a_program_that_is_stopped_or_ends_waits_for_the_times_of_its_last_steps(tmp_path, gpu):
    observe(tmp_path, steps=8, stop=True)
    with pytest.raises(SystemExit):
        GpuProgram(gpu).train(20)
    assert gpu.num_waits and [step[0] for step in read(tmp_path)["steps"]] == list(range(2, 9))


def test_a_gpu_that_never_gets_to_the_last_steps_does_not_keep_a_program_from_ending(tmp_path, gpu):
    observer = observe(tmp_path, steps=0)
    program = GpuProgram(gpu)
    program.train(4, most_ahead_s=0.0)
    program.train(1, gpu_s=math.inf)
    observer._close()
    found = read(tmp_path)
    assert found["num_steps"] == 5 and [step[0] for step in found["steps"]] == [2, 3, 4]


def test_a_call_captured_in_a_cuda_graph_is_not_a_step(tmp_path, gpu, monkeypatch):
    observe(tmp_path, steps=4)
    program = GpuProgram(gpu)
    program.train(2, most_ahead_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(observer, "mark", None)  # no GPU timing is requested
        program.optimizer.step()
    program.train(3, most_ahead_s=0.0)
    assert [step[0] for step in read(tmp_path)["steps"]] == [2, 3, 4]


def test_without_variables_nothing_is_loaded_and_torch_stays_as_it_is(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    loaded, init = set(sys.modules), DistributedDataParallel.__init__
    autoload.start()
    assert set(sys.modules) == loaded and DistributedDataParallel.__init__ is init


@pytest.mark.parametrize("value", ["no JSON", '{"folder": "/no/such/folder", "steps": 9}', '{"other": 1}'])
def test_an_error_never_leaves_the_entry_point(monkeypatch, capsys, value):
    monkeypatch.delenv("PACELINE_WRAPPER", raising=False)
    monkeypatch.setenv("PACELINE_ATTACH", value)
    autoload.start()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "PACELINE_ATTACH" in captured.err


def test_the_variable_holds_the_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_ATTACH", json.dumps({"folder": str(tmp_path), "steps": 8}))
    autoload.start()
    Program().train(12)
    assert (tmp_path / "seen").exists() and read(tmp_path)["num_steps"] == 8


def test_steps_are_timed_with_their_data_and_some_are_recorded(tmp_path):
    observe(tmp_path, steps=16, warmup=6, record=4)
    Program().train(20)
    found = read(tmp_path)
    assert [step[0] for step in found["steps"]] == list(range(2, 17))
    assert all(0 < data_s < step_s and host_s > 0 for _, step_s, data_s, host_s, *_ in found["steps"])
    ((trace, *window),) = found["windows"]
    assert window == [7, 11, 0] and found["num_steps"] == 16
    assert (found["rank"], found["world_size"], found["device"], found["backend"]) == (0, 1, "cpu", "none")
    events = json.loads((tmp_path / trace).read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert named.count("Optimizer.step#SGD.step") >= 4
    assert [name for name in named if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (6, 7, 8, 9)]


def test_the_weights_are_the_same_bits(tmp_path):
    plain, seen = Program(2), Program(2)
    plain.train(20)
    observe(tmp_path, steps=12, warmup=4, record=3)
    seen.train(20)
    for one, other in zip(plain.models, seen.models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_alternating_optimizers_are_one_step(tmp_path):
    observe(tmp_path, steps=8, record=0)
    Program(2).train(12)
    assert [step[0] for step in read(tmp_path)["steps"]] == list(range(2, 9))


def test_an_optimizer_that_runs_a_closure_ends_a_step_as_any_other(tmp_path):
    observe(tmp_path, steps=6, record=0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    assert [step[0] for step in read(tmp_path)["steps"]] == list(range(2, 7))


def test_times_are_written_during_the_run(tmp_path):
    observe(tmp_path, steps=0, record=0, every=4)
    Program().train(10)
    found = read(tmp_path)
    assert [step[0] for step in found["steps"]] == list(range(2, 9)) and "num_steps" not in found


def test_a_program_that_profiles_itself_is_not_recorded(tmp_path):
    observe(tmp_path, steps=12, warmup=4, record=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        Program().train(14)
    found = read(tmp_path)
    assert "trace" not in found and found["not_recorded"] and len(found["steps"]) == 11


def test_the_program_ends_after_the_requested_step(tmp_path, monkeypatch):
    observe(tmp_path, steps=8, record=0, stop=True)
    program, ended = Program(), []
    with pytest.raises(SystemExit) as exit_:
        program.train(20)
    assert exit_.value.code == 0 and read(tmp_path)["num_steps"] == 8
    # A program that catches every exception is eventually killed.
    monkeypatch.setattr(observer.os, "_exit", lambda code: ended.append(code) or sys.exit(code))
    for _ in range(observer._MOST_EXITS):
        with pytest.raises(SystemExit):
            program.train(1)
    assert ended == [0]


def test_an_error_while_observing_does_not_affect_the_program(tmp_path, monkeypatch):
    observer = observe(tmp_path, steps=8, record=0, stop=True)

    def fail() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(observer, "_advance", fail)
    program = Program()
    program.train(7)
    with pytest.raises(SystemExit):  # the stop must still take effect
        program.train(1)
    assert read(tmp_path)["error"] == "RuntimeError: no more"


def test_torch_finds_the_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = tomllib.loads(text)["project"]["entry-points"]["torch.backends"]["paceline_autoload"]
    assert found == f"{autoload.__name__}:{autoload.start.__name__}"


def test_a_program_that_begins_to_profile_itself_ends_the_recording(tmp_path):
    observe(tmp_path, steps=14, warmup=4, record=6)
    program = Program()
    program.train(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        program.train(3)
    program.train(6)
    assert any("SGD" in event.key for event in own.key_averages())
    assert [window[1:3] for window in read(tmp_path)["windows"]] == [[5, 7]]


def test_a_wrapper_is_noted_however_its_constructor_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module: torch.nn.Module.__init__(self))
    observer = observe(tmp_path, steps=8)
    first, second = (DistributedDataParallel.__new__(DistributedDataParallel) for _ in range(2))
    DistributedDataParallel.__init__(first, "net")
    DistributedDataParallel.__init__(self=second, module="net")  # as our replacement for torch's `__init__` does
    assert observer._list_wrappers() == [first, second]


def test_pauses_between_steps_are_timed_apart_from_data(tmp_path, monkeypatch):
    gc.disable()  # collect only when this test calls it
    observed = observe(tmp_path, steps=12)
    program = Program()
    observed._roots.add(id(program.models[0]))  # as if a wrapper contained it
    program.train(6)
    program.models[0].eval()
    time.sleep(0.05)
    torch.save({}, tmp_path / "inside.pt")
    assert list(program.loader)  # not a wait for data
    program.models[0].train()
    torch.nn.Linear(2, 2).eval()  # other modules do not mark evaluation
    gc.collect(0)
    gc.collect()
    threading.Thread(target=torch.save, args=({}, tmp_path / "aside.pt")).start()
    program.train(6)
    gc.enable()
    steps = {number: times for number, *times in read(tmp_path)["steps"]}
    for number, (step_s, data_s, _, evaluated_s, saved_s, collected_s, elements) in steps.items():
        assert (evaluated_s >= 0.05) == (saved_s > 0) == (collected_s > 0) == (number == 7)
        assert data_s + evaluated_s + saved_s <= step_s and elements == 8
    assert torch.save.__module__ == "torch.serialization" and not hasattr(torch.save, "__wrapped__")
    assert observed._time_collection not in gc.callbacks


def test_a_program_that_trains_in_evaluation_mode_does_not_evaluate(tmp_path):
    observed = observe(tmp_path, steps=8)
    program = Program()
    observed._roots.add(id(program.models[0]))
    for _ in range(10):
        program.models[0].eval()
        program.train(1)
    assert [step[4] for step in read(tmp_path)["steps"]] == [0.0] * 7


def test_padding_is_found_in_sequences_and_masks_only():
    tokens = torch.randint(1, 99, (16, 32))
    assert observer._find_padding(tokens) < 0.01
    tokens[:, 8:] = 0
    assert observer._find_padding(tokens) == pytest.approx(0.73, abs=0.02)  # one zero may end a sentence
    assert observer._find_padding(tokens.flip(1)) == observer._find_padding(tokens)
    mask = (torch.arange(32) < 8).long().repeat(16, 1)
    assert observer._find_padding(mask) == 0.75 == observer._find_padding(mask.bool().flip(1))
    classes = (torch.rand(64, 32) < 0.1).long()  # several classes of each sample
    for other in (classes, mask.float(), mask[0], mask[:, :4], mask[None]):
        assert observer._find_padding(other) == 0.0
    found = observer._list_tensors({"a": [tokens, (mask, "text")], "b": None})
    assert [one is other for one, other in zip(found, (tokens, mask), strict=True)] == [True, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_request_to_stop_keeps_what_was_observed_and_reaches_the_program(error):
    def show():
        if isinstance(error, KeyboardInterrupt):  # a terminal sends it to the program, too
            program.send_signal(signal.SIGTERM)
        raise error

    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert attach._wait(None, program, SimpleNamespace(show=show), False, None)
        assert program.poll() == -signal.SIGTERM
    finally:
        program.kill()
        program.wait()


# -- changes of the step time ------------------------------------------------------------------------------------------


def find_change(steps_s: list[float], begin: int = 12) -> tuple[int, int]:
    """The first step of a change that the observer finds in these steps, and the step after which it records again."""
    observer = Observer(Settings("unused", steps=0, record=4))
    observer._head["windows"] = [["trace", 7, begin - 1, 0]]
    for number, step_s in enumerate(steps_s, begin):
        observer._find_change(number, step_s)
        if observer._again:
            break
    return observer._since, observer._again


def test_noise_and_pauses_are_no_lasting_change():
    noisy_s = [0.01 * (1 + 0.1 * (number % 3 - 1)) * (4 if number % 5 == 0 else 1) for number in range(400)]
    assert find_change(noisy_s) == (0, 0)
    assert find_change([0.01] * 30 + [0.03] * 20 + [0.01] * 100) == (0, 0)  # twenty slow steps end again


@pytest.mark.parametrize("later_s", [0.013, 0.03, 0.007])
def test_a_lasting_change_is_found_with_its_first_step(later_s):
    steps_s = [0.01] * 49 + [later_s] * 80
    steps_s[12], steps_s[55] = 0.05, 0.0101  # outliers
    since, again = find_change(steps_s)
    assert since == 12 + 49 and since + 32 <= again <= since + 32 + 20


def test_steps_are_recorded_twice_and_after_a_change_but_not_if_the_program_ends(tmp_path, monkeypatch):
    observer = observe(tmp_path, steps=60, warmup=4, record=4)
    program = Program()
    program.loader = DataLoader(torch.randn(256, 4), batch_size=2)
    monkeypatch.setattr(observer, "_find_change", lambda *_: None)
    program.train(40)
    observer._since, observer._again = 35, 42
    program.train(10)
    observer._since, observer._again = 49, 58
    program.train(20)  # observation ends in the fourth recording
    windows = read(tmp_path)["windows"]
    assert [window[1:] for window in windows] == [[5, 9, 0], [21, 25, 0], [43, 47, 35]]
    for name, *_ in windows:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert sum(str(event.get("name")).startswith("ProfilerStep") for event in events) >= 4


def test_recordings_of_the_same_state_are_alternatives():
    def list_alike(*windows: list[object], slow: range = range(0)) -> list[str]:
        steps = [(n, 0.1 if n in slow else 0.05, 0.0) for n in range(1, 160)]
        return [one.trace for one in attach._list_alike([attach._Rank({"windows": list(windows)}, steps)] * 2)]

    first, second, later = ["a", 11, 19, 0], ["b", 31, 39, 0], ["c", 140, 148, 101]
    assert list_alike(first, second) == ["a", "b"]
    assert list_alike(first, second, later, slow=range(101, 160)) == ["c"]
    assert list_alike(first, second, slow=range(25, 160)) == ["b"]  # the state changed between them
    assert list_alike(first) == ["a"] and list_alike() == []


def test_steps_of_a_recording_that_is_not_over_are_not_shown():
    rank = attach._Rank({"windows": [["a", 11, 19, 0]], "recording": 30}, [(n, 0.1) for n in range(8, 34)])
    assert attach._list_traced([rank]) == {*range(11, 20), 31, 32, 33}
    rank.about["recording"] = 0
    assert attach._list_traced([rank]) == {*range(11, 20)}


def test_ranks_use_the_last_steps_that_all_of_them_recorded():
    both = [[["a", 11, 19, 0], ["b", 80, 88, 61]], [["a", 11, 19, 0], ["b", 80, 88, 61], ["c", 140, 148, 131]]]
    ranks = [attach._Rank({"windows": windows}, [(n, 0.1, 0.0) for n in range(1, 160)]) for windows in both]
    assert attach._choose_window(ranks) == ("b", 80, 88, 61)
    _, common, used = attach._pick_steps(ranks)
    assert common == list(range(1, 160)) and used == [*range(61, 80), *range(89, 140), *range(149, 160)]
    ranks.append(attach._Rank({}, ranks[0].steps))  # ranks beyond the 16th are not recorded
    assert attach._choose_window(ranks).trace == "b"
    assert attach._choose_window(ranks[2:]) == attach._Window()


def test_a_missing_script_is_named_before_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.py").touch()
    find, launcher = attach._find_missing, ["torchrun", "--nproc-per-node", "2"]
    assert find([*launcher, "train.py"]) == "train.py: no such file here; did you mean examples/train.py?"
    assert find(["/usr/bin/python3.11", "other.py"]) == "other.py: no such file here"
    assert find([*launcher, "examples/train.py"]) == find(["python", "-m", "a", "b.py"]) == ""
    assert find(["ssh", "host", "python", "other.py"]) == find(["python", "-c", "pass"]) == ""
