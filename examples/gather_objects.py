"""See why `all_gather_object` hangs, how to fix it, and how `world.share` avoids it.

python examples/gather_objects.py          # two ranks on gloo, on any machine
python examples/gather_objects.py nccl     # two ranks on NCCL, without torch.cuda.set_device; needs at least one GPU

docs/troubleshooting.md explains the output.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import paceline

LIMIT = timedelta(seconds=2)  # a hang times out quickly


def gather(group: dist.ProcessGroup | None = None) -> str:
    """Return the gathered objects as text, or the error message."""
    values: list[object] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, f"rank {dist.get_rank()}", group=group)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return str(values)


def hang_and_fix() -> list[str]:
    with paceline.init("gloo", "cpu", announce=None) as world:
        groups = [dist.new_group(timeout=LIMIT) for _ in range(2)]
        apart = gather(groups[world.rank])  # deadlock: each rank waits in a different group
        together = gather()
        return [apart, together, str(world.share(f"rank {world.rank}"))]


def gather_on_nccl() -> list[str]:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # raise on timeout instead of aborting the process
    dist.init_process_group("nccl", timeout=15 * LIMIT)
    rank, gpus = dist.get_rank(), torch.cuda.device_count()
    if gpus > 1:  # creates a communicator on GPUs 0 and 1; only rank 0 reuses it below
        dist.all_reduce(torch.ones(1, device=f"cuda:{rank}"))
    wrong = gather()  # both ranks use GPU 0
    return [f"{gpus} GPUs, the current one is {torch.cuda.current_device()}", wrong]


if __name__ == "__main__":
    on_nccl = "nccl" in sys.argv
    names = ("devices", "all_gather_object") if on_nccl else ("in two groups", "in one group", "world.share")
    values = paceline.run_ranks(gather_on_nccl if on_nccl else hang_and_fix, 2, timeout_s=120)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, every rank reaches this line
        for rank, lines in enumerate(values):
            for name, line in zip(names, lines, strict=True):
                print(f"rank {rank}: {name}: {line}")
