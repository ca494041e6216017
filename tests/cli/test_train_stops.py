"""`paceline train` when killed, stopped, damaged or misconfigured: nothing is lost, and the reason is printed.

The real command, mostly in a separate process; the ranks are tested in `tests/dist/test_training_resume.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from paceline.records.environment import capture_environment
from paceline.records.training import METRICS_FILE, load_config, load_metrics
from paceline.report.training_result import render_config
from paceline.runtime.ranks.launch import SAME_REQUEST_S, RankPool
from paceline.training.train_settings import TrainSettings
from tests.cli.test_train import one_launched_rank
from tests.conftest import descendants, find_ranks, wait_until

# Raise this number to search for a moment at which a kill does harm.
KILLS = int(os.environ.get("PACELINE_KILL_TRIALS", "3"))
NOTED = ("step", "epoch", "loss", "accuracy", "samples", "lr", "test_loss", "test_accuracy", "test_samples")
TRAIN = (
    "train", "--model", "cnn", "--channels", "4", "8", "--hidden", "16", "--samples", "256", "--batch-size", "8",
    "--epochs", "20", "--dropout", "0.1", "--schedule", "cosine", "--save-every", "5steps",
)  # fmt: skip
# The same with fewer saves, which only affect the duration.
SETTINGS = TrainSettings(
    model="cnn", channels=(4, 8), hidden=16, samples=256, batch_size=8, epochs=20, dropout=0.1, schedule="cosine",
    save_every="50steps", ranks=2,
)  # fmt: skip
COMMAND = ("-m", "paceline")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline")


def the_run(out: Path) -> Path:
    (folder,) = out.iterdir()
    return folder


def read_steps(out: Path) -> int:
    """The number of steps a run has logged so far; 0 before the run exists."""
    files = list(out.glob("*/metrics.jsonl"))
    return files[0].read_bytes().count(b"\n") if files else 0


def assert_same_run(one: Path, other: Path) -> None:
    rows, others = (
        [{key: row.get(key) for key in NOTED} for row in load_metrics(folder / "metrics.jsonl")]
        for folder in (one, other)
    )
    assert rows == others
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    assert_nothing_temporary(other)


def assert_nothing_temporary(folder: Path) -> None:
    assert not list(folder.rglob(".*"))


def finish(job: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command and return its stderr. Checks that its ranks are gone."""
    _, err = job.communicate(timeout=100)
    assert job.returncode == code, err
    assert "Traceback" not in err
    return err


def wait_for_steps(job: subprocess.Popen[str], out: Path, steps: int) -> None:
    wait_until(lambda: job.poll() is not None or read_steps(out) >= steps)
    assert job.poll() is None, job.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.fixture(scope="module")
