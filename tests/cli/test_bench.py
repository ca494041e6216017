"""`paceline bench` end to end, as a user types it: alone, under torchrun, corrupted, killed and interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline import load_run
from paceline.records import CollectiveRecord, MemoryRecord, Samples
from paceline.records.exchange import load_table
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
    # A line needs times that grow, which noise can deny at these sizes; what a line is, the unit tests say.
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
    # Every number that was printed follows from the record.
    for row, record in zip(rows, run.records, strict=True):
        assert isinstance(record, CollectiveRecord) and isinstance(record.timing, Samples)
        assert record.timing.count == row["iters"] == 5
        assert record.timing.median_s == row["median_s"]
    assert [r.num_bytes for r in load_table(folder / "table.csv")] == [row["num_bytes"] for row in rows]
    assert [r.time_s for r in load_table(folder / "table.csv")] == [row["median_s"] for row in rows]
    assert len(load_table(folder / "allreduce-times.csv")) == 4


def test_a_person_gets_a_table_the_fit_and_the_folder(command, tmp_path):
    answer = command(*SMALL, "--out", str(tmp_path / "here"))
    assert answer.code == 0
    for words in (
        "ranks",
        "size",
        "count",
        "time (ms)",
        "algbw (GB/s)",
        "busbw (GB/s)",
        "#wrong",
    ):
        assert words in answer.out
    assert re.search(r"1 MiB\s+262 144\s", answer.out)
    (folder,) = (tmp_path / "here").iterdir()
    assert "2 of 2 cells" in answer.err
    # The answer first; then the table, where the files are, and what to do next.
    assert answer.out.startswith("all_reduce of 1 MiB on 2 ranks takes ")
    assert answer.out.index("time (ms)") < answer.out.index(f"run: {folder}") < answer.out.index("next: paceline bench")


def test_memories_and_the_limit_are_told_everywhere(command, tmp_path):
    asked = (*SMALL, "--backend", "gloo,paceline", "--memory", "shared,ordinary", "--limit")
    answer = command(*asked, "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    rows = check_document(document)
    turns = [("gloo", "ordinary"), ("shm", "ordinary"), ("shm", "shared")]
    assert [(row["num_bytes"], (row["backend"], row["memory"])) for row in rows] == [
        (size, turn) for size in (4096, 2**20) for turn in turns
    ]
    folder = Path(document["run"])
    run = load_run(folder)
    passes = [r for r in run.records if isinstance(r, MemoryRecord)]
    assert [(r.num_bytes, r.operation, r.source) for r in passes] == [
        (size, operation, "measured") for size in (4096, 2**20) for operation in ("add", "copy")
    ]
    # Derived from the records of the run, each by its size.
    for row in rows:
        bound_s = min(r.timing.median_s for r in passes if r.num_bytes == row["num_bytes"])
        assert (row["memory_bound_s"], row["nwrong"]) == (bound_s, 0)
        assert row["fraction_of_memory"] == pytest.approx(bound_s / row["median_s"])
    assert all({"memory", "backend"} <= set(fit) for fit in document["fits"])
    table = (folder / "table.md").read_text()
    assert "| memory |" in table and "| of memory |" in table
    svg = (folder / "time.svg").read_text()
    assert "shm, shared memory, 2 ranks (measured)" in svg and "memory bound, 2 ranks (measured)" in svg
    assert [(r.backend, r.memory) for r in load_table(folder / "table.csv")] == turns * 2
    assert [(r.backend, r.memory) for r in load_table(folder / "allreduce-times.csv")] == turns * 2


def test_both_is_another_word_and_only_like_memory_stands_beside_like(command, tmp_path):
    small = ("bench", "allreduce", "--backend", "paceline", "--sizes", "4KiB", "--iters", "5", "--warmup", "1")
    first = json.loads(command(*small, "--memory", "both", "--json", "--out", str(tmp_path)).out)
    assert [row["memory"] for row in first["rows"]] == ["ordinary", "shared"]
    assert {row["fraction_of_memory"] for row in first["rows"]} == {None}
    answer = command(*small, "--memory", "shared", "--compare", first["run"], "--json", "--out", str(tmp_path / "b"))
    pairs = json.loads(answer.out)["comparison"]
    sides = [tuple(p[side] and p[side]["memory"] for side in ("here", "there")) for p in pairs]
    assert sides == [(None, "ordinary"), ("shared", "shared")]


def test_a_person_is_told_the_fraction_of_memory(command, tmp_path):
    answer = command(*SMALL, "--backend", "paceline", "--memory", "shared", "--limit", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert "all_reduce (shm, shared, cpu" in answer.out
    assert re.search(r"bound \(ms\)\s+of memory", answer.out) and re.search(r"\s\d+%\s", answer.out)


def test_a_range_of_sizes_as_nccl_tests_has_it(command, tmp_path):
    answer = command(
        "bench", "allreduce", "-b", "1KiB", "-e", "16KiB", "-f", "4", "-n", "2", "-w", "0",
        "--collective", "reduce_scatter", "--op", "max", "--dtype", "int32", "--json", "--out", str(tmp_path),
    )  # fmt: skip
    rows = json.loads(answer.out)["rows"]
    assert [row["num_bytes"] for row in rows] == [1024, 4096, 16384]
    assert {(row["collective"], row["op"], row["dtype"], row["nwrong"]) for row in rows} == {
        ("reduce_scatter", "max", "int32", 0)
    }


def test_compare_puts_an_imported_table_beside_the_measured_one(command, tmp_path):
    table = tmp_path / "theirs.md"
    table.write_text(
        "Some words.\n\n| Backend | Processes | Size | Avg Time (ms) |\n|---|---|---|---|\n"
        "| gloo (CPU) | 2 | 1MB | 1.5 |\n| nccl | 2 | 10MB | 2.5 |\n"
    )
    answer = command(*SMALL, "--compare", str(table), "--json", "--out", str(tmp_path / "runs"))
    pairs = json.loads(answer.out)["comparison"]
    beside = [pair for pair in pairs if pair["here"] and pair["there"]]
    assert [(p["here"]["num_bytes"], p["there"]["median_s"], p["there"]["source"]) for p in beside] == [
        (2**20, 0.0015, "imported")
    ]
    assert [p["there"]["backend"] for p in pairs if not p["here"]] == ["nccl"]
    assert "imported" in (next((tmp_path / "runs").iterdir()) / "comparison.md").read_text()


def test_compare_puts_only_like_beside_like_and_names_the_other_run(command, tmp_path):
    first = json.loads(command(*SMALL, "--json", "--out", str(tmp_path)).out)["run"]
    other = command(*SMALL, "--dtype", "float64", "--compare", first, "--json", "--out", str(tmp_path / "b"))
    pairs = json.loads(other.out)["comparison"]
    assert not any(pair["here"] and pair["there"] for pair in pairs)
    same = json.loads(command(*SMALL, "--compare", first, "--json", "--out", str(tmp_path / "c")).out)
    assert [bool(p["here"] and p["there"]) for p in same["comparison"]] == [True, True]
    svg = (Path(same["run"]) / "time.svg").read_text()
    assert f"(measured: {Path(first).name})" in svg and "(measured)" in svg
    broadcast = command(*SMALL, "--collective", "broadcast", "--compare", first)
    assert broadcast.code == 2 and "no broadcast: nothing to compare" in broadcast.err


def test_a_batch_shell_of_one_task_still_starts_ranks(command, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    answer = command(*SMALL, "--ranks", "2", "--json", "--out", str(tmp_path))
    assert answer.code == 0 and json.loads(answer.out)["rows"][0]["world_size"] == 2


def test_strict_fails_a_result_that_says_little(command, tmp_path):
    few = ("bench", "allreduce", "--sizes", "4KiB", "--iters", "2", "--out", str(tmp_path))
    assert command(*few).code == 0
    answer = command(*few, "--strict")
    assert answer.code == 1 and "paceline: failed (--strict): gloo, 2 ranks: fewer than 5 repetitions" in answer.err


@pytest.mark.parametrize("width", ["80", "120", "40"])
def test_the_table_fits_the_terminal_and_wide_shows_everything(command, monkeypatch, tmp_path, width):
    monkeypatch.setenv("COLUMNS", width)
    answer = command(*SMALL, "--out", str(tmp_path))
    lines = [line for line in answer.out.splitlines() if not line.startswith(("run:", "next:"))]
    assert answer.code == 0 and max(map(len, lines)) <= int(width)
    assert all(key in answer.out for key in ("4 KiB", "1 MiB")) and ("--wide" in answer.out) == (width != "120")
    if width == "40":
        wide = command(*SMALL, "--wide", "--out", str(tmp_path)).out
        assert all(name in wide for name in ("count", "p10 (ms)", "p90 (ms)", "iters")) and "--wide" not in wide


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


IN_A_WORLD = """
import os
import sys
import paceline

