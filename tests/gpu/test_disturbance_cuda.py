"""Messages during backward on one GPU, and how profiling them affects a prediction."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import paceline
from paceline.measure.disturbance import build_traffic
from paceline.parallel.channel import Channel
from paceline.records import StepRecord
from paceline.runtime.ranks.world import join_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIB = 2**20


def test_a_profile_carries_copies_and_contention_into_a_prediction():
    layers = [nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(6)]  # 96 MiB
    module, x = nn.Sequential(*layers), torch.randn(4096, 2048, device="cuda")
    profile = paceline.profile(module, lambda model: model(x).sum().backward(), iters=8, warmup=1)
    steps = [record for record in profile.records if isinstance(record, StepRecord)]
    assert Counter(record.role for record in steps) == {"plain": 1, "local": 2, "disturbed": 2}
    assert {record.device for record in steps} == {"cuda"} and not any(record.note for record in steps)
    for record in (record for record in steps if record.role == "disturbed"):
        assert record.message_bytes in (4 * MIB, 25 * MIB) and record.num_messages >= 1
        rows = zip(record.alone.reduced_s, record.under_way.reduced_s, record.overlapped.reduced_s, strict=True)
        # By the device's own clock: on the host's clock, a message would take only as long as its launch.
        assert all(alone_s > 0 and 0 <= before_s <= under_way_s for alone_s, under_way_s, before_s in rows)
        assert max(record.overlapped.reduced_s) > 0
    answer = paceline.predict(profile, network="hdr", ranks=8)
    lines = "\n".join(answer.findings)
    assert "contention on hdr: fitted to steps" in lines and "measured: in the paceline wrapper, copies take" in lines
    assert answer.interval[0] <= answer.step_s <= answer.interval[1]


def test_traffic_of_one_gpu_leaves_the_stream_of_the_step_alone():
    with join_world("nccl", "cuda") as world:
        memory = torch.ones(MIB, device=world.device)
        assert torch.distributed.group.WORLD is not None
        traffic = build_traffic(world, Channel(torch.distributed.group.WORLD, world.device), memory)
        assert traffic is not None and traffic.is_free and traffic.count_most(MIB) == 4
        begin, end = traffic.send(MIB, 4)
        torch.cuda.synchronize()
        traffic.wait()
        assert begin.elapsed_time(end) > 0 and memory.eq(1.0).all()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
