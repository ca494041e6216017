"""The answer of `demo`: a gain is claimed only if this run measured it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.records import Samples, StepRecord
from paceline.records.environment import capture_environment
from paceline.records.steps import RACED
from paceline.records.store import Run
from paceline.verbs.demo import PROGRAM, DemoResult

PLANS = {"as it is": None, "512 KiB": 0.5}


def build(own: list[float], other: list[float]) -> DemoResult:
    def record(times: list[float], **more: object) -> StepRecord:
        rows = tuple((time, time) for time in times for _ in range(3))
        waits = Samples(tuple((0.0, 0.0) for _ in rows))
        return StepRecord(
            model="Net", wrapper="torch", world_size=2, batch_size=1, backend="gloo", device="cpu",
            timing=Samples(rows), data_wait=waits, **{"label": "", **more},
        )  # fmt: skip

    raced = {"note": RACED, "steps_per_turn": 3}
    records = [record(own)]
    if other:
        records.append(record(own, label="as it is", bucket_bytes=(1024,) * 32, **raced))
        records.append(record(other, label="512 KiB", bucket_bytes=(32 * 1024,), **raced))
    return DemoResult(Run("tune attach", {"command": ["x"], "plans": PLANS}, capture_environment(), tuple(records)))


def test_a_measured_gain_has_its_interval_and_its_cure():
    result = build(
        [0.02 + 0.0001 * (7 * n % 16) for n in range(16)], [0.005 + 0.0001 * (3 * n % 16) for n in range(16)]
    )
    gain, low, high = result.saves
    assert result.verdict == "use" and result.cap_mib == 0.5 and 0.6 < low <= gain <= high < 0.8
    assert f"{gain:.0%} less (95 %: {low:.0%} to {high:.0%})" in result.answer
    assert [(row.num_messages, row.share) for row in result.variants] == [(32, 1.0), (1, pytest.approx(0.28, abs=0.02))]


@pytest.mark.parametrize("other", [[0.02, 0.021] * 8, [0.03] * 16, [0.01] * 3, []])
def test_without_a_measured_gain_none_is_claimed(other):
    result = build([0.021, 0.02] * 8 if len(other) != 3 else [0.02] * 3, other)
    assert result.verdict != "use"
    assert "Fixed" not in result.answer and result.answer.count("No gain") == 1
    assert result.next_steps == ("paceline demo",)


def test_the_program_is_part_of_the_package_and_needs_only_torch():
    assert "paceline" not in PROGRAM.read_text().partition('"""\n')[2]


def test_only_other_load_is_a_warning_and_unsteady_steps_are_not():
    result = build([0.02, 0.04] * 8, [0.005, 0.006] * 8)
    assert result.doubts
    for load, count in ((0.1, 0), (9.0, 1)):
        environment = replace(result.run.environment, load_average=load, stolen=0.0, cores=2)
        warnings = DemoResult(replace(result.run, environment=environment)).warnings
        assert len(warnings) == count and all(f"load {load:.1f} on 2 cores" in one for one in warnings)