def whole(warm_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the undisturbed run of TRAIN on two ranks."""
    from paceline.training.loop import train

    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.json").write_text(render_config(SETTINGS.to_json(), capture_environment()))
    warm_pool.run(train, (SETTINGS, folder, False), num_ranks=2)
    return folder


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    """A copy of the undisturbed run as if it had been killed shortly before its end."""
    folder = tmp_path / "broken"
    shutil.copytree(whole, folder)
    (folder / "weights.safetensors").unlink()
    shutil.rmtree(newest(folder))
    return folder


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def wait_for_a_save(job: subprocess.Popen[str], checkpoints: Path) -> None:
    """Wait until a save is in progress, which takes milliseconds."""
    deadline = time.monotonic() + 100
    while not any(checkpoints.glob(".saving-*")) and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.timeout(200 * KILLS)
def test_a_run_killed_repeatedly_equals_an_undisturbed_one(start, tmp_path, whole):
    moments = random.Random(os.environ.get("PACELINE_KILL_SEED"))
    out, shm = tmp_path / "out", set(os.listdir("/dev/shm"))
    job = start(*COMMAND, *TRAIN, "--ranks", "2", "--out", "out")
    done = 0
    for kill in range(KILLS):
        wait_for_steps(job, out, done + 1)
        ranks, checkpoints = descendants(job.pid), the_run(out) / "checkpoints"
        if kill % 2:
            wait_for_a_save(job, checkpoints)
        else:
            time.sleep(moments.uniform(0, 0.5))
        job.kill()
        job.communicate(timeout=100)
        wait_until(lambda ranks=ranks: gone(ranks))
        done = read_steps(out)
        print(f"kill {kill}: after step {done}, left {[path.name for path in checkpoints.glob('.*')]}")
        job = start(*COMMAND, "train", "--resume", str(the_run(out)))
    finish(job)
    assert_same_run(whole, the_run(out))
    assert set(os.listdir("/dev/shm")) <= shm


@pytest.mark.parametrize(
    ("number", "tell"),
    [
        # The group includes this process, so the signal covers what the process would do by itself.
        pytest.param(signal.SIGTERM, os.kill, marks=pytest.mark.slow),
        (signal.SIGTERM, os.killpg),
        pytest.param(signal.SIGINT, os.killpg, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, os.kill, marks=pytest.mark.slow),  # from Slurm, before the time limit
        pytest.param(signal.SIGHUP, os.killpg, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_ends_the_run(start, tmp_path, number, tell):
    # Like a terminal and `timeout`, signal the whole group: ranks must not count this as two signals.
    job = start(*COMMAND, *TRAIN, "--ranks", "2", "--out", "out")
    wait_for_steps(job, tmp_path / "out", 12)
    ranks = descendants(job.pid)
    tell(job.pid, number)
    err = finish(job, 128 + number)
    folder = the_run(tmp_path / "out")
    last = load_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert newest(folder).name == f"step-{last:08}"
    assert f"interrupted: step {last} saved; resume with: paceline train --resume" in err
    assert f"paceline train --resume {Path('out') / folder.name}" in err
    wait_until(lambda: gone(ranks))
    assert_nothing_temporary(folder)


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint(tmp_path):
    master, slave = os.openpty()
    job = subprocess.Popen(
        [sys.executable, *COMMAND, *TRAIN, "--ranks", "2", "--out", "out"], cwd=tmp_path, stdin=slave, stdout=slave,
        stderr=slave, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)

    def has_steps() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(master, 1 << 16)
        return read_steps(tmp_path / "out") >= 12

    try:
        wait_until(has_steps)
        ranks = descendants(job.pid)
        os.close(master)
        assert job.wait(100) == 129
    finally:
        if job.poll() is None:
            job.kill()
    wait_until(lambda: gone(ranks))
    folder = the_run(tmp_path / "out")
    assert newest(folder).name == f"step-{load_metrics(folder / 'metrics.jsonl')[-1]['step']:08}"
    assert_nothing_temporary(folder)


@pytest.mark.slow
def test_the_second_signal_ends_a_run_that_cannot_stop(start, tmp_path):
    job = start(*COMMAND, *TRAIN, "--ranks", "2", "--out", "out")
    wait_for_steps(job, tmp_path / "out", 1)
    ranks = find_ranks(job.pid)
    for rank in ranks:
        rank.suspend()
    job.send_signal(signal.SIGINT)
    wait_until(lambda: "interrupt again after a second" in job.stderr.readline())
    time.sleep(2 * SAME_REQUEST_S)
    job.send_signal(signal.SIGINT)
    finish(job, 130)
    assert gone(ranks)


@pytest.mark.slow
def test_under_torchrun_a_signal_saves_and_the_run_continues(start, tmp_path, whole):
    job = start(*TORCHRUN, *TRAIN, "--out", "out")
    wait_for_steps(job, tmp_path / "out", 12)
    ranks = descendants(job.pid)
    job.terminate()
    _, err = job.communicate(timeout=100)
    folder = the_run(tmp_path / "out")
    last = load_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert newest(folder).name == f"step-{last:08}"
    assert f"interrupted: step {last} saved; resume with: paceline train --resume" in err
    assert job.returncode != 0
    wait_until(lambda: gone(ranks))
    finish(start(*TORCHRUN, "train", "--resume", str(folder)))
    assert_same_run(whole, folder)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(command, whole, broken):
    file = newest(broken) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    answer = command("train", "--resume", str(broken))
    assert answer.code == 0, answer.err
    words = f"checkpoint {file.parent.name} is damaged: model.safetensors does not match manifest.json"
    said = " ".join(answer.err.split())
    assert words in said and "; using the previous one" in said
    assert_same_run(whole, broken)


@pytest.mark.slow
def test_a_run_with_an_incomplete_metrics_line_continues(command, broken):
    (broken / "metrics.jsonl").write_text('{"st')
    with one_launched_rank():
        answer = command("train", "--resume", str(broken))
    assert answer.code == 0, answer.err


@pytest.mark.slow  # `test_train` also continues a finished run
def test_a_finished_run_is_shown_and_more_epochs_are_remembered(command, whole, tmp_path):
    folder = tmp_path / "finished"
    shutil.copytree(whole, folder)
    for flags, epochs in (((), 20), (("--epochs", "21"), 21)):
        with one_launched_rank():
            answer = command("train", "--resume", str(folder), "--json", *flags)
        document = json.loads(answer.out)
        assert (answer.code, document["finished"], document["steps"]) == (0, True, 16 * epochs), answer.err
        assert len(document["epochs"]) == epochs == load_config(folder)["settings"]["epochs"]
        assert {"table.csv", "table.md", "training.png"} <= {path.name for path in folder.iterdir()}
    assert_nothing_temporary(folder)


@pytest.mark.slow
def test_a_job_that_is_started_again_resumes_its_run(command, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN", "job-7")
    for epochs in ("1", "2"):
        with one_launched_rank():
            answer = command(*(epochs if word == "20" else word for word in TRAIN), "--out", str(tmp_path))
        assert answer.code == 0, answer.err
        assert ("resumes at step 32" in answer.err) == (epochs == "2")
        assert the_run(tmp_path).name == "job-7" and read_steps(tmp_path) == 32 * int(epochs)


@pytest.mark.slow
def test_ranks_end_once_the_checkpoint_is_on_disk(warm_pool, tmp_path):
    """Launchers terminate the other ranks as soon as one has exited, but rank 0 may still be writing."""
    assert warm_pool.run(train_with_a_slow_disk, (tmp_path,), num_ranks=2) == [True, True]


def train_with_a_slow_disk(folder: Path) -> bool:
    """Whether the final checkpoint exists when this rank is done."""
    from paceline.training import checkpoint_files, loop

    wait = checkpoint_files.CheckpointStore.wait

    def wait_longer(self):
        if self._writer is not None:
            time.sleep(0.5)
            (folder / "written").touch()
        wait(self)

    checkpoint_files.CheckpointStore.wait = wait_longer
    try:
        loop.train(dataclasses.replace(SETTINGS, epochs=1, schedule="constant"), folder / "run")
    finally:
        checkpoint_files.CheckpointStore.wait = wait
    return (folder / "written").exists()


def test_a_nan_loss_exits_with_1(command, tmp_path):
    with one_launched_rank():
        answer = command(*TRAIN, "--out", str(tmp_path), "--lr", "1e20")
    assert answer.code == 1
    assert re.search(r"paceline: error: step \d+: .* finite.* --lr", answer.err)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist: pass the folder of a training run"),
        ("{", "cannot be read as JSON"),
        ('{"format": "paceline-run", "version": 3}', '"format": "paceline-train"'),
        ('{"format": "paceline-train", "version": 2}', "has version 2"),
        ('{"format": "paceline-train", "version": 1}', "has no settings"),
        ('{"format": "paceline-train", "version": 1, "settings": {"warmth": 3}}', "no field warmth"),
    ],
)
def test_a_folder_without_a_run_is_refused(command, tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    answer = command("train", "--resume", str(tmp_path))
    assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.slow
def test_an_interrupt_of_the_second_of_two_runs_names_both(start, tmp_path):
    asked = [{"--batch-size": "--global-batch-size", "20": "6"}.get(word, word) for word in TRAIN]
    job = start(*COMMAND, *asked, "--ranks", "1,2", "--out", "out")
    metrics = f"*/2-ranks/{METRICS_FILE}"
    wait_until(lambda: job.poll() is not None or any((tmp_path / "out").glob(metrics)))
    assert job.poll() is None, job.communicate()
    os.killpg(job.pid, signal.SIGINT)
    err = finish(job, 130)
    folder = the_run(tmp_path / "out")
    assert f"--resume {Path('out') / folder.name / '2-ranks'}" in err
    assert f"interrupted: 1-rank (finished) saved in {Path('out') / folder.name}" in err
    finish(start(*COMMAND, "train", "--resume", str(folder / "2-ranks")))
    finish(start(*COMMAND, "train", "--compare", str(folder / "1-rank"), str(folder / "2-ranks"), "--out", "compared"))
