"""TCP connections between hosts: addresses, and the proof that both ends belong to the job."""

import re
import socket
import time

import pytest
from ports import reserved_ports

from allred.comm.backends import connections
from allred.comm.bootstrap import SingleBootstrap
from allred.errors import ConfigError

SECRET, PURPOSE = "secret", "rank 0"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def accept(listener, expected=(1,)):
    return connections._Acceptor([listener], SECRET, PURPOSE, set(expected))


def connect(listener, secret=SECRET, purpose=PURPOSE, rank=1, before=()):
    return connections._connect_to_first([*before, listener.getsockname()], secret, purpose, rank)


def test_both_ends_prove_that_they_know_the_secret(listener):
    acceptor = accept(listener)
    with connect(listener) as mine:
        (peer, theirs), *others = acceptor.finish(5).items()
        mine.sendall(b"data")
        assert (peer, others) == (1, [])
        assert theirs.recv(4) == b"data"
        theirs.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"secret": "guess"}, "it did not prove that it belongs to this job"),
        ({"purpose": "rank 1"}, "it did not prove that it belongs to this job"),
        ({"rank": 2}, "the peer has closed the connection"),
    ],
)
def test_a_connection_without_proof_or_of_an_unexpected_rank_is_refused(listener, wrong, said):
    acceptor = accept(listener)
    assert connect(listener, **wrong).endswith(said)
    with connect(listener):  # the right one is still accepted
        found = acceptor.finish(5)
        assert list(found) == [1]
        found[1].close()


def test_a_program_that_sends_nothing_delays_no_one(listener):
    acceptor = accept(listener)
    with socket.create_connection(listener.getsockname()), connect(listener):
        begun = time.monotonic()
        found = acceptor.finish(connections.AUTHENTICATE_S)
        assert time.monotonic() - begun < connections.AUTHENTICATE_S / 2
        found[1].close()


def test_the_first_address_that_answers_is_taken(listener):
    closed = ("127.0.0.1", *reserved_ports(1))
    acceptor = accept(listener)
    with connect(listener, before=[closed]) as mine:
        assert mine.getpeername() == listener.getsockname()
        for one in acceptor.finish(5).values():
            one.close()


def test_what_each_address_said_is_reported(listener):
    listener.close()
    closed = ("127.0.0.1", *reserved_ports(1))
    said = connections._connect_to_first([closed], SECRET, PURPOSE, 1)
    assert said == f"127.0.0.1 port {closed[1]}: [Errno 111] Connection refused"


def test_addresses_by_name_and_by_network():
    assert connections.addresses("lo") == connections.addresses("127.0.0.0/8,lo")[: len(connections.addresses("lo"))]
    assert "127.0.0.1" in connections.addresses("nosuch0, 127.0.0.0/8")
    assert all(not address.startswith("127.") for address in connections.addresses("auto")) or connections.addresses(
        "auto"
    ) == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=r"ALLRED_NETWORK='eth99' fits no interface of .*; it has lo 127\.0\.0\.1"):
        connections.addresses("eth99")


def test_a_rank_that_cannot_start_a_thread_is_a_problem_of_all(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(connections.threading.Thread, "start", start)
    sockets, problem = connections.connect(SingleBootstrap(), [[0, 1]], "lo", 60.0)
    assert sockets == {}
    assert re.fullmatch(r"rank 0 on \S+ cannot accept connections: can't start new thread", problem)
