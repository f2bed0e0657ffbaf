"""The channel between processes of a job: handshake, limits, and peers that do not know the secret. Real TCP."""

import contextlib
import json
import socket
import threading
import time
import tracemalloc

import pytest
from ports import reserved_ports

from allred.runtime import channel
from allred.runtime.channel import (
    Channel,
    HandshakeError,
    Listener,
    connect,
)
from allred.runtime.loop import Loop
from allred.runtime.timings import LINE_BYTES, UNAUTHENTICATED_BYTES, UNAUTHENTICATED_PEERS

WAIT_S = 60.0


class Served:
    """A Listener in a thread that echoes each message. `refused`: the arguments of the calls of `refusal`."""

    def __init__(self, secret="secret", purpose="test", listening=None):
        self.refused, self.lost = [], []
        self.loop = Loop()
        self.socket = listening or socket.create_server(("127.0.0.1", 0))
        self.where = self.socket.getsockname()
        self.listener = Listener(self.loop, self.socket, purpose, secret, self.admit, self.refusal)
        self.ends = False

    def refusal(self, host, has):
        self.refused.append((host, has))
        return "no"

    def admit(self, peer, messages):
        peer.serve(self.loop, lambda messages: self.echo(peer, messages), self.lost.append)
        self.echo(peer, messages)

    def echo(self, peer, messages):
        for message in messages:
            peer.send(message)
            if "wrong" in message:
                raise ValueError("not of the protocol")

    def run(self):
        while not self.ends:
            self.loop.turn()

    def __enter__(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends = True
        self.loop.wake()
        self.thread.join()
        for key in list(self.loop._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.loop.close()

    def stranger(self):
        return socket.create_connection(self.where, WAIT_S)


def echo(peer, message):
    peer.send(message)
    return peer.receive_one(time.monotonic() + WAIT_S) == message


def test_peers_that_know_the_secret_talk():
    with Served() as served:
        peer = connect(served.where, "test", "secret")
        assert echo(peer, {"text": "x" * 300_000})
        assert echo(peer, {"text": "\ud800 é"})
        peer.connection.close()


@pytest.mark.parametrize(("secret", "has"), [("guess", True), ("", False)])
def test_a_wrong_secret_is_an_error_at_both_ends(secret, has):
    with Served() as served:
        with pytest.raises(HandshakeError, match="refuses this process: no"):
            connect(served.where, "test", secret)
        assert served.refused == [("127.0.0.1", has)]


def in_loop(where, hello, secret="secret", serve=lambda: None):
    """What `connect_in_loop` calls back with: a connection or an error."""
    loop, found = Loop(), []
    peer = channel.connect_in_loop(loop, where, "test", secret, hello, found.append, found.append)
    until = time.monotonic() + WAIT_S
    while not found and time.monotonic() < until:
        serve()
        loop.turn(0.01)
    peer.close()
    loop.close()
    return found[0]


def test_a_connection_is_made_in_an_event_loop(tmp_path):
    with Served() as served:
        assert isinstance(in_loop(served.where, {"accepted": True}), socket.socket)  # the listener echoes
        assert str(in_loop(served.where, {"rank": 1})).startswith("is not an allred process")
        assert str(in_loop(served.where, {}, secret="guess")) == "refuses this process: no"
    assert isinstance(in_loop(served.where, {}), ConnectionRefusedError)
    assert isinstance(in_loop(str(tmp_path / "missing"), {}), FileNotFoundError)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b'{"allred": -1, "nonce": "a"}\n', HandshakeError, "has another version of allred"),
        (b'{"allred": 1}\n', HandshakeError, "is not an allred process"),
        (b"HTTP/1.1 400\n", ValueError, ""),
        (b"", ConnectionError, "the peer has closed the connection"),
    ],
    ids=["version", "nonce", "no JSON", "end"],
)
def test_a_stranger_answers_in_an_event_loop(answer, kind, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)

        def serve():
            with contextlib.suppress(BlockingIOError):
                peer, _ = server.accept()
                peer.sendall(answer)
                peer.close()

        error = in_loop(server.getsockname(), {}, serve=serve)
    assert isinstance(error, kind)
    assert words in str(error)


def impostor(answers, purpose="test", count=1):
    """What `connect` raises if a stranger answers: `answers` takes the connections of `count` peers."""
    outcome = []

    def come(where):
        try:
            connect(where, purpose, "secret").connection.close()
            outcome.append(None)
        except (HandshakeError, OSError) as error:
            outcome.append(error)

    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        threads = [threading.Thread(target=come, args=(server.getsockname(),)) for _ in range(count)]
        peers = []
        for thread in threads:
            thread.start()
            peers.append(Channel(stack.enter_context(server.accept()[0])))
        answers(*peers)
        for thread in threads:
            thread.join(WAIT_S)
    return outcome


