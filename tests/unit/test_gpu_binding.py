"""Binding of ranks to GPUs and the use of GPUs: pure functions of the GPUs that ranks see."""

import ctypes

import numpy as np
import pytest

from allred.gpu import device_arrays, streams
from allred.gpu.streams import GpuBinding, VisibleGpus, bind

TWO = VisibleGpus(("GPU-a", "GPU-b"), cupy=True)
THREE = VisibleGpus(("GPU-a", "GPU-b", "GPU-c"), cupy=True)
ONLY_A, ONLY_B = VisibleGpus(("GPU-a",), cupy=True), VisibleGpus(("GPU-b",), cupy=True)


@pytest.mark.parametrize(
    ("seen", "nodes", "bindings"),
    [
        ([TWO, TWO], [0, 0], [GpuBinding(0), GpuBinding(1)]),  # local_rank
        ([TWO, TWO, TWO], [0, 1, 0], [GpuBinding(0), GpuBinding(0), GpuBinding(1)]),
        ([ONLY_A, ONLY_B], [0, 0], [GpuBinding(0), GpuBinding(0)]),  # srun --gpus-per-task=1
        ([TWO, THREE, TWO], [0, 0, 0], [GpuBinding(0, 2), GpuBinding(1), GpuBinding(0, 2)]),
        ([TWO] * 4, [0] * 4, [GpuBinding(0, 2), GpuBinding(1, 2), GpuBinding(0, 2), GpuBinding(1, 2)]),
    ],
)
def test_each_rank_is_bound_to_a_gpu_of_its_own(seen, nodes, bindings):
    assert [bind(seen, nodes, rank) for rank in range(len(seen))] == bindings


@pytest.mark.parametrize(
    ("bound", "version", "expected"),
    [
        (GpuBinding(0), 22000, {}),
        (GpuBinding(0, sharing=2), 23000, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (GpuBinding(0, sharing=2), 22907, {"NCCL_HOSTID": "node7-3"}),
    ],
)
def test_nccl_variables_for_several_ranks_on_one_gpu(bound, version, expected):
    assert streams.nccl_variables(bound, 3, version, "node7") == expected


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(streams.ctypes, "CDLL", no_library)
    assert streams._uuids() == ()


class Driver:
    """libcuda, on a GPU with two MIG instances; without `v2`, an old one."""

    def __init__(self, v2):
        self.cuInit = lambda flags: 0
        self.cuDeviceGetUuid = lambda uuid, index: ctypes.memset(uuid, 1, len(uuid)) and 0
        if v2:
            self.cuDeviceGetUuid_v2 = lambda uuid, index: ctypes.memset(uuid, 16 + index.value, len(uuid)) and 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 2
        return 0


@pytest.mark.parametrize("v2", [True, False])
def test_mig_instances_have_different_uuids(monkeypatch, v2):
    monkeypatch.setattr(streams.ctypes, "CDLL", lambda name: Driver(v2))
    assert streams._uuids() == (("10" * 16, "11" * 16) if v2 else ("01" * 16,) * 2)


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
    assert device_arrays.is_device(value) is on_gpu
