"""Checkpoints are intact or rejected after any fault of the process or the disk; a folder contains one run."""

import contextlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from paceline.errors import ConfigError, RecordError
from paceline.predict.goodput import estimate_save_interval
from paceline.training import checkpoint_files, checkpoints
from paceline.training.checkpoint_files import CheckpointStore, check_fingerprint, fingerprint, load_checkpoint
from paceline.training.train_settings import TrainSettings

FILES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


def model_of(step, size=4):
    embed = torch.full((size, 3), float(step))
    return {"embed": embed, "bias": torch.full((size,), step).bfloat16(), "head": embed}


def save(store, *steps, size=4):
    for step in steps:
        state = {"optimizer": {"state": {0: {"momentum": torch.full((size,), step)}}}, "rng": [torch.get_rng_state()]}
        store.save(step, model_of(step, size), state, {"world_size": 2, "position": step * 8, "loss": float("inf")})
    store.wait()


def assert_holds(loaded, step):
    assert loaded.step == step and loaded.meta == {"world_size": 2, "position": step * 8, "loss": float("inf")}
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in model_of(step).items())
    assert loaded.model["head"] is loaded.model["embed"]
    assert torch.equal(loaded.state["optimizer"]["state"][0]["momentum"], torch.full((4,), step))


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@contextlib.contextmanager
def opened(*arguments, **options):
    """A store that waits for its last save at the end of the test."""
    store = CheckpointStore(*arguments, **options)
    yield store
    store.wait()


@pytest.fixture
def store(tmp_path):
    """A store that has saved steps 10 and 20."""
    with opened(tmp_path / "run" / "checkpoints") as store:
        save(store, 10, 20)
        yield store


def test_a_checkpoint_comes_back_and_plain_safetensors_reads_its_weights(store):
    loaded = CheckpointStore(store.folder).load_latest()
    assert_holds(loaded, 20)
    assert loaded.path == store.folder / "step-00000020" and loaded.refused == []
    assert names(loaded.path) == sorted(FILES)
    assert safetensors.torch.load_file(loaded.path / "model.safetensors").keys() == {"embed", "bias"}


def test_an_empty_folder_is_not_an_error(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert store.find() == [] and store.load_latest() is None and not (tmp_path / "none").exists()


@pytest.mark.parametrize(("keep", "kept"), [(1, [50]), (3, [50, 40, 30]), (9, [50, 40, 30, 20, 10])])
def test_only_the_newest_are_kept(tmp_path, keep, kept):
    with opened(tmp_path, keep) as store:
        save(store, 10, 20, 30, 40, 50)
        assert store.find() == kept and len(names(tmp_path)) == len(kept)


def test_older_ones_are_removed_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    seen = []

    def watch(path, files):
        seen.append(store.find())
        save_folder(path, files)

    save_folder = checkpoint_files.save_folder
    monkeypatch.setattr(checkpoint_files, "save_folder", watch)
    with opened(tmp_path, keep=1) as store:
        save(store, 1, 2, 3)
    assert seen == [[], [1], [2]]


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path, monkeypatch):
    go, priorities = threading.Event(), []

    def hold(path, files):
        assert go.wait(100)
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        save_folder(path, files)

    save_folder = checkpoint_files.save_folder
    monkeypatch.setattr(checkpoint_files, "save_folder", hold)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with opened(tmp_path) as store:
        weights = torch.ones(1000)
        store.save(1, {"w": weights}, {"m": weights}, {})
        weights.zero_()  # as the next step would
        assert store.find() == []
        go.set()
        loaded = store.load_latest()
    assert loaded.model["w"].sum() == 1000 and loaded.state["m"].sum() == 1000
    assert priorities[0] >= 10 and before == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found_and_the_previous_checkpoint_is_used(store, name):
    path = store.path(20) / name
    bits = random.Random(name).sample(range(path.stat().st_size * 8), 30)
    for bit in bits:
        flip(path, bit)
        loaded = CheckpointStore(store.folder).load_latest()
        flip(path, bit)
        assert loaded.step == 10
        (reason,) = loaded.refused
        assert reason.startswith(f"checkpoint step-00000020 is damaged: {name} ")
        assert reason.endswith("; using the previous one")
    assert_holds(CheckpointStore(store.folder).load_latest(), 20)


