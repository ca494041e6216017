"""Buckets as events, one step of all ranks as lanes, and the picture and tables of them."""

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.measure.traces import build_bucket_events
from paceline.parallel.timeline import BucketTimes, StepTimes
from paceline.predict.advice import Advice
from paceline.predict.overview import BucketSpan, PhaseSpan, StepLane, build_lanes, build_overview, compare_overviews
from paceline.report.plots import render_png, render_svg
from paceline.report.tables import render_markdown
from paceline.report.timeline import plot_timeline
from paceline.report.trace_tables import (
    advice_row,
    advice_table,
    choose_overview_columns,
    compared_table,
    kernel_table,
    operator_table,
    overview_row,
)
from tests.unit.made_traces import NCCL, SGEMM, MadeTrace

MS = 1e-3


@pytest.fixture
def backward():
    """Two messages at a time; the first waited 1 ms for its turn. Backward began at 100.003 s and took 6 ms."""
    buckets = [
        BucketTimes(2**20, ready_s=1 * MS, launch_s=2 * MS, done_s=5 * MS),
        BucketTimes(2**21, ready_s=4 * MS, launch_s=4 * MS, done_s=8 * MS),
    ]
    return StepTimes(buckets, backward_s=6 * MS, over_s=8 * MS, is_sampled=True, begin_s=100.003)


