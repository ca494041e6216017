"""Runs that continue after a fault: the same weights on the same number of ranks, and every sample once per epoch."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import paceline
from paceline.errors import ConfigError, LaunchError
from paceline.records.training import load_metrics
from paceline.runtime.faults import monitor
from paceline.runtime.faults.recovery import Fault, Recovery
from paceline.runtime.ranks.launch import RankPool
from paceline.runtime.ranks.worker import SPARE, report_step, stand_by
from paceline.studies.fault_job import inject
from paceline.training.regroup import warm_up
from paceline.training.train_settings import TrainSettings, check_job
from paceline.verbs.train import JOB_MODULES
from tests.conftest import BACKEND

pytestmark = pytest.mark.skipif(bool(monitor.why_not()), reason=monitor.why_not() or "-")

# Two epochs of nine steps, the last of each smaller. A lost step must leave no trace in the state of dropout or
# BatchNorm.
SAMPLES, STEPS = 100, 18
NORMED = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(196, 10)
    )
"""
SMALL: dict[str, Any] = {
    "data": "synthetic:images", "samples": SAMPLES, "global_batch_size": 12, "epochs": 2,
    "save_every": "4steps", "keep": 20, "ranks": 2, "backend": "gloo", "threads": 1,
}  # fmt: skip
# A fault: the step before or during which it occurs, its rank, its kind, and its location.
Done = tuple[int, int, str, str]


def train_noted(settings: TrainSettings, folder: Path, resume: bool, rows: bool, faults: list[Done]) -> Any:
    """Train in a rank, record the samples of each step of each world, and inject each fault once."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from paceline.training import build, checkpoints, loader, loop

    real, seed_step, real_stand_by = loader.split_window, build.Job.seed_step, loop.stand_by
    taken: list[list[int]] = []
    now = [0]

    def split_window(*args: Any) -> Any:
        parts = real(*args)
        taken.append([int(index) for part in parts for index in part.indices[: part.num_counted]])
        return parts

    def reach(place: str) -> None:
        for number, (step, rank, fault, where) in enumerate(faults):
            mark, world = folder / f"fault-{number}", os.environ["PACELINE_JOB"]
            before = [folder / f"fault-{n}" for n, one in enumerate(faults[:number]) if one[::3] == (step, where)]
            is_next = all(other.exists() and other.read_text() != world for other in before)
            if (step, rank, where) == (now[0], int(os.environ["RANK"]), place) and not mark.exists() and is_next:
                mark.write_text(world)
                if fault == "stop" and os.environ["WORLD_SIZE"] == "1":
                    fault = "kill"  # all ranks are stopped: the job is suspended, which is not a fault
                await_spare() if fault == "wait" else inject(fault)

    def await_spare() -> None:
        until_s = time.monotonic() + 30.0
        while not (folder / "ready").exists() and time.monotonic() < until_s:
            time.sleep(0.02)

    def stand_by(step: int, is_lost: bool = False) -> None:
        if step < 0:
            (folder / "ready").touch()
        real_stand_by(step, is_lost)

    def begin(job: Any, step: int) -> None:
        now[0] = step + 1
        with (folder / f"notes-{os.getpid()}").open("a") as file:
            world = os.environ["PACELINE_JOB"]
            file.write(json.dumps([time.monotonic(), world, now[0], taken[-1], os.environ["WORLD_SIZE"]]) + "\n")
        reach("begin")
        seed_step(job, step)

    def reach_first(place: str, call: Any) -> Any:
        def reached(*args: Any) -> Any:
            reach(place)
            return call(*args)

        return reached

    loader.split_window, build.Job.seed_step = split_window, begin  # type: ignore[method-assign]
    loop.stand_by = stand_by
    loop.evaluate, evaluate = reach_first("evaluate", loop.evaluate), loop.evaluate
    # type: ignore[method-assign]
    checkpoints.RunFiles.save, save = reach_first("save", checkpoints.RunFiles.save), checkpoints.RunFiles.save
    handle = register_optimizer_step_pre_hook(lambda *_: reach("optimizer"))
    try:
        return loop.train(settings, folder, resume, rows)
    finally:
        loader.split_window, build.Job.seed_step = real, seed_step  # type: ignore[method-assign]
        loop.stand_by = real_stand_by
        loop.evaluate, checkpoints.RunFiles.save = evaluate, save  # type: ignore[method-assign]
        handle.remove()


def train_deaf(settings: TrainSettings, folder: Path, resume: bool, rows: bool, faults: list[Done]) -> Any:
    """`train_noted` with messages like NCCL's: a message to a lost rank waits until it is aborted, and raises
    nothing. Its memory is unchanged."""
    from paceline.parallel.channel import Channel
    from paceline.runtime.ranks import world

    wait, known, abort = Channel.wait, world._NOTICE_LOSS, world._abort_group

    def wait_deaf(self: Channel, work: Any, what: str) -> None:
        try:
            work.wait()
        except RuntimeError:
            while not (folder / f"aborted-{os.getpid()}").exists():
                time.sleep(0.01)

    Channel.wait = wait_deaf  # type: ignore[method-assign]
    world._NOTICE_LOSS = frozenset()
    world._abort_group = lambda group: (folder / f"aborted-{os.getpid()}").touch()
    try:
        return train_noted(settings, folder, resume, rows, faults)
    finally:
        Channel.wait, world._NOTICE_LOSS, world._abort_group = wait, known, abort  # type: ignore[method-assign]


def run(
    folder: Path, policy: str, faults: list[Done], job: Any = train_noted, source: str = NORMED, **changes: Any
) -> list[Fault]:
    """Train SMALL through these faults and return the launcher's record of them."""
    folder.mkdir()
    model = folder.parent / "normed.py"
    model.write_text(source)
    settings = TrainSettings(**SMALL | {"model": f"{model}:build", "on_fault": policy} | changes)
    recovery = Recovery(
        policy, settings.ranks, (settings, folder, True, False, faults), lambda *_: None, fit=settings.usable_ranks
    )
    with RankPool(settings.ranks, JOB_MODULES) as pool:
        arguments = (settings, folder, False, False, faults)
        # A busy machine may delay healthy ranks for seconds; only an endless loop needs the short time limit.
        hang_timeout_s = 5.0 if any(fault == "loop" for _, _, fault, _ in faults) else 60.0
        pool.run(job, arguments, timeout_s=110.0, hang_timeout_s=hang_timeout_s, recovery=recovery)
    return recovery.faults


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "weights.safetensors")


