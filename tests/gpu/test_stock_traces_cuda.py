"""`predict_trace` on traces of torch's own DDP with CUDA: two gloo ranks that share one GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import paceline
from paceline.predict.simulate import simulate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train_traced(folder: str) -> list[int]:
    with paceline.init("gloo", device="cuda", announce=None) as world:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(world.device), bucket_cap_mb=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(256, 512, device=world.device)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
            for _ in range(4):
                step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(f"{folder}/rank-{world.rank}.trace.json")
        said = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        return [int(size) for size in said.split(",")]


def test_steps_have_the_times_of_kernels_and_the_buckets_of_the_wrapper(tmp_path):
    buckets, _ = paceline.run_ranks(train_traced, 2, (str(tmp_path),))
    result = paceline.predict_trace(tmp_path)
    traced = result.traced
    assert (traced.device, traced.backend, traced.world_size, traced.ranks) == ("cuda", "gloo", 2, (0, 1))
    assert list(traced.layout) == buckets and len(traced.gradients) == 8 and len(traced.steps) >= 3
    for step in traced.steps:
        assert 0 < step.backward_s < step.over_s and step.launch_s == 0
        assert all(message.start_s >= message.launch_s for message in step.messages)
    own = simulate(result.job, result.now.cuts, result.costs)
    assert own.step_s == pytest.approx(traced.step_s, rel=1e-2)
