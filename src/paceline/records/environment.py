"""Where and how a run was made: host, cores, versions, threads, command line, commit.

What only a rank can know (GPU names, NCCL's version) is handed in by whoever measured.
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

__all__ = ["Environment", "capture_environment"]

_PACKAGES = ("torch", "numpy")
# What changes a result, and no paths of the machine.
_PREFIXES = (
    "GLOO_", "NCCL_", "OMP_", "MKL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE_", "CUDA_DEVICE_MAX_",
    "CUDA_LAUNCH_",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """The conditions of a run. Two runs are comparable when `differences` finds none."""

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

    def differences(self, other: Environment) -> list[str]:
        """What makes numbers from the two environments incomparable, in words; empty when nothing does."""
        names = ("host", "cpu", "cores", "python", "versions", "variables", "details")
        return [
            f"{name}: {getattr(self, name)} against {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def _git_commit() -> str | None:
    source = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def capture_environment() -> Environment:
    """The environment of this process.

    PACELINE_HOST replaces the host's name in what gets published, and PACELINE_COMMIT names the commit where the
    source was copied without its repository.
    """
    name = Path(sys.argv[0]).name
    command = ["paceline" if name in ("__main__.py", "") else name, *sys.argv[1:]]
    return Environment(
        host=os.environ.get("PACELINE_HOST") or platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=machine.cpu_name(),
        cores=machine.count_cores(),
        memory_bytes=machine.total_memory_bytes(),
        python=platform.python_version(),
        versions={"paceline": __version__} | {name: found for name in _PACKAGES if (found := _version(name))},
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        command_line=" ".join(command),
        git_commit=os.environ.get("PACELINE_COMMIT") or _git_commit(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
