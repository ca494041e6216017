"""The job of `paceline faults` on the ranks: a small model that trains, saves, and injects a fault into itself.

`paceline train` calls `build` for the model; under torchrun this file is the program (`main`), with Paceline's wrapper
and monitor or torch's own. The environment variable PACELINE_FAULT describes the fault as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline import machine
from paceline.runtime.faults.pulse import slow
from paceline.runtime.ranks.world import separate_hosts
from paceline.studies.fault_places import BATCH_SIZE, OUT, VARIABLE, Asked
from paceline.torch_internals import gpu_sleep

NUM_INPUTS = 784
_LOAD_S = 10.0


def read_asked() -> Asked:
    return Asked(**json.loads(os.environ[VARIABLE]))


class EndOfDataError(Exception):
    """Raised when this rank has no more batches."""


def inject(fault: str) -> None:
    """Inject a fault into this process; returns after a pause."""
    match fault:
        case "kill" | "stop" | "term" | "segv" | "abrt":
            os.kill(os.getpid(), signal.Signals[f"SIG{fault.upper()}"])
        case "exit":
            os._exit(3)
        case "gil":  # blocks forever without releasing the GIL; signal handlers cannot run
            mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        case "loop":
            while True:
                pass
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "endless-kernel":
            gpu_sleep(1 << 62)  # returns immediately, but runs longer than any timeout
        case "exception":
            raise ValueError("a bad sample")
        case "extra-collective":
            dist.barrier()
        case "early-end":
            raise EndOfDataError
        case "stall":
            time.sleep(5.0)
        case "evaluate":
            until_s = time.monotonic() + 5.0
            while time.monotonic() < until_s:
                torch.ones(1000).sum()
        case "straggle" | "link-down" | "slow-link" | "host-lost" | "store-lost":
            time.sleep(1.0)  # the trial cuts the network or a host during this step


# Disturbances of a healthy rank, and the part of a step in which each may occur.
NOISES = {
    "stall": "between",
    "evaluate": "between",
    "marked evaluation": "between",
    "straggle": "forward",
    "compile": "forward",
    "loaded machine": "between",
}


class Noise:
    """Injects disturbances, but no faults, into a healthy rank, in random order at random times. Counts them in the
    file at `path`."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._draw, self._counts = path, random.Random(seed), Counter[str]()
        self._due_s, self._next = 0.0, "compile"  # programs compile in their first step

    def reach(self, place: str) -> None:
        if time.monotonic() < self._due_s or NOISES[self._next] != place:
            return
        self._counts[self._next] += 1
        self._path.write_text(json.dumps(self._counts))
        match self._next:
            case "marked evaluation":
                with slow("evaluate"):
                    inject("evaluate")
            case "compile":
                _compile(64 + self._counts["compile"])
            case "loaded machine":
                _load_machine(_LOAD_S)
            case pause:
                inject(pause)
        self._due_s = time.monotonic() + self._draw.uniform(1.0, 5.0)
        self._next = self._draw.choice([*NOISES])


def _compile(size: int) -> None:
    """Compile a function for an uncached size."""
    torch.compiler.reset()
    backend = "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "eager"
    torch.compile(lambda inputs: torch.softmax(inputs.sin() * 2, 1).sum(), backend=backend)(torch.ones(size, 32))


def _load_machine(seconds: float) -> None:
    """Keep all cores busy with other processes for this time, or until this process exits."""
    goes_on = f"time.monotonic() < end and os.getppid() == {os.getpid()}"
    text = f"import os, time; end = time.monotonic() + {seconds}\nwhile {goes_on}: sum(range(9999))"
    for _ in range(os.cpu_count() or 1):
        subprocess.Popen([sys.executable, "-S", "-c", text])