def test_a_bit_flipped_anywhere_in_a_manifest_is_found(store):
    path = store.path(20) / "manifest.json"
    for bit in range(0, path.stat().st_size * 8, 11):
        flip(path, bit)
        with pytest.raises(RecordError, match=r"manifest.json"):
            load_checkpoint(path.parent)
        flip(path, bit)
    load_checkpoint(path.parent)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, lengthen, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_missing_file_or_a_wrong_length_is_found(store, name, harm):
    harm(store.path(20) / name)
    loaded = CheckpointStore(store.folder).load_latest()
    assert loaded.step == 10 and name in loaded.refused[0]


@pytest.mark.parametrize("harm", [lambda new, old: shutil.copy(old / FILES[0], new / FILES[0]),
                                  lambda new, old: [shutil.copy(file, new) for file in old.iterdir()]])  # fmt: skip
def test_files_of_another_step_are_found(store, harm):
    harm(store.path(20), store.path(10))
    loaded = CheckpointStore(store.folder).load_latest()
    assert loaded.path == store.path(10) and len(loaded.refused) == 1


def test_a_run_does_not_start_over_if_all_checkpoints_are_damaged(store):
    for step in store.find():
        flip(store.path(step) / "state.json", 100)
    with pytest.raises(RecordError, match="step-00000020") as caught:
        CheckpointStore(store.folder).load_latest()
    assert caught.value.code == "damaged"


def test_a_run_that_fell_back_replaces_damaged_checkpoints(store):
    save(store, 30)
    for step in (20, 30):
        flip(store.path(step) / "model.safetensors", 1000)
    with opened(store.folder, keep=1) as resumed:
        assert len(resumed.load_latest().refused) == 2
        save(resumed, 20)
        assert resumed.find() == [20]
        assert_holds(resumed.load_latest(), 20)


@pytest.mark.parametrize("step", [15, 20])
def test_a_run_that_did_not_resume_here_is_refused(store, step):
    with pytest.raises(ConfigError, match=f"step 20.*step {step}"):
        save(CheckpointStore(store.folder), step)
    assert_holds(store.load_latest(), 20)


def test_a_checkpoint_of_another_model_is_refused_and_not_skipped(store):
    expected = fingerprint({**model_of(0, size=5), "new": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"step-00000020 .*4 tensors.*embed"):
        check_fingerprint(fingerprint(store.load_latest().model), expected, f"checkpoint {store.path(20)}")


@contextlib.contextmanager
def full_disk(at):
    """The `at`-th call of `fsync`, counted from 0, fails because the disk is full."""
    count = iter(range(100))

    def fsync(handle):
        if next(count) == at:
            raise OSError(28, os.strerror(28))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@contextlib.contextmanager
def file_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def no_room():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        yield


@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        *(
            (lambda at=at: full_disk(at), "No space left on device; it needs 10.50 MiB and .* is free")
            for at in range(6)
        ),
        (file_limit, "File too large; it needs 10.50 MiB"),
        (no_room, "the disk is too full; it needs 10.50 MiB and 10 B is free"),
    ],
)
def test_a_full_disk_is_explained_and_keeps_existing_files(store, trouble, complaint):
    with trouble(), pytest.raises(RecordError, match=rf"step-00000030.*{complaint}") as caught:
        save(store, 30, size=500_000)
    assert "\n" not in str(caught.value)
    assert not [name for name in names(store.folder) if name.startswith(".")]
    store.wait()  # an error is raised only once
    for step in (10, 20):
        load_checkpoint(store.path(step))
    save(store, 30)
    assert store.find() == [30, 20, 10]
    assert_holds(store.load_latest(), 30)


def test_a_full_disk_is_reported_by_the_save_that_needs_the_room(store):
    with no_room(), pytest.raises(RecordError, match="disk") as caught:
        store.save(30, model_of(30), {}, {})
    assert caught.value.code == "disk" and store._writer is None


def test_a_folder_that_cannot_be_created_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="step-00000001: Not a directory") as caught:
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, model_of(1), {}, {})
    assert caught.value.code == "disk"


def test_an_interrupted_wait_can_be_repeated(store, monkeypatch):
    store.save(30, model_of(30), {}, {})
    thread, saving = store._writer

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(thread, "shutdown", interrupt)
        store.wait()
    store.wait()
    assert saving.done() and store.find() == [30, 20, 10]


