"""The machine, software and settings of a run.

The measurement passes facts that only a rank can query (GPU names, NCCL version) as `details`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__, machine
from paceline.units import format_memory

# Prefixes of variables that affect a result. None of them contains a path.
_PREFIXES = (
    "GLOO_", "NCCL_", "OMP_", "MKL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE_", "CUDA_DEVICE_MAX_",
    "CUDA_LAUNCH_",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """The conditions of a run. Two runs are comparable if `differences` is empty. `load_average` is the load before the
    run; `stolen` is the fraction of CPU time that the hypervisor gave to other virtual machines during the run."""

    host: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]
    variables: dict[str, str]
    command_line: str
    git_commit: str | None
    load_average: float | None
    details: dict[str, Any] = field(default_factory=dict)
    stolen: float | None = None

    @property
    def machine(self) -> str:
        """A short description: processor, cores, memory and, where known, the GPU."""
        gpu = f", {self.details['gpu']}" if self.details.get("gpu") else ""
        return f"{self.cpu}, {self.cores} cores, {format_memory(self.memory_bytes)}{gpu}"

    @property
    def machine_and_torch(self) -> str:
        """The conditions that two runs must share before their times may appear in one table."""
        return f"{self.machine}, torch {self.versions.get('torch', 'unknown')}"

    def differences(self, other: Environment) -> list[str]:
        """The conditions that differ between two environments and make their numbers incomparable."""
        here, there = self._list_conditions(), other._list_conditions()
        names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
        return [f"{name}: {here.get(name, 'none')} compared with {there.get(name, 'none')}" for name in names]

    def _list_conditions(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("host", "cpu", "cores", "python")}
        for name, of in (("version", self.versions), ("variable", self.variables), ("detail", self.details)):
            found |= {f"{name} {key}": value for key, value in of.items()}
        return found


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def capture_environment() -> Environment:
    """The environment of this process. PACELINE_HOST replaces the host name in published files, and PACELINE_COMMIT
    names the commit of a source tree that was copied without its repository."""
    name = Path(sys.argv[0]).name
    command = ["paceline" if name in ("__main__.py", "") else name, *sys.argv[1:]]
    gpu = machine.gpu_name()
    packages = [next(iter(importlib.metadata.distributions(name=name)), None) for name in ("torch", "numpy")]
    return Environment(
        host=os.environ.get("PACELINE_HOST") or platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=machine.cpu_name(),
        cores=machine.count_cores(),
        memory_bytes=machine.total_memory_bytes(),
        python=platform.python_version(),
        versions={"paceline": __version__} | {package.name: package.version for package in packages if package},
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        command_line=" ".join(command),
        git_commit=os.environ.get("PACELINE_COMMIT") or _git_commit(),
        load_average=machine.find_load(),
        details={"gpu": gpu} if gpu else {},
    )
