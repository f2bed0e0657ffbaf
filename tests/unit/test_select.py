"""What arrays travel on, and why: tables of facts and settings, and the choice. The banner prints the reason."""

import dataclasses

import pytest

from allred.comm import create as created
from allred.comm.bootstrap import SingleBootstrap
from allred.comm.create import add_devices, create
from allred.comm.select import MOST_NODES, TransportFacts, memory_nodes, plan
from allred.config import Config
from allred.errors import ConfigError
from allred.gpu.streams import NO_GPUS, VisibleGpus

GPU_A, GPU_B = (VisibleGpus((name,), cupy=True) for name in ("GPU-a", "GPU-b"))
TWO, CUPY_ALONE, NO_CUPY = VisibleGpus(("GPU-a", "GPU-b"), cupy=True), VisibleGpus((), cupy=True), NO_GPUS

SHARE, ALONE = "ranks share a node", "every rank is on a node of its own"
NO_MEMORY = "no two ranks could share memory; on one node that takes /proc or a Unix socket between them"
TCP, MPI = "TCP between nodes: no InfiniBand, EFA or Slingshot", "MPI between nodes"
NO_KERNELS = "rank 1 lacks the C extension"
NOT_USED = "GPUs are not used: "


def ranks(nodes, changes=None, **everywhere):
    """Facts of ranks on these nodes, "001". changes: of single ranks. everywhere: of all."""
    facts = [TransportFacts(int(node), **everywhere) for node in nodes]
    for rank, change in (changes or {}).items():
        facts[rank] = dataclasses.replace(facts[rank], **change)
    return facts


without_kernels = {1: {"has_kernels": False}}
not_on_node_0 = {rank: {"shares_memory": False} for rank in (0, 1)}
infiniband = {1: {"fabric": "InfiniBand mlx5_0"}}


@pytest.mark.parametrize(
    ("facts", "settings", "chosen", "reason"),
    [
        # one rank
        (ranks("0"), {}, "single", "one rank"),
        (ranks("0", has_mpi=False, has_kernels=False), {}, "single", "one rank"),
        (ranks("0"), {"backend": "single"}, "single", "as requested"),
        (ranks("0"), {"backend": "mpi"}, "mpi", "as requested"),
        (ranks("0"), {"backend": "shm"}, "mpi", "one rank has no other to share memory with"),
        (ranks("0"), {"transport": "tcp"}, "single", "one rank"),
        # one node
        (ranks("00"), {}, "shm", SHARE),
        (ranks("00"), {"backend": "shm"}, "shm", "as requested"),
        (ranks("00"), {"backend": "mpi"}, "mpi", "as requested"),
        (ranks("00", infiniband), {"transport": "tcp"}, "shm", SHARE),
        (ranks("00", without_kernels), {}, "mpi", f"{NO_KERNELS}, which shared memory needs"),
        (ranks("00", without_kernels), {"backend": "mpi"}, "mpi", "as requested"),
        # several nodes
        (ranks("001"), {}, "shm+tcp", f"{SHARE}; {TCP}"),
        (ranks("0011"), {"transport": "tcp"}, "shm+tcp", f"{SHARE}; TCP between nodes, as requested"),
        (ranks("0101"), {"transport": "mpi"}, "shm+mpi", f"{SHARE}; {MPI}, as requested"),
        (ranks("012"), {"transport": "mpi"}, "mpi+mpi", f"{ALONE}; {MPI}, as requested"),
        (ranks("01"), {}, "single+tcp", f"{ALONE}; {TCP}"),
        (ranks("001", infiniband), {}, "shm+mpi", f"{SHARE}; {MPI}: InfiniBand mlx5_0"),
        (ranks("01", infiniband), {}, "mpi+mpi", f"{ALONE}; {MPI}: InfiniBand mlx5_0"),
        (ranks("001", infiniband), {"transport": "tcp"}, "shm+tcp", f"{SHARE}; TCP between nodes, as requested"),
        (ranks("001"), {"backend": "shm"}, "shm+tcp", f"as requested; {TCP}"),
        (ranks("001"), {"backend": "shm", "transport": "mpi"}, "shm+mpi", f"as requested; {MPI}, as requested"),
        (ranks("01"), {"backend": "shm", "transport": "mpi"}, "mpi+mpi", f"{ALONE}; {MPI}, as requested"),
        (ranks("001"), {"backend": "mpi"}, "mpi+mpi", "as requested"),
        (ranks("01"), {"backend": "mpi", "transport": "tcp"}, "mpi+mpi", "as requested"),
        (ranks("001", without_kernels), {"backend": "mpi", "transport": "tcp"}, "mpi+mpi", "as requested"),
        (ranks("001", without_kernels), {}, "mpi+mpi", f"{NO_KERNELS}, which shared memory needs; {MPI}: {NO_KERNELS}"),
        (ranks("01", without_kernels), {}, "mpi+mpi", f"{ALONE}; {MPI}: {NO_KERNELS}"),
        # memory that cannot be shared
        (ranks("00", shares_memory=False), {}, "mpi", NO_MEMORY),
        (ranks("00", shares_memory=False), {"backend": "shm"}, "mpi", NO_MEMORY),
        (ranks("00", shares_memory=False), {"transport": "tcp"}, "mpi", NO_MEMORY),
        (ranks("001", shares_memory=False), {}, "single+tcp", f"{NO_MEMORY}; {TCP}"),
        (ranks("001", shares_memory=False), {"transport": "mpi"}, "mpi+mpi", f"{NO_MEMORY}; {MPI}, as requested"),
        (ranks("0011", not_on_node_0), {"transport": "mpi"}, "shm+mpi", f"{SHARE}; {MPI}, as requested"),
        # NCCL is added to a host backend, and does not change it
        (ranks("00", gpus=TWO), {"backend": "nccl"}, "shm", f"{SHARE}; device arrays by NCCL, host arrays by shm"),
        (ranks("00", gpus=TWO), {}, "shm", f"{SHARE}; device arrays by NCCL, host arrays by shm"),
    ],
)
def test_host_arrays(facts, settings, chosen, reason):
    choice = plan(facts, Config(**settings))
    assert ("+".join(filter(None, (choice.within, choice.between))), "; ".join(choice.reasons)) == (chosen, reason)
    names = {"shm+tcp": "tcp", "single+tcp": "tcp", "shm+mpi": "shm_mpi", "mpi+mpi": "mpi"}
    assert choice.backend == names.get(chosen, chosen)