def test_no_reader_sees_half_of_a_checkpoint_that_is_removed(store, monkeypatch):
    remove, seen = shutil.rmtree, []

    def watch(path, **options):
        seen.append(Path(path).name)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watch)
    store.keep = 1
    save(store, 30)
    assert {".removing-step-00000010", ".removing-step-00000020"} <= set(seen)
    assert not [name for name in seen if name.startswith("step-")]


def test_a_checkpoint_that_cannot_be_removed_is_reported(store, monkeypatch):
    remove = shutil.rmtree

    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", fail)
    store.keep = 1
    with pytest.raises(RecordError, match="Permission denied"):
        save(store, 30)
    assert store.load_latest().step == 30


def test_a_file_that_cannot_be_read_is_named_with_the_reason(store):
    (store.path(20) / "state.json").unlink()
    with pytest.raises(RecordError, match=r"state\.json.*No such file or directory"):
        load_checkpoint(store.path(20))


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_tensors(start, tmp_path):
    with opened(tmp_path) as store:
        weights = torch.zeros(8 * 2**20)  # 32 MiB
        store.save(1, {"w": weights}, {"a": weights + 1, "b": [weights + 2]}, {})
    out, err = start("-c", MEMORY, str(tmp_path)).communicate(timeout=100)
    assert not err.strip() and int(out) < 1.25 * 96 * 2**20, (out, err)


def test_an_error_of_the_writer_is_raised_by_the_next_save(store):
    with full_disk(0):
        store.save(30, model_of(30), {}, {})
        with pytest.raises(RecordError, match=r"step-00000030.*No space left"):
            store.save(40, model_of(40), {}, {})
    assert store.find() == [20, 10]


@pytest.mark.parametrize("name", [".saving-step-00000030", ".removing-step-00000010"])
def test_leftovers_of_an_interrupted_save_are_removed_and_nothing_else(store, name):
    for place in (name, "notes", ".hidden"):
        shutil.copytree(store.path(20), store.folder / place)
    reader = CheckpointStore(store.folder)
    assert_holds(reader.load_latest(), 20)
    assert name in names(store.folder)  # another process may still be writing it
    save(reader, 30)
    assert names(store.folder) == [".hidden", "notes", "step-00000010", "step-00000020", "step-00000030"]


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_a_pickle_is_never_loaded(store, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "bang"))
    for name in ("model.pt", "optimizer.pt", "state.pkl", "__init__.py"):
        (store.path(20) / name).write_bytes(bomb)
    assert_holds(store.load_latest(), 20)
    torch.save(Bomb(tmp_path / "bang"), tmp_path / "zip")
    for content in (bomb, (tmp_path / "zip").read_bytes()):
        for name in FILES[:3]:  # even with a manifest that vouches for it
            files = {file: (store.path(10) / file).read_bytes() for file in FILES[:3]}
            checkpoint_files.save_folder(store.folder / "forged", {**files, name: content})
            with pytest.raises(RecordError, match=f"forged.*{name}"):
                load_checkpoint(store.folder / "forged")
    assert not (tmp_path / "bang").exists()
    pickle.loads(bomb)
    assert (tmp_path / "bang").exists()  # the payload does run when unpickled normally


def forge(store, change):
    """A checkpoint with a valid manifest for the modified files."""
    files = {name: (store.path(20) / name).read_bytes() for name in FILES[:3]}
    change(files)
    checkpoint_files.save_folder(store.folder / "forged", files)
    return store.folder / "forged"


def change_state(**changes):
    def change(files):
        files["state.json"] = json.dumps({**json.loads(files["state.json"]), **changes}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda files: files.pop("state.safetensors"), "manifest.json lists model.safetensors, state.json but should"),
        (lambda files: files.update({"../x": b""}), "manifest.json lists .*, ../x but should"),
        (
            change_state(model={"embed": "float32 [4, 4]"}),
            "state.json does not describe the tensors in model.safetensors",
        ),
        (change_state(model={"lost": "float32 [1]"}), "state.json is not valid: KeyError 'lost'"),
        (change_state(aliases=None), "state.json is not valid"),
        (change_state(state={"$tensor": "lost"}), "state.json is not valid: KeyError 'lost'"),
        (lambda files: files.update({"state.json": b"[" * 100_000}), "state.json is not valid: Recursion"),
        (lambda files: files.update({"state.json": b"[]"}), "state.json is not valid: TypeError"),
    ],
)
def test_a_forged_checkpoint_is_refused(store, change, complaint):
    with pytest.raises(RecordError, match=f"forged.*{complaint}"):
        load_checkpoint(forge(store, change))


