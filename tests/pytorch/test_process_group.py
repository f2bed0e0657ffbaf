"""The process group without other ranks: what is forwarded to the device group, and registration that fails."""

import collections
import datetime
import gc
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import _allred_torch  # noqa: E402
import allred  # noqa: E402
from allred import testing, world  # noqa: E402
from allred.comm.backends.backend import SingleBackend  # noqa: E402
from allred.comm.communicator import Communicator  # noqa: E402
from allred.comm.work import Polled, WorkQueue  # noqa: E402
from allred.errors import CollectiveTimeout, InputError, RemoteRankError  # noqa: E402
from allred.torch import process_group, rendezvous, torch_work  # noqa: E402


class FakeDeviceGroup:
    """Stands for torch's own group with ProcessGroupNCCL; records calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        getattr(dist.ProcessGroup, name)  # raises AttributeError for what the real one has not
        return lambda *arguments: self.calls.append((name, arguments)) or "its work"


@pytest.fixture
def group(monkeypatch):
    communicator = Communicator(SingleBackend(), 10.0)
    made = process_group.ProcessGroupAllred(communicator, dist.HashStore(), datetime.timedelta(seconds=7))
    assert made._device_types == []  # else torch 2.15 attaches its flight recorder, and fails
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, made, ("allred", None))
    return made


METHODS = [
    ("allreduce", 1),
    ("allreduce_coalesced", 1),
    ("broadcast", 1),
    ("reduce", 1),
    ("allgather", 2),
    ("allgather_coalesced", 2),
    ("allgather_into_tensor_coalesced", 2),
    ("_allgather_base", 2),
    ("reduce_scatter", 2),
    ("reduce_scatter_tensor_coalesced", 2),
    ("_reduce_scatter_base", 2),
    ("alltoall", 2),
    ("gather", 2),
    ("scatter", 2),
]


@pytest.mark.parametrize(("name", "count"), METHODS)
def test_tensors_on_other_devices_are_forwarded(group, monkeypatch, name, count):
    """torch's device "meta" stands for a GPU."""
    created = []
    monkeypatch.setattr(
        process_group, "_create_device_group", lambda *arguments: created.append(arguments) or FakeDeviceGroup()
    )
    remote, options = torch.zeros(2, device="meta"), object()
    for _ in range(2):
        assert getattr(group, name)(*[[[remote]]] * count, options) == "its work"
    assert [call[0] for call in group.device_group("meta").calls] == [name, name]
    assert group.device_group("meta").calls[0][1] == (*[[[remote]]] * count, options)
    ((device, store, communicator, timeout_s),) = created
    assert (device, communicator, timeout_s) == ("meta", group.communicator, 7)
    store.set("key", "value")
    assert group._device_types == [torch.device("cpu"), torch.device("meta")]
    assert group._get_backend(torch.device("meta")) == "its work"
    assert group.device_group("meta").calls[-1][0] == "_get_backend"
    group.shutdown()
    assert group.device_group("meta").calls[-1] == ("shutdown", ())


def test_a_device_group_has_the_methods_of_a_group_and_not_those_of_its_backend():
    """Regression: on a GPU, DTensor.full_tensor() was an AttributeError. Here gloo stands for NCCL."""
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(store, 0, 1)
    made = process_group._group_of_backend("cpu", dist.ProcessGroup.BackendType.GLOO, gloo, store)
    tensor, gathered = torch.arange(3.0), torch.zeros(3)
    made.allgather_into_tensor_coalesced([gathered], [tensor]).wait()
    made.allreduce([tensor]).wait()
    assert gathered.tolist() == tensor.tolist() == [0, 1, 2]
    assert isinstance(made._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    made.shutdown()


def test_messages_and_splits_are_forwarded(group, monkeypatch):
    monkeypatch.setattr(process_group, "_create_device_group", lambda *_: FakeDeviceGroup())
    remote = torch.zeros(2, device="meta")
    group.send([remote], 1, 0)
    group.recv([remote], 1, 0)
    group.alltoall_base(remote, remote, [], [], None)
    group.gather([], [remote], None)  # not the root
    assert [call[0] for call in group.device_group("meta").calls] == ["send", "recv", "alltoall_base", "gather"]


def test_tensors_on_the_host_are_not_forwarded(group, monkeypatch):
    monkeypatch.setattr(process_group, "_create_device_group", None)
    tensor = torch.arange(3.0)
    assert group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2]
    assert group.barrier().is_completed()
    assert group._device_types == [torch.device("cpu")]


def test_unsupported_device_is_an_error(group):
    with pytest.raises(InputError, match="tensors on meta are not supported; use tensors on the CPU or on a CUDA GPU"):
        group.allreduce([torch.zeros(2, device="meta")])
    with pytest.raises(RuntimeError, match="tensors on meta"):  # which torch's own code catches
        group._get_backend(torch.device("meta"))
    if not torch.cuda.is_available():  # regression: an AttributeError
        with pytest.raises(RuntimeError, match="tensors on cuda need a GPU"):
            group._get_backend(torch.device("cuda"))


