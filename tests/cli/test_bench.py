"""`paceline bench` end to end, as users run it: alone, under torchrun, corrupted, killed and interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline import load_run
from paceline.records import CollectiveRecord, MemoryRecord, Samples
from paceline.records.exchange import load_table
from tests.cli.test_train import type_command
from tests.conftest import descendants, find_ranks, wait_until

ROW_KEYS = {
    "collective", "backend", "device", "world_size", "num_bytes", "dtype",
    "median_s", "p10_s", "p90_s", "algbw_gbps", "busbw_gbps", "nwrong", "iters",
}  # fmt: skip
FIT_KEYS = {"backend", "world_size", "alpha_s", "beta_bytes_per_s", "max_rel_residual"}
SMALL = ("bench", "allreduce", "--sizes", "4KiB,1MiB", "--iters", "5", "--warmup", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def check_document(document: dict) -> list[dict]:
    assert {"rows", "fits", "run", "warnings"} <= set(document)
    for row in document["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["algbw_gbps"] == pytest.approx(row["num_bytes"] / row["median_s"] / 1e9)
        n = row["world_size"]
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * 2 * (n - 1) / n)
    for fit in document["fits"]:
        assert set(fit) >= FIT_KEYS
    return document["rows"]


def test_json_is_one_document_and_the_run_folder_holds_everything(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = command(*SMALL, "--ranks", "2,3", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    rows = check_document(document)
    assert [(row["world_size"], row["num_bytes"], row["nwrong"]) for row in rows] == [
        (2, 4096, 0), (2, 2**20, 0), (3, 4096, 0), (3, 2**20, 0),
    ]  # fmt: skip
    # A fit needs growing times, which noise can prevent at these sizes; the unit tests check fits.
    assert {fit["world_size"] for fit in document["fits"]} <= {2, 3}

    folder = Path(document["run"])
    assert folder.parent == Path("runs")
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "run.json", "table.md", "table.csv", "allreduce-times.csv",
        "time.png", "time.svg", "bandwidth.png", "bandwidth.svg",
    }  # fmt: skip
    run = load_run(folder)
    assert run.complete and run.config["ranks"] == [2, 3] and run.verb == "bench allreduce"
    assert run.environment.versions["torch"] and run.environment.details["threads_per_rank"] >= 1
    # Every printed number follows from the record.
    for row, record in zip(rows, run.records, strict=True):
        assert isinstance(record, CollectiveRecord) and isinstance(record.timing, Samples)
        assert record.timing.count == row["iters"] == 5
        assert record.timing.median_s == row["median_s"]
    assert [r.num_bytes for r in load_table(folder / "table.csv")] == [row["num_bytes"] for row in rows]
    assert [r.time_s for r in load_table(folder / "table.csv")] == [row["median_s"] for row in rows]
    assert len(load_table(folder / "allreduce-times.csv")) == 4


def test_a_person_gets_a_table_the_fit_and_the_folder_in_the_width_of_the_terminal(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer = command(*SMALL, "--out", str(tmp_path / "here"))
    assert answer.code == 0
    for words in ("ranks", "size", "time (ms)", "algbw (GB/s)", "busbw (GB/s)", "#wrong", "--details"):
        assert words in answer.out
    (folder,) = (tmp_path / "here").iterdir()
    assert "2 of 2 cells" in answer.err
    # The answer comes first, then the table, the location of the files, and the next command.
    assert answer.out.startswith("all_reduce of 1 MiB on 2 ranks takes ")
    assert answer.out.index("time (ms)") < answer.out.index(f"run: {folder}") < answer.out.index("next: paceline bench")
    result = paceline.load_result(folder)
    for width in (40, 80, 120):
        lines = [line for line in result.text(width).splitlines() if not line.startswith(("run:", "next:"))]
        assert max(map(len, lines)) <= width and all(key in "".join(lines) for key in ("4 KiB", "1 MiB"))
        shown = "\n".join(lines).partition("warning:")[0]
        assert ("--details" in shown) == (width != 120)
        if width == 80:
            assert set(lines) <= set(answer.out.splitlines())


@pytest.fixture(scope="module")
def memories(rendered, tmp_path_factory):
    """One run with both kinds of memory and the memory limit, shared by several tests."""
    asked = (*SMALL, "--backend", "gloo,paceline", "--memory", "both", "--limit")
    answer = type_command(*asked, "--json", "--out", str(tmp_path_factory.mktemp("memories")))
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_both_kinds_of_memory_and_the_limit_are_reported_everywhere(memories):
    rows = check_document(memories)
    turns = [("gloo", "ordinary"), ("shm", "ordinary"), ("shm", "shared")]
    assert [(row["num_bytes"], (row["backend"], row["memory"])) for row in rows] == [
        (size, turn) for size in (4096, 2**20) for turn in turns
    ]
    folder = Path(memories["run"])
    passes = [r for r in load_run(folder).records if isinstance(r, MemoryRecord)]
    assert [(r.num_bytes, r.operation, r.source) for r in passes] == [
        (size, operation, "measured") for size in (4096, 2**20) for operation in ("add", "copy")
    ]
    # Derived from the records of the run, matched by size.
    for row in rows:
        bound_s = min(r.timing.median_s for r in passes if r.num_bytes == row["num_bytes"])
        assert (row["memory_bound_s"], row["nwrong"]) == (bound_s, 0)
        assert row["fraction_of_memory"] == pytest.approx(bound_s / row["median_s"])
    assert all({"memory", "backend"} <= set(fit) for fit in memories["fits"])
    table = (folder / "table.md").read_text()
    assert "| memory |" in table and "| of memory |" in table
    svg = (folder / "time.svg").read_text()
    assert "shm, shared memory, 2 ranks (measured)" in svg and "memory bound, 2 ranks (measured)" in svg
    assert [(r.backend, r.memory) for r in load_table(folder / "table.csv")] == turns * 2
    assert [(r.backend, r.memory) for r in load_table(folder / "allreduce-times.csv")] == turns * 2


def test_only_the_same_kind_of_memory_is_compared_and_the_other_run_is_named(command, memories, tmp_path):
    asked = ("--backend", "paceline", "--memory", "shared", "--compare", memories["run"])
    document = json.loads(command(*SMALL, *asked, "--json", "--out", str(tmp_path)).out)
    assert {row["fraction_of_memory"] for row in document["rows"]} == {None}  # without --limit
    sides = [tuple(p[side] and p[side]["memory"] for side in ("here", "there")) for p in document["comparison"]]
    assert sides == [(None, "ordinary")] * 4 + [("shared", "shared")] * 2
    svg = (Path(document["run"]) / "time.svg").read_text()
    assert f"(measured: {Path(memories['run']).name})" in svg and "(measured)" in svg
    broadcast = command(*SMALL, "--collective", "broadcast", "--compare", memories["run"])
    assert broadcast.code == 2 and "no broadcast: nothing to compare" in broadcast.err


def test_the_text_shows_the_fraction_of_memory_and_details_show_everything(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    asked = ("--backend", "paceline", "--memory", "shared", "--limit", "--details")
    answer = command(*SMALL, *asked, "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert "all_reduce (shm, shared, cpu" in answer.out and re.search(r"1 MiB\s+262 144\s", answer.out)
    assert re.search(r"bound \(ms\)\s+of memory", answer.out) and re.search(r"\s\d+%\s", answer.out)
    assert (
        all(name in answer.out for name in ("count", "p10 (ms)", "p90 (ms)", "iters")) and "--details" not in answer.out
    )


def test_a_range_of_sizes_as_in_nccl_tests(command, tmp_path):
    answer = command(
        "bench", "allreduce", "-b", "1KiB", "-e", "16KiB", "-f", "4", "-n", "2", "-w", "0",
        "--collective", "reduce_scatter", "--op", "max", "--dtype", "int32", "--json", "--out", str(tmp_path),
    )  # fmt: skip
    rows = json.loads(answer.out)["rows"]
    assert [row["num_bytes"] for row in rows] == [1024, 4096, 16384]
    assert {(row["collective"], row["op"], row["dtype"], row["nwrong"]) for row in rows} == {
        ("reduce_scatter", "max", "int32", 0)
    }


@pytest.mark.slow
def test_in_a_batch_shell_of_one_task_ranks_start_and_an_imported_table_is_compared(command, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    table = tmp_path / "theirs.md"
    table.write_text(
        "Some words.\n\n| Backend | Processes | Size | Avg Time (ms) |\n|---|---|---|---|\n"
        "| gloo (CPU) | 2 | 1MB | 1.5 |\n| nccl | 2 | 10MB | 2.5 |\n"
    )
    answer = command(*SMALL, "--ranks", "2", "--compare", str(table), "--json", "--out", str(tmp_path / "runs"))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    pairs = document["comparison"]
    both = [pair for pair in pairs if pair["here"] and pair["there"]]
    assert [(p["here"]["num_bytes"], p["there"]["median_s"], p["there"]["source"]) for p in both] == [
        (2**20, 0.0015, "imported")
    ]
    assert document["rows"][0]["world_size"] == 2
    assert [p["there"]["backend"] for p in pairs if not p["here"]] == ["nccl"]
    assert "imported" in (next((tmp_path / "runs").iterdir()) / "comparison.md").read_text()


@pytest.mark.slow
def test_strict_fails_an_inconclusive_result(command, tmp_path):
    answer = command("bench", "allreduce", "--sizes", "4KiB", "--iters", "2", "--strict", "--out", str(tmp_path))
    assert answer.code == 1 and "paceline: failed (--strict): gloo, 2 ranks: fewer than 5 repetitions" in answer.err


def test_a_call_from_python_gives_a_result_and_writes_nothing(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    result = paceline.bench.allreduce(ranks=(2,), sizes=("64KiB", "1MiB"), iters=3)
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == [] and result.folder is None
    assert [(r.num_bytes, r.num_wrong, r.timing.count) for r in result.records] == [(2**16, 0, 3), (2**20, 0, 3)]
    assert [row["num_bytes"] for row in result.table().rows_json()] == [2**16, 2**20]
    assert result.figure().axes and result.figure("bandwidth").axes
    document = result.to_json()
    check_document(document)
    assert json.loads(json.dumps(document, allow_nan=False)) == document and document["run"] is None
    assert max(map(len, str(result).splitlines())) <= 80 and str(result).startswith("all_reduce of 1 MiB on 2 ranks")
    assert "<table>" in result._repr_html_()
    folder = result.save(tmp_path / "saved")
    again = paceline.load_result(folder)
    assert again.records == result.records and again.to_json()["rows"] == document["rows"]
    assert again.config == json.loads(json.dumps(result.config))
    assert max(map(len, again.table().terminal(80).splitlines())) <= 80


def test_chunks_table_and_picture(command, tmp_path):
    arguments = ("bench", "chunks", "--total", "4MB", "--iters", "2", "--warmup", "1", "--out", str(tmp_path))
    answer = command(*arguments, "--json")
    document = json.loads(answer.out)
    assert answer.code == 0 and "fewer than 5" in str(document["warnings"])  # fails only with --strict
    assert [row["num_messages"] for row in document["rows"]] == [100, 34, 10, 4, 1]
    assert all(row["nwrong"] == 0 for row in document["rows"])
    files = {path.name for path in Path(document["run"]).iterdir()}
    assert files == {"run.json", "table.md", "table.csv", "chunks.png", "chunks.svg"}


# In one launched world: a call, a command, and commands during which one rank computes wrong sums.
LAUNCHED = """
import os
import sys
import torch
import torch.distributed as dist
import paceline
from paceline.cli.main import main