def test_a_checkpoint_of_another_version_is_not_skipped(store, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_VERSION", 2)
    save(store, 30)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"step-00000030.*version 2"):
        CheckpointStore(store.folder).load_latest()


def test_too_little_memory_is_not_a_damaged_checkpoint(store, monkeypatch):
    def fail(*args, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(MemoryError):
        store.load_latest()
    assert not store._refused


MEMORY = """
import resource, sys
from pathlib import Path
from paceline.training.checkpoint_files import CheckpointStore

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before = peak()
loaded = CheckpointStore(Path(sys.argv[1])).load_latest()
print(peak() - before)
"""


# One process forks all of them, because importing torch takes seconds.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from paceline.training.checkpoint_files import CheckpointStore

def train(folder, ready):
    store = CheckpointStore(folder, keep=2)
    loaded = store.load_latest()
    first = loaded.step + 1 if loaded else 1
    for step in range(first, first + 10_000):
        store.save(step, {"w": torch.full((10_000,), float(step))}, {"m": [torch.full((5_000,), step)]}, {})
        if step == first + 1:  # the save before it is over
            os.write(ready, b"x")

chance, last = random.Random(int(sys.argv[2])), 0
for trial in range(12):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        train(Path(sys.argv[1]), write)
        os._exit(1)
    os.read(read, 1)
    time.sleep(chance.uniform(0.001, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(read), os.close(write)
    store = CheckpointStore(Path(sys.argv[1]))
    left = any(name.startswith(".") for name in os.listdir(sys.argv[1]))
    loaded = store.load_latest()
    step = loaded.step if loaded else 0
    assert step >= last, (step, last)
    assert not loaded or not loaded.refused, loaded.refused
    assert not loaded or (loaded.model["w"] == step).all() and (loaded.state["m"][0] == step).all()
    last = step
    print(step, left)
store.remove_leftovers()
assert not any(name.startswith(".") for name in os.listdir(sys.argv[1]))
"""


def test_a_kill_at_any_moment_leaves_an_intact_checkpoint(start, tmp_path):
    # Newer Python versions warn about forking with threads, such as numpy's; those are idle here.
    out, err = start("-W", "ignore", "-c", KILLED, str(tmp_path / "run"), "7").communicate(timeout=100)
    assert not err.strip(), err
    steps = [int(line.split()[0]) for line in out.splitlines()]
    assert len(steps) == 12 and steps[-1] > 0
    assert "True" in out  # at least one kill interrupted a save


def test_the_error_of_a_run_is_not_replaced_by_that_of_a_save(tmp_path):
    world = SimpleNamespace(rank=0, share=lambda value: [value])
    files = checkpoints.RunFiles(tmp_path, TrainSettings(), world)
    files.lock(resume=False)
    files.open(0)
    with full_disk(0):
        files._store.save(1, model_of(1), {}, {})
        files.close(has_failed=True)
        other = checkpoints.RunFiles(tmp_path, TrainSettings(), world)
        other.lock(resume=False)  # the folder is unlocked
        with pytest.raises(RecordError, match="No space left"):
            files.close()
    other.close()


def test_two_runs_do_not_write_to_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_LOCK_TIMEOUT_S", 0.0)
    world = SimpleNamespace(rank=0, share=lambda value: [value])
    first, second = (checkpoints.RunFiles(tmp_path, TrainSettings(), world) for _ in range(2))
    first.lock(resume=False)
    first.open(0)
    with pytest.raises(ConfigError) as caught:
        second.lock(resume=False)
    assert caught.value.code == "locked"
    first.write_rows([{"step": 1}])
    first.close()
    second.lock(resume=False)
    second.open(1)
    second.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def save_at(times, step, begin_s, stall_s, write_s):
    """A save that started at this time, and the interval that follows."""
    times.begin(step, begin_s, begin_s + stall_s)
    interval_s = times.choose_interval(3600.0)
    times.end(begin_s + stall_s + write_s)
    return interval_s


def test_intervals_grow_to_the_best_one_and_follow_the_cost_of_saves(tmp_path):
    path = tmp_path / "saves.jsonl"
    with contextlib.closing(checkpoints.SaveTimes(path, 0)) as times:
        assert times.choose_interval(3600.0) == 5.0
        found = [save_at(times, step, 100.0 * step, stall_s, 0.5) for step, stall_s in enumerate((9.0, 2.0, 2.0), 1)]
    best_s = estimate_save_interval([2.0], 0.5, 3600.0)
    assert found == pytest.approx([20.0, 80.0, best_s])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["stall_s"] for row in rows] == [9.0, 2.0, 2.0]
    assert rows[-1] == {"step": 3, "stall_s": 2.0, "wait_s": 0.0, "next_s": found[-1], "write_s": 0.5}
    # A resumed run, here from step 2, keeps its schedule.
    with contextlib.closing(checkpoints.SaveTimes(path, 2)) as times:
        assert times.choose_interval(3600.0) == best_s and len(path.read_text().splitlines()) == 2
        # Writing takes longer than the best interval, so the next save starts at once.
        assert save_at(times, 3, 300.0, 1e-3, 200.0) < best_s
        assert save_at(times, 4, 600.0, 1e-3, 200.0) >= 199.9


def test_the_interval_follows_stalls_without_waits_and_the_share_of_faults_that_need_a_checkpoint(tmp_path):
    path = tmp_path / "saves.jsonl"
    with contextlib.closing(checkpoints.SaveTimes(path, 0)) as times:
        for step in (1, 2, 3):
            times.begin(step, 100.0 * step, 100.0 * step + 3.0, wait_s=2.5)
            times.end(100.0 * step + 4.0)
    path.write_text(path.read_text() + '{"step": 4}\n')  # an incomplete line does not count
    for lost, times_longer in ((1.0, 1.0), (0.05, 20**0.5)):
        with contextlib.closing(checkpoints.SaveTimes(path, 4)) as times:
            times._interval_s = 1e9
            wanted_s = times_longer * math.sqrt(2 * 0.5 * 1e7)
            assert times.choose_interval(1e7, lost) == pytest.approx(wanted_s, rel=0.01)
    world = SimpleNamespace(rank=0, share=lambda value: [value], hosts=("a",))
    for policy, lost in (("stop", 1.0), ("restart", 1.0), ("spare", 0.05), ("shrink", 0.05)):
        assert checkpoints.RunFiles(None, TrainSettings(on_fault=policy), world)._lost == lost


def test_saves_at_a_given_time_are_recorded_and_choose_nothing(tmp_path):
    world = SimpleNamespace(rank=0, share=lambda value: [value], hosts=("a", "b"))
    with contextlib.closing(checkpoints.SaveTimes(tmp_path / "saves.jsonl", 0)) as times:
        times.begin(1, 5.0, 6.0)
        times.end(8.0)
    row = {"step": 1, "stall_s": 1.0, "wait_s": 0.0, "write_s": 2.0}
    assert json.loads((tmp_path / "saves.jsonl").read_text()) == row
    for folder, every, wanted in ((tmp_path, "60s", 60.0), (tmp_path, "auto", 5.0), (None, "auto", math.inf)):
        files = checkpoints.RunFiles(folder, TrainSettings(save_every=every), world)
        assert files._every_s == wanted and files._mtbf_s == (43200.0 if every == "auto" else None)


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_save_is_due_relative_to_the_newest_one_of_any_process(tmp_path, has_saved):
    world = SimpleNamespace(rank=0, share=lambda value: [value])
    for age_s, is_due in ((0.0, False), (50.0, False), (70.0, True)):
        files = checkpoints.RunFiles(tmp_path, TrainSettings(save_every="60s"), world)
        newest = tmp_path / "checkpoints" / ("step-00000004" if has_saved else "")
        newest.mkdir(parents=True, exist_ok=True)
        os.utime(newest, (time.time() - age_s,) * 2)
        files.lock(resume=False)
        assert files.is_due_by_time == is_due
        files.close()