def hear(peer):
    return peer.receive_one(time.monotonic() + WAIT_S)


def test_the_secret_is_not_sent():
    heard = []

    def answers(peer):
        peer.send({"allred": channel.VERSION, "nonce": "ab"})
        heard.append(hear(peer))
        peer.send({"proof": "guess"})

    [error] = impostor(answers)
    assert str(error) == "does not know this job's secret"
    assert "secret" not in json.dumps(heard)


def test_a_reflected_proof_is_not_accepted():
    def answers(peer):
        peer.send({"allred": channel.VERSION, "nonce": "ab"})
        peer.send({"proof": hear(peer)["proof"]})

    [error] = impostor(answers)
    assert str(error) == "does not know this job's secret"


def test_a_proof_of_another_connection_is_not_accepted():
    """The stranger has two peers connect, and answers the first with what the second sends for the same nonce."""

    def answers(first, second):
        first.send({"allred": channel.VERSION, "nonce": "ab"})
        second.send({"allred": channel.VERSION, "nonce": hear(first)["nonce"]})
        first.send({"proof": hear(second)["proof"]})
        second.send({"proof": "ab"})

    errors = impostor(answers, count=2)
    assert {str(error) for error in errors} == {"does not know this job's secret"}


def test_a_proof_for_one_purpose_is_not_accepted_for_another():
    """The stranger relays messages between a peer of one service and the listener of another."""

    def answers(peer):
        with served.stranger() as connection:
            relayed = Channel(connection)
            peer.send(hear(relayed))
            relayed.send(hear(peer))
            peer.send(hear(relayed))

    with Served(purpose="watcher") as served:
        [error] = impostor(answers, purpose="meeting")
        assert str(error) == "refuses this process: no"


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ("220 mail.example.org ESMTP", "is not an allred process: another program uses this port"),
        ("[]", "is not an allred process"),
        ("x" * 2**17, "is not an allred process"),
        ('{"allred": 99, "nonce": "ab"}', "has another version of allred (protocol 99, here 2); install the same"),
    ],
)
def test_other_programs_and_versions_are_reported(greeting, words):
    [error] = impostor(lambda peer: peer.send_line(greeting))
    assert isinstance(error, HandshakeError)
    assert words in str(error)


def test_no_listener_at_the_address():
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.1", *reserved_ports(1)), "test", "secret")


def test_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(TimeoutError):
        connect(listening.getsockname(), "test", "secret", limit_s=0.2)


def test_messages_that_are_not_of_the_protocol_close_the_channel():
    with Served() as served:
        peer = connect(served.where, "test", "secret")
        assert echo(peer, {"text": "right"})
        peer.send({"wrong": True})
        assert hear(peer) == {"wrong": True}
        with pytest.raises(ConnectionError):
            peer.receive()
        peer.close()
    assert [str(error) for error in served.lost] == ["not of the protocol"]


def test_a_unix_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with Served(listening=listening) as served:
            peer = connect(served.where, "test", "secret")
            assert echo(peer, {"text": "x"})
            assert peer.detach() is peer.connection
            peer.close()
            with pytest.raises(HandshakeError, match="refuses this process: no"):
                connect(served.where, "test", "guess")
            assert served.refused == [("this host", True)]


def test_a_peer_that_is_closed_before_authentication_connects_again():
    served, found = Served(), []
    peer = threading.Thread(target=lambda: found.append(connect(served.where, "test", "secret")))
    peer.start()
    served.socket.setblocking(True)
    served.socket.accept()[0].close()
    served.socket.setblocking(False)
    with served:
        peer.join()
        assert echo(found[0], {"here": True})
        found[0].connection.close()


