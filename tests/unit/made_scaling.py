"""Synthetic records of scaling studies: a batch sweep, cells by number of ranks, large-batch runs, predictions."""

import math
import random

import numpy as np
from hypothesis import strategies as st

from paceline.predict.predictor import Prediction
from paceline.records import BatchRecord, CollectiveRecord, CurvePoint, LargeBatchRecord, Samples, StepRecord

JOB = {"model": "cnn", "data": "synthetic", "device": "cpu", "precision": "fp32"}
COUNT = 9  # repetitions in a cell


def make_samples(rng, middle_s, ranks=1, count=COUNT, spread=0.03):
    """Each rank of each repetition takes a different time."""
    rows = tuple(tuple(middle_s * rng.uniform(1 - spread, 1 + spread) for _ in range(ranks)) for _ in range(count))
    return Samples(seconds=rows)


def make_batch(rng, batch_size, epoch_s=None, num_samples=4096, **changes):
    fields = {
        **JOB, "threads": 1, "batch_size": batch_size, "num_samples": num_samples,
        "num_steps": -(-num_samples // batch_size), "peak_bytes": 2**27 + batch_size * 2**20,
    }  # fmt: skip
    if epoch_s is not None:
        fields |= {"timing": make_samples(rng, epoch_s, count=3), "data_wait": make_samples(rng, 0.02, count=3)}
    return BatchRecord(**{**fields, **changes})


def make_batches(rng):
    """A batch sweep with its knee at 512; a batch of 4096 does not fit in memory."""
    epochs = {32: 8.0, 128: 3.0, 512: 1.05, 1024: 1.0, 2048: 1.2}
    failed = make_batch(rng, 4096, failure="out of memory", peak_bytes=0)
    return [*(make_batch(rng, size, epoch_s) for size, epoch_s in epochs.items()), failed]


def make_scale(rng, world_size, compute_s, exposed_s=0.0, busy_s=None, mode="weak", cell_size=32, **changes):
    """A step with these compute and exposed seconds; a single rank has no wrapper."""
    alone = world_size == 1
    fields = {
        **JOB, "mode": mode, "cell_size": cell_size, "threads": 1, "accumulate": 1, "world_size": world_size,
        "wrapper": "none" if alone else "paceline", "backend": "none" if alone else "gloo",
        "batch_size": cell_size if mode == "weak" else cell_size // world_size,
        "timing": make_samples(rng, compute_s + exposed_s, world_size),
    }  # fmt: skip
    if not alone:
        fields |= {"num_bytes": 4_000_000, "num_messages": 3, "no_comm": make_samples(rng, compute_s, world_size)}
    if busy_s is not None:
        fields["busy"] = make_samples(rng, busy_s, world_size)
    return StepRecord(**{**fields, **changes})


CONTESTANTS = (("torch", "gloo", 1.0), ("paceline", "gloo", 0.9), ("paceline", "paceline", 0.3))


def make_cell(rng, mode, cell_size, counts=(2, 4)):
    """A single rank and three wrappers at several numbers of ranks."""
    alone_s = 1e-3 + 2e-4 * cell_size
    records = [make_scale(rng, 1, alone_s, mode=mode, cell_size=cell_size)]
    for ranks in counts:
        share_s = alone_s * 1.05 if mode == "weak" else 1e-3 + alone_s / ranks
        records += [
            make_scale(
                rng, ranks, share_s, 2e-3 * cost * ranks, 4e-3 * cost * ranks, mode, cell_size,
                wrapper=wrapper, backend=backend,
            )
            for wrapper, backend, cost in CONTESTANTS
        ]  # fmt: skip
    return records


def make_scales(rng, weak=(32, 128), strong=(256,)):
    cells = [("weak", size) for size in weak] + [("strong", size) for size in strong]
    return [record for mode, size in cells for record in make_cell(rng, mode, size)]


def make_collectives(rng, middle_s=1e-4, backends=("gloo", "paceline"), counts=(2, 4)):
    """All-reduces of 16 MiB that run faster than the messages of any step."""
    return [
        CollectiveRecord(
            collective="all_reduce", backend=backend, device="cpu", world_size=ranks, num_bytes=2**24, dtype="float32",
            op="sum", timing=make_samples(rng, middle_s, ranks),
        )
        for backend in backends
        for ranks in counts
    ]  # fmt: skip


def make_run(
    global_batch_size=128, recipe="none", seed=0, accuracy=0.9, budget="epochs", epochs=4, data=1024, **changes
):
    """A run evaluated after each epoch that reaches this accuracy."""
    per_epoch = -(-data // global_batch_size)
    curve = tuple(
        CurvePoint(
            update=epoch * per_epoch, num_samples=epoch * data, train_loss=2.0 / epoch, test_loss=2.2 / epoch,
            test_accuracy=accuracy * (1 - 0.5**epoch) / (1 - 0.5**epochs),
        )
        for epoch in range(1, epochs + 1)
    )  # fmt: skip
    fields = {
        **JOB, "world_size": 2, "batch_size": global_batch_size // 2, "global_batch_size": global_batch_size,
        "largest_batch_size": global_batch_size, "recipe": recipe, "configuration": f"{recipe}, momentum 0.9",
        "budget": budget, "epochs": epochs, "num_updates": epochs * per_epoch, "num_samples": data, "seed": seed,
        "lr": 0.1, "seconds": 3.0 + seed, "curve": curve,
    }  # fmt: skip
    return LargeBatchRecord(**{**fields, **changes})


def make_runs(rng, seeds=3):
    """An 8x batch costs 20 points, which lars recovers; one seed of the largest batch failed."""
    means = {(128, "none"): 0.9, (512, "none"): 0.86, (1024, "none"): 0.7, (1024, "linear"): 0.8, (1024, "lars"): 0.893}
    runs = [
        make_run(size, recipe, seed, mean + rng.uniform(-0.004, 0.004), epochs=10)
        for (size, recipe), mean in means.items()
        for seed in range(seeds)
    ]
    return [*runs, make_run(1024, "linear", seeds, failure="loss is nan after 3 updates", curve=(), epochs=10)]


def make_predictions(variant="paceline on gloo", mode="weak", cell_size=32, counts=(1, 2, 4, 8, 64, 1024)):
    alone_s = 1e-3 + 2e-4 * cell_size
    cost_s = 1.5e-3 if variant.endswith("gloo") else 5e-4
    steps = {n: (alone_s if mode == "weak" else alone_s / n) + cost_s * n**0.5 * (n > 1) for n in counts}
    return [
        Prediction(
            label=variant,
            mode=mode,
            cell_size=cell_size,
            world_size=n,
            step_s=s,
            low_s=0.9 * s,
            high_s=1.15 * s,
            local_s=alone_s,
            network="this host",
            doubt="far" if n > 64 else "",
        )
        for n, s in steps.items()
    ]


def make_rng(seed=7):
    return random.Random(seed)


SEEDS = st.integers(0, 10**6).map(make_rng)


def slowest(samples):
    """Each repetition's slowest rank, computed independently."""
    return np.array([sorted(row)[-1] for row in samples.seconds])


def interval(ratios):
    """The wider half of the median's 95 % interval, from order statistics."""
    ordered, n = np.sort(ratios), len(ratios)
    k = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    middle = float(np.median(ordered))
    return middle, max(float(ordered[-1 - k]) - middle, middle - float(ordered[k]))
