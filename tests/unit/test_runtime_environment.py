"""A rank's place, read from the environment variables of each launcher."""

import pytest

from paceline.errors import ConfigError
from paceline.runtime.ranks.place import Place, first_host, is_launched, read_place

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place(5, 8, 1, 4, "torchrun", "node0", 29400)),
        ({**TORCHRUN, "PACELINE_LAUNCHER": "paceline"}, Place(5, 8, 1, 4, "paceline", "node0", 29400)),
        ({**SLURM, **TORCHRUN}, Place(5, 8, 1, 4, "torchrun", "node0", 29400)),
        (SLURM, Place(5, 8, 1, 4, "slurm", "gpu03", 25102)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, Place(5, 6, 1, 4, "slurm", "gpu03", 25102)),
        ({**SLURM, "MASTER_ADDR": "me", "MASTER_PORT": "99"}, Place(5, 8, 1, 4, "slurm", "me", 99)),
        (MPIRUN, Place(3, 4, 1, 2, "mpirun", None, None)),
        # Kubernetes provides no information about hosts.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "svc", "MASTER_PORT": "23456"},
            Place(1, 2, None, None, "torchrun", "svc", 23456),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1, "torchrun")),
        ({"RANK": " 0 ", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, Place(0, 2, None, None, "torchrun")),
        ({}, Place(0, 1, 0, 1, "none")),
        ({"MASTER_ADDR": "node0", "LOCAL_RANK": "3", "SLURM_JOB_ID": "7"}, Place(0, 1, 0, 1, "none")),
    ],
)
def test_read_place_of_every_launcher(variables, place):
    assert read_place(variables) == place
    assert is_launched(variables) == (place.launcher != "none")


def test_the_process_environment_is_the_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PACELINE_LAUNCHER", raising=False)
    assert is_launched()
    assert read_place() == Place(5, 8, 1, 4, "torchrun", "node0", 29400)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not.*torchrun"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not.*unset WORLD_SIZE"),
        ({"SLURM_PROCID": "0"}, "SLURM_PROCID is set but SLURM_STEP_NUM_TASKS is not"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x'"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_incomplete_or_impossible_worlds_are_refused(variables, reason):
    with pytest.raises(ConfigError, match=reason):
        read_place(variables)


@pytest.mark.parametrize(
    ("tasks", "node", "local_world_size"),
    [
        ("2", 0, 2),
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("3,2(x2)", 1, 2),
        ("4", 5, 4),  # SLURM_NTASKS_PER_NODE applies to every node
        ("many", 0, None),
    ],
)
def test_slurm_tasks_per_node(tasks, node, local_world_size):
    variables = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    assert read_place(variables).local_world_size == local_world_size


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-07,9],login", "gpu03"),
        ("gpu[9,11-12]", "gpu9"),
        ("a-b-[001-004]", "a-b-001"),
        ("n[1-2]-ib,m3", "n1-ib"),
        ("login,gpu[1-2]", "login"),
        ("rack[0-1]_blade[2-5]", "rack0_blade2"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",", "[1-2]"])
def test_a_node_list_without_a_host_is_refused(nodelist):
    with pytest.raises(ConfigError, match="host"):
        first_host(nodelist)


def test_slurm_ports_are_agreed_on_per_step_below_the_ephemeral_range():
    def port(job, step):
        return read_place({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port

    ports = [port(job, step) for job in (1, 2, 17_000, 10**9) for step in range(7)]
    assert all(15_000 <= p < 32_768 for p in ports)
    assert len(set(ports[:14])) == 14
    assert (
        port(5, 3) == read_place({**SLURM, "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0"}).master_port
    )