def test_more_nodes_than_transport_tcp_has():
    facts = [TransportFacts(node, has_mpi=False) for node in range(MOST_NODES + 1)]
    assert plan(facts[1:], Config()).between == "tcp"
    text = f"{MOST_NODES + 1} nodes, but transport tcp is for at most {MOST_NODES}"
    with pytest.raises(ConfigError, match=f"needs MPI: MPI between nodes: {text}"):
        plan(facts, Config())
    with pytest.raises(ConfigError, match=f"ALLRED_TRANSPORT=tcp: there are {text}"):
        plan(facts, Config(transport="tcp"))


@pytest.mark.parametrize(
    ("facts", "settings", "device", "reason"),
    [
        (ranks("00", gpus=TWO), {}, "nccl", "by NCCL, host arrays by shm"),
        (ranks("00", {0: {"gpus": GPU_A}, 1: {"gpus": GPU_B}}), {}, "nccl", "by NCCL, host arrays by shm"),
        (ranks("00", gpus=TWO), {"backend": "nccl"}, "nccl", "by NCCL, host arrays by shm"),
        (ranks("01", gpus=GPU_A), {}, "nccl", "by NCCL, host arrays by tcp"),
        (ranks("01", gpus=GPU_A), {"transport": "mpi"}, "nccl", "by NCCL, host arrays by mpi"),
        (
            ranks("001", gpus=TWO),
            {"nccl_cross": "mpi", "transport": "mpi"},
            "staged",
            "through the host, as requested by ALLRED_NCCL_CROSS, host arrays by shm_mpi",
        ),
        (ranks("00", gpus=TWO), {"nccl_cross": "mpi"}, "nccl", "by NCCL, host arrays by shm"),
        (ranks("000", gpus=TWO), {"gpu_oversubscribe": True}, "nccl", "by NCCL, host arrays by shm"),
        (ranks("00", gpus=TWO, shares_memory=False), {}, "nccl", "by NCCL, host arrays by mpi"),
    ],
)
def test_arrays_on_gpus(facts, settings, device, reason):
    choice = plan(facts, Config(**settings))
    assert (choice.device, choice.reasons[-1]) == (device, f"device arrays {reason}")


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (ranks("00", {0: {"gpus": TWO}}), "cupy is not installed on rank 1; pip install cupy"),
        (ranks("01", {0: {"gpus": TWO}, 1: {"gpus": CUPY_ALONE}}), "rank 1 sees no GPU; check CUDA_VISIBLE_DEVICES"),
        (
            ranks("000", gpus=TWO),
            "3 ranks (rank 0 and others) share a node with 2 GPUs; start one rank per GPU, or set ALLRED_GPU_OVERS",
        ),
        (ranks("100", {0: {"gpus": GPU_A}}, gpus=GPU_B), "2 ranks (rank 1 and others) share a node with 1 GPU; start"),
        (
            ranks("00", {1: {"gpu_problem": "ImportError: no NCCL"}}, gpus=TWO),
            "cupy or its NCCL does not work on rank 1 (ImportError: no NCCL); run python -m allred doctor",
        ),
    ],
)
def test_gpus_that_cannot_be_used(facts, problem):
    """Backend auto continues without GPUs and prints why; backend nccl raises."""
    choice = plan(facts, Config())
    assert choice.device == ""
    assert choice.reasons[-1].startswith(NOT_USED + problem)
    with pytest.raises(ConfigError) as raised:
        plan(facts, Config(backend="nccl"))
    assert str(raised.value).startswith(f"backend 'nccl': {problem}")