def check_equal(folder: Path, other: Path) -> None:
    found, wanted = weights(folder), weights(other)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def count_samples(folder: Path, steps_of_epoch: int = STEPS // 2) -> tuple[list[collections.Counter[int]], list[int]]:
    """How often each sample was used in each epoch, and the ranks of each step. If a step was attempted several times,
    only the attempt in the last world counts: the others did not change the model."""
    worlds: dict[int, dict[str, tuple[float, list[int], int]]] = {}
    for path in folder.glob("notes-*"):
        for line in path.read_text().splitlines():
            when_s, world, step, ids, size = json.loads(line)
            before = worlds.setdefault(step, {}).get(world, (0.0, [], 0))
            worlds[step][world] = max(when_s, before[0]), before[1] + ids, int(size)
    epochs: list[collections.Counter[int]] = [collections.Counter(), collections.Counter()]
    sizes = []
    for step in sorted(worlds):
        _, ids, size = max(worlds[step].values())
        epochs[(step - 1) // steps_of_epoch].update(ids)
        sizes.append(size)
    return epochs, sizes


def check_samples(folder: Path) -> list[int]:
    """Check that every sample was used once per epoch and every step has a row; return the ranks of each step."""
    epochs, sizes = count_samples(folder)
    assert epochs == [collections.Counter(range(SAMPLES))] * 2
    rows = load_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "test_loss" in row] == [STEPS // 2, STEPS]
    return sizes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(folder, "restart", []) == []
    return folder


@pytest.mark.parametrize(
    ("policy", "fault", "rank", "place"),
    [
        ("restart", "kill", 1, "begin"),
        pytest.param("spare", "kill", 1, "optimizer", marks=pytest.mark.slow),
        pytest.param("spare", "kill", 0, "begin", marks=pytest.mark.slow),
        pytest.param("spare", "segv", 1, "begin", marks=pytest.mark.slow),
        pytest.param("spare", "stop", 1, "begin", marks=pytest.mark.slow),
        pytest.param("spare", "loop", 0, "optimizer", marks=pytest.mark.slow),
        pytest.param("restart", "exception", 0, "optimizer", marks=pytest.mark.slow),
        pytest.param("spare", "exception", 0, "begin", marks=pytest.mark.slow),
    ],
)
def test_the_weights_equal_those_of_a_run_without_a_fault(undisturbed, tmp_path, policy, fault, rank, place):
    (found,) = run(tmp_path / "run", policy, [(11, rank, fault, place)])
    stays = policy == "spare" and fault != "exception"
    assert (found.rank, found.policy) == (rank, policy if stays else "restart")
    # The steps since the last checkpoint on disk, or since the start; the other rank may have completed its step.
    assert found.steps_lost in ([0] if stays else [2, 3, 6, 7, 10, 11])
    assert found.step in (11, 12) and found.ranks_after == 2 and found.recovered_s is not None and found.recovered_s > 0
    check_equal(tmp_path / "run", undisturbed)
    check_samples(tmp_path / "run")


@pytest.mark.slow
def test_ranks_whose_messages_never_fail_are_notified_and_aborted_steps_do_not_count(undisturbed, tmp_path):
    (found,) = run(tmp_path / "run", "spare", [(11, 1, "kill", "optimizer")], job=train_deaf)
    assert (found.rank, found.policy, found.steps_lost, found.ranks_after) == (1, "spare", 0, 2)
    # On the surviving rank; on a busy machine it may be told before it waits for a message.
    assert len(list((tmp_path / "run").glob("aborted-*"))) <= 1
    check_equal(tmp_path / "run", undisturbed)
    check_samples(tmp_path / "run")


@pytest.mark.parametrize("backend", [BACKEND, pytest.param("gloo", marks=pytest.mark.slow)])
def test_fewer_ranks_continue_and_one_more_joins(tmp_path, backend):
    faults: list[Done] = [(5, 0, "kill", "optimizer"), (8, 0, "wait", "begin")]
    (found,) = run(tmp_path / "run", "shrink", faults, ranks=3, backend=backend)
    assert (found.rank, found.policy, found.steps_lost, found.ranks_after) == (0, "shrink", 0, 2)
    sizes = check_samples(tmp_path / "run")
    assert sizes[0] == 3 and 2 in sizes and sizes[-1] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("step", "place", "rank"), [(9, "evaluate", 0), (12, "save", 1), (18, "evaluate", 1)])
def test_work_after_a_step_is_repeated(undisturbed, tmp_path, step, place, rank):
    (found,) = run(tmp_path / "run", "spare", [(step, rank, "kill", place)])
    assert (found.policy, found.steps_lost) == ("spare", None if step == STEPS else 0)
    check_equal(tmp_path / "run", undisturbed)
    check_samples(tmp_path / "run")


@pytest.mark.slow
def test_repeated_work_may_fail_again(undisturbed, tmp_path):
    faults: list[Done] = [(9, 0, "kill", "evaluate"), (9, 1, "kill", "evaluate")]
    found = run(tmp_path / "run", "spare", faults)
    assert [(fault.rank, fault.policy) for fault in found] == [(0, "spare"), (1, "spare")]
    check_equal(tmp_path / "run", undisturbed)
    check_samples(tmp_path / "run")


def act(what: str, folder: Path) -> str:
    """A job with a fault of this kind on its ranks, but without faults in their next world."""
    if os.environ.pop(SPARE, ""):
        (folder / f"spare-{os.getpid()}").touch()
        stand_by(-1)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "lost":
        stand_by(3, is_lost=True)
    elif what == "spare":
        report_step(0)
        spares: list[Path] = []
        while len(spares) < 2:  # start the second one only after the first has ended
            time.sleep(0.02)
            if len(spares := list(folder.glob("spare-*"))) == 1 and not (folder / "ended").exists():
                (folder / "ended").touch()
                time.sleep(0.3)  # until the spare is on standby
                os.kill(int(spares[0].name.rpartition("-")[2]), signal.SIGKILL)
    return what


@pytest.mark.parametrize(
    ("what", "size"), [("killed", 2), ("lost", 1), pytest.param("lost", 2, marks=pytest.mark.slow)]
)
def test_all_ranks_restart_if_none_can_continue(tmp_path, what, size):
    recovery = Recovery("shrink", 2, ("fine", tmp_path), lambda *_: None)
    with RankPool(2, JOB_MODULES) as pool:
        found = pool.run(act, (what, tmp_path), num_ranks=size, timeout_s=110.0, recovery=recovery)
    assert found == ["fine", "fine"] and [fault.policy for fault in recovery.faults] == ["restart"]


@pytest.mark.parametrize("policy", ["restart", pytest.param("shrink", marks=pytest.mark.slow)])
def test_a_signal_while_all_ranks_start_again_ends_the_run(tmp_path, policy):
    recovery = Recovery(policy, 2, ("fine", tmp_path), lambda *_: None)
    recovery.is_over = lambda: recovery.faults  # comes after the launcher's decision
    with RankPool(2, JOB_MODULES) as pool, pytest.raises(LaunchError) as caught:
        pool.run(act, ("killed", tmp_path), timeout_s=110.0, recovery=recovery)
    assert caught.value.code == "interrupted"


def test_a_spare_that_ends_on_standby_is_replaced(tmp_path):
    heard: list[str] = []
    recovery = Recovery("spare", 1, (), lambda faults, line: heard.append(line))
    with RankPool(1, JOB_MODULES) as pool:
        assert pool.run(act, ("spare", tmp_path), timeout_s=110.0, recovery=recovery) == ["spare"]
    assert len(heard) == 1 and "SIGKILL" in heard[0]


def get_ready(settings: TrainSettings) -> tuple[int, bool]:
    carried = warm_up(settings)
    return carried.step, carried.module is not None and carried.sets is not None


@pytest.mark.parametrize(
    "changes", [{"samples": 100, "lr_warmup": 10}, {"batch_growth": ((0.5, 4),), "grow": "batch-size"}]
)
def test_a_spare_takes_the_settings_of_the_run(on_ranks, changes):
    settings = TrainSettings(**SMALL | {"model": "cnn", "on_fault": "spare", "tail": "drop"} | changes)
    assert on_ranks(1, get_ready, settings) == [(-1, True)]


@pytest.mark.slow
def test_a_stateless_strategy_can_use_spares(tmp_path):
    run(tmp_path / "a", "restart", [], strategy="bf16")
    (found,) = run(tmp_path / "b", "spare", [(11, 1, "kill", "begin")], strategy="bf16")
    assert found.policy == "spare"
    check_equal(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize(
    "changes",
    [
        {"on_fault": "spare", "strategy": "zero1"}, {"on_fault": "shrink", "strategy": "diloco:10"},
        {"on_fault": "spare", "strategy": "topk:0.1"}, {"on_fault": "spare", "ranks": 1},
        {"on_fault": "shrink", "wrapper": "torch"}, {"on_fault": "restart", "spares": 2},
        {"on_fault": "hope"}, {"max_faults": 0},
    ],
)  # fmt: skip
def test_state_without_a_replica_is_refused_before_a_rank_starts(changes):
    with pytest.raises(ConfigError):
        check_job(TrainSettings(**SMALL | changes))


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_launched_world_leaves_recovery_to_its_launcher(tmp_path, monkeypatch, is_launched):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if is_launched else ():
        monkeypatch.setenv(name, "0" if name.endswith("RANK") else "2")
    out = tmp_path / "out"
    with pytest.raises(ConfigError) as caught:
        paceline.train("cnn", on_fault="restart", ranks=2, out=out if is_launched else None)
    assert caught.value.code == "on-fault" and not out.exists()
    assert ("--on-fault stop" if is_launched else "--out") in str(caught.value)


def plan_faults(seed: int) -> tuple[int, list[Done]]:
    """A number of ranks, and up to three faults in different steps."""
    chance = random.Random(seed)
    ranks, steps = chance.choice([2, 3, 4]), sorted(chance.sample(range(2, STEPS + 1), chance.randint(1, 3)))
    kinds = ["kill", "kill", "kill", "segv", "exit", "stop"]
    places = dict.fromkeys((4, 8, 12, 16), "save") | dict.fromkeys((STEPS // 2, STEPS), "evaluate")
    faults = []
    for step in steps:
        place = chance.choice(["begin", "optimizer", places.get(step, "begin")])
        faults.append((step, chance.randrange(ranks), chance.choice(kinds), place))
    pauses = [(step, 0, "straggle", "begin") for step in chance.sample(range(1, STEPS + 1), 3)]
    return ranks, faults + pauses


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(*map(int, os.environ.get("PACELINE_FAULT_SEQUENCES", "0:200").split(":"))))
def test_random_faults_with_shrink_and_grow_use_every_sample_once(tmp_path, seed):
    """PACELINE_FAULT_SEQUENCES=20:40 runs a subset."""
    ranks, faults = plan_faults(seed)
    backend = BACKEND if seed % 2 else "gloo"
    found = run(tmp_path / "run", "shrink", faults, ranks=ranks, backend=backend)
    recovered = [fault for fault in found if fault.policy == "shrink" and fault.recovered_s is not None]
    assert all(fault.steps_lost in (0, None) for fault in recovered)  # None: before the first step of a world
    if len(found) == 1 and found[0].ranks_after:  # no other rank is lost: all learned of the fault in time
        assert found[0].ranks_after >= found[0].ranks - 1
    check_samples(tmp_path / "run")
