"""Messages over sockets: several ranks in one process, which the test lets make progress."""

import os
import random
import threading
import time

import numpy as np
import pytest

from allred.comm.backends import socket_messages
from allred.comm.backends.socket_messages import MessageSockets, SocketMessages
from allred.comm.bootstrap import SingleBootstrap
from allred.errors import AllredError, ConfigError

MIB = 2**20


class ThreadBootstrap(SingleBootstrap):
    """The Bootstrap of a rank that is a thread."""

    def __init__(self, rank, size, barrier, values):
        self.rank, self.size, self._barrier, self._values = rank, size, barrier, values

    def allgather(self, value):
        self._barrier.wait()
        self._values[self.rank] = value
        self._barrier.wait()
        return [self._values[rank] for rank in range(self.size)]


def in_threads(size, function):
    """The results of function(bootstrap) of each rank, or their exceptions."""
    barrier, values, results = threading.Barrier(size), {}, {}

    def run(rank):
        try:
            results[rank] = function(ThreadBootstrap(rank, size, barrier, values))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(size)]


@pytest.fixture(params=["unix", "tcp"])
def make(request):
    """Makes the Messages of some ranks."""

    def messages(size=2):
        def of(bootstrap):
            domain = "" if request.param == "unix" else str(bootstrap.rank)
            sockets = MessageSockets(bootstrap, domain, "127.0.0.1", "auto", 30.0)
            return SocketMessages(sockets, bootstrap, list(range(size)))

        return in_threads(size, of)

    yield messages
    for each in [*socket_messages._open]:
        each.close()


def run(*operations):
    """Let all ranks make progress until the operations are complete."""
    until = time.monotonic() + 60
    left = list(operations)
    while left := [each for each in left if not each.done()]:
        for sockets in [*socket_messages._open]:
            sockets.progress()
        assert time.monotonic() < until, f"{len(left)} operations are not complete"


def filled(value, nbytes=8):
    return np.full(nbytes, value, np.uint8)


def test_messages_of_a_tag_arrive_in_order_however_receives_and_sends_are_mixed(make):
    one, two = make()
    dice = random.Random(1)
    sizes = [dice.choice([0, 1, 511, 70_000]) for _ in range(300)]
    tags = [dice.randrange(4) for _ in sizes]
    expected = [filled(index % 251, nbytes) for index, nbytes in enumerate(sizes)]
    found = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
    sends, receives, left = [], [], {tag: [i for i, each in enumerate(tags) if each == tag] for tag in range(4)}
    while len(sends) < len(sizes) or any(left.values()):
        if len(sends) < len(sizes) and dice.random() < 0.5:
            index = len(sends)
            sends.append(one.send(expected[index], 1, tags[index], synchronous=dice.random() < 0.3))
        elif (tag := dice.choice([tag for tag in left if left[tag]] or [-1])) >= 0:
            receives.append(two.receive(found[index := left[tag].pop(0)], dice.choice([0, -1]), tag))
        dice.choice(sends + receives or [one.send(filled(0), 1, 9)]).done()
    run(*sends, *receives)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    assert {each.sender for each in receives} == {0}


def test_a_receive_from_any_rank_takes_the_earliest_message(make):
    zero, one, two = make(3)
    early, late = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    for sender, value in ((two, 2), (one, 1)):
        send = sender.send(filled(value), 0, 5)
        other = sender.send(filled(9), 0, 6, synchronous=True)  # complete: the one before it has arrived
        run(send, other, zero.receive(late, -1, 6))
    first = zero.receive(early, -1, 5)
    second = zero.receive(late, -1, 5)
    run(first, second)
    assert (first.sender, second.sender, early[0], late[0]) == (2, 1, 2, 1)


def test_a_receive_from_one_rank_leaves_the_messages_of_others(make):
    zero, one, two = make(3)
    found = {sender: np.zeros(8, np.uint8) for sender in (1, 2)}
    run(two.send(filled(2), 0, 0), zero.receive(np.zeros(8, np.uint8), 2, 0))
    posted = zero.receive(found[2], 2, 0), zero.receive(found[1], -1, 0)
    run(one.send(filled(1), 0, 0), two.send(filled(2), 0, 0), *posted)
    assert [(sender, found[sender][0]) for sender in (1, 2)] == [(1, 1), (2, 2)]
    assert [each.sender for each in posted] == [2, 1]


def test_a_synchronous_send_is_complete_after_the_receive_has_started(make):
    one, two = make()
    plain, synchronous = one.send(filled(1), 1, 0), one.send(filled(2), 1, 1, synchronous=True)
    other = two.send(filled(3), 0, 3)
    run(plain, other)
    for _ in range(100):
        assert not synchronous.done()
        assert not two.receive(np.zeros(8, np.uint8), 0, 4).done()
    run(two.receive(np.zeros(8, np.uint8), 0, 1), synchronous)