@pytest.mark.parametrize(
    ("gpus", "backend"), [(NO_CUPY, "auto"), (CUPY_ALONE, "auto"), (TWO, "mpi"), (TWO, "shm"), (NO_CUPY, "shm")]
)
def test_without_gpus_there_is_no_message(gpus, backend):
    choice = plan(ranks("00", gpus=gpus), Config(backend=backend))
    assert (choice.device, len(choice.reasons)) == ("", 1)


@pytest.mark.parametrize(
    ("facts", "settings", "error"),
    [
        (ranks("00"), {"backend": "single"}, "backend 'single' is for one rank, but there are 2; use auto, shm or mpi"),
        *(
            (
                ranks("0", has_mpi=False),
                {"backend": name},
                f"backend '{name}' needs an MPI, but none could be loaded; pip install mpich",
            )
            for name in ("mpi", "shm")
        ),
        (
            ranks("00", without_kernels),
            {"backend": "shm"},
            "backend 'shm' needs the C extension, but rank 1 does not have it (python -m allred.native shows the "
            "reason); or use backend mpi",
        ),
        (
            ranks("001", without_kernels),
            {"transport": "tcp"},
            "ALLRED_TRANSPORT=tcp needs the C extension, but rank 1 lacks the C extension (python -m allred.native "
            "shows the reason); or use ALLRED_TRANSPORT=mpi",
        ),
    ],
)
def test_settings_that_cannot_be_used(facts, settings, error):
    with pytest.raises(ConfigError) as raised:
        plan(facts, Config(**settings))
    assert str(raised.value) == error


@pytest.mark.parametrize(
    ("members", "transport", "chosen"),
    [
        ([0, 1], "tcp", ("shm", "", "nccl")),
        ([0, 2], "tcp", ("single", "tcp", "staged")),
        ([2], "tcp", ("single", "", "nccl")),
        ([0, 1, 2], "mpi", ("shm", "mpi", "staged")),
        ([1, 2], "mpi", ("mpi", "mpi", "staged")),
    ],
)
def test_a_process_set_is_planned_from_the_facts_of_its_members(members, transport, chosen):
    """The transport is that of all workers, not auto."""
    everyone = ranks("001", infiniband, gpus=TWO)
    choice = plan([everyone[rank] for rank in members], Config(transport=transport, nccl_cross="mpi"))
    assert (choice.within, choice.between, choice.device) == chosen


def test_ranks_that_cannot_share_memory_are_nodes_of_their_own():
    assert memory_nodes(ranks("0011", not_on_node_0)) == [-1, -2, 1, 1]


def no_driver(*_):
    raise OSError("no libnccl.so")


def test_an_attempt_on_a_gpu_that_fails_is_a_fact(monkeypatch):
    monkeypatch.setattr(created, "Device", no_driver)
    host, facts = create(SingleBootstrap(), ranks("0", gpus=GPU_A), Config())
    facts = add_devices(host, facts, Config())
    assert [each.gpu_problem for each in facts] == ["OSError: no libnccl.so"]
    assert host.devices is None
    reason = f"one rank; {NOT_USED}cupy or its NCCL does not work on rank 0 (OSError: no libnccl.so); run python"
    assert "; ".join(plan(facts, Config()).reasons).startswith(reason)
    with pytest.raises(ConfigError, match="backend 'nccl': cupy or its NCCL does not work on rank 0"):
        add_devices(host, ranks("0", gpus=GPU_A), Config(backend="nccl"))
