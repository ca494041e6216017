"""The migration page: every argument of torch's wrapper has a correct row, and its code and commands run."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import Net, average_alone, check_close, error_of, loss

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-ddp.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Arguments")[1].split("\n## ")[0], re.MULTILINE))
# A value that a program might pass for each supported argument.
GIVEN: dict[str, Any] = {
    "device_ids": None, "output_device": None, "dim": 0, "broadcast_buffers": False, "init_sync": False,
    "process_group": None, "bucket_cap_mb": 1e-4, "find_unused_parameters": True, "check_reduction": True,
    "gradient_as_bucket_view": True, "static_graph": True, "device_mesh": None, "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1e-4, 1], "batched_grad_copy": True, "forward_sync_buffers": False,
    "lazy_bucket_allocation": True,
}  # fmt: skip


def test_every_argument_of_torchs_wrapper_has_a_row_and_no_other():
    torchs = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"}
    ours = set(inspect.signature(DDP.__init__).parameters)
    assert torchs <= set(ROWS) <= ours
    more = re.search(r"has more options: (.*?)\.\n", PAGE, re.DOTALL)
    assert more is not None and set(re.findall(r"`(\w+)`", more[1])) == ours - set(ROWS) - {"self"}


ALLOW_UNUSED = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")


class Marked(Net):
    """A model with a buffer that contains the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mark", torch.tensor(float(rank)))


def find_effects(rank: int, **given: Any) -> list[str]:
    """The effect of an argument, out of all observable effects. Collective."""
    torch.manual_seed(rank)
    before = Marked(rank)
    model = DDP(copy.deepcopy(before), **given)
    is_own = torch.equal(model.module.first.weight, before.first.weight)
    found = ["weights stay"] if rank and is_own else []
    found += ["buffers stay"] if float(model.module.mark) == rank > 0 else []
    torch.manual_seed(0)  # with init_sync=False, ranks must start from the same values
    model = DDP(Marked(rank), **given)
    for step in range(3):
        model.zero_grad()
        model.module.mark.fill_(rank)
        wanted = average_alone(model.module, lambda alone, rank, step=step: loss(alone, rank, step), 2)
        loss(model, rank, step).backward()
        check_close(model, wanted, given)
    found += ["buffers differ after a step"] if float(model.module.mark) == rank > 0 else []
    found += ["several buckets"] if len(model.plan.bucket_bytes) > 1 else []
    torch.manual_seed(0)
    model = DDP(Net(), **given)
    kind, _ = error_of(lambda: loss(model, rank, use="left").backward())
    return found + ["unused parameters"] * (not kind)


EFFECTS = {
    "broadcast_buffers": ["buffers stay", "buffers differ after a step"],
    "forward_sync_buffers": ["buffers differ after a step"],
    "init_sync": ["weights stay", "buffers stay"],
    "bucket_cap_mb": ["several buckets"],
    "bucket_cap_mb_list": ["several buckets"],
} | {name: ["unused parameters"] for name in ALLOW_UNUSED}


def give_arguments(refused: list[str]) -> dict[str, list[str]]:
    with paceline.init(announce=None) as world:
        for name in refused:
            kind, text = error_of(lambda name=name: DDP(Net(), **{name: object()}))
            assert kind == "ConfigError" and name in text
        assert find_effects(world.rank) == []
        return {name: find_effects(world.rank, **{name: value}) for name, value in GIVEN.items()}


def test_exactly_the_documented_arguments_are_refused(on_ranks):
    refused = [name for name, text in ROWS.items() if text.startswith("refused")]
    assert set(refused) == set(ROWS) - {"module", *GIVEN}
    first, second = on_ranks(2, give_arguments, refused)
    assert {name: effects for name, effects in second.items() if effects} == EFFECTS
    # Rank 0 broadcasts its values.
    seen = {name: [e for e in effects if "stay" not in e and "differ" not in e] for name, effects in second.items()}
    assert first == seen


def run_block(source: str, folder: Path) -> None:
    with contextlib.chdir(folder):
        try:
            exec(compile(source, "docs/from-ddp.md", "exec"), {"__name__": "__main__"})
        finally:
            paceline.swap_wrapper(False)
            if dist.is_initialized():
                dist.barrier()
            paceline.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group()


def find_missing(source: str) -> list[str]:
    """Packages that a program imports but that are not installed."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
    return [name for name in names if name and importlib.util.find_spec(name.split(".")[0]) is None]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs(on_ranks, tmp_path, number):
    if missing := find_missing(BLOCKS[number]):
        pytest.skip(f"not installed: {', '.join(missing)}")
    on_ranks(2, run_block, BLOCKS[number], tmp_path)
    if number == 0:
        assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(start, tmp_path, command):
    (tmp_path / "train.py").write_text(BLOCKS[0])
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    process = start("-m", "torch.distributed.run", *arguments, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "model.pt").exists(), out