def test_large_messages_in_both_directions_at_once(make):
    ranks = make()
    data = [np.resize(np.arange(rank, 251, dtype=np.uint8), 64 * MIB) for rank in range(2)]  # of different periods
    found = [np.empty(64 * MIB, np.uint8) for _ in range(2)]
    sends = [ranks[rank].send(data[rank], 1 - rank, 7, synchronous=True) for rank in range(2)]
    receives = [ranks[rank].receive(found[rank], 1 - rank, 7) for rank in range(2)]
    run(*sends, *receives)
    assert all((found[rank] == data[1 - rank]).all() for rank in range(2))
    assert receives[0].progress_count == 64 * MIB < sends[0].progress_count


def test_many_tags_and_communicators_are_independent_and_leave_nothing(make):
    one, two = make()
    sockets = [each._sockets for each in (one, two)]

    def communicator(bootstrap):
        return SocketMessages(sockets[1 - bootstrap.rank], bootstrap, [1, 0])

    swapped = in_threads(2, communicator)
    tags = [*range(300), one.last_tag]
    sends = [one.send(filled(tag % 199), 1, tag) for tag in tags]
    sends += [swapped[1].send(filled(200), 0, tag) for tag in tags]  # by the same connection
    run(*sends)
    found, other = {tag: np.zeros(8, np.uint8) for tag in tags}, {tag: np.zeros(8, np.uint8) for tag in tags}
    receives = [swapped[0].receive(other[tag], 1, tag) for tag in reversed(tags[1:])]
    receives += [two.receive(found[tag], 0, tag) for tag in reversed(tags)]
    run(*receives)
    assert all((found[tag] == tag % 199).all() for tag in tags)
    assert all((other[tag] == 200).all() for tag in tags[1:])
    assert [*sockets[1]._unexpected] == [(swapped[0]._number, 0)]
    swapped[0].close([])
    assert not sockets[1]._unexpected
    assert not sockets[1]._receives
    assert not sockets[0]._unacknowledged


def test_a_message_of_an_older_world_is_dropped(make):
    one, two = make()
    old = one.send(filled(1), 1, 0)
    one._sockets.generation = two._sockets.generation = 2
    found = np.zeros(8, np.uint8)
    run(old, one.send(filled(2), 1, 0, synchronous=True), two.receive(found, 0, 0))
    assert found[0] == 2


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_peer_that_has_ended_is_lost(make, is_connected):
    zero, one, two = make(3)
    if is_connected:
        run(one.send(filled(1), 0, 0), zero.receive(np.zeros(8, np.uint8), 1, 0))
        run(zero.send(filled(1), 1, 0), one.receive(np.zeros(8, np.uint8), 0, 0))
    assert zero.lost_peers() == {}
    one._sockets.close()
    with pytest.raises(AllredError, match="has closed their connections"):
        one.send(filled(1), 0, 0).done()
    waiting = zero.receive(np.zeros(8, np.uint8), 1, 0), zero.send(filled(1), 1, 1, synchronous=True)
    until = time.monotonic() + 60
    while not zero.lost_peers() and time.monotonic() < until:
        assert not any(each.done() for each in waiting)
    assert zero.lost_peers() == {1: os.uname().nodename}
    run(zero.send(filled(5), 2, 0), two.receive(np.zeros(8, np.uint8), 0, 0))  # the others go on


def test_a_fork_closes_its_connections_and_leaves_those_of_its_parent(make):
    one, two = make()
    found = np.zeros(8, np.uint8)
    run(one.send(filled(1), 1, 0), two.receive(found, 0, 0))
    files = [
        one._sockets._outgoing[1]._connection.fileno(),
        *(each._socket.fileno() for each in one._sockets._listeners),
    ]
    child = os.fork()
    if child == 0:
        closed = 0
        for file in files:
            try:
                os.fstat(file)
            except OSError:
                closed += 1
        os._exit(closed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(files)
    run(one.send(filled(2), 1, 0), two.receive(found, 0, 0))
    run(two.send(filled(3), 0, 0), one.receive(found, 1, 0))  # by a new connection
    assert found[0] == 3


def test_an_exception_within_a_message_ends_all(make, monkeypatch):
    one, two = make()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(two._sockets, "find_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(one.send(filled(1), 1, 0), two.receive(np.zeros(8, np.uint8), 0, 0))
    with pytest.raises(AllredError, match="exception has interrupted them"):
        two.receive(np.zeros(8, np.uint8), 0, 0).done()


def test_all_ranks_raise_if_one_cannot_listen_and_tcp_is_needed():
    def of(bootstrap, domain=""):
        network = "10.255.0.0/30" if bootstrap.rank else "auto"
        return MessageSockets(bootstrap, domain, "127.0.0.1", network, 30.0)

    for each in in_threads(2, of):
        assert len(each._listeners) == 1
        each.close()
    errors = in_threads(2, lambda bootstrap: of(bootstrap, str(bootstrap.rank)))
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert len({str(error) for error in errors}) == 1
    assert "rank 1 on " in str(errors[0])
    assert "ALLRED_NETWORK='10.255.0.0/30' fits no interface" in str(errors[0])


def test_a_network_replaces_the_address(monkeypatch):
    monkeypatch.setattr(socket_messages, "addresses", lambda network: {"lo": ["127.0.0.5"]}[network])
    [found] = in_threads(1, lambda bootstrap: MessageSockets(bootstrap, "", "127.0.0.1", "lo", 30.0))
    assert found._ranks[0][-1][0] == "127.0.0.5"
    found.close()
