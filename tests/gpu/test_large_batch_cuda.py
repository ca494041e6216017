"""LARS, LAMB and ghost BatchNorm on a GPU: the same numbers as on the CPU, and the host never waits."""

import copy

import pytest
import torch
from torch import nn

from paceline import LAMB, LARS, GhostBatchNorm
from paceline.training.optimizers import split_parameters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def refuses_waits():
    """Makes torch raise an error if the host would wait for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_steps_are_those_of_the_cpu_and_wait_for_nothing(kind, refuses_waits):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)).double()
    there = copy.deepcopy(module).cuda()
    low = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16, device="cuda"))  # another dtype in the same group
    ours, theirs = kind(split_parameters(module, 0.1), lr=0.1), kind(split_parameters(there, 0.1), lr=0.1)
    theirs.param_groups[0]["params"].append(low)
    for step in range(4):
        for a, b in zip(module.parameters(), there.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.cuda()
        low.grad = torch.ones_like(low)
        if step == 1:
            refuses_waits()
            theirs.step()
            torch.cuda.set_sync_debug_mode("default")
        else:
            theirs.step()
        ours.step()
    for a, b in zip(module.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-10, atol=1e-12)
    assert bool(torch.isfinite(low).all())


@pytest.mark.parametrize("samples", [16, 14])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_ghosts_are_those_of_the_cpu_in_their_layout(samples, layout, refuses_waits):
    torch.manual_seed(1)
    layer = GhostBatchNorm(8, 4)
    there = copy.deepcopy(layer).cuda()
    x = torch.randn(samples, 8, 6, 6).contiguous(memory_format=layout)
    y = x.cuda().requires_grad_()
    refuses_waits()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = copy.deepcopy(there)(y.bfloat16())
    out = there(y)
    out.pow(3).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    z = x.clone(memory_format=torch.preserve_format).requires_grad_()
    wanted = layer(z)
    wanted.pow(3).sum().backward()
    assert out.is_contiguous(memory_format=layout) and half.is_contiguous(memory_format=layout)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(half.cpu().float(), wanted, rtol=0.05, atol=0.05)
    torch.testing.assert_close(y.grad.cpu(), z.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there.running_var.cpu(), layer.running_var, rtol=1e-5, atol=1e-6)
