import os
import re

import pytest

from allred import numbering
from allred.cluster import mpi, topology
from allred.errors import ConfigError, NotInitializedError


def columns(nodes, *names):
    return [tuple(getattr(numbering.number(nodes, rank), name) for name in names) for rank in range(len(nodes))]


def test_one_node():
    assert columns([0, 0, 0], "local_rank", "local_size", "cross_rank", "cross_size", "nodes") == [
        (0, 3, 0, 1, 1),
        (1, 3, 0, 1, 1),
        (2, 3, 0, 1, 1),
    ]


def test_ranks_dealt_out_over_two_nodes():
    assert columns([0, 1, 0, 1], "local_rank", "local_size", "cross_rank", "cross_size") == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_uneven_nodes():
    assert columns([5, 5, 5, 9], "local_rank", "local_size", "cross_rank", "cross_size", "nodes") == [
        (0, 3, 0, 2, 2),
        (1, 3, 0, 1, 2),
        (2, 3, 0, 1, 2),
        (0, 1, 1, 2, 2),
    ]


@pytest.mark.parametrize(
    "name", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "world_rank", "world_size"]
)
def test_numbers_before_init_are_an_error_with_a_remedy(name):
    with pytest.raises(NotInitializedError, match=re.escape("call allred.init() first")):
        getattr(topology, name)()


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_world_of_one_under_a_launcher_of_four_is_an_error(variable):
    with pytest.raises(ConfigError, match=rf"started 4 processes \({variable}=4\), but mpi4py loads MPICH 5: each"):
        mpi.check_world(1, "MPICH 5", {variable: "4"})
    mpi.check_world(4, "MPICH 5", {variable: "4"})
    mpi.check_world(1, "MPICH 5", {variable: "1"})
    mpi.check_world(1, "MPICH 5", {variable: "several"})


def test_the_launcher_nearest_to_the_rank_counts():
    mpi.check_world(1, "Open MPI 5", {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"})
    mpi.check_world(1, "MPICH 5", {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"})


def test_init_under_torchrun_is_an_error():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match=r'torchrun started 2 processes.*init_process_group\("allred"\) instead'):
        mpi.check_torchrun(torchrun)
    mpi.check_torchrun(torchrun | {"WORLD_SIZE": "1"})
    mpi.check_torchrun(torchrun | {"PMI_SIZE": "2"})  # mpirun joins them
    mpi.check_torchrun({"WORLD_SIZE": "2"})


SEVERAL_HOSTS = {"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "3", "OMPI_MCA_btl_tcp_flags": "1"}


def test_mpi_settings_of_several_hosts_respect_the_environment_and_files(tmp_path):
    hosts = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "HOME": str(tmp_path)}
    algorithm, flags = SEVERAL_HOSTS
    assert mpi.settings(hosts) == SEVERAL_HOSTS
    assert mpi.settings(hosts | {flags: "7"}) == {algorithm: "3"}
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi/mca-params.conf").write_text("# btl_tcp_flags = 1\n coll_libnbc_iallreduce_algorithm = 1\n")
    assert mpi.settings(hosts) == {flags: "1"}


def test_mpi_settings_are_made_only_where_they_cannot_hurt():
    one_node = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert mpi.settings({}) == {"OMPI_MCA_btl": "self"}
    assert mpi.settings(one_node) == {"OMPI_MCA_btl": "^ofi"}
    assert mpi.settings(one_node | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}) == SEVERAL_HOSTS
    assert mpi.settings({"PMIX_RANK": "0"}) == {}
    assert mpi.settings(one_node | {"OMPI_MCA_btl": "tcp,self"}) == {}
    assert "OMPI_MCA_btl" not in os.environ


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:\t5.0.2\nMPICH Release date: ...", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI root@x Distribution, ident: 5.0.11\0", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.19 for Linux* OS\n", "Intel(R) MPI Library 2021.19 for Linux* OS"),
    ],
)
def test_library_names(text, name):
    assert mpi.library_name(text) == name


def test_a_fabric_is_an_active_device(tmp_path):
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert topology.fabric(tmp_path) == ""
    (port / "state").write_text("4: ACTIVE\n")
    assert topology.fabric(tmp_path) == "InfiniBand mlx5_0"
    (port / "state").unlink()
    (tmp_path / "cxi/cxi0").mkdir(parents=True)
    assert topology.fabric(tmp_path) == "Slingshot cxi0"
