"""Loss and accuracy on a whole data set, each sample counted once on whatever number of ranks.

Training does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime.world import World
from paceline.training.step import Learner
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import evaluation_share
from paceline.workloads.losses import compute_outcome

__all__ = ["Evaluation", "evaluate"]

# What a forward without gradients holds is its answers: a vocabulary's worth of them for each token.
_MOST_SAMPLES, _MOST_TARGETS = 64, 4096


@dataclass(frozen=True)
class Evaluation:
    """Averages over all targets of all samples; no accuracy where numbers are predicted."""

    loss: float
    accuracy: float | None
    num_samples: int


@torch.no_grad()
def evaluate(learner: Learner, data: DataSet, world: World) -> Evaluation:
    """Evaluate the replicas, each on its own share. Collective: every rank must call this.

    Ranks share out whole batches, which are the same for every number of ranks: how a product is rounded, and how far a
    sequence is padded, follows from the batch that it is in.
    """
    if isinstance(learner.model, DistributedDataParallel):
        # torch makes buffers equal only in the next training forward.
        for buffer in learner.module.buffers():
            dist.broadcast(buffer, src=0)
    was_training = learner.module.training
    learner.module.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=learner.device)
    correct = torch.zeros((), dtype=torch.int64, device=learner.device)
    size = max(1, min(_MOST_SAMPLES, _MOST_TARGETS // learner.form.targets_per_sample))
    starts = range(0, len(data), size)
    share = evaluation_share(len(starts), world.rank, world.world_size)
    try:
        for start in starts[share.start : share.stop]:
            indices = torch.arange(start, min(start + size, len(data)))
            batch = data.prepare(data.take(indices).to(learner.device), indices, 0)
            with learner.autocast():
                outcome = compute_outcome(learner.module, batch, learner.form)
            loss_sum += outcome.loss_sum.double()
            if outcome.num_correct is not None:
                correct += outcome.num_correct
    finally:
        learner.module.train(was_training)
    sums = torch.stack([loss_sum, correct.double()]).cpu()
    if world.world_size > 1:
        dist.all_reduce(sums, group=world.control)
    num_targets = len(data) * learner.form.targets_per_sample
    loss, accuracy = (sums / max(1, num_targets)).tolist()
    return Evaluation(loss, accuracy if learner.form.num_classes else None, len(data))
