"""The parity matrix on NCCL: the cases and checks of `tests/dist/test_parity.py`, on a GPU."""

from __future__ import annotations

import pytest

import paceline
from tests.dist import test_parity
from tests.dist.parity_models import CASES
from tests.gpu.gpu_ranks import KeptGroups, patched

# One case of each kind, for every number of ranks. They also test strategies that deliberately differ from one process,
# for which replicas are compared with each other.
KINDS = [
    "plain", "tied", "frozen", "unused", "float32 and bfloat16", "batchnorm", "accumulation", "uneven",
    "channels_last", "autocast and GradScaler", "checkpointing",
]  # fmt: skip
OTHERS = [name for name in CASES if name not in KINDS]
EXACT = [name for name in KINDS if name in test_parity.SENT]
# Four and eight ranks share the rarer cases.
NAMES = {
    ("reducers", 2): list(CASES),
    ("reducers", 4): KINDS + OTHERS[::2],
    ("reducers", 8): KINDS + OTHERS[1::2],
    ("strategies", 2): test_parity.SENT,
    ("strategies", 4): EXACT,
    ("strategies", 8): EXACT,
    **{("lossy", ranks): KINDS for ranks in (2, 4, 8)},
}


def run_cases(names: list[str], variants: str) -> list[str]:
    groups = KeptGroups()
    train = groups.reuse(test_parity.train_together)
    with paceline.init(announce=None, timeout_s=30) as world, groups, patched(test_parity, "train_together", train):
        return [line for name in names for line in test_parity.run_case(name, world, variants)]


@pytest.mark.parametrize(("variants", "ranks"), NAMES)
def test_every_reducer_and_strategy_trains_as_one_process_does(on_nccl, variants, ranks):
    lines = on_nccl(ranks, run_cases, NAMES[variants, ranks], variants, timeout_s=400)
    found = [line for each in lines for line in each]
    assert not found, "\n".join(["", *dict.fromkeys(found)])