result = paceline.bench.allreduce(sizes="4KiB", iters=5, out="runs")
assert (result.folder is not None) == (os.environ["RANK"] == "0")
print(len(result.records), result.records[0].world_size, result.records[0].timing.median_s, file=sys.stderr)
"""


@pytest.mark.timeout(180)
def test_a_call_in_a_launched_world_gives_every_rank_the_same_result(start, tmp_path):
    (tmp_path / "program.py").write_text(IN_A_WORLD)
    job = start(*TORCHRUN, "program.py")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0 and out == "", err
    lines = [line for line in err.splitlines() if line.startswith("1 2 ")]
    assert len(lines) == 2 and lines[0] == lines[1]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_chunks_table_and_picture(command, tmp_path):
    arguments = ("bench", "chunks", "--total", "4MB", "--iters", "2", "--warmup", "1", "--out", str(tmp_path))
    answer = command(*arguments, "--json")
    document = json.loads(answer.out)
    assert [row["num_messages"] for row in document["rows"]] == [100, 34, 10, 4, 1]
    assert all(row["nwrong"] == 0 for row in document["rows"])
    files = {path.name for path in Path(document["run"]).iterdir()}
    assert files == {"run.json", "table.md", "table.csv", "chunks.png", "chunks.svg"}


@pytest.mark.timeout(180)
def test_the_same_command_under_torchrun_gives_the_same_kind_of_result(start, tmp_path):
    job = start(*TORCHRUN, "-m", "paceline", *SMALL, "--ranks", "2,4", "--json")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    document = json.loads(out)
    assert [row["world_size"] for row in check_document(document)] == [2, 2]
    assert "not measured: 4 ranks, because the launched world has 2" in document["warnings"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert load_run(folder).environment.details["launcher"] == "torchrun"


CORRUPTING = """
import torch.distributed as dist
from paceline.cli.main import main

