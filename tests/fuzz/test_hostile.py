"""Inputs of unknown programs and damaged files: a short run of the fuzzer with a fixed seed, inputs that failed once,
and many connections that do not prove anything. `make fuzz-input T=1800` runs longer."""

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import urllib.request

import hostile
import numpy as np
import pytest
from hostile_targets import (
    ADDRESSES,
    CONNECTION_BYTES,
    TARGETS,
    _chunk_seeds,
    _close_all,
    _content_seeds,
    _hello,
    page_server,
    quiet,
    remove_directory,
)

from allred.launch.rendezvous_server import PURPOSE, RendezvousServer
from allred.runtime import channel
from allred.runtime.timings import UNAUTHENTICATED_PEERS

SEED, EXECUTIONS = 1, 100


@pytest.fixture(autouse=True)
def directory(monkeypatch):
    from allred import log

    for name in ("rank_warning", "runtime_warning"):
        monkeypatch.setattr(log, name, getattr(log, name))  # `quiet` sets them
    quiet()
    yield
    remove_directory()


def test_a_fixed_seed():
    words = ["--seed", str(SEED), "--executions", str(EXECUTIONS)]
    done = subprocess.run([sys.executable, hostile.__file__, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [f"{name}: {EXECUTIONS} executions, 0 defects" for name in TARGETS]
    assert done.stdout.splitlines()[1:] == [*found, f"{len(TARGETS)} targets, 0 defects"], done.stdout + done.stderr


DEEP = b"[" * 4000
TASK_KEY = hashlib.blake2b(b"0-2 title", digest_size=8).hexdigest().encode()  # of the exchange of the target "task"
FAILED_ONCE = [
    ("task", b"\n"),
    ("task", b"cmd=missing\n"),
    *(
        ("task", b"cmd=allgathered key=%s.1 %s\n" % (TASK_KEY, words))
        for words in (b"", b"left=0", b"left=1 values=A", b"left=0 values=A", b"left=0 values=", b"left=0 values=eJw=")
    ),
    ("task", b"cmd=allgathered key=%s.1 left=1 values=\n" % TASK_KEY * 4),
    ("rendezvous", b'{"task": "/job:ps/task:0", "addresses": 1}\n'),
    ("rendezvous", b'{"task": "/job:ps/task:0", "digest": [], "addresses": {"a": [[]]}}\n'),
    ("pmi", b"cmd=allgather key=k ranks=0-99999999999999 value=\n"),
    ("waiting", b'{"missing": [{}]}\n'),
    ("waiting", b'{"missing": 1}\n'),
    ("rendezvous", b'{"rank": Infinity}\n'),
    ("rank", b"{}"),  # its descriptors stayed open
    ("rank", b"1"),
    ("rank", DEEP),
    ("page", b"GET / HTTP/1.1\r\n" + b"".join(b"A: %s\r\n" % (b"x" * 60000) for _ in range(90))),  # 6 MB were kept
    ("sealed_timeline", b"[\xff\xff\xff\x07"),
    ("sealed_timeline", b"(\xff\xff\xff\x07"),
    ("sealed_timeline", b"s\xff\xff\xff\x7f"),
    ("sealed_timeline", b"l\xff\xff\xff\x07"),
    ("hosts", b"node1:" + b"9" * 5000),
    ("batch_variables", b"n[1/2]"),
    ("batch_variables", b"n[1-9223372036854775808]"),
    ("batch_variables", b"n[1-9]" + b"[1-9]" * 20),
    ("batch_variables", b"n[1-9]" * 5 + b"x" * 3000),
    ("batch_variables", b"n\0001(x99999999999)"),
    ("batch_variables", b"\0\0node1"),
    ("batch_variables", b"\0\0node1 x"),
    ("batch_variables", b"\0\0\0node1\n"),
    ("tensorflow_config", b'{"cluster": {}, "task": {"type": "worker", "index": Infinity}}'),
    ("tensorflow_config", DEEP),
    ("tensorflow_config", b'{"cluster": {"worker": 1%s}, "task": {"type": "worker", "index": 0}}' % (b"0" * 30)),
    ("scalars", DEEP + b"\n"),
    ("scalars", b"1\n"),
    ("job_files", b"1"),
    ("job_files", b"{}"),
    ("job_files", DEEP),
    ("array_file", b"\x93NUMPY\x03\0\xff\xff\xff\x7f"),
    ("idx_file", b"\0\0\x08\x41" + struct.pack(">65I", *[1] * 65) + b"\0"),
    ("idx_file", b"\0\0\x08\x04" + struct.pack(">4I", 0, *[2**32 - 1] * 3)),
]


@pytest.mark.parametrize(("name", "data"), FAILED_ONCE)
def test_inputs_that_failed_once(name, data):
    hostile.execute(TARGETS[name], data)


ENTRY = ("shards", 0, "entries", 0)
TABLE = ("meta", "tables", "t")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*ENTRY, "name"), []),
        ((*ENTRY, "dtype"), "floattrue"),
        ((*ENTRY, "shape"), [1] * 65),
        ((*ENTRY, "shape"), [-2, -3]),
        ((*ENTRY, "shape"), [0, 2**62, 2**62]),
        ((*ENTRY, "stop"), -1),
        (("shards", 0, "file"), "a\0b"),
        (("shards", 0, "nbytes"), None),
        (("step",), "3"),
        (("time",), None),
        (("meta",), []),
        (("meta", "tables"), 1),
        (TABLE, {}),
        ((*TABLE, "base"), "../x"),
        ((*TABLE, "parts"), True),
        ((*TABLE, "parts"), [{}]),
    ],
)
def test_a_manifest_that_was_changed_with_its_checksum(place, value):
    hostile.execute(TARGETS["sealed_manifest"], _changed(place, value))


