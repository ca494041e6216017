"""The training loop shared by all scoreboard programs: two ranks and torch's own DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/scoreboard/programs/slow_loader.py [--cured] [--steps N] [--times FILE]

A program is a subclass of `Program` that declares the expected answer and overrides the method that causes its problem.
`--cured` runs the same program without the problem, `--times` saves the duration of every step, and `--peer` adds
another tool's instrumentation to the loop.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WARMUP_STEPS = 20  # steps that build buckets and fill caches
CLASSES = 10


class Program:
    """A healthy program, and the answer expected from a tool.

    Any kind of first finding in `causes` is correct, because all of them have the same fix. The rank counts only if one
    rank is the culprit.
    """

    title: ClassVar[str] = ""
    causes: ClassVar[tuple[str, ...]] = ("healthy",)
    culprit: ClassVar[int | None] = None
    needs_cuda: ClassVar[bool] = False

    backend = "gloo"
    threads = 1
    width, depth, batch = 128, 8, 1024
    loader_options: ClassVar[dict[str, Any]] = {}
    wrapper_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, cured: bool = False, rank: int = 0) -> None:
        self.cured = cured
        self.rank = rank
        self.device = torch.device("cpu")
        if self.needs_cuda:
            self.backend, self.width, self.batch = "nccl", 512, 32768
            self.device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        self.configure()

    @property
    def is_ailing_here(self) -> bool:
        """Whether the problem occurs on this rank."""
        return not self.cured and self.culprit in (None, self.rank)

    @property
    def samples(self) -> int:
        """Samples per step across all ranks, in any unit, to compare times per sample."""
        return self.batch

    def configure(self) -> None:
        """Set options that depend on `cured` or on the rank, before building anything."""

    def build_model(self) -> nn.Module:
        layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(self.width, CLASSES))

    def wrap(self, net: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(net, **self.wrapper_options)

    def build_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=1e-3, fused=True)

    def build_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(self.batch, self.width, generator=generator)
        return inputs, torch.randint(0, CLASSES, (self.batch,), generator=generator)

    def load(self, number: int) -> None:
        """Do extra work when reading a batch, besides fetching it from memory."""

    def build_loader(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        return DataLoader(Batches(self, steps), batch_size=None, **self.loader_options)

    def move(self, batch: Tensor) -> Tensor:
        return batch.to(self.device, non_blocking=True)

    def find_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    def train_step(self, model: Any, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss = self.find_loss(model, inputs, targets)
        loss.backward()
        self.after_backward(model, loss)
        optimizer.step()

    def after_backward(self, model: nn.Module, loss: Tensor) -> None:
        """Do extra work between backward and the optimizer."""

    def after_step(self, number: int, model: nn.Module) -> None:
        """Do extra work after the optimizer."""


class Batches(Dataset):
    """Batches of random numbers, generated in advance."""

    def __init__(self, program: Program, steps: int) -> None:
        generator = torch.Generator().manual_seed(program.rank)
        self.program, self.steps = program, steps
        self.made = [program.build_batch(generator) for _ in range(4)]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= self.steps:
            raise IndexError(number)
        self.program.load(number)
        return self.made[number % len(self.made)]


def spin(seconds: float) -> None:
    """Keep a core busy for this time."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def main(kind: type[Program]) -> None:
    parser = argparse.ArgumentParser(description=kind.title)
    parser.add_argument("--cured", action="store_true")
    parser.add_argument("--steps", type=int, default=WARMUP_STEPS + 200)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--peer", choices=("profiler", "traceml"))
    parser.add_argument("--folder", type=Path, default=Path("."), help="output folder of another tool")
    asked = parser.parse_args()
    rank = int(os.environ["RANK"])
    program = kind(asked.cured, rank)
    torch.manual_seed(0)
    torch.set_num_threads(program.threads)
    if program.needs_cuda:
        torch.cuda.set_device(program.device)
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):  # on separate hosts, NCCL ranks can share a GPU
            os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    if program.backend == "shm":  # the environments of other tools have Paceline on their path, but not installed
        from paceline.transport import register

        register()
    dist.init_process_group(program.backend)
    with open_peer(asked.peer, asked.folder, rank) as peer:
        moments_s = run_loop(program, asked.steps, peer)
    if asked.times is not None and rank == 0:
        steps_s = [after_s - before_s for before_s, after_s in itertools.pairwise(moments_s)]
        asked.times.write_text(json.dumps({"samples": program.samples, "steps_s": steps_s[WARMUP_STEPS - 1 :]}))
    dist.destroy_process_group()


def run_loop(program: Program, steps: int, peer: Any) -> list[float]:
    """Train, and return the end time of each step."""
    net = program.build_model().to(program.device)
    model = program.wrap(net)
    optimizer = program.build_optimizer(net)
    moments_s = []
    for number, (inputs, targets) in enumerate(program.build_loader(steps)):
        with peer(model):
            program.train_step(model, optimizer, program.move(inputs), program.move(targets))
            program.after_step(number, model)
        if program.needs_cuda and number + 1 in (WARMUP_STEPS, steps):  # makes the total in between exact
            torch.cuda.synchronize()
        moments_s.append(time.perf_counter())
    return moments_s


@contextlib.contextmanager
def open_peer(name: str | None, folder: Path, rank: int) -> Iterator[Any]:
    """Open the tool's context managers around the loop and around each step."""
    if name == "traceml":
        import traceml_ai

        traceml_ai.init(mode="auto")
        yield traceml_ai.trace_step
    elif name == "profiler":
        schedule = torch.profiler.schedule(wait=10, warmup=2, active=8, repeat=1)
        ready = torch.profiler.tensorboard_trace_handler(str(folder / "traces"), worker_name=f"rank-{rank}")
        with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as profiler:

            @contextlib.contextmanager
            def step(model: nn.Module) -> Iterator[None]:
                yield
                profiler.step()

            yield step
        table = [
            {"name": row.key, "count": row.count, "self_us": row.self_cpu_time_total, "total_us": row.cpu_time_total}
            for row in profiler.key_averages()
            if row.cpu_time_total  # kernels have rows of their own, some with the name of a step
        ]
        (folder / f"operators-{rank}.json").write_text(json.dumps(table))
    else:
        yield contextlib.nullcontext