real = dist.all_reduce

def damaged(tensor, *args, **kwargs):
    work = real(tensor, *args, **kwargs)
    if dist.get_rank() == 1 and tensor.numel() > 100:
        tensor[3] += 1
    return work

dist.all_reduce = damaged
main()
"""


@pytest.mark.timeout(180)
def test_corrupted_data_on_one_rank_is_reported_and_exits_1(start, tmp_path):
    script = tmp_path / "corrupting.py"
    script.write_text(CORRUPTING)
    job = start(
        *TORCHRUN, "--no-python", "bash", "-c", f'{sys.executable} {script} "$@" ; echo "exit $?" >&2', "x",
        *SMALL, "--json",
    )  # fmt: skip
    out, err = job.communicate(timeout=120)
    assert err.count("exit 1") == 2, err  # both ranks say so, not only the damaged one
    document = json.loads(out)
    assert [row["nwrong"] for row in document["rows"]] == [6, 6]  # one element, six repetitions, one rank
    assert any("WRONG DATA" in warning for warning in document["warnings"])


LONG = ("-m", "paceline", "bench", "allreduce", "--sizes", "4KiB,64MiB", "--iters", "1000", "--warmup", "1")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_finished_and_leaves_no_process(start, tmp_path, ending):
    job = start(*LONG)
    try:
        wait_until(lambda: "1 of 2 cells" in job.stderr.readline(), 60)
        ranks = descendants(job.pid)
        shm = set(os.listdir("/dev/shm"))
        os.killpg(job.pid, ending) if ending == signal.SIGINT else job.send_signal(ending)
        _, err = job.communicate(timeout=15)
    finally:
        job.kill()
    assert job.returncode == 128 + ending
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"paceline: interrupted: 1 of 2 cells is saved in runs/{folder.name}" in err and "Traceback" not in err
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), 10)
    assert set(os.listdir("/dev/shm")) <= shm
    run = load_run(folder)
    assert not run.complete and [record.num_bytes for record in run.records] == [4096]


def test_a_killed_rank_is_named_and_ends_the_command(start, tmp_path):
    job = start(*LONG)
    wait_until(lambda: "1 of 2 cells" in job.stderr.readline(), 60)
    find_ranks(job.pid)[1].kill()
    _, err = job.communicate(timeout=20)
    assert job.returncode == 2
    assert "rank 1 of 2 was killed by SIGKILL" in err.splitlines()[-1]
    assert descendants(job.pid) == []


@pytest.mark.parametrize("after_s", [0.0, 0.4, 0.8, 1.2, 1.6])
def test_ctrl_c_while_the_ranks_start_ends_everything(start, tmp_path, after_s):
    job = start("-m", "paceline", "bench", "allreduce", "--sizes", "256MiB", "--iters", "1000")
    # The server that imports torch, and then forks the ranks.
    wait_until(lambda: any("serve_forks" in " ".join(child.cmdline()) for child in descendants(job.pid)), 60)
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=20)
    assert job.returncode == 130, err
    assert "Traceback" not in err and "paceline: interrupted: nothing was saved" in err
    assert list((tmp_path / "runs").iterdir()) == []
