"""Which GPU a rank has, and whether GPUs serve at all: pure functions of what the ranks see."""

import numpy as np
import pytest

from allred.comm.create import add_devices, create, select_backend, select_devices
from allred.config import Config
from allred.errors import ConfigError
from allred.gpu import places, values
from allred.gpu.places import NOTHING, Place, Seen, bind

TWO = Seen(("GPU-a", "GPU-b"), cupy=True)


@pytest.mark.parametrize(
    ("seen", "nodes", "places"),
    [
        ([TWO, TWO], [0, 0], [Place(0), Place(1)]),  # the local rank's
        ([TWO, TWO, TWO], [0, 1, 0], [Place(0), Place(0), Place(1)]),
        ([Seen(("GPU-a",), True), Seen(("GPU-b",), True)], [0, 0], [Place(0), Place(0)]),  # srun --gpus-per-task=1
        ([TWO, Seen(("GPU-a", "GPU-b", "GPU-c"), True), TWO], [0, 0, 0], [Place(0, 2), Place(1), Place(0, 2)]),
        ([TWO] * 4, [0] * 4, [Place(0, 2), Place(1, 2), Place(0, 2), Place(1, 2)]),
    ],
)
def test_each_rank_takes_a_gpu_that_no_other_has(seen, nodes, places):
    assert [bind(seen, nodes, rank) for rank in range(len(seen))] == places


@pytest.mark.parametrize(
    ("seen", "nodes", "words"),
    [
        ([TWO, NOTHING], [0, 0], "rank 1 has no cupy, through which GPUs are used; pip install cupy"),
        ([TWO, Seen((), True)], [0, 1], "rank 1 sees no GPU; look at CUDA_VISIBLE_DEVICES"),
        ([TWO] * 3, [0] * 3, "3 ranks .* share a node on which they see 2 GPUs; start one rank a GPU.*OVERSUBSCRIBE=1"),
    ],
)
def test_what_stands_in_the_way(seen, nodes, words):
    """auto goes on without GPUs and says so; nccl is an error."""
    wanted, said = select_devices(Config(), seen, nodes)
    assert not wanted
    assert said.startswith("GPUs are not used: ")
    with pytest.raises(ConfigError, match=f"backend 'nccl': {words}"):
        select_devices(Config(backend="nccl"), seen, nodes)


def test_gpus_are_shared_if_that_is_asked_for():
    assert select_devices(Config(gpu_oversubscribe=True), [TWO] * 3, [0] * 3) == (True, "")


@pytest.mark.parametrize(("backend", "seen"), [("auto", NOTHING), ("auto", Seen((), True)), ("mpi", TWO)])
def test_without_gpus_nothing_is_said(backend, seen):
    assert select_devices(Config(backend=backend), [seen] * 2, [0, 0]) == (False, "")


def test_nccl_stands_on_the_backend_that_auto_takes():
    assert select_backend("nccl", [0, 0], True, [True, True])[0] == "shm"
    host = create("single", None, 1.0, [0])
    assert add_devices(host, Config(), [NOTHING], [0]) == ""
    assert not host.takes_device_arrays


@pytest.mark.parametrize(
    ("place", "version", "expected"),
    [
        (Place(0), 22000, {}),
        (Place(0, sharing=2), 23000, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (Place(0, sharing=2), 22907, {"NCCL_HOSTID": "node7-3"}),
    ],
)
def test_what_nccl_needs_for_several_ranks_on_one_gpu(place, version, expected):
    assert places.nccl_variables(place, 3, version, "node7") == expected


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(places.ctypes, "CDLL", no_library)
    assert places._identities() == ()


class Foreign:
    def __init__(self, device_type):
        self._device_type = device_type

    def __dlpack_device__(self):
        return self._device_type, 0


class Cuda:
    __cuda_array_interface__ = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("value", "on_gpu"),
    [
        *((value, False) for value in (np.ones(2), np.float32(1), 1.0, [1.0], None, "x", Foreign(1))),
        *((value, True) for value in (Cuda(), Foreign(2), Foreign(13))),
    ],
)
def test_what_counts_as_a_device_array(value, on_gpu):
    assert values.is_device(value) is on_gpu
