"""Layer profiles on a GPU: the device's own times, without waiting for it during the step."""

import pytest
import torch
from torch import nn

from paceline.measure.job_profile import measure_layers
from paceline.runtime.ranks.world import join_world
from tests.unit.test_layers import LABELS, build_replica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_gradients_are_ready_when_the_device_has_them(monkeypatch):
    layers = [nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(4)]
    module, x = nn.Sequential(*layers), torch.randn(8192, 2048, device="cuda")
    waits = []
    synchronize = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: (waits.append(1), synchronize(*args)))
    with join_world("gloo", "cuda") as world:
        waits.clear()
        replica = build_replica(module, lambda: module(x).sum())
        (record,) = measure_layers(world, replica, LABELS, iters=3, warmup=2)
    assert len(waits) == 2 * 2 * 5  # before and after each step, plain or profiled
    assert record.device == "cuda"
    assert [p.name for p in record.parameters] == ["3.weight", "2.weight", "1.weight", "0.weight"]
    assert record.is_order_stable
    # Equal layers: if the host's launches had been timed, all gradients would be ready at the start.
    assert record.parameters[-1].median_s > 2 * record.parameters[0].median_s > 0
    rows = [block.backward_s for block in (*record.blocks, record.outside)]
    assert [sum(row) for row in zip(*rows, strict=True)] == pytest.approx(list(record.profiled_backward.reduced_s))
