"""A data-parallel training program in plain torch, without Paceline, short enough to read in one sitting.

    python examples/minimal_ddp.py                    # two ranks on this machine's CPU
    torchrun --nproc-per-node 2 examples/minimal_ddp.py   # one rank per GPU with NCCL, or CPU ranks with gloo

It works like the wrapper, in the simplest form. Read `examples/train_by_hand.py` next: the same loop with
`paceline.DDP`, which combines gradients into buckets.
"""

import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

BATCH, STEPS = 32, 60
WARMUP, REPETITIONS = 3, 10


# 1. Process group: every rank knows its number, and all ranks can exchange tensors.
def open_group() -> torch.device:
    # torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    return device


# 2. Data parallelism: every rank has the same model and different samples, and ranks average their gradients.
class AveragedGradients:
    """Averages each gradient as soon as it is ready in backward, with one all-reduce per parameter."""

    def __init__(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)  # start with rank 0's model on every rank
        self.works: list[tuple[dist.Work, torch.Tensor]] = []
        self.wait_s = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.send)

    def send(self, param: torch.Tensor) -> None:
        # Asynchronous: backward continues with earlier layers while the message is in flight.
        self.works.append((dist.all_reduce(param.grad, async_op=True), param.grad))

    def wait(self) -> None:
        """Wait for all messages. Call between backward and the optimizer step."""
        begin_s = time.perf_counter()
        for work, grad in self.works:
            work.wait()
            grad /= dist.get_world_size()
        self.works.clear()
        self.wait_s += time.perf_counter() - begin_s


def make_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate synthetic data (y = x w), different on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(step * ranks + rank)
    x = torch.randn(BATCH, 10, generator=generator)
    return x.to(device), (x @ torch.arange(10.0) / 10).to(device)


def train(device: torch.device) -> float:
    torch.manual_seed(dist.get_rank())  # deliberately different: the broadcast synchronizes the models
    model = nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    averaged = AveragedGradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin_s = time.perf_counter()
    for step in range(STEPS):
        x, y = make_batch(step, device)
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        averaged.wait()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()  # wait for the asynchronous GPU before reading the clock
    times_s = torch.zeros(dist.get_world_size(), device=device)
    times_s[dist.get_rank()] = time.perf_counter() - begin_s
    dist.all_reduce(times_s)  # gathers all times: the other entries are zero
    check_equal(model)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f} after {STEPS} steps of {dist.get_world_size()} x {BATCH} samples")
        for rank, time_s in enumerate(times_s.tolist()):
            print(f"rank {rank}: {time_s:.2f} s in total, {time_s / STEPS:.4f} s per batch")
        if device.type == "cpu":  # with NCCL the GPU waits instead of this process: use a profiler
            share = averaged.wait_s / times_s[0].item()
            print(f"rank 0 spends {share:.0%} of this time waiting for messages after backward")
    return loss.item()


def check_equal(model: nn.Module) -> None:
    """Check that the replicas are still equal: they started equal and applied the same updates."""
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(least, most), "the replicas differ"


# 3. Message cost: all-reduce time by size.
def sweep(device: torch.device) -> None:
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{'size':>10} {'time':>12} {'algbw':>11} {'busbw':>11}")
    for num_bytes in (4 << 10, 256 << 10, 4 << 20, 16 << 20):
        vector = torch.ones(num_bytes // 4, device=device)
        times_s = []
        for _ in range(WARMUP + REPETITIONS):
            vector.fill_(1.0)
            dist.barrier()  # start all ranks together: otherwise times would include waiting for late ranks
            begin_s = time.perf_counter()
            dist.all_reduce(vector)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - begin_s)
        assert torch.all(vector == ranks), "wrong sum"
        time_s = sorted(times_s[WARMUP:])[REPETITIONS // 2]  # the median: outliers would distort the mean
        if dist.get_rank() == 0:
            algbw = num_bytes / time_s / 1e9
            busbw = algbw * 2 * (ranks - 1) / ranks  # the bandwidth of each link in a ring
            print(f"{num_bytes >> 10:>6} KiB {time_s * 1e3:>9.3f} ms {algbw:>6.2f} GB/s {busbw:>6.2f} GB/s")


def main(local_rank: int = -1, ranks: int = 0, port: int = 0) -> None:
    if local_rank >= 0:  # started by mp.spawn below, not by torchrun
        os.environ |= {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = open_group()
    train(device)
    sweep(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        mp.spawn(main, (2, number), nprocs=2)
