"""Programs written for gloo run unchanged on paceline: in warm ranks, under torchrun, in debug mode, and they agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.transport import register, why_not
from tests.dist import gloo_programs

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")


def run_program(backend: str, name: str, debug: str = "") -> Any:
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
        dist.set_debug_level_from_env()
    register()
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    try:
        return getattr(gloo_programs, name)()
    finally:
        if debug:
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
            dist.set_debug_level_from_env()
        dist.destroy_process_group()


def compare(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            compare(one, other, f"{where}[{number}]")
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            compare(found[key], wanted[key], f"{where}[{key!r}]")
    else:
        assert found == wanted, where


PROGRAMS = [
    "ddp", "ddp_with_hooks", "ddp_with_uneven_inputs", "zero_redundancy", "fully_shard", "checkpoint", "objects",
    "reductions", "rooted", "all_to_all", "point_to_point", "gathering", "asynchronous", "coalesced", "functional",
    "kinds", "empty", "scattered_in_memory", "groups", "meshes", "reopened",
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_on_paceline_what_it_finds_on_gloo(on_ranks, name):
    num_ranks = 4 if name in ("groups", "meshes") else 2
    wanted = on_ranks(num_ranks, run_program, "gloo", name)
    compare(on_ranks(num_ranks, run_program, "paceline", name), wanted, name)
