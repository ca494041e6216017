"""Train with Ray: it starts the workers and opens their process group, and Paceline averages the gradients in it.

python examples/ray_train.py [FOLDER]  # two CPU workers on this host; the second run resumes the first, with its plan

Needs `pip install 'paceline[ray]'`. Saves checkpoints to FOLDER, by default a temporary folder.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # otherwise worker output appears twice
# Despite its name, this also works on Linux: Ray stays on loopback instead of listening on every interface.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

import paceline


def train_worker(config: dict) -> None:
    device, rank = get_device(), train.get_context().get_world_rank()
    # After a fault, Ray restarts the workers: prefer this run's checkpoint.
    checkpoint = train.get_checkpoint() or config["checkpoint"]
    state = {"epoch": 0}
    buckets = {"bucket_cap_mb": 0.002}  # small enough for several buckets; paceline.tune finds the best size
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        buckets = {"plan": paceline.Plan.from_json(state["plan"])}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(device)
    model = paceline.DDP(net, **buckets)  # was: ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if checkpoint:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(state["epoch"], config["epochs"]):
        paceline.set_seed(1000 * epoch, per_rank=True)  # different data on each rank and in each epoch
        for _ in range(20):
            inputs = torch.randn(32, 10, device=device)
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs.mean(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        metrics = {"epoch": epoch + 1, "loss": loss.item(), "buckets": len(model.plan.buckets)}
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(state | {"plan": model.plan.to_json()}, Path(folder, "state.pt"))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)
    if rank == 0:
        print(model.report())


def fit(epochs: int, folder: str, checkpoint: train.Checkpoint | None = None) -> train.Result:
    return TorchTrainer(
        train_worker,
        train_loop_config={"epochs": epochs, "checkpoint": checkpoint},
        torch_config=TorchConfig(backend="shm"),  # all workers on one host; omit it for gloo, or NCCL on GPUs
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=folder),
    ).fit()


if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else tempfile.mkdtemp()
    with ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False):  # ends with ray.shutdown()
        first = fit(2, folder)
        print(f"first run: {first.metrics}")
        second = fit(4, folder, first.checkpoint)
        print(f"second run: {second.metrics}")