class Net(nn.Module):
    """Three layers that inject the fault at its place and step."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        widths = (NUM_INPUTS, asked.width, asked.width, 10)
        layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        rank = int(os.environ.get("RANK", "0"))
        self._asked, self._is_mine = asked, rank == asked.rank and bool(asked.fault)
        self._noise = Noise(Path(asked.folder) / f"noise-{rank}", rank) if asked.fault == "noise" else None
        self.num_steps, self._factor = 0, 1.0
        register_optimizer_step_pre_hook(lambda *_: self._reach("optimizer"))
        register_optimizer_step_post_hook(self._count)

    def _reach(self, place: str) -> None:
        asked = self._asked
        if self._noise is not None:
            self._note(self._is_mine)
            self._is_mine = False
            self._noise.reach(place)
            return
        if (place, self.num_steps + 1) != (asked.place, asked.step):
            return
        if asked.fault == "other-shape":  # this fault involves every rank
            self._note(self._is_mine)
            dist.all_reduce(torch.ones(1001 if self._is_mine else 1000, device=next(self.parameters()).device))
        elif self._is_mine and asked.fault == "kill-in-save":
            self._is_mine = False
            threading.Thread(target=self._kill_in_save, daemon=True).start()
        elif self._is_mine:
            self._is_mine = asked.fault == "straggle"
            self._note()
            self._inject(asked.fault)

    def _note(self, is_mine: bool = True) -> None:
        """Record when the fault was injected, in a file that the trial waits for. The trial itself injects some of the
        faults."""
        path = Path(self._asked.folder) / "injected"
        if is_mine and not path.exists():
            path.write_text(f"{time.monotonic()} {self.num_steps + 1}")

    def _inject(self, fault: str) -> None:
        match fault:
            case "nan":
                self._factor = math.nan
            case "flipped-weight":
                next(self.parameters()).detach().view(torch.int32)[0, 0] ^= 1 << 20
            case "skipped-step":
                for param in self.parameters():
                    param.grad = None
            case "disk-full":
                with contextlib.suppress(OSError), Path(self._asked.folder, OUT, "filler").open("wb", 0) as file:
                    while True:
                        file.write(bytes(1 << 20))
            case "oom":  # in a control group with a memory limit: the kernel must not kill other processes
                Path(self._asked.group, "cgroup.procs").write_text(str(os.getpid()))
                taken = [torch.ones(1 << 22) for _ in range(64)]  # a gigabyte
                raise RuntimeError(f"{len(taken)} blocks were allocated without running out of memory")
            case _:
                inject(fault)

    def _kill_in_save(self) -> None:
        folder = Path(self._asked.folder)
        while not any(folder.glob(f"{OUT}/*/checkpoints/.saving-*/*")) and not any(folder.glob(f"{OUT}/*.new")):
            time.sleep(0.0005)
        self._note()
        inject("kill")

    def _count(self, *_: Any) -> None:
        self.num_steps += 1
        self._reach("between")  # after this step, before the next

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[:2](inputs.flatten(1)[:, :NUM_INPUTS])
        if self.training:
            if self._asked.pause_s and self.num_steps + 2 == self._asked.step:
                with slow("waiting for a spare"):
                    time.sleep(self._asked.pause_s)
            self._reach("forward")
            hidden.register_hook(lambda _: self._reach("backward"))
        output: torch.Tensor = self.layers[2:](hidden) * self._factor
        self._factor = 1.0
        return output


def build() -> Net:
    """Build the model for `paceline train --model FILE:build`."""
    return Net(read_asked())


def main() -> None:
    """Act as a user's script: train, save with torch.save, and resume from the last save."""
    asked = read_asked()
    torch.manual_seed(1)
    if asked.wrapper == "torch":
        device = torch.device(asked.device)
        if asked.backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            if machine.must_share_gpus(torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])):
                separate_hosts()
        dist.init_process_group(asked.backend)
        net = Net(asked).to(device)
        model: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        from paceline.parallel import DDP
        from paceline.runtime.faults.monitored import monitor
        from paceline.runtime.ranks.world import init

        device = init(asked.backend, asked.device, announce=None).device
        monitor()  # before the model: the monitor's hook must come first
        net = Net(asked).to(device)
        model = DDP(net)
    optimizer, path, first = torch.optim.SGD(net.parameters(), 0.01), Path(asked.folder) / OUT / "saved.pt", 0
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        saved = torch.load(path, map_location=device)
        net.load_state_dict(saved["model"])
        first = net.num_steps = saved["step"]
    for step in range(first, asked.steps):
        inputs = torch.randn(BATCH_SIZE, NUM_INPUTS, device=device)
        model(inputs).square().mean().backward()
        try:
            optimizer.step()
        except EndOfDataError:
            break
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % asked.save_every == 0:
            torch.save({"model": net.state_dict(), "step": step + 1}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
