"""Results of profiles: layers, traces, networks, and two runs compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline import load_result
from paceline.errors import ConfigError, RecordError
from paceline.predict.advice import StepFacts, advise
from paceline.predict.traces import build_overview
from paceline.records import BlockTimes, ParameterTimes
from paceline.records.findings import Finding
from paceline.records.store import Run, load_run, save_run
from paceline.report.compared import ComparisonResult
from paceline.report.profiles import (
    BLOCKS,
    PARAMETERS,
    ProfileResult,
    TraceResult,
    describe_layers,
    list_blocks,
    list_parameters,
    plot_ready,
)
from paceline.report.result import build_result
from paceline.report.table import Table
from tests.unit.made_traces import NCCL, SGEMM, TENSOR_GEMM, MadeTrace
from tests.unit.made_tuning import MadeJob

from .test_records_layers import build_profile, build_times

RESULTS = Path(__file__).parents[2] / "results"


def test_the_tables_show_blocks_and_parameters_in_their_orders():
    record = build_profile()
    table = Table("", "", BLOCKS, list_blocks(record))
    blocks = table.markdown().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in blocks[2:]] == ["embed", "head", "outside"]
    assert "| 60.0% |" in blocks[2]
    parameters = Table("", "", PARAMETERS, list_parameters(record)).markdown()
    assert "| 2 | embed.weight = head.weight | embed | float32 | 40 B | 900 | 52 B |" in parameters
    assert "| 3 | spare | embed | float32 | 16 B | never | 52 B |" in parameters
    assert "| 1 | scale | outside |" in parameters
    rows = table.rows_json()
    assert sum(row["num_bytes"] for row in rows) == record.num_bytes
    assert sum(row["backward_s"] for row in rows) == pytest.approx(1.0)
    assert Table("", "", PARAMETERS, list_parameters(record)).rows_json()[3]["ready_s"] is None


def test_the_text_has_costs_and_warnings():
    text = "\n".join(describe_layers(build_profile(note="2 parameters are not trained")))
    assert "profiling overhead: +20.0% ± 10.0% of a step; +50.0%" in text
    assert "same order in every step" in text
    assert "embed.weight = head.weight" in text
    assert "without a gradient: spare" in text
    assert "2 parameters are not trained" in text
    assert "within the noise" in "\n".join(describe_layers(build_profile(profiled_step=build_times(0.9, 2.2))))


def test_the_plot_rises_to_the_bytes_that_become_ready():
    figure = plot_ready(build_profile(), "box")
    (axes,) = figure.axes
    line, end, marks = axes.get_lines()
    assert list(line.get_xdata()) == pytest.approx([0, 200, 300, 900, 1000])
    assert line.get_ydata()[-1] * 2**20 == pytest.approx(52)
    assert list(end.get_xdata()) == pytest.approx([1000, 1000])
    assert list(marks.get_xdata()) == pytest.approx([200, 900])
    assert "ready (measured, median)" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"head", "embed"} <= {text.get_text() for text in axes.texts}


def test_labels_that_would_print_over_each_other_are_joined():
    names = ("a", "b", "c", "d")
    parameters = tuple(ParameterTimes(n, 4, 1, "float32", n, (0.5 + i / 1000,) * 2) for i, n in enumerate(names[:3]))
    parameters = (ParameterTimes("d", 400, 100, "float32", "d", (0.1,) * 2), *parameters)
    figure = plot_ready(
        build_profile(parameters=parameters, blocks=tuple(BlockTimes(n, (0.0,) * 2, (0.0,) * 2) for n in names)), ""
    )
    assert [text.get_text() for text in figure.axes[0].texts] == ["d", "c +2"]


def test_a_profile_without_blocks_can_be_drawn():
    parameters = (ParameterTimes("a", 4, 1, "float32", "", (0.1, 0.1)),)
    plot_ready(build_profile(parameters=parameters, blocks=()), "").draw_without_rendering()


@pytest.fixture
def build(build_environment):
    def build(verb, *records, **config):
        return build_result(Run(verb, config, build_environment(), records))

    return build


@pytest.fixture
def traced(build_environment):
    def build(*, batch_size=8, step_ms=10, accumulate=1, world_size=1, gemm=SGEMM, message_ms=2, rank=0, **config):
        traces = []
        for number, ms in enumerate(message_ms if isinstance(message_ms, tuple) else (message_ms,), rank):
            made = MadeTrace(number).step(0, step_ms).phase("forward", 0, 3).phase("backward", 3, 7)
            traces.append(made.kernel(gemm, 0, 4).kernel(NCCL, 3, 3 + ms).op("aten::mm", 0, 6).build())
        facts = StepFacts(batch_size, accumulate, world_size=world_size)
        overviews = [build_overview(trace) for trace in traces]
        document = TraceResult.build_document(overviews, facts, advise(overviews, facts))
        run = Run("profile trace", {"model": "cnn", "wrapper": "paceline"} | config, build_environment(), ())
        return TraceResult(run, None, document, traces)

    return build


def test_a_profile_says_where_the_time_goes(build, build_phases):
    layers = build("profile layers", build_profile())
    assert isinstance(layers, ProfileResult) and layers.profile == build_profile()
    assert layers.answer.startswith("A step of toy takes 1.5 s (batch ")
    assert set(layers.to_json()) >= {"blocks", "parameters", "notes", "run"}
    assert "takes 1.5 s" in layers.answer and all(f"{name} " in layers.answer for name in ("forward", "optimizer"))
    both = build("profile", build_profile(), build_phases())
    assert "20% exposed communication" in both.answer
    assert [table.name for table in both.tables()] == ["phases", "blocks", "parameters"]


def test_a_profile_is_saved_and_the_same_again(build, build_phases, tmp_path):
    result = build("profile", build_profile(), build_phases())
    folder = result.save(tmp_path / "run")
    assert {"run.json", "phases.md", "blocks.csv", "parameters.csv", "ready.png", "layer-times.csv"} <= {
        path.name for path in folder.iterdir()
    }
    assert load_result(folder).to_json() == result.to_json()


def test_a_trace_is_saved_and_the_same_again(traced, tmp_path):
    result = traced()
    assert list(result.figures()) == ["timeline"]
    folder = result.save(tmp_path / "run")
    assert {"overview.json", "overview.md", "operators.csv", "kernels.csv", "trace.json.gz", "timeline.png"} <= {
        path.name for path in folder.iterdir()
    }
    again = load_result(folder)
    assert isinstance(again, TraceResult) and again.document == json.loads(json.dumps(result.document))
    assert again.answer == result.answer and again.figures() == {}
    (folder / "overview.json").unlink()
    with pytest.raises(RecordError, match="paceline profile trace"):
        load_result(folder)


def test_the_title_of_a_trace_says_what_is_accumulated(traced):
    assert traced(accumulate=4).table().title == "cnn on 1 rank, batch 8, accumulate 4, fp32"
    assert "cnn on 1 rank, batch 8, accumulate 4, fp32 takes" in traced(accumulate=4).answer
    assert traced().table().title == "cnn on 1 rank, batch 8, fp32"


def test_the_finding_with_the_largest_gain_is_in_the_answer_and_old_documents_are_read(build_environment):
    first = Finding("data", "the step waits", "use more workers", gain_s=5e-3, certainty="at most", step_s=10e-3)
    overview = build_overview(MadeTrace().step().op("aten::mm", 0, 6).build())
    document = TraceResult.build_document([overview], StepFacts(8), [first, Finding("bound", "nothing else")])
    run = Run("profile trace", {}, build_environment(), ())
    result = TraceResult(run, None, document)
    assert result.answer.splitlines()[:4] == first.card_lines and "50%" in first.verdict
    assert (result.advice[0], result.findings) == (first, ["also: nothing else"])
    assert result.to_json()["advice"][0]["factor"] == pytest.approx(2)
    old = {"kind": "data", "text": "the step waits: use more workers", "gain_s": 5e-3, "certainty": "at most",
           "step_s": 10e-3, "factor": 2.0}  # fmt: skip
    for lacks in ("", "step_s"):
        advice = [{name: value for name, value in old.items() if name != lacks}]
        (again,) = TraceResult(run, None, document | {"advice": advice}).advice
        assert (again.text, again.verdict, again.gain) == (first.text, first.verdict, first.gain)


def test_the_comm_table_says_what_is_simulated_and_from_what(build):
    result = build("profile comm-table", build_profile(), networks="10gbe,1gbe", ranks=[2, 64])
    (row, *_) = result.to_json()["rows"]
    assert (row["network"], row["world_size"], row["gradient_bytes"], row["source"]) == ("10gbe", 2, 68, "simulated")
    assert row["overhead"] == pytest.approx(row["comm_s"] / (row["comm_s"] + row["compute_s"]))
    assert row["exposed_s"] == result.rows[0].step.exposed_s
    assert "compute measured, comm simulated |" in result.table().markdown()
    assert len(result.findings) == 3 and result.findings[0].startswith("10gbe: ")


def test_several_profiles_make_one_comm_table_in_which_models_stand_together(build):
    small, large = build_profile(), build_profile(model="larger")
    result = build("profile comm-table", small, large, networks="10gbe,1gbe", ranks=[2, 64])
    rows = result.to_json()["rows"]
    assert [(row["network"], row["world_size"], row["model"]) for row in rows[:4]] == [
        ("10gbe", 2, small.model), ("10gbe", 2, "larger"), ("10gbe", 64, small.model), ("10gbe", 64, "larger"),
    ]  # fmt: skip
    assert len(rows) == 8 and "of a step of " in result.answer and "68 B of gradients" in result.answer
    result.folder = Path("a")
    assert result.next_steps == []
    one = build("profile comm-table", small, networks="10gbe", ranks=[2])
    assert one.table().terminal(80).count(small.model) == 1
    one.folder = Path("a")
    assert one.next_steps == ["paceline predict --model-profile a --network 10gbe"]


def test_profiles_at_two_batch_sizes_can_be_told_apart(build):
    result = build("profile comm-table", build_profile(), build_profile(batch_size=99), networks="10gbe", ranks=[2])
    assert [row["batch_size"] for row in result.to_json()["rows"]] == [build_profile().batch_size, 99]
    assert "| batch |" in result.table().markdown() and "(batch " in result.answer


def test_two_profiles_of_one_job_have_each_its_own_copies_and_neighbors(build):
    def carry(made, slowed):
        return sorted(made.build_carried(slowed), key=lambda record: record.kind != "layer_profile")

    before, after = carry(MadeJob(), 1.0), carry(MadeJob(gather_s=0.02), 1.5)
    asked = {"networks": "10gbe", "ranks": [2, 8], "curves": [str(RESULTS / "neoverse-n1-2-cores" / "allreduce-gloo")]}
    alone = [build("profile comm-table", *records, **asked).rows for records in (before, after)]
    both = build("profile comm-table", *before, *after, **asked).rows
    assert sorted(both, key=repr) == sorted([*alone[0], *alone[1]], key=repr) and alone[0] != alone[1]


def test_a_saved_comm_table_reads_its_curves_again(build):
    curve = str(RESULTS / "neoverse-n1-2-cores" / "allreduce-gloo")
    result = build("profile comm-table", build_profile(), networks="10gbe", ranks=[2], curves=[curve, "nowhere"])
    assert [row.step.network for row in result.rows] == ["10gbe", "gloo"]
    assert result.findings[-1] == "nowhere no longer exists, so its networks are omitted"


def test_a_comm_table_has_the_doubts_of_its_profiles_and_curves_and_none_of_its_own(
    build, build_environment, monkeypatch, tmp_path
):
    monkeypatch.setattr("paceline.machine.find_load", lambda: 1e6)
    names = {"quiet": 0.0, "busy": 16.0}
    for name, load in names.items():
        (tmp_path / name).mkdir()
        run = build("profile layers", replace(build_profile(), model=name)).run
        save_run(replace(run, environment=build_environment(load_average=load)), tmp_path / name / "run.json")
    swept = load_run(RESULTS / "neoverse-n1-2-cores" / "allreduce-gloo")
    (tmp_path / "curve").mkdir()
    save_run(replace(swept, environment=build_environment(stolen=0.5)), tmp_path / "curve" / "run.json")
    asked = {"profiles": [tmp_path / name for name in names], "network": "10gbe", "ranks": 2}
    result = paceline.comm_table(**asked, curves=[tmp_path / "curve"], out=tmp_path / "runs")
    # The sweep starts at 1 MiB, and the model has 68 bytes.
    small = "68 B is extrapolated: it is less than half the smallest measured size, 1 MiB; "
    doubts = {(row["model"], row["network"]): row["doubt"].removeprefix(small) for row in result.to_json()["rows"]}
    on = "measured on a busy machine: "
    assert doubts == {
        ("quiet", "10gbe"): "", ("busy", "10gbe"): f"{on}{tmp_path / 'busy'}",
        ("quiet", "gloo"): f"{on}--curve {tmp_path / 'curve'}",
        ("busy", "gloo"): f"{on}{tmp_path / 'busy'}, --curve {tmp_path / 'curve'}",
    }  # fmt: skip
    assert "| yes |" in result.table().markdown() and load_result(result.folder).to_json() == result.to_json()
    busy = "the machine was busy before the run (load 16.0 on 8 cores): the times may include other work"
    few = "1 rank: fewer than 5 repetitions at {}, batch 2: the median is not reliable"
    assert [line for line in result.warnings if not line.startswith("--curve")] == [
        f"{tmp_path / 'quiet'}: {few.format('quiet')}", f"{tmp_path / 'busy'}: {few.format('busy')}",
        f"{tmp_path / 'busy'}: {busy}",
    ]  # fmt: skip
    assert any("the hypervisor stole 50%" in line for line in result.warnings)
    here = build("profile comm-table", build_profile(), networks="10gbe", ranks=[2])
    assert [row.step.doubt for row in here.rows] == [""]
    loaded = build_result(replace(here.run, environment=build_environment(load_average=16.0)))
    assert [row.step.doubt for row in loaded.rows] == [f"{on}profile"]  # measured by this run


def test_two_profiles_are_compared(build, build_phases, build_wrapper, traced, build_environment, build_samples):
    first = build("profile phases", build_phases(), model="cnn", wrapper="torch")
    slow = build_samples(*(0.02,) * 10)
    second = build("profile phases", build_phases(timing=slow), model="cnn", wrapper="none")
    second.run = replace(second.run, warnings=("noisy",))
    result = ComparisonResult.of((first, second), build_environment())
    step = next(row for row in result.to_json()["rows"] if row["name"] == "2 ranks, batch 16: step")
    assert (step["first"], step["second"], step["ratio"]) == pytest.approx((0.01, 0.02, 2.0))
    assert result.to_json()["settings_that_differ"] == {"wrapper": ["torch", "none"]}
    assert "2.00 times as long" in result.answer and not result.table().title.endswith("rank 0")
    assert result.warnings == ("run 2: noisy",)
    other = build("profile phases", build_phases(batch_size=2))
    for two in (other, traced(), build("train")):
        with pytest.raises(ConfigError, match="no numbers in common") as caught:
            paceline.compare(first, two)
        assert caught.value.code == "mismatch"
    traces = ComparisonResult.of((traced(), traced(batch_size=16, step_ms=20)), build_environment())
    assert traces.rows[0].ratio == pytest.approx(1.0)
    assert "16 samples instead of 8 and take 2.00 times as long" in traces.answer
    assert traces.table().title.endswith(", rank 0")
    rows = {row.name: row for row in traces.rows}
    assert (rows["step"].first, rows["step"].second, rows["step"].ratio) == pytest.approx((0.01, 0.02, 2.0))
    assert rows["gpu busy"].ratio == pytest.approx(0.5) and rows["cpu"].first == pytest.approx(1e-3)
    assert "peak bytes" not in rows and "| step | 10 ms | 20 ms | 2.00 |" in traces.table().markdown()


def test_operators_and_kernels_of_two_traces_are_compared(traced, build_environment):
    before, after = traced(), traced(step_ms=20, gemm=TENSOR_GEMM, message_ms=1)
    result = ComparisonResult.of((before, after), build_environment())
    assert [table.name for table in result.tables()] == ["comparison", "operators", "kernels"]
    (operator,) = result.to_json()["operators"]
    assert operator == {
        "name": "aten::mm", "first_s": 6e-3, "second_s": 6e-3, "difference_s": 0.0, "ratio": 1.0,
        "first_calls": 1.0, "second_calls": 1.0,
    }  # fmt: skip
    # Largest difference first; an entry missing from one run is None and counts as zero in the difference.
    rows = [
        (r["name"], r["first_s"], r["second_s"], r["difference_s"], r["ratio"]) for r in result.to_json()["kernels"]
    ]
    assert rows == [
        (SGEMM, pytest.approx(4e-3), None, pytest.approx(-4e-3), None),
        (TENSOR_GEMM, None, pytest.approx(4e-3), pytest.approx(4e-3), None),
        (NCCL, pytest.approx(2e-3), pytest.approx(1e-3), pytest.approx(-1e-3), pytest.approx(0.5)),
    ]
    assert result.to_json()["kernels"][0]["second_calls"] is None
    assert "-4.00" in result.table("kernels").terminal() and TENSOR_GEMM in result.table("kernels").csv()


def test_a_terminal_shows_only_the_largest_kernel_differences(build_environment, traced):
    long = "sm80_xmma_gemm_f32f32_f32f32_f32_{}_n_tilesize{}x64x8_stage3_warpsize2x2x1_execute_kernel__5x_cublas"
    names = [long.format(order, size) for order in ("nt", "tn", "nn") for size in (64, 128, 256, 512)]
    traces = []
    for factor in (1, 2):
        made = MadeTrace().step(0, 10)
        for number, name in enumerate(names):
            made.kernel(name, 0, 0.1 * factor * (number + 1))
        overview = build_overview(made.build())
        document = TraceResult.build_document([overview], StepFacts(8), [])
        traces.append(TraceResult(traced().run, None, document))
    table = ComparisonResult.of(traces, build_environment()).table("kernels")
    assert [row.name for row in table.rows] == names[::-1]
    assert len(table.shown) == 10 and "10 largest of 12 changes" in table.title
    single = traces[0].table("kernels").terminal()
    assert len({line.split()[0] for line in single.splitlines() if "sm80_…" in line}) == 12
    # Shortening names that differ in only a few characters keeps these characters.
    shown = [line.split()[0] for line in table.terminal().splitlines()[3:13]]
    assert shown[:2] == ["sm80_…nn_…tilesize512x64x8_…", "sm80_…nn_…tilesize256x64x8_…"]
    assert len(set(shown)) == len(shown) == 10
    assert table.markdown().count("sm80_…") == 12


def test_steps_of_different_sizes_are_said_to_differ_and_compared_by_samples(traced, build_environment):
    result = ComparisonResult.of((traced(), traced(batch_size=32, accumulate=2, step_ms=20)), build_environment())
    assert "4.00 times as many samples/s" in result.answer
    assert "64 samples instead of 8 and take 2.00 times as long" in result.answer
    assert result.rows[0].name == "samples/s"
    assert result.config["settings_that_differ"] == {"batch_size": [8, 32], "accumulate": [1, 2]}


def test_two_traces_that_differ_only_in_accumulation_show_its_expected_effect(traced, build_environment):
    """Messages take 42.2 % of the first kernel time: 42.2 / (42.2 + 2 x 57.8) is 26.7 %."""

    def compare(second):
        # Rank 0 waits least before, and rank 1 after, and over both together.
        first = traced(world_size=2, message_ms=(2.8, 4 * 0.422 / 0.578), accumulate=second.pop("from_", 1))
        then = traced(**{"world_size": 2, "message_ms": (3, 1)} | second)
        return ComparisonResult.of((first, then), build_environment())

    result = compare({"accumulate": 2})
    found = result.to_json()["accumulation"]
    assert (found["of"], found["accumulate"]) == ("kernel time", [1, 2])
    assert (found["share"], found["predicted"], found["measured"]) == pytest.approx((0.422, 0.267, 0.2), abs=5e-4)
    (line,) = (line for line in result.findings if "predicts" in line)
    assert "42.2% of kernel time on rank 1 at accumulate 1" in line
    assert "predicts 26.7%; measured: 20.0%; mean over all ranks: " in line and found["rank"] == 1
    assert found["means"] == pytest.approx([(2.8 / 6.8 + 0.422) / 2, (3 / 7 + 1 / 5) / 2], abs=5e-4)
    assert "s / (s + 2 (1 - s))" in line and found["optimizer"] == 0
    fewer = compare({"accumulate": 2, "from_": 4}).to_json()["accumulation"]
    assert fewer["predicted"] == pytest.approx(0.422 / (0.422 + 0.5 * 0.578))
    for other in ({}, {"accumulate": 2, "wrapper": "torch"}, {"accumulate": 2, "batch_size": 16}):
        assert compare(other).to_json()["accumulation"] is None
    # the runs have no rank in common
    assert compare({"accumulate": 2, "message_ms": 1, "rank": 2}).to_json()["accumulation"] is None
    alone = ComparisonResult.of((traced(), traced(accumulate=2)), build_environment())
    assert alone.to_json()["accumulation"] is None


def test_a_comparison_is_saved_and_the_same_again(traced, build_environment, tmp_path):
    result = ComparisonResult.of((traced(world_size=2), traced(world_size=2, accumulate=2)), build_environment())
    folder = result.save(tmp_path / "run")
    assert {"comparison.md", "operators.csv", "kernels.md"} <= {path.name for path in folder.iterdir()}
    assert load_result(folder).text() == result.text()
    assert result.run.verb == "compare"


def test_two_runs_of_the_repository_are_compared(build_environment):
    before, after = (load_result(RESULTS / "h200-16-cores" / f"smollm2-{name}") for name in ("before", "after"))
    result = ComparisonResult.of((before, after), build_environment())
    assert "256 samples instead of 8" in result.answer
    rows = {row["name"]: row for row in result.to_json()["operators"]}
    assert rows["aten::mm"]["first_calls"] == rows["aten::mm"]["second_calls"] == 675
    changes = [abs(row["difference_s"]) for row in result.to_json()["kernels"]]
    assert changes == sorted(changes, reverse=True) and len(changes) > 100
    assert all(len(line) <= 80 for table in result.tables() for line in table.terminal(80).splitlines())
    kernels = result.table("kernels")
    names = [kernels.columns[0].cell(row) for row in kernels.rows]
    assert len(set(names)) == len(names) and max(map(len, names)) <= 35


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("what", ["layers", "both", "trace", "comm", "compared"])
def test_a_terminal_shows_every_key_and_no_cut_number(build, build_phases, traced, build_environment, what, width):
    result = {
        "layers": lambda: build("profile layers", build_profile()),
        "both": lambda: build("profile", build_profile(), build_phases()),
        "trace": traced,
        "comm": lambda: build("profile comm-table", build_profile(), networks="10gbe,nvlink", ranks=[2, 1024]),
        "compared": lambda: ComparisonResult.of((traced(), traced(step_ms=12)), build_environment()),
    }[what]()
    text = result.text(width, details=True)
    assert all(len(line) <= width for line in text.splitlines())
    for table in result.tables():
        for column in table.columns:
            if column.is_key and column.name:
                assert all(column.cell(row) in text for row in (table.rows if table.shown is None else table.shown))


KINDS = ("phases", "trace", "layers", "wrappers", "smollm2")
SAVED = sorted(path.parent for kind in KINDS for path in RESULTS.glob(f"*/*{kind}*/run.json.gz"))


@pytest.mark.parametrize("run", SAVED, ids=lambda path: path.name)
def test_the_runs_of_the_repository_are_results(run):
    result = load_result(run)
    if result.run.verb.startswith(("profile", "bench wrappers")):
        assert type(result).__name__ != "Result" and result.answer and result.tables()
        lines = [line for table in result.tables() for line in table.terminal(80).splitlines()]
        assert lines and all(len(line) <= 80 for line in lines)
