"""A simulated step as a trace: spans that a viewer takes, and that add up to the step."""

import json

import pytest

from paceline.predict.costs import AlphaBeta
from paceline.predict.curves import LineCurve
from paceline.predict.simulate import Backward, MachineCosts, simulate_buckets
from paceline.predict.traces import check_trace
from paceline.report.simulated_timeline import render_timeline

COSTS = MachineCosts(curve=LineCurve(AlphaBeta(1e-3, 1e6, 1, 10**6, ())), launch_s=1e-3)


def test_spans_add_up_and_a_viewer_takes_them():
    step = simulate_buckets([1000, 3000], [0.01, 0.02], Backward((0.01, 0.02), 0.02, 0.005, 0.003), COSTS)
    trace = json.loads(render_timeline({"one": step, "two": step}))
    assert check_trace(trace) == []
    own = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    phases = {e["name"]: (e["ts"], e["dur"]) for e in own if e["tid"] == 1}
    assert list(phases) == ["data and forward", "backward", "exposed communication", "optimizer"]
    assert sum(length for _, length in phases.values()) == pytest.approx(step.step_s * 1e6)
    for number, bucket in enumerate(step.buckets):
        lane = [e for e in own if e["tid"] == 2 + number]
        assert lane[0]["ts"] == pytest.approx((step.before_s + bucket.ready_s) * 1e6, abs=0.01)
        assert lane[-1]["ts"] + lane[-1]["dur"] == pytest.approx((step.before_s + bucket.done_s) * 1e6, abs=0.01)