def test_a_query_creates_no_group_for_the_gpu(group, monkeypatch):
    monkeypatch.setattr(process_group, "_check_device", lambda _: None)
    monkeypatch.setattr(process_group, "_create_device_group", None)
    assert group._get_backend(torch.device("cuda")) is group


def never():
    """The steps of an operation that is never complete."""
    yield Polled(lambda: False, waits_for_peers=True)


def test_polling_ends_at_the_time_limit():
    """Regression: a loop over is_completed() was endless."""
    work = torch_work.TorchWork([(WorkQueue(0.3).start("the operation", never()), None)], [], None)
    while not work.is_completed():
        time.sleep(0.01)
    assert str(work.exception()).startswith("[allred] Timed out waiting for the operation: not complete after 0.3 s")
    with pytest.raises(CollectiveTimeout, match="the operation"):
        work.wait()


def test_polling_ends_when_another_rank_fails():
    errors = []

    def program():
        if allred.rank() == 1:
            raise ValueError("of rank 1")
        group = process_group.ProcessGroupAllred(world.current().communicator, dist.HashStore(), None)
        work = group.allreduce([torch.ones(2)])
        while not work.is_completed():
            time.sleep(0.01)
        errors.append(work.exception())

    with pytest.raises(ValueError, match="of rank 1"):
        testing.threads(2, program, timeout_s=60)
    [error] = errors
    assert isinstance(error, RemoteRankError)


def test_a_group_waits_for_its_operations_unless_an_exception_is_handled():
    """Regression: the end of a group ignored its operations."""
    communicator = Communicator(SingleBackend(), 10.0)
    group = process_group.ProcessGroupAllred(communicator, dist.HashStore(), datetime.timedelta(seconds=0.3))
    group._start([(WorkQueue(10.0).start("the operation", never()), None)], [])
    with pytest.raises(
        CollectiveTimeout, match=r"^\[allred\] Timed out waiting for the operation: not complete after 0.3 s"
    ):
        group.shutdown()
    group._start([(WorkQueue(10.0).start("the operation", never()), None)], [])
    try:
        raise ValueError("of the program")
    except ValueError:
        group.shutdown()


@pytest.mark.parametrize("kept", [0, 2])
def test_complete_work_is_kept_for_older_versions_of_torch(group, monkeypatch, kept):
    """Their C++ code waits for a Work whose Python object would be gone."""
    monkeypatch.setattr(process_group, "_KEPT", kept)
    group._finished = collections.deque(maxlen=kept)
    tensor = torch.ones(2)
    output = weakref.ref(tensor)
    works = [weakref.ref(group.allreduce([tensor]))]
    assert works[0]().result() == [tensor]
    del tensor
    works += [weakref.ref(group.barrier()) for _ in range(3)]
    gc.collect()
    assert output() is None
    assert [work() is not None for work in works] == [False, kept > 0, kept > 0, True]
    assert all(work().wait() for work in works if work() is not None)


def test_registration_that_fails_raises_nothing(monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("registration failed")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    _allred_torch.register()
    assert capsys.readouterr().err == (
        "allred: cannot register its backend with torch.distributed: RuntimeError('registration failed')\n"
    )


def test_other_backends_keep_their_rendezvous(monkeypatch):
    """Regression: without its variables, gloo gets torch's error, also under mpirun."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("gloo")


def test_rank_and_size_without_a_launcher_are_left_to_torch(monkeypatch):
    """Regression: torch.multiprocessing.spawn, with rank=, world_size=, MASTER_ADDR and MASTER_PORT."""
    monkeypatch.setattr(rendezvous.allred, "init", lambda: pytest.fail("a world of one rank was started"))
    for name in ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous.env_rendezvous("env://?rank=1&world_size=2") is None


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store):
        self._store, self.requests = store, collections.Counter()

    def __getattr__(self, name):
        self.requests[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_torchrun_make_few_requests_to_its_store(nodes, monkeypatch):
    size, local = 8, threading.local()
    entered = [None] * size
    store = CountingStore(dist.HashStore())
    monkeypatch.setattr(rendezvous, "shared_memory_domain", lambda: f"node {local.rank % nodes}")
    monkeypatch.setattr(
        rendezvous, "open_listener", lambda one_node, host: (None, f"{'127.0.0.1' if one_node else host}:{local.rank}")
    )
    monkeypatch.setattr(
        rendezvous, "enter_rendezvous", lambda *arguments, mode: entered.__setitem__(local.rank, arguments)
    )
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")

    def join(rank):
        local.rank = rank
        rendezvous._join_tasks(store, rank, size)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host = "127.0.0.1" if nodes == 1 else "10.0.0.1"
    assert [arguments[1] for arguments in entered] == [f"rank {rank}" for rank in range(size)]
    assert all(arguments[0] == {f"rank {rank}": f"{host}:{rank}" for rank in range(size)} for arguments in entered)
    assert len({arguments[2] for arguments in entered}) == 1
    assert store.requests.total() == size * 6 + size + 4, store.requests
