"""Messages between two ranks: values, order, tags, mismatches, and their independence of collectives."""

import functools

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.backends.socket_messages import MessageSockets, SocketMessages
from allred.comm.point_to_point import CHUNK_BYTES
from allred.errors import InputError, MismatchError


class NotAnArray:
    def __array__(self, dtype=None, copy=None):
        raise ValueError("x" + "é" * 400)


pytestmark = pytest.mark.mpi


@functools.cache
def sockets(domain):
    return MessageSockets(MpiBootstrap(MPI.COMM_WORLD.Dup()), domain, "127.0.0.1", "auto", 30.0)


@pytest.fixture(params=["mpi", "unix", "tcp"])
def comm(comm, request, monkeypatch):
    if comm.size == 1:
        pytest.skip("needs several ranks")
    if request.param != "mpi":
        of_world = sockets("" if request.param == "unix" else str(comm.rank))
        bootstrap = MpiBootstrap(MPI.COMM_WORLD)
        monkeypatch.setattr(comm.backend, "messages", SocketMessages(of_world, bootstrap, list(range(comm.size))))
    return comm


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.parametrize("count", [0, 1, 1009, CHUNK_BYTES // 4 + 3, CHUNK_BYTES])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_ring(comm, count, dtype):
    after, before = neighbours(comm)
    data, found = np.arange(count).astype(dtype) + np.dtype(dtype).type(comm.rank), np.zeros(count, dtype)
    sent, received = comm.send(data, after), comm.recv(found, before)
    assert received.wait() == before
    assert sent.wait() is None
    assert (found == np.arange(count).astype(dtype) + np.dtype(dtype).type(before)).all()


def test_strided_arrays(comm):
    after, before = neighbours(comm)
    found = np.zeros((4, 6))
    sent = comm.send(np.arange(24.0).reshape(6, 4).T[:, ::2], after)
    comm.recv(found[:, 1::2], before).wait()
    sent.wait()
    assert (found[:, 1::2] == np.arange(24.0).reshape(6, 4).T[:, ::2]).all()
    assert (found[:, ::2] == 0).all()


def test_messages_of_a_tag_keep_their_order_and_tags_are_independent(comm):
    after, before = neighbours(comm)
    sent = [comm.send(np.full(2000 * number, number), after, tag=number % 2) for number in range(1, 7)]
    found = {number: np.zeros(2000 * number, int) for number in range(1, 7)}
    received = [comm.recv(found[number], before, tag=number % 2) for number in (2, 4, 1, 6, 3, 5)]
    for work in reversed(received + sent):
        work.wait()
    assert all((array == number).all() for number, array in found.items())


def test_collectives_in_any_order(comm):
    """Rank 0 starts a message before an allreduce, the others after it."""
    sent, found = [], np.zeros(5)
    if comm.rank == 0:
        sent = [comm.send(np.full(5, float(rank)), rank, tag=3) for rank in range(1, comm.size)]
    assert comm.allreduce(np.ones(3), allred.Sum).wait().tolist() == [comm.size] * 3
    if comm.rank:
        comm.recv(found, 0, tag=3).wait()
        assert found.tolist() == [comm.rank] * 5
    for work in sent:
        work.wait()


def test_a_message_completes_while_the_sender_waits_for_a_collective(comm):
    found = np.zeros(3 * CHUNK_BYTES, np.uint8)
    if comm.rank == 0:
        work = comm.send(found + 1, comm.size - 1)
    if comm.rank == comm.size - 1:
        comm.recv(found, 0).wait()
        assert (found == 1).all()
    comm.barrier().wait()
    if comm.rank == 0:
        assert work.done()


def test_from_any_rank(comm):
    found, number = np.zeros(3), float(comm.rank)
    if comm.rank == 0:
        senders = []
        for _ in range(comm.size - 1):
            senders.append(comm.recv(found, tag=1).wait())
            assert found.tolist() == [senders[-1]] * 3
        assert sorted(senders) == list(range(1, comm.size))
    else:
        comm.send(np.full(3, number), 0, tag=1).wait()


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [
        (np.zeros(3), np.zeros(4), r"float64 \(3,\) on rank 0; float64 \(4,\) on rank 1; both must have the same"),
        (np.zeros(3), np.zeros(3, int), r"float64 \(3,\) on rank 0; int64 \(3,\) on rank 1"),
        (np.zeros(3), [0, 0, 0], "rank 1: in place needs a numpy array, got list"),
        (np.zeros(3, object), np.zeros(3), "rank 0: dtype object holds Python objects or no bytes"),
        (NotAnArray(), np.zeros(3), f"rank 0: ValueError: x{'é' * 243}$"),  # the record holds 500 bytes
    ],
    ids=["shape", "dtype", "list", "object", "long"],
)
def test_both_ranks_raise_the_same_error(comm, sent, expected, words):
    if comm.rank < 2:
        work = comm.send(sent, 1, tag=5) if comm.rank == 0 else comm.recv(expected, 0, tag=5)
        with pytest.raises((MismatchError, InputError), match=f"^message from rank 0 to rank 1, tag 5: .*{words}"):
            work.wait()
    found = np.zeros(1)  # the channel can be used again
    if comm.rank == 0:
        comm.send(np.ones(1), 1, tag=5).wait()
    elif comm.rank == 1:
        comm.recv(found, 0, tag=5).wait()
        assert found == 1


def test_peers_and_tags_that_cannot_be_used(comm):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    with pytest.raises(InputError, match=rf"rank {comm.rank} is not another rank .* expected one of \{others}"):
        comm.send(np.zeros(1), comm.rank).wait()
    with pytest.raises(InputError, match="rank 99 is not another rank"):
        comm.recv(np.zeros(1), 99).wait()
    with pytest.raises(InputError, match="tag=-1 must be a whole number from 0 to"):
        comm.send(np.zeros(1), others[0], -1).wait()


def test_a_process_set(rank, size):
    if size < 3:
        pytest.skip("needs 3 ranks")
    if rank in (0, 2):
        comm = allred.ProcessSet([0, 2]).communicator()
        found = np.zeros(2)
        if rank == 2:
            comm.send(np.full(2, 7.0), 0).wait()
        else:
            assert comm.recv(found, 2).wait() == 2
            assert found.tolist() == [7, 7]


def test_one_rank(size):
    if size > 1:
        pytest.skip("one rank only")
    with pytest.raises(InputError, match="send and recv need several processes; this is backend single"):
        allred.ProcessSet([0]).communicator().send(np.zeros(1), 0).wait()
