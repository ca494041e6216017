"""Who this rank is, read from the variables that launchers set. Needs no torch and touches no network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank's place in the world, as its launcher set it.

    `local_rank` and `local_world_size` are None where the launcher sets nothing about hosts (Kubernetes sets
    RANK and WORLD_SIZE alone); the ranks then exchange their hosts.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...]


# In order of precedence: torchrun may itself run inside a Slurm job.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
)


def _find_launcher(variables: Mapping[str, str]) -> _Launcher | None:
    for launcher in _LAUNCHERS:
        if launcher.rank in variables:
            return launcher
        # WORLD_SIZE without RANK is reported rather than taken for a world of one.
        if launcher.name == "torchrun" and "WORLD_SIZE" in variables:
            return launcher
    return None


def is_launched(variables: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (torchrun, Slurm, mpirun) started this process as one rank of a world."""
    return _find_launcher(os.environ if variables is None else variables) is not None


def _read_int(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is None or not text.strip():
        return None
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise ConfigError(f"{name}={text!r} is not a whole number: unset it or let the launcher set it")
    return int(text)


def _tasks_on_node(text: str, node: int) -> int | None:
    """Slurm's `2(x3),1` means 2 tasks on each of three nodes, then 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if not match:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-07,9],login` is `gpu03`."""
    match = re.match(r"[^,\[]+(?:\[[^\]]+\][^,\[]*)*", nodelist.strip())
    if not match:
        raise ConfigError(f"the Slurm node list {nodelist!r} names no host: set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _slurm_port(variables: Mapping[str, str]) -> int:
    """A port that all ranks of a job step derive alike, and that two steps do not share.

    Below the range from which Linux chooses ports (32768 and up).
    """
    job = _read_int(variables, "SLURM_JOB_ID") or _read_int(variables, "SLURM_JOBID") or 0
    step = _read_int(variables, "SLURM_STEP_ID") or 0
    return 15000 + (job * 101 + step) % 17000


def read_place(variables: Mapping[str, str] | None = None) -> Place:
    """This rank's place, from torchrun's, Slurm's or mpirun's variables; without any, a world of one."""
    variables = os.environ if variables is None else variables
    launcher = _find_launcher(variables)
    if launcher is None:
        return Place(0, 1, 0, 1, "none")
    rank = _read_int(variables, launcher.rank)
    size_name = next((n for n in launcher.world_size if variables.get(n)), launcher.world_size[0])
    world_size = _read_int(variables, size_name)
    for found, missing, value in ((launcher.rank, size_name, world_size), (size_name, launcher.rank, rank)):
        if value is None:
            raise ConfigError(
                f"{found} is set and {missing} is not: start the ranks with torchrun or srun, "
                f"or unset {found} to run alone"
            )
    assert rank is not None and world_size is not None
    if world_size < 1 or rank >= world_size:
        raise ConfigError(f"{launcher.rank}={rank} and {size_name}={world_size}: ranks count from 0 to {size_name} - 1")

    local_rank = _read_int(variables, launcher.local_rank)
    local_name = next((n for n in launcher.local_world_size if variables.get(n)), None)
    local_world_size = None
    if local_name and launcher.name == "slurm":
        local_world_size = _tasks_on_node(variables[local_name], _read_int(variables, "SLURM_NODEID") or 0)
    elif local_name:
        local_world_size = _read_int(variables, local_name)
    if local_rank is not None and local_world_size is not None and local_rank >= local_world_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} and {local_name}={variables[local_name or '']}: "
            "local ranks count from 0"
        )

    master_addr, master_port = variables.get("MASTER_ADDR") or None, _read_int(variables, "MASTER_PORT")
    if launcher.name == "slurm":
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
        master_addr = master_addr or (first_host(nodes) if nodes else None)
        master_port = master_port or _slurm_port(variables)
    name = variables.get("PACELINE_LAUNCHER", launcher.name)  # our own launcher sets torchrun's variables
    if world_size == 1:
        local_rank, local_world_size = local_rank or 0, local_world_size or 1
    return Place(rank, world_size, local_rank, local_world_size, name, master_addr, master_port)
