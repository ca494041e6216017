"""Messages during backward on one rank: their start times, their records, and their use in a profile."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.measure.disturbance import Disturbance, Traffic, build_traffic
from paceline.measure.job_profile import measure_layers
from paceline.measure.step_bench import OwnJob, Variant
from paceline.parallel.channel import Channel
from paceline.predict.predictor import Evidence, fit_rank
from paceline.predict.strategy_costs import MEASURED
from paceline.records import CodecRecord, StepRecord
from paceline.training.step import PhaseClock
from paceline.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def world():
    """A world of one process, this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(
        rank=0, world_size=1, shares_clock=False, backend="gloo", device=CPU, share=lambda value: [value]
    )
    dist.destroy_process_group()


@pytest.fixture
def traffic(world):
    found = build_traffic(world, Channel(dist.group.WORLD, CPU), torch.ones(MIB))
    yield found
    found.close()


def test_a_thread_adds_and_copies_all_bytes_of_its_messages(traffic):
    spans = [traffic.send(MIB, 2) for _ in range(2)]
    traffic.wait()
    assert all(end > begin for begin, end in spans)
    # Four messages cover the memory once: each adds its slice to a running total and copies the total back.
    assert traffic.memory.min() >= 1.0 and traffic.memory.max() > 1.0 and traffic.count_most(MIB) == 4
    assert sum(thread.name.startswith("paceline-traffic") for thread in threading.enumerate()) == 1
    traffic.close()  # the fixture closes it again
    assert not any(thread.name.startswith("paceline-traffic") for thread in threading.enumerate())


class Noted(Traffic):
    """Messages that take no time and a record of the ready gradients at each send."""

    def __init__(self, params):
        super().__init__(torch.zeros(1024))
        self.params, self.left = params, []

    def send(self, num_bytes, count, is_timed=True):
        self.left.append([param.grad is not None for param in self.params])
        return [1.0, 1.5]


def test_messages_leave_with_gradients_at_even_moments_and_are_noted_once_a_step(world):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(8)))
    job = OwnJob(lambda: (model, lambda m: m(torch.ones(2, 3)).sum().backward()))
    replica = job.build()
    variant, sent = Variant({"message_bytes": 256}, replica), Noted(list(model.parameters()))
    # Backward takes 8 s, and gradient k, counted from the end of the model, is ready after k seconds.
    probe = Disturbance(world, sent, variant, lambda: ({7 - k: k + 1.0 for k in range(8)}, 8.0))
    assert variant.kinds == ("marked",) and variant.probe is probe
    for _ in range(2):
        with contextlib.ExitStack() as hooks:
            probe.begin("marked", hooks)
            phases = PhaseClock(CPU)
            sent.left.clear()
            replica.run(None, phases)
            probe.end("marked", phases.end())
        # Bursts at 1, 3, 5 and 7 s; a single message takes half a second, far less than a quarter of backward.
        assert len(sent.left) == 4
    assert variant.labels["num_messages"] == 4 * 16
    assert variant.times["under_way"] == pytest.approx([0.5 / 16] * 2) and len(variant.times["alone"]) == 2


def test_a_profile_carries_what_a_rank_pays(world):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))  # 1 MiB
    job = OwnJob(
        lambda: (
            nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))),
            lambda m: m(torch.ones(4, 256)).sum().backward(),
        )
    )
    profile, *carried = measure_layers(world, job.build(), job.labels, iters=2, warmup=1, job=job)
    steps = [record for record in carried if isinstance(record, StepRecord)]
    codecs = [record for record in carried if isinstance(record, CodecRecord)]
    assert {record.num_bytes for record in codecs} == {profile.num_bytes} and len(codecs) == 3 * len(MEASURED) - 4
    assert {parameter.shape for parameter in profile.parameters} == {(256, 256), (256,)}
    assert Counter(record.role for record in steps) == {"plain": 1, "disturbed": 1, "local": 2}
    assert {record.wrapper for record in steps} == {"paceline"} and profile.num_bytes == sum(
        p.nbytes for p in model.parameters()
    )
    one, each = (record for record in steps if record.role == "local")
    assert (one.num_buckets, each.num_buckets) == (1, 8)
    rank = fit_rank(Evidence([profile, *steps]))
    # Such a short backward may allow no conclusion.
    assert rank.too_short == (MIB // 4,) if rank.contention is None else rank.contention.sizes == (MIB // 4,)
    assert all(record.alone.median_s > 0 for record in steps if record.role == "disturbed")
    assert rank.neighbors == ((1, 1.0),) and rank.launch_s >= 0 and rank.gather_s_per_byte >= 0
