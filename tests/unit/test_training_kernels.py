"""Kernels are settled before the first step, and as they were behind the last."""

from __future__ import annotations

import pytest
import torch

from paceline.training.step import settled_kernels


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_torch_would_turn_off_is_off_from_the_start_and_on_again_at_the_end(precision):
    before = torch._C._get_mkldnn_enabled()
    with settled_kernels(torch.device("cpu"), precision):
        inside = torch._C._get_mkldnn_enabled()
        with torch.autocast("cpu", torch.float16 if precision == "fp16" else torch.bfloat16, precision != "fp32"):
            for _ in range(2):
                torch.nn.functional.linear(torch.ones(8, 16), torch.ones(16, 16), torch.ones(16))
        assert torch._C._get_mkldnn_enabled() == inside, "torch changed its mind in the middle"
    assert torch._C._get_mkldnn_enabled() == before