def _changed(place, value):
    content = json.loads(_content_seeds()[1])
    node = content
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return json.dumps(content).encode()


def test_a_tensor_that_is_larger_than_its_file_is_not_allocated():
    content = json.loads(_changed((*ENTRY, "shape"), [2**40]))
    content["shards"][0]["entries"][0].update(start=0, stop=2**40)
    hostile.execute(TARGETS["sealed_manifest"], json.dumps(content).encode())


@pytest.mark.parametrize(
    "change", [{"rank": None}, {"size": 2**40}, {"time": 1e300}, {"name": 1}, {"job": ()}, {"rank": -1}]
)
def test_a_first_record_with_other_fields(change):
    from allred.timeline import marshalled

    (kind, about), *_ = marshalled.loads(_chunk_seeds()[0])
    import marshal

    changed = {key: value for key, value in {**about, **change}.items() if value is not None}
    hostile.execute(TARGETS["sealed_timeline"], marshal.dumps([(kind, changed)]))


# Many connections that prove nothing.

WAIT_S = 60.0


@contextlib.contextmanager
def rendezvous(secret):
    """A rendezvous process, in a thread: its address and its Loop."""
    listening = socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    settings = {"secret": secret, "addresses": ADDRESSES, "listener": listening.detach(), "pid": os.getpid()}
    server, ends = RendezvousServer(settings), threading.Event()
    thread = threading.Thread(target=lambda: [server._loop.turn(0.1) for _ in iter(ends.is_set, True)], daemon=True)
    thread.start()
    yield where
    ends.set()
    thread.join()
    _close_all(server._loop)


def test_the_rendezvous_goes_on_beside_strangers():
    """Connections that are held open, silent, half a message, or 4 KiB without an end; then all tasks connect."""
    with rendezvous("secret") as where, contextlib.ExitStack() as held:
        tracemalloc.start()
        for number in range(4 * UNAUTHENTICATED_PEERS):
            stranger = held.enter_context(socket.create_connection(where))
            with contextlib.suppress(OSError):  # the oldest are closed
                stranger.sendall((b"", b'{"nonce": "', b"x" * 4096, b"[" * 4000)[number % 4])
        tasks = []
        for task in ADDRESSES:
            tasks.append(channel.connect(where, PURPOSE, "secret", WAIT_S))
            held.callback(tasks[-1].close)
            tasks[-1].send(_hello(task))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for each in tasks:
            each.connection.settimeout(WAIT_S)
            while not any("go" in message for message in each.receive()):
                pass
    assert peak < UNAUTHENTICATED_PEERS * 2**15 + CONNECTION_BYTES


def test_without_a_secret_other_users_of_this_machine_are_refused():
    """Else their bytes could reach pickle in the other tasks."""
    with rendezvous("") as where:
        with contextlib.closing(channel.connect(where, PURPOSE, "", WAIT_S)) as mine:
            assert channel.user_of_peer(mine.connection) == os.geteuid()
            mine.send(_hello(next(iter(ADDRESSES))))
            mine.connection.settimeout(WAIT_S)
            assert "missing" in mine.receive()[0]
        as_ipv6 = ("::ffff:" + where[0], where[1])  # a socket of the other family
        for address in (where, as_ipv6) if os.geteuid() == 0 else ():
            done = subprocess.run([sys.executable, "-c", _AS_NOBODY.format(address)], capture_output=True, text=True)
            assert "refused" in done.stdout, done.stdout + done.stderr


_AS_NOBODY = """
import os
from allred.launch.rendezvous_server import PURPOSE
from allred.runtime import channel
os.setuid(65534)
try:
    mine = channel.connect({}, PURPOSE, "", 60.0)
    mine.send({{"rank": 0}})
    print(mine.receive())
    print(channel.user_of_peer(mine.connection))
except channel.HandshakeError as error:
    print(error)
"""


def test_the_page_goes_on_beside_strangers():
    server = page_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket), contextlib.ExitStack() as held:
        for number in range(2 * UNAUTHENTICATED_PEERS):
            stranger = held.enter_context(socket.create_connection(server.server_address))
            with contextlib.suppress(OSError):  # the oldest are closed
                stranger.sendall((b"", b"GET / HTTP/1.1\r\nHost: ")[number % 2])
        assert urllib.request.urlopen(server.address, timeout=WAIT_S).read().startswith(b"<!doctype html>")
        assert len(server._waiting) <= UNAUTHENTICATED_PEERS
        server.shutdown()


def test_memory_for_a_request_of_the_page():
    server = page_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket), socket.create_connection(server.server_address) as stranger:
        tracemalloc.start()
        with contextlib.suppress(OSError):  # it is closed
            stranger.sendall(b"GET / HTTP/1.1\r\n" + b"".join(b"A: " + b"x" * 60000 + b"\r\n" for _ in range(3)))
            for _ in range(90):
                stranger.sendall(b"A: " + b"x" * 60000 + b"\r\n")
            stranger.settimeout(WAIT_S)
            assert b" 200 " not in stranger.recv(1000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        server.shutdown()
    assert peak < CONNECTION_BYTES


def test_arrays_are_still_read(tmp_path):
    from allred.data import columns

    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "a.npy", "wb") as file:
            np.lib.format.write_array(file, np.arange(6), version)
        assert columns.npy(tmp_path / "a.npy").tolist() == [*range(6)]