def test_buckets_become_events_on_tracks_of_their_own(backward):
    events = build_bucket_events(3, backward, origin_s=100.0)
    spans = [(e["cat"], e["tid"], e["ts"], e["dur"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("bucket", "buckets 0", pytest.approx(5000), pytest.approx(3000), 2**20),
        ("bucket_wait", "buckets ready 0", pytest.approx(4000), pytest.approx(1000), 2**20),
        ("bucket", "buckets 1", pytest.approx(7000), pytest.approx(4000), 2**21),
    ]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["buckets 1"] == "rank 3: buckets 1"
    (over,) = [e for e in events if e["ph"] == "i"]
    assert over["ts"] == pytest.approx(9000)


def made_rank(rank, backward, origin_ms=0.0):
    made = MadeTrace(rank, origin_ms).step(0, 20).phase("forward", 0, 3).phase("backward", 3, 12)
    made.phase("optimizer", 12, 15)
    made.events += build_bucket_events(rank, backward, origin_s=100.0)
    return made.build()


def test_lanes_are_on_the_clock_of_the_first_rank(backward):
    lanes = build_lanes([made_rank(1, backward, origin_ms=2), made_rank(0, backward)])
    assert [lane.rank for lane in lanes] == [0, 1]
    first, second = lanes
    # What backward() waited for messages after its own work is no phase.
    assert [(p.name, round(p.start_s / MS, 6), round(p.end_s / MS, 6)) for p in first.phases] == [
        ("forward", 0, 3), ("backward", 3, 9), ("optimizer", 12, 15),
    ]  # fmt: skip
    assert (first.backward_end_s, first.end_s) == pytest.approx((9 * MS, 20 * MS))
    bucket = first.buckets[0]
    assert (bucket.num_bytes, bucket.ready_s, bucket.launch_s, bucket.done_s) == (
        2**20, pytest.approx(4 * MS), pytest.approx(5 * MS), pytest.approx(8 * MS),
    )  # fmt: skip
    assert first.exposed_s == pytest.approx(2 * MS)
    assert second.buckets[0].ready_s == pytest.approx(6 * MS)


def test_a_step_that_is_not_there_is_refused(backward):
    with pytest.raises(RecordError, match="1 steps"):
        build_lanes([made_rank(0, backward)], step=1)
    with pytest.raises(RecordError, match="no trace"):
        build_lanes([])


def lane(rank, **changes):
    fields = {
        "phases": (PhaseSpan("forward", 0, 3 * MS), PhaseSpan("backward", 3 * MS, 9 * MS)),
        "buckets": (
            BucketSpan(2**20, 4 * MS, 5 * MS, 8 * MS), BucketSpan(2**21, 7 * MS, 8 * MS, 12 * MS),
            BucketSpan(2**22, 9 * MS, 9 * MS, 12 * MS),
        ),
        "backward_end_s": 9 * MS, "end_s": 14 * MS,
    }  # fmt: skip
    return StepLane(rank, **{**fields, **changes})


def test_a_picture_tells_ranks_phases_sizes_and_source():
    figure = plot_timeline([lane(0), lane(1)], "one step of cnn", "box, 2 cores")
    svg = render_svg(figure).decode()
    for text in ("rank 0", "rank 1", "one step of cnn", "measured. box, 2 cores", "1 MiB", "4 MiB", "exposed (3 ms)"):
        assert text in svg
    assert render_png(figure).startswith(b"\x89PNG")
    assert render_svg(plot_timeline([lane(0), lane(1)], "one step of cnn", "box, 2 cores")).decode() == svg
    assert "simulated. box" in render_svg(plot_timeline([lane(0)], "t", "box", source="simulated")).decode()


def _hatched_ms(figure):
    found = []
    for collection in figure.axes[0].collections:
        if collection.get_hatch():
            corners = [path.vertices for path in collection.get_paths()]
            found += [(round(float(c[:, 0].min()), 6), round(float(c[:, 0].max()), 6)) for c in corners]
    return found


def test_what_moves_after_the_end_of_backward_is_hatched():
    assert _hatched_ms(plot_timeline([lane(0)], "t", "s")) == [(9, 12), (9, 12)]
    assert _hatched_ms(plot_timeline([lane(0, backward_end_s=12 * MS)], "t", "s")) == []
    assert _hatched_ms(plot_timeline([lane(0, backward_end_s=None)], "t", "s")) == []


def test_eight_ranks_can_be_drawn_and_nine_not():
    eight = plot_timeline([lane(rank) for rank in range(8)], "t", "s")
    assert eight.get_size_inches()[1] > plot_timeline([lane(0)], "t", "s").get_size_inches()[1]
    for count in (0, 9):
        with pytest.raises(ConfigError, match=f"{count} ranks"):
            plot_timeline([lane(rank) for rank in range(count)], "t", "s")


def test_a_rank_without_buckets_can_be_drawn():
    svg = render_svg(plot_timeline([lane(0, buckets=(), backward_end_s=None)], "t", "s")).decode()
    assert "rank 0" in svg and "bucket" not in svg


def test_tables_say_what_the_overview_says():
    on_gpu = build_overview(MadeTrace().step().kernel(SGEMM, 0, 4).kernel(NCCL, 3, 5).op("aten::mm", 0, 6).build())
    on_cpu = build_overview(MadeTrace(rank=1).step().op("aten::mm", 0, 6).build())
    table = render_markdown(choose_overview_columns([on_gpu, on_cpu]), [on_gpu, on_cpu]).splitlines()
    header = [cell.strip() for cell in table[0].split("|")]
    first = dict(zip(header, (cell.strip() for cell in table[2].split("|")), strict=True))
    assert (first["kernels"], first["communication"], first["CPU"], first["other"]) == (
        "40.0%",
        "10.0%",
        "10.0%",
        "40.0%",
    )
    assert (first["GPU busy"], first["tensor cores"], first["source"]) == ("50.0%", "0.0%", "measured")
    assert "copies" not in header and "occupancy (est.)" not in header
    assert "GPU busy" not in [column.name for column in choose_overview_columns([on_cpu])]
    assert f"| {SGEMM} | matmul | 1 | 4.0000 | 4000.0 |  | no |" in render_markdown(kernel_table, on_gpu.kernels)
    assert "| aten::mm | 1 | 6.0000 | 6.0000 |" in render_markdown(operator_table, on_cpu.operators)
    assert "| step | 10 ms | 10 ms | 1.00 |" in render_markdown(compared_table, compare_overviews(on_gpu, on_cpu))
    row = overview_row(on_gpu)
    assert (row["kernel_share"], row["gpu_busy"]) == pytest.approx((0.4, 0.5))
    assert overview_row(on_cpu).keys() == row.keys()


def test_advice_has_a_row_with_its_gain():
    advice = Advice("data", "more workers", gain_s=5e-3, certainty="at most", step_s=10e-3)
    assert "| data | 5 ms | 2.00 x | at most | more workers |" in render_markdown(advice_table, [advice])
    assert advice_row(advice)["factor"] == pytest.approx(2)
