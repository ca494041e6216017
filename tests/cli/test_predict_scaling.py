"""`paceline predict --model-profile`: files from a laptop, predictions for a cluster, and one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.errors import RecordError
from paceline.records import BlockTimes, CollectiveRecord, LayerProfileRecord, ParameterTimes, Samples
from paceline.records.environment import Environment
from paceline.records.store import Run, save_run
from paceline.report.predictions import PredictResult
from paceline.report.result import build_result
from paceline.units import format_ms
from tests.cli.test_train import type_command

MIB = 2**20
KEYS = {
    "network", "world_size", "algorithm", "step_s", "low_s", "high_s", "local_step_s", "efficiency",
    "efficiency_low", "efficiency_high", "exposed_s", "neighbours_s",
    "exposed_share", "straggler_s", "best_cap_bytes", "plateau_low_bytes", "plateau_high_bytes", "num_buckets",
    "default_step_s", "gain", "keeps_default", "bound", "doubt", "source",
}  # fmt: skip

ENVIRONMENT = Environment(
    host="box", system="Linux", cpu="Some CPU", cores=8, memory_bytes=2**34, python="3.11", versions={},
    variables={}, command_line="", git_commit="", load_average=0.0, details={},
)  # fmt: skip


def samples(*times_s: float, ranks: int = 1) -> Samples:
    return Samples(seconds=tuple((time_s,) * ranks for time_s in times_s))


def profile(step_s: tuple[float, ...] = (0.12, 0.13, 0.14)) -> LayerProfileRecord:
    moments, count = [0.02 * (number + 1) for number in range(4)], len(step_s)

    def same(seconds: float) -> Samples:
        return samples(*(seconds,) * count)

    return LayerProfileRecord(
        model="toy", device="cpu", dtype="float32", batch_size=2,
        parameters=tuple(
            ParameterTimes(f"{number}.weight", 40 * MIB, 10 * MIB, "float32", "all", (moment,) * count)
            for number, moment in enumerate(moments)
        ),
        blocks=(BlockTimes("all", (0.01,) * count, (0.02,) * count),), timing=samples(*step_s), forward=same(0.03),
        backward=same(0.08), optimizer=same(0.02), profiled_step=same(0.13), profiled_forward=same(0.03),
        profiled_backward=same(0.08),
    )  # fmt: skip


def allreduce(backend: str, world_size: int, size: int) -> CollectiveRecord:
    seconds = world_size * 1e-4 + size / 1e9
    return CollectiveRecord(
        collective="all_reduce", backend=backend, device="cpu", world_size=world_size, num_bytes=size,
        dtype="float32", op="sum", timing=samples(seconds, 1.01 * seconds, ranks=world_size),
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("files")
    loaded = replace(ENVIRONMENT, load_average=16.0, cores=2)
    sweep = [allreduce("gloo", world, size) for world in (2, 4) for size in (1000, MIB, 100 * MIB)]
    both = [*sweep, *(allreduce("paceline", 2, size) for size in (1000, MIB, 100 * MIB))]
    made = {"profile": [profile()], "gloo": sweep, "both": both, "busy profile": [profile()], "busy gloo": sweep}
    for name, records in made.items():
        folder = root / name
        folder.mkdir()
        where = loaded if name.startswith("busy") else ENVIRONMENT
        save_run(Run(name, {}, where, tuple(records)), folder / "run.json")
    return {name: str(root / name) for name in made}


@pytest.fixture
def predict(command, files, tmp_path):
    """Run `predict --model-profile` on the small profile; words in braces are placeholders for files."""

    def run(*words: str):
        filled = [word.format(**files) for word in words]
        return command("predict", "--model-profile", files["profile"], *filled, "--out", str(tmp_path / "runs"))

    return run


def test_a_row_for_each_network_and_number_of_ranks(predict):
    answer = predict(
        "--network", "10gbe,1GB/s,50us", "--allreduce", "{gloo}/run.json", "--ranks", "1,4,16384", "--json"
    )
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    rows = document["rows"]
    assert [(row["network"], row["world_size"]) for row in rows] == [
        (name, count) for name in ("10gbe", "1GB/s,50us", "gloo") for count in (1, 4, 16384)
    ]
    assert all(set(row) == KEYS and row["source"] == "simulated" for row in rows) and document["source"] == "simulated"
    assert [row["efficiency"] for row in rows[::3]] == [1.0, 1.0, 1.0]
    for one, four, many in (rows[:3], rows[3:6], rows[6:]):
        assert one["step_s"] < four["step_s"] < many["step_s"] and four["low_s"] <= four["step_s"] <= four["high_s"]
    assert rows[7]["algorithm"] == "measured" and rows[8]["doubt"] and not rows[7]["doubt"]
    assert any("10 Gb/s Ethernet" in line for line in document["assumptions"])
    assert any(line.startswith("doubtful: gloo on 16,384 ranks") for line in document["assumptions"])
    written = {path.name for path in Path(document["run"]).iterdir()}
    assert written == {"run.json", "table.csv", "table.md", "efficiency.png", "efficiency.svg"}
    again = paceline.load_result(document["run"])
    assert isinstance(again, PredictResult) and again.to_json() == document


def test_the_text_has_the_table_and_its_assumptions(predict):
    answer = predict("--network", "hdr", "--ranks", "8,1024", "--straggler", "3%", "--accumulate", "4", "--details")
    assert answer.code == 0, answer.err
    for words in ("efficiency", "1,024", "slowest rank (ms)", "assumed:", "vary by 3.0%", "4 micro-batches", "run: "):
        assert words in answer.out


ASKED = ("--network", "10gbe", "--ranks", "8", "--json")


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory) -> dict:
    out = str(tmp_path_factory.mktemp("plain"))
    answer = type_command("predict", "--model-profile", files["profile"], *ASKED, "--out", out)
    row: dict = json.loads(answer.out)["rows"][0]
    return row


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["--gradients", "bf16"], lambda row, plain: row["exposed_s"] < 0.7 * plain["exposed_s"]),
        (["--accumulate", "3"], lambda row, plain: row["step_s"] == pytest.approx(plain["step_s"] + 2 * 0.11)),
        (["--straggler", "5%"], lambda row, plain: row["straggler_s"] > 0 == plain["straggler_s"]),
        (["--straggler", "profile"], lambda row, plain: row["straggler_s"] > 0),
        (["--slow-rank", "20%"], lambda row, plain: row["straggler_s"] == pytest.approx(0.2 * plain["local_step_s"])),
        (["--algorithm", "tree"], lambda row, plain: row["algorithm"] == "tree" != plain["algorithm"]),
        (["--ranks-per-node", "8"], lambda row, plain: row["step_s"] < 0.5 * plain["step_s"]),
        (["--ranks-per-node", "8", "--inside", "1gbe"], lambda row, plain: row["step_s"] > plain["step_s"]),
    ],
)
def test_each_option_does_what_it_says(predict, plain, words, change):
    assert change(json.loads(predict(*ASKED, *words).out)["rows"][0], plain)


@pytest.mark.parametrize(
    ("words", "received"),
    [
        ([], "pass --network, --allreduce RUN, or both"),
        (["--network", "hdr", "--ranks", "0"], "--ranks '0' is not a whole number of at least 1"),
        (["--network", "hrd"], "did you mean hdr"),
        (["--network", "hdr", "--straggler", "3"], "a percentage such as 3%"),
        (["--network", "hdr", "--slow-rank", "fast"], "not a percentage such as 3%"),
        (["--network", "hdr", "--backend", "gloo"], "--backend gloo selects from an --allreduce run"),
        (["--allreduce", "{gloo}", "--inside", "nvlink"], "needs a --network"),
        (["--allreduce", "{gloo}", "--ranks-per-node", "0"], "0 ranks per node: must be at least 1"),
        (["--allreduce", "{both}"], "gloo on cpu in float32; paceline on cpu in float32"),
        (["--allreduce", "{both}", "--backend", "paceline"], "1,024 ranks do not fit"),
        (["--allreduce", "{profile}"], "has no record of a collective"),
        (["--allreduce", "{gloo}/none"], "does not exist"),
        (["--allreduce", "{gloo}", "--algorithm", "magic"], "error: unknown algorithm 'magic'"),
        (["--network", "hdr", "--csv", "{gloo}"], "pass one of them"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(predict, tmp_path, words, received):
    answer = predict(*words)
    assert answer.code == 2 and received in answer.err and answer.err.count("\n") == 1, answer
    assert not (tmp_path / "runs").exists()


def test_other_runs_and_stray_options_are_refused(command, files, tmp_path):
    answer = command("predict", "--model-profile", files["gloo"], "--network", "hdr", "--out", str(tmp_path / "runs"))
    assert answer.code == 2 and "this run of `gloo` has 0 layer profiles" in answer.err
    answer = command("predict", "--csv", files["gloo"], "--ranks", "8", "--algorithm", "ring")
    assert answer.code == 2 and "--algorithm with --csv" in answer.err


def test_the_library_answers_for_one_network_and_number_of_ranks(files, tmp_path):
    result = paceline.predict(files["profile"], network="10gbe", ranks=64)
    (row,) = result.rows
    assert (result.step_s, result.exposed_s) == (row.step_s, row.exposed_s) and result.exposed_s > 0
    assert result.interval == (row.low_s, row.high_s) and row.low_s < result.step_s < row.high_s
    assert result.folder is None and not (tmp_path / "runs").exists()
    again = paceline.predict(result, network="10gbe", ranks=64)  # a result with one profile can replace its folder
    assert again.step_s == result.step_s
    saved = paceline.load_result(result.save(tmp_path / "saved"))
    assert saved.answer == result.answer and saved.interval == result.interval


def test_several_rows_have_no_single_number(files):
    result = paceline.predict(files["profile"], network="10gbe,hdr", ranks=(8, 64))
    assert len(result.rows) == 4
    for name in ("step_s", "interval", "exposed_s"):
        with pytest.raises(RecordError, match="4 networks"):
            getattr(result, name)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("network", ["10gbe", "10gbe,hdr"])
def test_a_terminal_shows_the_ranks_and_cuts_no_number(files, width, network):
    result = paceline.predict(files["profile"], network=network, ranks=(8, 64, 1024))
    text = result.table().terminal(width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    lines = [line.split() for line in text.splitlines()]
    for row in result.rows:
        (found,) = (
            cells for cells in lines
            if f"{row.world_size:,}" in cells[:2] and (row.network in cells or network == "10gbe")
        )  # fmt: skip
        assert format_ms(row.step_s) in found and f"{row.efficiency:.1%}" in found
    assert network in text if network == "10gbe" else "hdr" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_person_sees_the_ranks_on_a_terminal(command, files, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    asked = ("--network", "10gbe", "--ranks", "8,64,1024", "--out", str(tmp_path / "runs"))
    answer = command("predict", "--model-profile", files["profile"], *asked)
    assert answer.code == 0, answer.err
    lines = [line for line in answer.out.splitlines() if not line.startswith(("run: ", "next: "))]
    assert max(map(len, lines)) <= width
    firsts = [line.split()[0] for line in lines if line.startswith("  ") and line.split()]
    assert [first for first in firsts if first in ("8", "64", "1,024")] == ["8", "64", "1,024"]


BUSY = "the machine was busy before the run (load 16.0 on 2 cores): the times may include other work"


@pytest.mark.parametrize(
    ("inputs", "busy", "marked"),
    [
        (("profile", "gloo"), [], []),
        (("busy profile", "gloo"), ["profile"], ["10gbe", "gloo"]),
        (("profile", "busy gloo"), ["all-reduce"], ["gloo"]),
        (("busy profile", "busy gloo"), ["profile", "all-reduce"], ["10gbe", "gloo"]),
    ],
)
def test_a_prediction_inherits_the_load_under_which_its_inputs_were_measured(
    command, files, tmp_path, monkeypatch, inputs, busy, marked
):
    monkeypatch.setattr("paceline.machine.find_load", lambda: 1e6)  # a prediction times nothing
    profile, allreduce = (files[name] for name in inputs)
    asked = ("--network", "10gbe", "--allreduce", allreduce, "--ranks", "2,1024", "--out", str(tmp_path))
    answer = command("predict", "--model-profile", profile, *asked, "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert [line for line in document["warnings"] if "busy" in line] == [f"{name}: {BUSY}" for name in busy]
    assert ("Simulated, from times measured on a busy machine." if busy else "Simulated.") in document["answer"]
    doubts = {(row["network"], row["world_size"]): row["doubt"] for row in document["rows"]}
    for (network, ranks), doubt in doubts.items():
        names = [name for name in busy if name == "profile" or network == "gloo"]
        assert doubt.endswith(f"measured on a busy machine: {', '.join(names)}") if names else "busy" not in doubt
        assert bool(doubt) is (network in marked or (network, ranks) == ("gloo", 1024))
    again = paceline.load_result(document["run"])
    assert again.to_json() == document and again.run.environment.load_average is None
    said = again.text(details=True)
    assert all(f"{name}: the machine was busy" in said for name in busy)
    shown = [
        line for line in again.table().terminal(80).splitlines() if line.rstrip().endswith("yes") or " yes " in line
    ]
    assert len(shown) == sum(map(bool, doubts.values()))


def test_a_comm_table_passes_the_load_on(command, files, tmp_path):
    asked = ("--network", "10gbe", "--ranks", "2", "--out", str(tmp_path))
    for name, is_busy in (("profile", False), ("busy profile", True)):
        table = command("profile", "comm-table", "--model-profile", files[name], *asked, "--json")
        run = json.loads(table.out)["run"]
        document = json.loads(command("predict", "--model-profile", run, *asked, "--json").out)
        assert [row["doubt"] for row in document["rows"]] == ["measured on a busy machine: profile" if is_busy else ""]
        assert any(BUSY in line for line in document["warnings"]) is is_busy


def test_the_interval_is_not_narrower_than_the_noise_of_an_unstable_profile():
    steady, noisy = (0.12, 0.13, 0.14) * 4, (0.13, 0.13, 0.35, 0.13, 0.13, 0.4) * 2
    for step_s, is_noisy in ((steady, False), (noisy, True)):
        record = profile(step_s)
        given = build_result(Run("profile layers", {}, ENVIRONMENT, (record,)))
        result = paceline.predict(given, network="nvlink", ranks=1)
        (row,) = result.rows
        width = (row.high_s - row.low_s) / 2 / row.step_s
        assert (width >= record.timing.noise) is is_noisy and (record.timing.noise > 0.25) is is_noisy
        assert (row.doubt == "measured on a busy machine: profile") is is_noisy
        assert any("the step is unstable" in line for line in result.warnings) is is_noisy


@pytest.fixture(scope="module")
def nccl(tmp_path_factory) -> str:
    """nccl-tests output from a node with 4 GPUs, pasted into a file."""
    names = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    ranks = [f"#  Rank  {n} Group  0 Pid {n + 1} on box device  {n} [0x0{n}] NVIDIA H100" for n in range(4)]
    rows = []
    for size in (2**10, 2**20, 2**27):
        time_us = 20 + size / 1e5
        block = f"{time_us:.2f} {size / time_us / 1e3:.2f} {1.5 * size / time_us / 1e3:.2f} N/A"
        rows.append(f"{size} {size // 4} float sum -1 {block} {block}")
    path = tmp_path_factory.mktemp("nccl") / "output.txt"
    path.write_text("\n".join([*ranks, names, *rows, "# Avg bus bandwidth : 1.0"]))
    return str(path)


def test_the_output_of_nccl_tests_predicts(predict, nccl):
    document = json.loads(predict("--allreduce", nccl, "--ranks", "2,4,8", "--json").out)
    two, four, eight = document["rows"]
    assert (four["algorithm"], four["doubt"], two["doubt"]) == ("measured", "", "")
    assert "8 ranks are on several nodes, but all measurements are from one" in eight["doubt"]
    assert four["exposed_s"] < eight["exposed_s"] and eight["high_s"] / eight["low_s"] > four["high_s"] / four["low_s"]
    assert any(line.startswith("doubtful: nccl on 8 ranks") for line in document["assumptions"])
    again = paceline.load_result(document["run"])
    assert isinstance(again, PredictResult) and again.to_json() == document


def test_a_sweep_inside_nodes_and_a_network_between_them(predict, nccl):
    words = ("--allreduce", nccl, "--network", "hdr", "--ranks-per-node", "4", "--ranks", "4,8")
    document = json.loads(predict(*words, "--json").out)
    four, eight = document["rows"]
    assert {row["network"] for row in document["rows"]} == {"hdr"} and not eight["doubt"]
    assert four["algorithm"] == "measured" and eight["algorithm"].startswith("two-level")
    assert any("all-reduce measured on 4 ranks, 4 per node" in line for line in document["assumptions"])


def test_a_published_network_is_found_by_its_name(predict):
    document = json.loads(predict("--network", "a100-hdr", "--ranks", "8,16,128", "--json").out)
    assert [row["algorithm"] for row in document["rows"]] == ["measured"] * 3
    assert any("abci2.0benchmark" in line for line in document["assumptions"])
