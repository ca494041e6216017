"""Synthetic training records: noise-scale probes and rows of metrics."""

from paceline.records.training import NoiseProbe, NoiseRecord


def build_noise(probes=None, **changes):
    fields = {
        "model": "cnn", "data": "mnist", "device": "cpu", "world_size": 2, "precision": "fp32", "step": 40,
        "epoch": 5.0, "seed": 1, "small_batch_size": 8,
        "probes": probes or (NoiseProbe((6.0, 4.0), 3.0), NoiseProbe((5.0, 7.0), 4.0), NoiseProbe((4.0, 4.0), 2.0)),
    }  # fmt: skip
    return NoiseRecord(**{**fields, **changes})


def build_known(noise_scale, **changes):
    """A record with this noise scale: |G|^2 is 1, and the small batch holds 8 of the 16 samples."""
    small, big = 1 + noise_scale / 8, 1 + noise_scale / 16
    return build_noise(tuple(NoiseProbe((small + s, small + s), big) for s in (-0.03, 0.0, 0.03)), **changes)


def build_epoch_row(step, epoch=0, **changes):
    fields = {
        "step": step, "epoch": epoch, "loss": 2.0, "accuracy": 0.5, "samples": 12, "lr": 0.1, "step_s": 0.5,
        "exposed_comm_s": 0.1, "data_wait_s": 0.05,
    }  # fmt: skip
    return {**fields, **changes}


EPOCH_ROWS = [
    build_epoch_row(1, loss=3.0, accuracy=0.25, exposed_comm_s=None),
    build_epoch_row(2, loss=1.0, accuracy=0.5),
    build_epoch_row(3, loss=13.0, accuracy=1.0, samples=1, test_loss=1.5, test_accuracy=0.4, test_samples=40),
    build_epoch_row(4, 1, loss=0.5, test_loss=1.25, test_accuracy=0.6, test_samples=40),
]
