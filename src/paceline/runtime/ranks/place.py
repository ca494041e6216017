"""This rank's place in the world, from the variables that launchers set. Needs neither torch nor the network."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank's place as set by its launcher. Fields that are None are derived from the hosts that ranks exchange."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None


# For each launcher, the variables for rank, world size, local rank and local world size. If several are listed for one
# value, the first one that is set counts.
_Launcher = tuple[str, str, tuple[str, ...], str, tuple[str, ...]]
# In order of precedence: torchrun may itself run inside a Slurm job.
_LAUNCHERS: tuple[_Launcher, ...] = (
    ("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    (
        "slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    (
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
)  # fmt: skip


def _find_launcher(variables: Mapping[str, str]) -> _Launcher | None:
    if "WORLD_SIZE" in variables:  # without RANK this is reported as an error, not treated as a world of one
        return _LAUNCHERS[0]
    return next((launcher for launcher in _LAUNCHERS if launcher[1] in variables), None)


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
    """Parse Slurm's `2(x3),1`: 2 tasks on each of three nodes, then 1."""
    counts: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)):
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-07,9],login` is `gpu03`."""
    match = re.match(r"[^,\[]+(?:\[[^\]]+\][^,\[]*)*", nodelist.strip())
    if not match:
        raise ConfigError(f"the Slurm node list {nodelist!r} has no host: set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def read_place(variables: Mapping[str, str] | None = None) -> Place:
    """This rank's place, from torchrun's, Slurm's or mpirun's variables; without any, a world of one."""
    variables = os.environ if variables is None else variables
    launcher = _find_launcher(variables)
    if launcher is None:
        return Place(0, 1, 0, 1, "none")
    name, rank_name, size_names, local_rank_name, local_size_names = launcher
    rank = _read_int(variables, rank_name)
    size_name = next((n for n in size_names if variables.get(n)), size_names[0])
    world_size = _read_int(variables, size_name)
    if rank is None or world_size is None:
        found, missing = (rank_name, size_name) if world_size is None else (size_name, rank_name)
        hint = f"start with torchrun or srun, or unset {found} to run alone"
        raise ConfigError(f"{found} is set but {missing} is not: {hint}")
    if world_size < 1 or rank >= world_size:
        raise ConfigError(f"{rank_name}={rank} and {size_name}={world_size}: ranks are numbered 0 to {size_name} - 1")

    local_rank = _read_int(variables, local_rank_name)
    local_name = next((n for n in local_size_names if variables.get(n)), "")
    if name == "slurm" and local_name:
        local_world_size = _tasks_on_node(variables[local_name], _read_int(variables, "SLURM_NODEID") or 0)
    else:
        local_world_size = _read_int(variables, local_name)
    if local_rank is not None and local_world_size is not None and local_rank >= local_world_size:
        size = f"{local_name}={variables[local_name]}"
        raise ConfigError(f"{local_rank_name}={local_rank} and {size}: local ranks are numbered from 0")

    master_addr, master_port = variables.get("MASTER_ADDR") or None, _read_int(variables, "MASTER_PORT")
    if name == "slurm":
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
        master_addr = master_addr or (first_host(nodes) if nodes else None)
        # The same for all ranks of a job step and different for two steps; Linux picks ephemeral ports from 32768 up.
        job = _read_int(variables, "SLURM_JOB_ID") or _read_int(variables, "SLURM_JOBID") or 0
        step = _read_int(variables, "SLURM_STEP_ID") or 0
        master_port = master_port or 15000 + (job * 101 + step) % 17000
    name = variables.get("PACELINE_LAUNCHER", name)  # our own launcher sets torchrun's variables
    if world_size == 1:
        local_rank, local_world_size = local_rank or 0, local_world_size or 1
    return Place(rank, world_size, local_rank, local_world_size, name, master_addr, master_port)
