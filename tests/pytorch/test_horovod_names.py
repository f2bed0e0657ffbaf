"""Names, arguments and defaults of allred.torch are those of horovod.torch 0.28; all have docstrings and are in
docs/from-horovod.md."""

import inspect
import pathlib
import re

import pytest

pytest.importorskip("torch")

import allred.torch as hvd
from allred.comm.ops import ReduceOp

_SET, _SCALES = "process_set=global_process_set", "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = f"average=None, name=None, op=None, {_SCALES}, {_SET}"
_COMPRESS = f"average=None, name=None, compression=Compression.none, op=None, {_SCALES}, {_SET}"
ARGUMENTS = {
    "allreduce": f"tensor, {_COMPRESS}",
    **dict.fromkeys(["allreduce_", "allreduce_async", "allreduce_async_"], f"tensor, {_REDUCE}"),
    "grouped_allreduce": f"tensors, {_COMPRESS}",
    **dict.fromkeys(
        ["grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"], f"tensors, {_REDUCE}"
    ),
    "sparse_allreduce_async": f"tensor, name, op, {_SET}",
    **dict.fromkeys(["allgather", "allgather_async"], f"tensor, name=None, {_SET}"),
    **dict.fromkeys(["grouped_allgather", "grouped_allgather_async"], f"tensors, name=None, {_SET}"),
    **dict.fromkeys(
        ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"], f"tensor, root_rank, name=None, {_SET}"
    ),
    **dict.fromkeys(["alltoall", "alltoall_async"], f"tensor, splits=None, name=None, {_SET}"),
    "reducescatter": f"tensor, name=None, compression=Compression.none, op=Average, {_SET}, {_SCALES}",
    "reducescatter_async": f"tensor, name=None, op=Average, {_SET}, {_SCALES}",
    "grouped_reducescatter": f"tensors, name=None, compression=Compression.none, op=Average, {_SET}, {_SCALES}",
    "grouped_reducescatter_async": f"tensors, name=None, op=Average, {_SET}, {_SCALES}",
    "barrier": _SET,
    "join": "device=-1",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {_SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, "
        f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {_SET}"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "shutdown": "",
    "is_initialized": "",
    **dict.fromkeys(["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"], ""),
    **dict.fromkeys(["mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"], ""),
    **dict.fromkeys(["nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"], ""),
}
OTHER_NAMES = {"Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "HorovodInternalError", "elastic"}
OTHER_NAMES |= {"global_process_set"}
PAGE = pathlib.Path(__file__).parents[2] / "docs/from-horovod.md"


def described(value):
    """The text of a default value in ARGUMENTS."""
    known = {hvd.Compression.none: "Compression.none", hvd.global_process_set: "global_process_set"}
    if isinstance(value, ReduceOp):
        return value.value
    return known.get(value, repr(value)) if value.__hash__ else repr(value)


def test_the_names():
    assert set(hvd.__all__) == set(ARGUMENTS) | OTHER_NAMES


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    found = [
        each.name if each.default is each.empty else f"{each.name}={described(each.default)}"
        for each in inspect.signature(getattr(hvd, name)).parameters.values()
    ]
    assert ", ".join(found) == ARGUMENTS[name]


@pytest.mark.parametrize("name", sorted({*ARGUMENTS, "Compression", "HorovodInternalError", "elastic"}))
def test_docstrings(name):
    assert getattr(hvd, name).__doc__


def test_an_argument_that_is_given_twice_or_unknown_is_an_error_before_the_ranks():
    for arguments, options in (
        ((1, None, "name", hvd.Compression.none), {"compression": None}),
        ((1,), {"unknown": 1}),
    ):
        with pytest.raises(TypeError, match=r"allreduce\(\) got (multiple values for|an unexpected keyword) argument"):
            hvd.allreduce(*arguments, **options)


def test_the_page_has_all_names():
    text = PAGE.read_text()
    assert [name for name in hvd.__all__ if not re.search(rf"`hvd\.{name}\b", text)] == []
