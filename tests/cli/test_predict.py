"""`paceline predict` on layer tables: a plateau, what shifts it, and one-line errors for missing input."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.text import Text

from paceline import load_result
from paceline.errors import ConfigError, RecordError
from paceline.predict.search import CapCurve, estimate_caps
from paceline.report.predictions import CapsResult
from paceline.report.table import build_row
from paceline.units import format_bytes, format_ms
from paceline.verbs.predict import predict_csv

SIZES = ",Name,No. Params\n0,Token embedding,1000000\n1,Layer 0,3000000\n2,Layer 1,3000000\n3,LM head,1000000\n"
TIMES = "Name,min,max,mean,std,median\n" + "".join(
    f"{name},{s},{s},{s},0,{s}\n"
    for name, s in (("layer_0 grad", 0.02), ("layer_1 grad", 0.02), ("lm_head grad", 0.01))
)
ALLREDUCE = "backend,world_size,total_elements,total_bytes,average_time,stdev_time\n" + "".join(
    f"nccl,8,{n},{4 * n},{1e-4 + 4 * n / 1e9},0\n" for n in (1, 10_000, 1_000_000, 10_000_000)
)


@pytest.fixture
def tables(tmp_path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, text in (("layer-sizes", SIZES), ("layer-times", TIMES), ("allreduce-times", ALLREDUCE)):
        (folder / f"{name}-model.csv").write_text(text)
    return folder


def test_one_document_with_the_plateau(command, tables, tmp_path):
    answer = command("predict", "--csv", str(tables), "--json", "--out", str(tmp_path / "runs"))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["source"] == "simulated" and document["local_backward_s"] == pytest.approx(0.05)
    assert [row["num_buckets"] for row in document["caps"]] == [3, 2, 1]
    # The first layer, 12 MB, and the tied embedding, 4 MB, are ready last: two messages are exposed with any plan.
    assert document["best"]["exposed_s"] == pytest.approx(2e-4 + 16e6 / 1e9, rel=0.05)
    # The message of the second layer, 12 MB, runs at 60 % of its speed next to compute, and slows compute as published.
    slowed_s = document["caps"][0]["expected_s"] - document["best"]["backward_s"]
    assert slowed_s == pytest.approx((1e-4 + 12e6 / 1e9) / 0.6 * 0.189 / 1.189, rel=0.05)
    low_s, high_s = document["interval_s"]
    assert low_s < document["expected_s"] < high_s
    assert document["expected_s"] == min(row["expected_s"] for row in document["caps"])
    assert document["expected_s"] == document["expected_best"]["backward_s"]
    # torch's default has a first bucket of 1 MiB: the second layer, followed by everything else.
    assert document["default_s"] == pytest.approx(0.05 + 1e-4 + 16e6 / 1e9, rel=0.01)
    assert document["default_expected_s"] - document["default_s"] == pytest.approx(slowed_s, rel=0.01)
    assert document["plateau_low_bytes"] <= document["best"]["high_bytes"] <= document["plateau_high_bytes"]
    assert {row["changed"] for row in document["sensitivity"]} == {"nothing", "B", "alpha", "beta"}
    same = document["sensitivity"][0]
    assert same["factor"] == 1 and same["backward_s"] == document["best"]["backward_s"] and not same["is_beyond"]
    # B x 10 has buckets above 40 MB, the largest message of the table.
    assert [row["factor"] for row in document["sensitivity"] if row["is_beyond"]] == [10]
    assert document["alpha_s"] == pytest.approx(1e-4) and document["beta_bytes_per_s"] == pytest.approx(1e9)
    assert document["closed_form_bytes"] == pytest.approx(28e6 * math.sqrt(1e-4 / 0.05))
    run = Path(document["run"])
    assert {path.name for path in run.iterdir()} >= {"run.json", "caps.csv", "caps.md", "caps.png", "sensitivity.md"}


def test_a_tied_tensor_in_two_parts(tables):
    """A GPT-2 of width 100 with two blocks: only the last gradients remain exposed; then row transfers."""
    sizes = {"Token embedding": 5_000_000, "Block 0": 121_300, "Block 1": 121_300, "LM head": 5_000_000}
    rows = "".join(f"{number},{name},{size}\n" for number, (name, size) in enumerate(sizes.items()))
    (tables / "layer-sizes-model.csv").write_text(f",Name,No. Params\n{rows}")
    times = {"lm_head": 0.01, "block_1": 0.05, "block_0": 0.05}
    rows = "".join(f"{name} grad,{s},{s},{s},0,{s}\n" for name, s in times.items())
    (tables / "layer-times-model.csv").write_text(TIMES.splitlines()[0] + "\n" + rows)
    result = predict_csv(tables)
    first = result.splits[0]
    assert result.free_plan[1].exposed_s == pytest.approx(1e-4 + 20e6 / 1e9, rel=0.05)
    # The last matrix product of the first block has 3 w^2 + 3 w parameters, and its norm has 2 w.
    assert first.late_bytes == 4 * (30_000 + 500) and first.num_bytes == 256 * 404
    # 8 ranks gather their rows: the same traffic as an all-reduce of four times one rank's bytes.
    left_s = result.cost.estimate_s(first.late_bytes) + result.cost.estimate_s(4 * first.num_bytes)
    assert first.free.exposed_s == pytest.approx(left_s, rel=0.01) and 0 < first.quick.exposed_s < left_s
    drawn = result.figure("split").axes[0]
    assert {"rows of the lookups", "bucket with the tied tensor"} <= set(drawn.get_legend_handles_labels()[1])
    # Backward is so short that one bucket is best: the tensor is sent whole, and rows gain nothing.
    rows = "".join(f"{name} grad,{s},{s},{s},0,{s}\n" for name, s in ((name, s / 1000) for name, s in times.items()))
    (tables / "layer-times-model.csv").write_text(TIMES.splitlines()[0] + "\n" + rows)
    short = predict_csv(tables)
    assert short.job.lookups and not short.splits and not any("paceline.DDP" in line for line in short.findings)


@pytest.mark.parametrize(("row_s", "expected_s"), [(0.01, 0.06), (1.6e-6, 0.05)])
def test_the_row_backward_covers_time_outside_layers_or_only_the_call(tables, row_s, expected_s):
    rows = f"backward,{row_s},{row_s},{row_s},0,{row_s}\n"
    (tables / "layer-times-model.csv").write_text(TIMES + rows)
    result = predict_csv(tables)
    assert result.job.backward_s == pytest.approx(expected_s) == result.job.ready_s[-1]
    assert any("distributed in proportion" in note for note in result.job.notes) == (row_s == 0.01)


@pytest.mark.slow
def test_one_of_several_numbers_of_ranks_is_chosen(command, tables, tmp_path):
    header, *rows = ALLREDUCE.splitlines()
    other = [row.replace("nccl,8", f"gloo,{ranks}") for ranks in (16, 4) for row in rows]
    (tables / "allreduce-times-model.csv").write_text("\n".join([header, *rows, *other]) + "\n")
    asked = ("predict", "--csv", str(tables), "--json", "--out", str(tmp_path / "runs"))
    for more, words in (
        ((), "gloo on 4 ranks, gloo on 16 ranks, nccl on 8 ranks; choose one with --ranks and --backend"),
        (("--ranks", "2"), "nccl on 8 ranks, and none for --ranks 2; choose one"),
        (("--ranks", "8", "--backend", "gloo"), "and none for --ranks 8 --backend gloo; choose one"),
        (("--ranks", "4,8"), "--ranks 4,8 with --csv: must be a single number"),
        (("--network", "10gbe"), "--network with --csv"),
    ):
        answer = command(*asked, *more)
        assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1, answer.err
    whole = predict_csv(tables, backend="nccl")
    for more in (("--ranks", "8"), ("--backend", "nccl")):
        document = json.loads(command(*asked, *more).out)
        assert document["best"]["backward_s"] == whole.caps.best.backward_s


def test_measured_times_are_compared(command, tables, tmp_path):
    result = predict_csv(tables)
    best = result.caps.best.backward_s
    table = tmp_path / "measured.csv"
    table.write_text(f"bucket_size,backward_s,note\n1MiB,{best * 1.1},a\n25MB,{best * 1.2},b\n1GiB,{best * 2},c\n")
    asked = ("predict", "--csv", str(tables), "--measured", str(table), "--out", str(tmp_path / "runs"))
    document = json.loads(command(*asked, "--json").out)
    rows = document["measured"]
    assert [row["cap_bytes"] for row in rows] == [2**20, 25_000_000, 2**30]
    assert rows[0]["error"] == pytest.approx(1 / 1.1 - 1) and rows[2]["error"] < rows[0]["error"]
    expected = 1 + rows[0]["expected_error"]
    assert expected == pytest.approx(document["caps"][0]["expected_s"] / (best * 1.1)) and expected > 1 / 1.1
    by_tables, slowed = document["notes"][-3:-1]
    assert "predictions from the tables are" in by_tables and "the best measured size is 1 MiB" in by_tables
    assert "predictions with contention are" in slowed
    again = load_result(document["run"])
    labels = again.figure("caps").axes[0].get_legend_handles_labels()[1]
    assert {"measured (imported)", "best measured", "closed form b*"} <= set(labels)
    for text, words in (
        ("bucket_size\n1MiB\n", "lacks"),
        ("bucket_size,step_s\n25,0.1\n", "has no unit"),
        ("bucket_size,step_s\n25MiB,0\n", "0.0 s"),
    ):
        table.write_text(text)
        answer = command(*asked)
        assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1, answer.err
    answer = command("predict", "--model-profile", "nowhere", "--measured", str(table))
    assert answer.code == 2 and "--measured needs --csv" in answer.err
    answer = command("predict", "--csv", str(tables), "--strategy", "all", "--out", str(tmp_path))
    assert answer.code == 2 and "--model-profile" in answer.err and "gradient shapes" in answer.err


def test_measured_steps_need_the_step_in_the_tables(tables, tmp_path):
    table = tmp_path / "measured.csv"
    table.write_text("bucket_size,step_s\n1MiB,0.1\n")
    with pytest.raises(ConfigError, match=r"forward.*step"):
        predict_csv(tables, measured=table)
    rows = "forward,0,0,0,0,0.03\nstep,0,0,0,0,0.01\n"
    (tables / "layer-times-model.csv").write_text(TIMES + rows)
    result = predict_csv(tables, measured=table)
    for curve in (result.caps, result.expected):
        assert result.predict_s(result.measured[0], curve) == pytest.approx(curve.points[0].backward_s + 0.04)
    assert result.expected.points[0].step_s > result.caps.points[0].backward_s + 0.04


def write_hidden(folder: Path) -> None:
    """Eight gradients of 1 MB, with only the last message exposed: larger messages barely take longer."""
    rows = "".join(f"{n},Layer {n},250000\n" for n in range(8))
    (folder / "layer-sizes-model.csv").write_text(",Name,No. Params\n" + rows)
    rows = "".join(f"layer_{n} grad,0.01,0.01,0.01,0,0.01\n" for n in range(8))
    (folder / "layer-times-model.csv").write_text(TIMES.splitlines()[0] + "\n" + rows)
    times = ((1, 1e-5), (250_000, 4e-3), (2_000_000, 6e-3))
    rows = "".join(f"nccl,8,{n},{4 * n},{s},0\n" for n, s in times)
    (folder / "allreduce-times-model.csv").write_text(ALLREDUCE.splitlines()[0] + "\n" + rows)


def test_one_range_is_good_with_and_without_contention(tables, tmp_path):
    write_hidden(tables)
    measured, best = tmp_path / "measured.csv", predict_csv(tables).expected.best
    measured.write_text(f"bucket_size,backward_s\n1MB,0.084\n{best.high_bytes}B,0.086\n")
    result, unfitted = predict_csv(tables, measured=measured), predict_csv(tables)
    assert len(result.caps.best.cuts) == 8
    both = [p.low_bytes for p, q in zip(result.caps.points, result.expected.points, strict=True)
            if result.caps.is_fast(p) and result.expected.is_fast(q)]  # fmt: skip
    # Two curves, one answer: the sizes within 1 % of the best on both curves, and the largest possible loss.
    assert {low for low, _ in unfitted.shared} <= set(both) and unfitted.recommended in unfitted.shared
    assert 0 <= unfitted.risk <= 0.01 and unfitted.answer.count("Use a bucket size of ") == 1
    assert f"Use a bucket size of {format_bytes(unfitted.recommended[0])} to " in unfitted.answer
    # The time in the answer is that of the curve at its own best size, and lies inside its interval.
    assert f"{format_ms(unfitted.expected.best.backward_s)} ms (90 %: " in unfitted.answer
    assert unfitted.interval[0] < unfitted.expected.best.backward_s < unfitted.interval[1]
    by_tables, slowed = result.findings[-3:-1]
    assert by_tables.endswith("the best measured size is 976.56 KiB, which lies in a predicted range")
    assert slowed.endswith("the best measured size is 976.56 KiB, which lies in a predicted range")


def test_a_cpu_has_one_curve(tables):
    (tables / "allreduce-times-model.csv").write_text(ALLREDUCE.replace("nccl", "gloo"))
    result = predict_csv(tables)
    assert list(result.curves) == ["from the tables"] and "published" not in result.answer
    assert "expected_s" not in build_row(result.table("caps").columns, result.caps.best)


def test_the_table_of_changes_is_for_the_sizes_it_names(tables, tmp_path):
    write_hidden(tables)
    result = predict_csv(tables)
    changes = result.table("sensitivity")
    rows = list(csv.DictReader(io.StringIO(changes.csv())))
    for row, change in zip(rows, result.changes, strict=True):
        assert float(row["backward_s"]) == change.chosen.backward_s
        assert int(row["num_buckets"]) == len(change.chosen.cuts)
        assert not any("{" in cell for cell in row.values())


def write_small(folder: Path, most: int = 10_000_000) -> None:
    """Gradients of 4 MB (ready last) and 8 MB; all-reduces have a latency of 0.1 ms."""
    (folder / "layer-sizes-model.csv").write_text(",Name,No. Params\n0,a,1000000\n1,b,2000000\n")
    rows = "".join(f"{name},{s},{s},{s},0,{s}\n" for name, s in (("a grad", 0.02), ("b grad", 0.05)))
    (folder / "layer-times-model.csv").write_text(TIMES.splitlines()[0] + "\n" + rows)
    rows = "".join(f"nccl,8,{n},{4 * n},{1e-4 + 4 * n / 1e9},0\n" for n in (1, 10_000, most))
    (folder / "allreduce-times-model.csv").write_text(ALLREDUCE.splitlines()[0] + "\n" + rows)


def test_a_measured_time_fits_the_one_rate(command, tables, tmp_path):
    write_hidden(tables)
    before = predict_csv(tables)
    point = before.caps.points[len(before.caps.points) // 2]
    for factor in (0.7, 1.0, 1.6):
        true = estimate_caps(before.job, before.model.scale(factor))
        took_ms = 1e3 * next(p for p in true.points if p.cuts == point.cuts).backward_s
        asked = f"{point.high_bytes}B={took_ms:.6f}ms"
        result = predict_csv(tables, measured=asked)
        assert result.factor == pytest.approx(factor, rel=1e-3) and result.unexplained < 1e-4
        # All other sizes follow from the measured one, and the answer depends on nothing else.
        assert [p.backward_s for p in result.fitted.points] == pytest.approx(
            [p.backward_s for p in true.points], rel=1e-3
        )
        assert list(result.bases) == ["fitted"] and result.interval[0] <= result.fitted_s <= result.interval[1]
    again = json.loads(
        command("predict", "--csv", str(tables), "--measured", asked, "--json", "--out", str(tmp_path)).out
    )
    assert again["factor"] == result.factor and again["recommended_low_bytes"] == result.recommended[0]
    assert before.next_steps and not result.next_steps


def test_a_measured_time_narrows_the_interval(tables, tmp_path):
    write_hidden(tables)
    before = predict_csv(tables)
    best = before.expected.best
    asked = f"{best.high_bytes}B={1e3 * best.backward_s:.6f}ms"
    result = predict_csv(tables, measured=asked)
    widths = [high_s - low_s for low_s, high_s in (before.interval, result.interval)]
    assert widths[1] < widths[0]
    table = tmp_path / "measured.csv"
    table.write_text(f"bucket_size,backward_s\n{best.high_bytes}B,{best.backward_s:.9f}\n")
    assert predict_csv(tables, measured=table).factor == pytest.approx(result.factor, rel=1e-6)
    # Two times that no single rate explains are less certain than one.
    twice = predict_csv(tables, measured=f"{asked},1MB={1.3e3 * best.backward_s:.3f}ms")
    assert twice.interval[1] - twice.interval[0] > widths[1] and len(twice.measured) == 2
    for words in ("25MiB", "25MiB=724", "=724ms", "25MiB=fast", "25=1ms"):
        with pytest.raises((ConfigError, RecordError)):
            predict_csv(tables, measured=words)


def test_equal_sizes_are_a_tied_tensor_unless_the_table_or_the_option_says_otherwise(command, tables, tmp_path):
    assert predict_csv(tables).job.num_bytes == 28_000_000
    untied = predict_csv(tables, untied=True)
    assert untied.job.num_bytes == 32_000_000 and not untied.splits
    for total, num_bytes in ((7_000_000, 28_000_000), (8_000_000, 32_000_000)):
        (tables / "layer-sizes-model.csv").write_text(f"{SIZES}4,Total,{total}\n")
        assert predict_csv(tables).job.num_bytes == num_bytes
    (tables / "layer-sizes-model.csv").write_text(f"{SIZES}4,Total,9000000\n")
    with pytest.raises(RecordError, match="total"):
        predict_csv(tables)
    (tables / "layer-sizes-model.csv").write_text(SIZES)
    answer = command("predict", "--csv", str(tables), "--untied", "--json", "--out", str(tmp_path / "runs"))
    document = json.loads(answer.out)
    assert document["local_backward_s"] == untied.job.backward_s
    assert load_result(document["run"]).job.num_bytes == 32_000_000
    answer = command("predict", "--trace", str(tables), "--untied")
    assert answer.code == 2 and "--untied needs --csv" in answer.err


def test_the_picture_has_every_measured_size_and_the_text_says_which_is_best(tables, tmp_path):
    write_small(tables)
    table = tmp_path / "measured.csv"
    table.write_text("bucket_size,backward_s\n1KiB,0.1\n6MiB,0.09\n25MiB,0.08\n")
    result = predict_csv(tables, measured=table)
    axes = result.figure("caps").axes[0]
    assert axes.get_xlim() == pytest.approx((2**-10, 25))
    # Differences between sizes remain visible: the time axis starts just below the time without communication.
    assert axes.get_ylim() == pytest.approx((0.97 * 70, 1.03 * 100))
    assert result.table("caps").columns[0].cell(result.caps.points[0]) == "3.81 MiB to 7.63 MiB"
    assert "lines: simulated" not in "".join(text.get_text() for text in axes.figure.findobj(Text))
    assert result.recommended == (4_000_000, 8_000_000)
    assert result.keeps_default  # torch's default also sends each of the two separately
    # 80 ms is 11.1 % less than 90.
    assert (
        "the best measured size is 25 MiB, 11.1% faster than the best measured size in a predicted range"
        in result.findings[-2]
    )
    table.write_text("bucket_size,backward_s\n1KiB,0.07\n25MiB,0.08\n")
    assert "1 KiB, which lies in a predicted range" in predict_csv(tables, measured=table).findings[-2]


def test_other_ranges_are_those_that_are_not_the_answer(tables):
    result = predict_csv(tables)
    best = result.caps.best
    slow = replace(best, low_bytes=5_000_001, high_bytes=5_999_999, backward_s=9.0)
    first, last = (
        replace(best, low_bytes=low, high_bytes=high) for low, high in ((4 * 10**6, 5 * 10**6), (6_000_000, 10**8))
    )
    result.caps = CapCurve((first, slow, last))
    assert result.caps.plateau == (6_000_000, 10**8)
    assert "1 more range of sizes within 1 % of the best, from the tables: 3.81 MiB to 4.77 MiB" in result.findings


def test_extrapolation_is_reported_in_the_answer_and_in_the_legend(tables):
    write_small(tables, most=1_000_000)
    result = predict_csv(tables)
    assert result.answer.endswith("Simulated; some messages are larger than any in the table.")
    labels = result.figure("sensitivity").axes[0].get_legend_handles_labels()[1]
    assert "the same, extrapolated beyond the table" in labels


def test_the_text_has_the_answer(command, tables, tmp_path):
    answer = command("predict", "--csv", str(tables), "--details", "--out", str(tmp_path / "runs"))
    assert answer.code == 0 and answer.out.startswith("Keep torch's default buckets")
    assert "one tied tensor" in answer.out
    again = load_result(answer.out.split("run: ", 1)[1].splitlines()[0])
    assert isinstance(again, CapsResult) and format_ms(again.caps.best.backward_s) in again.answer


@pytest.mark.slow
def test_the_terminal_shows_few_ranges_of_bucket_sizes_from_small_to_large(tables):
    names = [f"Layer {n}" for n in range(60)]
    rows = "".join(f"{n},{name},{3000000 + 1000 * n}\n" for n, name in enumerate(names, 1))
    (tables / "layer-sizes-model.csv").write_text(SIZES.split("1,Layer 0")[0] + rows + "61,LM head,1000000\n")
    times = "".join(f"layer_{n} grad,{s},{s},{s},0,{s}\n" for n, s in ((n, 0.02) for n in range(60)))
    (tables / "layer-times-model.csv").write_text(TIMES.splitlines()[0] + "\n" + times + TIMES.splitlines()[-1] + "\n")
    table = predict_csv(tables).table("caps")
    assert 12 <= len(table.shown) <= 24 < len(table.rows)
    covered = sum(math.log(row.high_bytes / row.low_bytes) for row in table.shown)
    fast = [row for row in table.rows if row.backward_s < 1.5 * min(row.backward_s for row in table.rows)]
    assert table.shown[-1].high_bytes > 0.9 * fast[-1].high_bytes
    assert covered > 0.8 * math.log(fast[-1].high_bytes / fast[0].low_bytes)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "layer-times-model.csv").unlink(), "no file named layer-times*.csv"),
        (lambda folder: (folder / "layer-times-2.csv").write_text(TIMES), "2 files named layer-times*.csv"),
        (lambda folder: (folder / "layer-times-model.csv").write_text("x\n"), "layer-times-model.csv"),
    ],
)
def test_a_missing_table_is_refused_in_one_line(command, tables, tmp_path, break_it, words):
    break_it(tables)
    answer = command("predict", "--csv", str(tables), "--out", str(tmp_path / "runs"))
    assert answer.code == 2 and words in answer.err and answer.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_nothing_to_predict_from(command, tmp_path):
    assert "or --csv FOLDER" in command("predict", "--out", str(tmp_path)).err
    assert "no such folder" in command("predict", "--csv", str(tmp_path / "none"), "--out", str(tmp_path)).err
