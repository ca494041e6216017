"""Where the time of a step goes, from made-up times: exposed, overlap, gaps, what profiling costs, and the tables."""

import dataclasses

import pytest

from paceline.errors import RecordError
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.samples import Samples
from paceline.records.steps import StepRecord
from paceline.report.phase_tables import describe_phases, phase_row, phase_table
from paceline.report.tables import render_markdown


@pytest.fixture
def build_phases(build_samples):
    """Steps of 10 ms, of which 2 are exposed communication: 8 without; marked steps take 10.1."""

    def build(**changes):
        ranks = changes.get("world_size", 2)
        times = {
            "timing": 0.010, "marked": 0.0101, "no_comm": 0.008, "no_comm_backward": 0.004, "data_wait": 0.001,
            "forward": 0.002, "backward": 0.006, "optimizer": 0.001,
        }  # fmt: skip
        fields = {
            "model": "cnn", "data": "synthetic", "wrapper": "paceline", "backend": "gloo", "device": "cpu",
            "world_size": 2, "precision": "fp32", "batch_size": 16, "accumulate": 2, "num_parameters": 8,
            "num_bytes": 4_000_000, "num_messages": 3, "busy": build_samples(*(0.005,) * 10, ranks=ranks),
            **{name: build_samples(*(time_s,) * 10, ranks=ranks) for name, time_s in times.items()},
        }  # fmt: skip
        return StepRecord(**{**fields, **changes})

    return build


def test_communication_is_the_difference_to_silent_steps(build_phases):
    record = build_phases()
    assert record.exposed_s == pytest.approx(0.002)
    assert record.compute_s == pytest.approx(0.008)
    assert record.overhead == pytest.approx(0.2)
    assert record.overlap == pytest.approx(1 - 2 / 5)
    assert record.busbw_bytes_per_s == pytest.approx(4e6 / 0.005 * 2 * (2 - 1) / 2)
    assert record.samples_per_s == pytest.approx(2 * 16 * 2 / 0.010)


def test_exposed_is_the_median_of_differences_in_one_repetition(build_phases, build_samples):
    """A slow spell hits neighbours alike; the difference of the medians would be 9 ms here."""
    record = build_phases(
        **{name: build_samples(*(0.01,) * 3) for name in ("marked", "data_wait", "forward", "backward", "optimizer")},
        no_comm_backward=build_samples(*(0.004,) * 3),
        timing=build_samples(0.010, 0.019, 0.020),
        no_comm=build_samples(0.009, 0.018, 0.010),
        busy=None,
    )
    assert record.exposed_s == pytest.approx(0.001)


def test_exposed_is_never_negative(build_phases, build_samples):
    record = build_phases(no_comm=build_samples(*(0.011,) * 10))
    assert (record.exposed_s, record.overhead, record.overlap) == (0.0, 0.0, 1.0)


def test_the_slowest_rank_is_what_a_step_takes(build_phases):
    uneven = Samples(seconds=((0.010, 0.014),) * 10)
    assert build_phases(timing=uneven).exposed_s == pytest.approx(0.006)


def test_one_rank_has_no_communication(build_phases):
    record = build_phases(world_size=1, busy=None, num_bytes=0, num_messages=0)
    assert (record.exposed_s, record.overhead, record.exposed_noise_s) == (0.0, 0.0, None)
    assert (record.overlap, record.busy_s, record.busbw_bytes_per_s) == (None, None, None)
    assert record.compute_s == pytest.approx(0.010)


def test_what_is_left_beside_the_phases_is_the_hosts(build_phases):
    """10.1 ms, less 1 + 2 + 6 + 1: on each rank by itself, for ranks wait for each other inside a phase."""
    assert build_phases().gap_s == pytest.approx(0.0001)
    early_late = Samples(seconds=((0.0010, 0.0030),) * 10), Samples(seconds=((0.0060, 0.0040),) * 10)
    assert build_phases(data_wait=early_late[0], backward=early_late[1]).gap_s == pytest.approx(0.0001)
    assert build_phases(backward=Samples(seconds=((0.009, 0.009),) * 10)).gap_s == 0.0


def test_profiling_is_marked_over_plain(build_phases, build_samples):
    record = build_phases()
    assert record.cost.value == pytest.approx(1.01)
    assert record.cost.noise == pytest.approx(0.0)
    assert build_phases(marked=build_samples(*(0.01, 0.011) * 5)).cost.is_clear is False


def test_the_noise_of_exposed_is_in_seconds(build_phases, build_samples):
    record = build_phases(timing=build_samples(*(0.010, 0.012) * 5))
    assert record.exposed_noise_s == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize(
    "name",
    ["marked", "timing", "no_comm", "no_comm_backward", "data_wait", "forward", "backward", "optimizer", "busy"],
)
def test_parts_of_other_ranks_are_refused(build_phases, build_samples, name):
    with pytest.raises(
        RecordError, match=f"cnn.*{'marked' if name == 'timing' else name} has other repetitions or ranks"
    ):
        build_phases(**{name: build_samples(*(0.001,) * 10, ranks=3)})


@pytest.mark.parametrize("name", ["marked", "no_comm", "optimizer"])
def test_parts_of_other_repetitions_are_refused(build_phases, build_samples, name):
    with pytest.raises(RecordError, match=f"{name} has other repetitions"):
        build_phases(**{name: build_samples(0.001, 0.001)})


@pytest.mark.parametrize("busy", [True, False])
def test_a_record_survives_json(build_phases, busy):
    record = build_phases() if busy else build_phases(busy=None)
    assert record_from_json(record_to_json(record)) == record


def test_the_row_and_the_table_say_the_same(build_phases):
    record = build_phases()
    row = phase_row(record)
    assert row["exposed_comm_s"] == pytest.approx(0.002) and row["comm_overhead"] == pytest.approx(0.2)
    assert row["backward_s"] == pytest.approx(0.004), "what is computed, not what is waited for"
    assert row["busbw_gbps"] == pytest.approx(0.8)
    assert row["profiling_cost"] == pytest.approx(0.01)
    assert (row["world_size"], row["batch_size"], row["accumulate"], row["source"]) == (2, 16, 2, "measured")
    head, _, line = render_markdown(phase_table, [record]).strip().splitlines()
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in line.split("|")), strict=True))
    assert float(cells["step (ms)"]) == pytest.approx(10) and float(cells["exposed (ms)"]) == pytest.approx(2)
    assert (cells["comm overhead"], cells["overlap"], cells["samples/s"]) == ("20.0%", "60.0%", "6,400")
    assert cells["source"] == "measured"


def test_what_is_unknown_is_an_empty_cell(build_phases):
    cells = {column.name: column.cell(build_phases(busy=None)) for column in phase_table}
    assert (cells["busy (ms)"], cells["overlap"], cells["busbw (GB/s)"]) == ("", "", "")


def test_in_words(build_phases, build_samples):
    sent, cost = describe_phases(build_phases())
    assert "2 ranks, batch 16: each rank sends" in sent and "in 3 messages per step" in sent and "20.0%" in sent
    assert "profiling costs +1.0%" in cost and "within the noise" not in cost
    (alone,) = describe_phases(build_phases(world_size=1, busy=None, marked=build_samples(*(0.01, 0.011) * 5, ranks=1)))
    assert alone.startswith("1 rank, batch 16: profiling costs") and alone.endswith("within the noise")


def test_a_record_cannot_be_changed(build_phases):
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_phases().model = "other"