def test_as_many_peers_as_are_expected_may_connect_at_once(loop_with_listener):
    loop, address = loop_with_listener(expected=20)
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(UNAUTHENTICATED_PEERS + 20):
            peers.append(stack.enter_context(socket.create_connection(address, WAIT_S)))
            loop.turn()
        peers[0].settimeout(WAIT_S)
        assert b"nonce" in peers[0].recv(200)
        peers[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is not closed
            peers[0].recv(200)


@pytest.fixture
def loop_with_listener():
    with contextlib.closing(Loop()) as loop, contextlib.ExitStack() as stack:

        def listen(**more):
            listening = socket.create_server(("127.0.0.1", 0))
            listener = Listener(loop, listening, "test", "secret", lambda *_: None, **more)
            stack.callback(listener.close)
            return loop, listening.getsockname()

        yield listen


def test_unauthenticated_connections_are_limited_and_block_no_peer():
    with Served() as served, contextlib.ExitStack() as stack:
        before = connect(served.where, "test", "secret")
        strangers = []
        for number in range(2 * UNAUTHENTICATED_PEERS):
            strangers.append(stack.enter_context(served.stranger()))
            if number % 50 == 0:
                assert echo(before, {"number": number})
        after = connect(served.where, "test", "secret")
        assert echo(before, {"still": "here"})
        assert echo(after, {"now": "here"})
        for stranger in strangers[: UNAUTHENTICATED_PEERS + 1]:  # the oldest are closed, and had the greeting
            while stranger.recv(200):
                pass
        assert len(served.listener._pending) <= UNAUTHENTICATED_PEERS
        before.connection.close()
        after.connection.close()


@pytest.mark.parametrize("line", [b"x" * (UNAUTHENTICATED_BYTES + 1), b"x" * 2**17 + b"\n"])
def test_a_stranger_s_long_line_closes_its_connection(line):
    with Served() as served, served.stranger() as stranger:
        with contextlib.suppress(ConnectionError):  # it may be closed in the midst of this
            stranger.sendall(line)
            while stranger.recv(200):
                pass
        peer = connect(served.where, "test", "secret")
        assert echo(peer, {"still": "here"})
        peer.connection.close()


def pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname(), WAIT_S)
        return ours, listening.accept()[0]


def read_all(peer):
    while True:
        assert peer.receive_lines() == []


def test_a_long_line_is_refused_before_it_is_in_memory():
    ours, theirs = pair()

    def send():
        with contextlib.suppress(OSError):  # refused, so nobody reads the rest
            for _ in range(64):
                ours.sendall(bytes(LINE_BYTES))

    sender = threading.Thread(target=send)
    tracemalloc.start()
    try:
        sender.start()
        with pytest.raises(ValueError, match=f"a line of more than {LINE_BYTES} bytes"):
            read_all(Channel(theirs))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        theirs.close()
        sender.join()
        ours.close()
    assert peak < 8 * LINE_BYTES


def test_a_message_that_is_sent_in_part_is_the_end_of_a_channel():
    ours, theirs = pair()
    ours.settimeout(0.1)
    mine = Channel(ours)
    mine.send({"text": "x" * 50_000_000})  # more than the sockets hold, and nobody reads
    mine.send({"text": "more"})
    with pytest.raises(ConnectionError):
        mine.receive()
    with pytest.raises((ConnectionError, ValueError)):
        read_all(Channel(theirs))
    ours.close()
    theirs.close()


@pytest.fixture
def served_pair():
    """A loop, a channel in it whose sends do not wait, its other end, and the errors that it has reported."""
    ours, theirs = socket.socketpair()
    lost = []
    with contextlib.closing(Loop()) as loop, ours, theirs:
        mine = Channel(ours)
        mine.serve(loop, lambda messages: None, lost.append, waits=False)
        yield loop, mine, Channel(theirs), lost


def test_a_send_does_not_wait_for_a_peer_that_does_not_read(served_pair):
    loop, mine, peer, _ = served_pair
    sent = [{"number": number, "text": "x" * 100_000} for number in range(20)]  # more than the kernel takes
    for message in sent:
        mine.send(message)
    found = []
    peer.connection.setblocking(False)
    while len(found) < len(sent):
        loop.turn(0.0)
        found += peer.receive()
    assert found == sent
    mine.send({"number": 20})
    assert peer.receive() == [{"number": 20}], "sent at once again"


def test_the_rest_of_what_was_sent_arrives_before_the_end(served_pair):
    _, mine, peer, _ = served_pair
    mine.send({"text": "x" * 900_000})
    thread = threading.Thread(target=mine.finish)
    thread.start()
    peer.connection.settimeout(WAIT_S)
    found = []
    while not found:
        found = peer.receive()
    thread.join()
    assert len(found[0]["text"]) == 900_000
    with pytest.raises(ConnectionError):
        peer.receive()


def test_a_peer_that_never_reads_is_lost(served_pair, monkeypatch):
    loop, mine, _, lost = served_pair
    monkeypatch.setattr(channel.timings, "SEND_S", 0.05)
    mine.send({"text": "x" * 900_000})
    until = time.monotonic() + WAIT_S
    while not lost and time.monotonic() < until:
        loop.turn(0.05)
    assert isinstance(lost[0], ConnectionError)
    mine.send({"text": "nobody receives it"})