commands = dict(line.split(":") for line in sys.argv[1:])

def run(name):
    sys.argv, code = ["paceline", *commands[name].split()], 0
    try:
        main()
    except SystemExit as exit_:
        code = exit_.code
    print(f"{name} exits {code}", file=sys.stderr, flush=True)

result = paceline.bench.allreduce(sizes="4KiB", iters=5, out="called")
assert (result.folder is not None) == (os.environ["RANK"] == "0")
median_s = result.records[0].timing.median_s
print(f"call: {len(result.records)} {result.records[0].world_size} {median_s}", file=sys.stderr, flush=True)
run("healthy")

reduce, step = dist.all_reduce, torch.optim.SGD.step

def damage(tensor, *args, **kwargs):
    work = reduce(tensor, *args, **kwargs)
    if dist.get_rank() == 1 and tensor.numel() > 100:
        tensor[3] += 1
    return work

def drift(self, *args, **kwargs):
    step(self, *args, **kwargs)
    if dist.get_rank() == 1:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-6)

dist.all_reduce = damage
run("corrupted")
dist.all_reduce, torch.optim.SGD.step = reduce, drift
run("drifting")
"""


@pytest.mark.slow
def test_in_a_launched_world_calls_and_commands_agree_and_one_wrong_rank_fails_all(start, tmp_path):
    (tmp_path / "program.py").write_text(LAUNCHED)
    wrappers = ("bench", "wrappers", "--model", "cnn", "--wrapper", "bare,torch", "--iters", "2", "--batch-size", "2")
    commands = {"healthy": (*SMALL, "--ranks", "2,4"), "corrupted": SMALL, "drifting": wrappers}
    job = start(*TORCHRUN, "program.py", *(f"{name}:{' '.join(words)} --json" for name, words in commands.items()))
    out, err = job.communicate(timeout=150)
    assert job.returncode == 0, err
    # Every rank gets the same result, and both ranks fail, not only the wrong one.
    calls = [line for line in err.splitlines() if line.startswith("call: 1 2 ")]
    assert len(calls) == 2 and calls[0] == calls[1] and len(list((tmp_path / "called").iterdir())) == 1
    for name, code in (("healthy", 0), ("corrupted", 1), ("drifting", 1)):
        assert err.count(f"{name} exits {code}") == 2, err
    documents, decoder = [], json.JSONDecoder()
    while out.strip():
        document, end = decoder.raw_decode(out.lstrip())
        out = out.lstrip()[end:]
        documents.append(document)
    healthy, corrupted, drifting = documents
    assert [row["world_size"] for row in check_document(healthy)] == [2, 2]
    assert "not measured: 4 ranks, because the launched world has 2" in healthy["warnings"]
    assert load_run(tmp_path / healthy["run"]).environment.details["launcher"] == "torchrun"
    assert [row["nwrong"] for row in corrupted["rows"]] == [6, 6]  # one element, six repetitions, one rank
    assert any("WRONG DATA" in warning for warning in corrupted["warnings"])
    assert [(row["nwrong"], row["nchecked"]) for row in drifting["rows"]] == [(None, None), (1, 16)]
    assert any("WRONG PARAMETERS of cnn in torch (1 of 16 parameters)" in text for text in drifting["warnings"])


LONG = ("-m", "paceline", "bench", "allreduce", "--sizes", "4KiB,64MiB", "--iters", "1000", "--warmup", "1")


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_keeps_finished_records_and_leaves_no_process(start, tmp_path, ending):
    job = start(*LONG)
    try:
        wait_until(lambda: "1 of 2 cells" in job.stderr.readline())
        ranks = descendants(job.pid)
        shm = set(os.listdir("/dev/shm"))
        os.killpg(job.pid, ending) if ending == signal.SIGINT else job.send_signal(ending)
        _, err = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode == 128 + ending
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"paceline: interrupted: 1 of 2 cells saved in runs/{folder.name}" in err and "Traceback" not in err
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    assert set(os.listdir("/dev/shm")) <= shm
    run = load_run(folder)
    assert not run.complete and [record.num_bytes for record in run.records] == [4096]


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_command(start, tmp_path):
    job = start(*LONG)
    wait_until(lambda: "1 of 2 cells" in job.stderr.readline())
    find_ranks(job.pid)[1].kill()
    _, err = job.communicate(timeout=100)
    assert job.returncode == 2
    assert "rank 1 of 2 was killed by SIGKILL" in err.splitlines()[-1]
    assert descendants(job.pid) == []


def _serves_forks(process: psutil.Process) -> bool:
    try:
        return "serve_forks" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("after_s", [0.0, 0.8, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.4, 1.2, 1.6))])
def test_ctrl_c_while_the_ranks_start_ends_everything(start, tmp_path, after_s):
    job = start("-m", "paceline", "bench", "allreduce", "--sizes", "256MiB", "--iters", "1000")
    # The server that imports torch and then forks the ranks.
    wait_until(lambda: any(map(_serves_forks, descendants(job.pid))))
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 130, err
    assert "Traceback" not in err and "paceline: interrupted: nothing was saved" in err
    assert list((tmp_path / "runs").iterdir()) == []
