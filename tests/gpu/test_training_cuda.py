"""Transfers of batches to a GPU: the host never waits for them, so it can run steps ahead."""

import pytest
import torch

from paceline.training.loader import load_windows
from paceline.workloads.data import DataForm, DataRequest
from paceline.workloads.data.sets import Augmentation, ImageData, build_synthetic
from paceline.workloads.data.sharding import EpochOrder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def refuses_waits():
    """Makes torch raise an error if the host would wait for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["images", "numbers", "pairs", "tokens"])
def test_synthetic_batches_are_taken_on_the_device_without_a_wait(kind, refuses_waits):
    data = build_synthetic(DataRequest(name=f"synthetic:{kind}", samples=64), "train", device="cuda")
    windows = load_windows(data, EpochOrder(64, 16, 1, 0), 0, 0, 1, 8, torch.device("cuda"))
    next(windows)
    refuses_waits()
    assert len(list(windows)) == 3


def test_augmentation_is_drawn_without_a_wait(refuses_waits):
    data = ImageData(
        name="test", form=DataForm(kind="images", shape=(3, 8, 8), num_classes=10), split="train", source="made",
        inputs=torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8), targets=torch.arange(64) % 10,
        mean=(0.5,) * 3, std=(0.2,) * 3, augmentation=Augmentation(2, True, 1),
    )  # fmt: skip
    windows = load_windows(data, EpochOrder(64, 16, 1, 0), 0, 0, 1, 16, torch.device("cuda"))
    next(windows)
    refuses_waits()
    assert len(list(windows)) == 3
