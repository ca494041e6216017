"""Faults of ranks that compute on one GPU."""

import pytest
import torch

from paceline.studies.fault_trials import Trial, measure_fault

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("system", ["train", "script"])
@pytest.mark.parametrize("fault", ["kill", "stop", "endless-kernel"])
def test_two_gloo_ranks_on_one_gpu_and_the_one_at_fault_is_named(fault, system):
    record = measure_fault(Trial(fault, system, "gloo", limit_s=60.0, device="cuda"))
    assert record.is_right and not record.left_over and record.ended_s is not None, record
