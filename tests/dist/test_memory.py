"""The memory of a real step on the CPU, where every byte can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which sets an environment variable
from torch import nn

import paceline
from paceline.report.profiles import MemoryRow, TraceResult, list_memory

INPUTS, HIDDEN, OUTPUTS, BATCH = 64, 32, 8, 16
WEIGHTS = 4 * (INPUTS * HIDDEN + HIDDEN + HIDDEN * OUTPUTS + OUTPUTS)


def build() -> tuple[nn.Module, Any]:
    """A two-layer perceptron with momentum. The input exists before the step; the step creates the target."""
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(BATCH, INPUTS)

    def step(model: nn.Module) -> None:
        torch.zeros(1000)  # temporary
        target = torch.ones(BATCH, OUTPUTS)
        loss = (model(x) - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def find_rows(result: TraceResult) -> dict[str, MemoryRow]:
    memory = result.overviews[0].memory
    assert memory is not None
    return {row.category: row for row in list_memory(memory)}


def test_the_bytes_of_a_perceptron_match_a_count_by_hand(tmp_path: Path) -> None:
    model, step = build()
    result = paceline.trace(model, step, steps=1, warmup=1, memory=True, wrapper="none", out=tmp_path)
    rows, data, target = find_rows(result), 4 * BATCH * INPUTS, 4 * BATCH * OUTPUTS
    for category in ("parameters", "optimizer"):
        row = rows[category]
        assert row.begin_bytes == row.peak_bytes == row.end_bytes == row.largest_bytes == WEIGHTS
    assert (rows["gradients"].begin_bytes, rows["gradients"].largest_bytes, rows["gradients"].end_bytes) == (
        0,
        WEIGHTS,
        0,
    )
    assert (rows["data"].begin_bytes, rows["data"].largest_bytes) == (data, data + target)
    # ReLU's output, the difference that square() saves, and the loss. The first layer's own output is temporary.
    assert rows["activations"].largest_bytes == 4 * BATCH * HIDDEN + target + 4
    assert rows["temporary"].largest_bytes >= 4000 and rows["temporary"].end_bytes == 0
    assert rows["buckets"].largest_bytes == 0 and rows["other"].largest_bytes <= 1  # torch 2.11 keeps one byte
    assert rows["total"].begin_bytes == 2 * WEIGHTS + data + rows["other"].begin_bytes
    # A saved run gives the same result, without the traces.
    assert result.folder is not None and (result.folder / "memory.png").exists()
    again = paceline.load_result(result.folder)
    assert isinstance(again, TraceResult) and find_rows(again) == rows and list(again.figures()) == ["memory"]
    assert again.findings[0] == result.findings[0] and again.findings[0].startswith("memory: peak ")


def test_the_wrapper_holds_gradients_in_its_buckets_between_steps() -> None:
    model, step = build()
    rows = find_rows(paceline.trace(model, step, steps=1, warmup=1, memory=True))
    assert WEIGHTS <= rows["buckets"].begin_bytes == rows["buckets"].end_bytes < 2 * WEIGHTS
    assert rows["parameters"].begin_bytes == rows["optimizer"].begin_bytes == WEIGHTS
    assert rows["total"].begin_bytes == sum(row.begin_bytes for name, row in rows.items() if name != "total")
