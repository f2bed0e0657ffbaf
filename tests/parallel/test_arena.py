"""Arenas that the ranks of a node share: arrays of `allred.empty` are read and written by peers."""

from weakref import WeakValueDictionary

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred import arena, native
from allred.comm import functions
from allred.comm.backends import peer_arenas, segment
from allred.comm.backends.mpi_bootstrap import MpiBootstrap

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.Get_size() == 1, reason="takes several ranks")]


@pytest.fixture
def comm():
    if functions.current().backend.name != "shm" or arena.memory() is None:
        pytest.skip("these ranks have no arenas")
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


def address(array):
    return array.__array_interface__["data"][0]


def check_peers(comm, memories):
    rank, size = comm.Get_rank(), comm.Get_size()
    array = allred.empty((size, 1000), "int64")
    array[:] = rank
    base = address(np.frombuffer(memories[rank], np.uint8))
    offsets = comm.allgather(address(array) - base)
    peers = [np.frombuffer(memory, "int64", array.size, at) for memory, at in zip(memories, offsets, strict=True)]
    assert [set(peer.tolist()) for peer in peers] == [{each} for each in range(size)]
    comm.Barrier()
    for peer in peers:
        peer.reshape(array.shape)[rank] = 100 + rank
    comm.Barrier()
    assert (array == 100 + np.arange(size)[:, None]).all()


def test_peers_read_and_write(comm):
    memories = peer_arenas.share(MpiBootstrap(comm))
    check_peers(comm, memories)
    own = arena.memory()[0]
    assert memories[comm.Get_rank()] is own


def test_a_second_use_maps_nothing(comm):
    memories = peer_arenas.share(MpiBootstrap(comm))
    assert all(one is other for one, other in zip(memories, peer_arenas.share(MpiBootstrap(comm)), strict=True))
    assert len(peer_arenas._mapped) == comm.Get_size()


def test_descriptors_over_sockets(comm, monkeypatch):
    """Some ranks cannot use /proc."""
    accept = segment.accept
    monkeypatch.setattr(peer_arenas, "_mapped", WeakValueDictionary())
    if comm.Get_rank() != 1:
        monkeypatch.setattr(segment, "accept", lambda offer, fd=-1: accept(offer, fd) if fd >= 0 else None)
    check_peers(comm, peer_arenas.share(MpiBootstrap(comm)))


@pytest.mark.parametrize("odd", [0, 1])
def test_none_on_all_ranks_if_one_has_none(comm, monkeypatch, odd):
    if comm.Get_rank() == odd:
        monkeypatch.setattr(arena, "memory", lambda: None)
    assert peer_arenas.share(MpiBootstrap(comm)) is None


def test_none_on_all_ranks_if_one_cannot_map(comm, monkeypatch):
    monkeypatch.setattr(peer_arenas, "_mapped", WeakValueDictionary())
    if comm.Get_rank() == 1:
        monkeypatch.setattr(segment, "accept", lambda offer, fd=-1: None)
    assert peer_arenas.share(MpiBootstrap(comm)) is None
