"""Worlds of several NCCL ranks on one GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline import machine
from paceline.runtime.ranks.launch import RankPool
from tests.conftest import run_as_if_fresh
from tests.gpu.gpu_ranks import run_on_device

MAX_RANKS = 8
# With PACELINE_TEST_NCCL=gloo the same functions run in gloo ranks on the CPU, to debug them without a GPU.
BACKEND, DEVICE = ("gloo", "cpu") if os.environ.get("PACELINE_TEST_NCCL") == "gloo" else ("nccl", "cuda")
_CONTROL = "nvidia-cuda-mps-control"


class SharedGpu:
    """The variables of ranks that share the first visible GPU, through CUDA MPS if it is installed. Without MPS
    processes take turns on the GPU, and a small all-reduce takes 100 times as long."""

    def __init__(self) -> None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        self.variables = {machine.SHARE_GPUS: "1", "CUDA_VISIBLE_DEVICES": first}
        # cuBLAS is deterministic on several streams only with a fixed workspace.
        self.variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        is_running = "CUDA_MPS_PIPE_DIRECTORY" in os.environ  # started by the person or job that runs the tests
        if DEVICE == "cpu" or is_running or shutil.which(_CONTROL) is None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-mps-")
        for kind in ("PIPE", "LOG"):
            path = Path(self._folder.name, kind.lower())
            path.mkdir()
            self.variables[f"CUDA_MPS_{kind}_DIRECTORY"] = str(path)
        done = self._control("-d", stdin=subprocess.DEVNULL)
        if done.returncode:
            warnings.warn(f"without MPS, which does not start: {done.stdout}", stacklevel=2)
            self._forget()

    def stop(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a client is stuck in a kernel
                self._control(input="quit\n")
            self._forget()

    def _control(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        # The daemon serves all GPUs: it and its clients would both count from the first visible one.
        variables = {name: v for name, v in (os.environ | self.variables).items() if name != "CUDA_VISIBLE_DEVICES"}
        # Into a file, because the daemon would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [_CONTROL, *arguments], env=variables, stdout=output, stderr=output, text=True,
                timeout=20, **options,
            )  # fmt: skip
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read(), "")

    def _forget(self) -> None:
        assert self._folder is not None
        with contextlib.suppress(OSError):  # the daemon may still write its log
            self._folder.cleanup()
        self._folder = None
        for kind in ("PIPE", "LOG"):
            del self.variables[f"CUDA_MPS_{kind}_DIRECTORY"]


@pytest.fixture(scope="session")
def shared_gpu() -> Iterator[SharedGpu]:
    if DEVICE == "cuda" and not (machine.count_gpus() and dist.is_nccl_available()):
        pytest.skip("needs a GPU and a build of torch with NCCL")
    gpu = SharedGpu()
    gpu.start()
    yield gpu
    gpu.stop()


@pytest.fixture(scope="session")
def nccl_pool(shared_gpu: SharedGpu) -> Iterator[RankPool]:
    with RankPool(MAX_RANKS) as pool:
        yield pool


@pytest.fixture
def on_nccl(nccl_pool: RankPool, shared_gpu: SharedGpu) -> Callable[..., list[Any]]:
    """`on_nccl(num_ranks, fn, *args)`: like `on_ranks`, but in NCCL ranks that share a GPU. The world that the function
    opens, the models it wraps and the batches that `tests.dist` draws are on the GPU."""

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in shared_gpu.variables.items():  # ranks read the environment when they start
                patch.setenv(name, value)
            job = (run_on_device, BACKEND, DEVICE, fn, *args)
            try:
                return nccl_pool.run(run_as_if_fresh, job, num_ranks=num_ranks, timeout_s=timeout_s)
            except BaseException:
                # The ranks were killed, perhaps in the middle of a kernel, which leaves MPS in an undefined state.
                shared_gpu.stop()
                shared_gpu.start()
                raise

    return run
