"""Targets of the fuzzer of inputs (hostile.py): each passes bytes to the code that listens at a port or parses text.

A target returns, or raises an error of `expected`; anything else is a defect. Inputs begin as what the real code wrote:
`seeds` of each target.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from allred import checkpoint, config, log
from allred.checkpoint import files as checkpoint_files
from allred.checkpoint import restore, table_rows, tensor_file
from allred.cluster.spec import tf_config
from allred.data import columns, tfrecord_files
from allred.errors import AllredError, CheckpointError, ConfigError, DataError, InputError
from allred.launch import rendezvous_client
from allred.launch.rendezvous_bootstrap import TaskConnection
from allred.launch.rendezvous_server import PURPOSE, Pmi, RendezvousServer
from allred.monitor import state, web
from allred.run import host_list
from allred.runtime import channel
from allred.runtime.channel import Channel, HandshakeError, Listener
from allred.runtime.loop import Loop
from allred.runtime.timings import UNAUTHENTICATED_BYTES
from allred.session import summary
from allred.timeline import recorder, show
from allred.timeline.command import main as timeline_command
from allred.timeline.rank_file import read_timeline
from allred.watch import job_directory
from allred.watch.process import Watcher
from allred.watch.records import WatcherSettings

CONNECTION_BYTES = 1 << 22  # the bound of the memory for one connection, or one small file


class ReachedPickle(BaseException):
    """Bytes of a peer that is not authenticated have reached pickle."""


@dataclasses.dataclass(frozen=True)
class Target:
    """run: the call. seeds: valid inputs. expected: errors that `run` may raise. nbytes, factor: the memory that a call
    may use is nbytes + factor * bytes of the input."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    expected: tuple[type[Exception], ...] = ()
    nbytes: int = CONNECTION_BYTES
    factor: int = 0


TARGETS: dict[str, Target] = {}


def _target(seeds: Callable[[], list[bytes]], *expected: type[Exception], factor: int = 0, nbytes=CONNECTION_BYTES):
    def add(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        TARGETS[run.__name__] = Target(run, seeds, expected, nbytes, factor)
        return run

    return add


@contextlib.contextmanager
def no_pickle() -> Iterator[None]:
    """Raise ReachedPickle if the code in this block calls pickle."""

    def refuse(*arguments, **more):
        raise ReachedPickle

    kept = pickle.loads, pickle.load, pickle.Unpickler
    pickle.loads = pickle.load = pickle.Unpickler = refuse
    try:
        yield
    finally:
        pickle.loads, pickle.load, pickle.Unpickler = kept


_directory: list[str] = []


def directory() -> pathlib.Path:
    """The directory for the files of this process, in memory if possible."""
    if not _directory:
        _directory.append(tempfile.mkdtemp(prefix="allred-hostile-", dir=os.environ.get("HOSTILE_DIRECTORY", memory())))
    return pathlib.Path(_directory[0])


def memory() -> str | None:
    """Return a directory in memory, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def remove_directory() -> None:
    while _directory:
        shutil.rmtree(_directory.pop())


def _file(name: str, data: bytes) -> pathlib.Path:
    path = directory() / name
    path.write_bytes(data)
    return path


# Channels. A Unix socket in place of TCP: thousands of TCP connections would use up all ports.

SECRET = "the secret"


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("")
        name = unix.getsockname().decode("latin-1")
        yield unix, name


def _connected(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(name)
    peer.setblocking(False)
    return peer


def _send(loop: Loop, peer: socket.socket, data: bytes) -> None:
    """Send all bytes while the loop runs, until it has nothing to do."""
    for _ in range(len(data) // 1000 + 20):
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            data = data[peer.send(data, socket.MSG_NOSIGNAL) :] if data else data
        loop.turn(0.0)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            peer.recv(1 << 16)
        if not data:
            break
    for _ in range(3):
        loop.turn(0.0)


def _authenticate(loop: Loop, peer: socket.socket, purpose: str, secret: str) -> Channel:
    """Let a peer prove that it knows the secret."""
    mine = Channel(peer)
    steps = channel.prove(mine, purpose, secret)
    next(steps)
    for _ in range(20):
        loop.turn(0.0)
        with contextlib.suppress(StopIteration):
            for message in mine.receive():
                steps.send(message)
            continue
        return mine
    raise AssertionError("a peer with the secret was not authenticated")


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[int, str]]]:
    """Record the lines that all channels of this process send: (id of the channel, line)."""
    lines: list[tuple[int, str]] = []
    real = Channel.send_line

    def send_line(self: Channel, line: str) -> None:
        lines.append((id(self), line))
        real(self, line)

    Channel.send_line = send_line
    try:
        yield lines
    finally:
        Channel.send_line = real


def _streams(lines: list[tuple[int, str]]) -> list[bytes]:
    """The lines of each channel."""
    found: dict[int, list[str]] = {}
    for sender, line in lines:
        found.setdefault(sender, []).append(line)
    return ["".join(f"{line}\n" for line in each).encode() for each in found.values()]


def _handshake_seeds() -> list[bytes]:
    """What both ends send, with the right secret and with a wrong one."""
    with recorded() as lines, listening() as (unix, name):
        loop, kept = Loop(), []
        Listener(loop, unix, "test", SECRET, lambda peer, messages: kept.append(peer))
        ends = threading.Event()
        thread = threading.Thread(target=lambda: [loop.turn(0.05) for _ in iter(ends.is_set, True)], daemon=True)
        thread.start()
        for secret in (SECRET, "wrong"):
            with contextlib.suppress(HandshakeError):
                found = channel.connect(name, "test", secret)
                found.send({"rank": 1})
                kept.append(found)
        ends.set()
        thread.join()
        loop.close()
    return _streams(lines)


@_target(_handshake_seeds)
def handshake(data: bytes) -> None:
    """A listener with a secret, and a peer without it that sends the bytes in three parts."""
    admitted = []
    with listening() as (unix, name), contextlib.closing(Loop()) as loop, no_pickle():
        listener = Listener(loop, unix, "test", SECRET, lambda peer, messages: admitted.append(peer))
        with _connected(name) as peer:
            loop.turn(0.0)
            for part in (data[: len(data) // 3], data[len(data) // 3 : -3], data[-3:] if len(data) > 2 else b""):
                _send(loop, peer, part)
            held = sum(len(each.channel._received) for each in listener._pending)
            assert held <= UNAUTHENTICATED_BYTES + 1, f"{held} bytes of a peer without the secret are kept"
            with _connected(name) as other:  # the listener goes on
                _authenticate(loop, other, "test", SECRET).send({"rank": 0})
                loop.turn(0.0)
        listener.close()
    assert len(admitted) == 1, "a peer without the secret was admitted"
    admitted[0].close()


@_target(_handshake_seeds, HandshakeError, OSError)
def connector(data: bytes) -> None:
    """A process that connects to a program that does not know the secret and sends the bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs, no_pickle():
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        channel._prove_as_connector(Channel(ours, UNAUTHENTICATED_BYTES), "test", SECRET, time.monotonic() + 3)
        raise AssertionError("a listener without the secret was accepted")


@_target(_handshake_seeds, ValueError, OSError)
def messages(data: bytes) -> None:
    """Lines of an authenticated peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        reader, left = Channel(ours, longest=1 << 12), data
        while left:
            left = left[theirs.send(left[:3000]) :]
            for message in reader.receive():
                assert isinstance(message, dict)
            assert len(reader._received) <= 1 << 12


# The rendezvous. Without a secret every process of this machine is admitted.

ADDRESSES = {"/job:ps/task:0": "127.0.0.1:1", "/job:worker/task:0": "127.0.0.1:2", "/job:worker/task:1": "127.0.0.1:3"}
_PMI_OF_MPICH = """cmd=init pmi_version=1 pmi_subversion=1
cmd=get_maxes
cmd=get_appnum
cmd=get_my_kvsname
cmd=get kvsname=allred_9472826995ffb49a key=PMI_hwloc_xmlfile
cmd=put kvsname=allred_9472826995ffb49a key=-allgather-shm-1-0 value=2D3A
cmd=barrier_in
cmd=finalize
"""


def _hello(task: str) -> dict[str, object]:
    return {
        "task": task, "addresses": ADDRESSES, "node": "node", "host": "host", "pid": 7, "user": os.geteuid(),
    }  # fmt: skip


class _Tasks(TaskConnection):
    """A task whose lines are kept."""

    own_host = ""

    def __init__(self, rank: int) -> None:
        super().__init__(limit_s=1.0)
        self.rank, self.size, self.sent = rank, len(ADDRESSES), []

    def _send(self, line: str) -> None:
        self.sent.append(line)

    def _receive(self, timeout_s: float) -> None: ...


def _exchange(rank: int) -> str:
    task = _Tasks(rank)
    task.begin(range(task.size), pickle.dumps(("host", rank)), "title")
    task._send("cmd=missing key=" + next(iter(task._values)))
    return "\n".join(task.sent) + "\n"


def _rendezvous_seeds() -> list[bytes]:
    hellos = [json.dumps(_hello(task)) + "\nstarts\nup\nleft\n" for task in ADDRESSES]
    exchanges = [f'{{"rank": {rank}}}\n{_exchange(rank)}' for rank in range(len(ADDRESSES))]
    mpi = [f'{{"rank": {rank}}}\n{_PMI_OF_MPICH}' for rank in range(len(ADDRESSES))]
    twice, problem = (
        hellos[:2] + hellos[1:2],
        json.dumps({**_hello(next(iter(ADDRESSES))), "problem": "no port"}) + "\n",
    )
    wrong = json.dumps({**_hello("/job:worker/task:0"), "addresses": {"/job:ps/task:0": "a:1"}}) + "\n"
    streams = [hellos + exchanges, hellos + mpi, twice, [problem], [hellos[0], wrong], [*hellos, hellos[0]]]
    return ["\0".join(each).encode() for each in streams]


def _close_all(loop: Loop) -> None:
    for key in [*loop._selector.get_map().values()]:
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fileobj != loop._pipe[0]:
            os.close(key.fileobj)
    loop.close()


@_target(_rendezvous_seeds)
def rendezvous(data: bytes) -> None:
    """The rendezvous process without a secret: several peers, separated by zero bytes, prove that and send the rest."""
    with listening() as (unix, name), no_pickle(), contextlib.ExitStack() as stack:
        settings = {"secret": "", "addresses": ADDRESSES, "listener": os.dup(unix.fileno()), "pid": os.getpid()}
        server = RendezvousServer(settings)
        stack.callback(_close_all, server._loop)
        peers = []
        for part in data.split(b"\0")[:8]:
            with contextlib.suppress(ConnectionRefusedError):
                peers.append(stack.enter_context(_connected(name)))
                _authenticate(server._loop, peers[-1], PURPOSE, "")
                _send(server._loop, peers[-1], part)
        for peer in peers:
            peer.close()
            server._loop.turn(0.0)


def _pmi_seeds() -> list[bytes]:
    return [_PMI_OF_MPICH.encode(), *(_exchange(rank).encode() for rank in range(len(ADDRESSES)))]


@_target(_pmi_seeds, ValueError, factor=200)
def pmi(data: bytes) -> None:
    """Lines of a rank for PMI-1 and the exchanges."""
    server = Pmi(["a", "a", "b"])
    with no_pickle():
        for number, line in enumerate(data.decode(errors="replace").split("\n")):
            for ranks, answer in server.handle(number % 3, line):
                assert set(ranks) <= {0, 1, 2}
                assert isinstance(answer, str)


def _task_seeds() -> list[bytes]:
    server, found = Pmi(["a", "a", "b"]), []
    for rank in range(3):
        for line in _exchange(rank).splitlines():
            found += [answer for others, answer in server.handle(rank, line) if 0 in others]
    return [("\n".join(found) + "\n").encode()]


@_target(_task_seeds, AllredError)
def task(data: bytes) -> None:
    """A task that gets the bytes from the rendezvous process."""
    ours, theirs = socket.socketpair()
    alive, other = socket.socketpair()
    with theirs, other, no_pickle():
        joined = rendezvous_client.Joined(0, 3, ours.detach(), alive.detach(), None)
        with _quiet_fork(), contextlib.closing(_connection(joined)) as found:
            key = found.begin(range(3), b"value", "title")
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                theirs.send(data)
            theirs.close()
            while not found.poll(key):
                pass
            assert all(isinstance(value, bytes) for value in found.take(key))


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """The connection registers itself for forks, once for each input."""
    real, os.register_at_fork = os.register_at_fork, lambda **more: None
    try:
        yield
    finally:
        os.register_at_fork = real


def _connection(joined: rendezvous_client.Joined):
    from allred.launch.rendezvous_bootstrap import RendezvousConnection

    return RendezvousConnection(joined, 1.0, tuple(ADDRESSES))


def _waiting_seeds() -> list[bytes]:
    sent = [{"missing": ["a (b:1)"]}, {"notice": "text"}, {"refused": "text"}, {"go": True}, {"differs": True}]
    return [
        ("\n".join(map(json.dumps, each)) + "\n").encode()
        for each in (sent[:2], sent[2:3], sent[:2] + sent[3:4], sent[4:])
    ]


@_target(_waiting_seeds, AllredError)
def waiting(data: bytes) -> None:
    """A task that waits for the others, and gets the bytes from the rendezvous process."""
    ours, theirs = socket.socketpair()

    class Connector:
        addresses = ADDRESSES

        def connect(self, where, **hello):
            return Channel(ours)

    with ours, theirs, no_pickle():
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.close()
        rendezvous_client._wait(Connector(), [], {}, rendezvous_client._Waiting("task", 5.0, "another"))


# The watcher's socket for ranks. Processes of this user reach it.

_watchers: list[Watcher] = []


def _watcher() -> Watcher:
    if not _watchers:
        about = {"job": "hostile", "program": "", "mode": "sync", "starts": 1, "host": "here"}
        settings = WatcherSettings(
            token="a" * 32, ranks=1, size=1, nodes=1, warn_s=60.0, limit_s=60.0, chief=True, address="", expendable=(),
            launcher=False, runner="", about=about,
        )  # fmt: skip
        _watchers.append(Watcher(settings))
    return _watchers[0]


def _rank_seeds() -> list[bytes]:
    hello = {"token": "b" * 32, "rank": 0, "host": "here", "stack_signal": 12, "main_thread": 1, "chief": None}
    return [json.dumps(hello).encode()]


@_target(_rank_seeds)
def rank(data: bytes) -> None:
    """A process of this user that connects to the watcher without the job's token, and passes descriptors."""
    watcher = _watcher()
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, no_pickle():
        peer.connect(watcher.name.encode("latin-1"))
        socket.send_fds(peer, [data[:100_000]], [0, 1, 2][: len(data) % 4])
        watcher._loop.turn(0.0)
    assert not watcher._ranks
    after = len(os.listdir("/proc/self/fd"))
    assert after == before, f"{after - before} descriptors of a refused process stay open"


# The live page.

_TOKEN = "correct-horse-battery"


def _page_seeds() -> list[bytes]:
    browser = "User-Agent: Mozilla/5.0\r\nAccept: text/html\r\nConnection: keep-alive\r\n\r\n"
    urls = ("/", "/?token=wrong", "/events?token=wrong")
    found = [f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n{browser}" for url in urls]
    found += [
        "GET /\r\n",
        "HEAD / HTTP/1.0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n",
    ]
    return [each.encode() for each in found]


def page_server() -> web.PageServer:
    """A server of the page of a job that does not exist, at a free port."""
    kept, web.resolve = web.resolve, lambda name: name
    try:
        return web.PageServer("hostile")
    finally:
        web.resolve = kept


_pages: list[web.PageServer] = []


@_target(_page_seeds)
def page(data: bytes) -> None:
    """A request without the token."""
    if not _pages:
        _pages.append(page_server())
        _pages[0].token = _TOKEN
    ours, theirs = socket.socketpair()
    with ours, theirs, no_pickle():
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            web._Handler(ours, ("127.0.0.1", 1), _pages[0])
        with contextlib.suppress(BlockingIOError):
            answer = theirs.recv(1 << 16)
            assert b" 200 " not in answer.split(b"\r\n", 1)[0] or _TOKEN.encode() in data


# Checkpoints.


def _checkpoint_files(path: pathlib.Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.iterdir())}


def _saved() -> dict[str, bytes]:
    """The files of a small checkpoint."""
    with tempfile.TemporaryDirectory() as root:
        begun = checkpoint.begin(root, 3)
        entries = [
            checkpoint.whole("w", np.arange(6.0).reshape(2, 3)),
            checkpoint.whole("w", np.arange(6.0, dtype=np.float32).reshape(2, 3), "m"),
            (checkpoint.Entry("b", "", "int64", (4,), 0, 2), np.arange(2)),
        ]
        rest = [(checkpoint.Entry("b", "", "int64", (4,), 2, 4), np.arange(2)), checkpoint.pickled_extra({"a": 1})]
        shards = [checkpoint.write_shard(begun, index, 2, each) for index, each in enumerate((entries, rest))]
        return _checkpoint_files(checkpoint.commit(begun, 3, shards, {"optimizer": "momentum", "ranks": 2}))


def _in_checkpoint(change: Callable[[dict[str, bytes]], None]) -> pathlib.Path:
    """A directory with the files of the checkpoint after a change."""
    content = _cached(_saved)
    found = dict(content)
    change(found)
    path = directory() / "root" / "step-00000003"
    path.mkdir(parents=True, exist_ok=True)
    for name, data in found.items():
        (path / name).write_bytes(data)
    return path


_cache: dict[object, object] = {}


def _cached(function):
    if function not in _cache:
        _cache[function] = function()
    return _cache[function]


def _manifest_seeds() -> list[bytes]:
    return [_cached(_saved)["manifest.json"], b'{"writer": "pid 7 on host"}']


def _read_all(path: pathlib.Path) -> None:
    with no_pickle():
        checkpoint.verify(path)
        restore.read_newest(path.parent)
        checkpoint.read_checkpoint(path)


@_target(_manifest_seeds, CheckpointError, factor=100)
def manifest(data: bytes) -> None:
    """The bytes in place of the manifest."""
    _read_all(_in_checkpoint(lambda files: files.update({"manifest.json": data})))


def _content_seeds() -> list[bytes]:
    content = json.loads(_cached(_saved)["manifest.json"])
    del content["checksum"]
    tables = {"t": {"step": 1, "base": "", "parts": content["shards"][:1]}}
    return [json.dumps(each).encode() for each in (content, {**content, "meta": {"tables": tables}})]


@_target(_content_seeds, CheckpointError, factor=100)
def sealed_manifest(data: bytes) -> None:
    """The same, with the right checksum."""
    try:
        content = json.loads(data)
        text = json.dumps({**content, "checksum": checkpoint_files._content_checksum(content)}).encode()
    except (ValueError, TypeError, RecursionError):
        return
    path = _in_checkpoint(lambda files: files.update({"manifest.json": text}))
    _read_all(path)
    for name in table_rows.tables_in(checkpoint_files.read_manifest(path).meta):
        list(table_rows.read_rows(path, name))


def _shard_seeds() -> list[bytes]:
    return [data for name, data in _cached(_saved).items() if name.endswith(".safetensors")]


@_target(_shard_seeds, CheckpointError, factor=100)
def sealed_shard(data: bytes) -> None:
    """The bytes in place of a shard, with the right length and checksum in the manifest."""
    content = json.loads(_cached(_saved)["manifest.json"])
    del content["checksum"]
    for shard in content["shards"][:1]:
        shard.update(nbytes=len(data), checksum=f"{zlib.crc32(data):08x}")
    sealed = {**content, "checksum": checkpoint_files._content_checksum(content)}
    name = content["shards"][0]["file"]
    _read_all(_in_checkpoint(lambda files: files.update({"manifest.json": json.dumps(sealed).encode(), name: data})))


@_target(_shard_seeds, OSError, factor=100)
def tensors(data: bytes) -> None:
    """A file of tensors of which nothing is expected."""
    with open(_file("tensors", data), "rb", buffering=0) as file:
        reader = tensor_file.Reader(file)
        reader.read({}, lambda key: np.empty(0))
        reader.read_rest()


# Timelines.


def _timeline() -> bytes:
    path = directory() / "seed.timeline"
    written = recorder.Recorder(str(path))
    about = {"job": "j", "rank": 0, "size": 2, "name": "rank 0", "host": "h", "pid": 7, "time": 1e9, "start": 5}
    written.begin(about)
    for record in _records():
        written.add(record)
    written.close()
    return path.read_bytes()


def _records() -> list[tuple[object, ...]]:
    rows = recorder.ROW.pack(50, 60, 8, 0, 0) + recorder.ROW.pack(70, 0, 8, 1, 1)
    return [
        ("clock", 10, 3, 1), ("clock", 90, 4, 1), ("span", "", "step", "step 1", 10, 90, 0),
        ("span", "data", "load", "b\u00e9", 12, 14, 2**40), ("operation", "0-1", "allreduce", "w", 20, 25, 30, 96),
        ("call", "0-1", "allreduce", 18), ("calls", "0-1", ["a", "b"], rows), ("end", 95),
    ]  # fmt: skip


def _timeline_seeds() -> list[bytes]:
    return [_cached(_timeline)]


def _show_timeline(data: bytes) -> None:
    folder = directory() / "timelines"
    folder.mkdir(exist_ok=True)
    path = folder / "rank-0.timeline"
    path.write_bytes(data)
    with no_pickle():
        found = read_timeline(path)
        assert isinstance(found.number, int)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            timeline_command(["merge", str(folder), "--output", str(directory() / "merged.json")])


@_target(_timeline_seeds, InputError, factor=100)
def timeline(data: bytes) -> None:
    """A file of a rank."""
    _show_timeline(data)


def _chunk_seeds() -> list[bytes]:
    data, at, found = _cached(_timeline), len(recorder.MAGIC), []
    while at < len(data):
        length, _ = recorder.CHUNK.unpack_from(data, at)
        found.append(data[at + recorder.CHUNK.size :][:length])
        at += recorder.CHUNK.size + length
    return found


@_target(_chunk_seeds, InputError, factor=100)
def sealed_timeline(data: bytes) -> None:
    """The bytes as the records of a rank, with the right checksum, after its first record."""
    chunks = [data] if data.startswith(_cached(_chunk_seeds)[0][:5]) else [_cached(_chunk_seeds)[0], data]
    if data:
        sealed = (recorder.CHUNK.pack(len(each), zlib.crc32(each)) + each for each in chunks)
        _show_timeline(recorder.MAGIC + b"".join(sealed))


def _trace_seeds() -> list[bytes]:
    folder = directory() / "merged"
    folder.mkdir(exist_ok=True)
    (folder / "rank-0.timeline").write_bytes(_cached(_timeline))
    with contextlib.redirect_stdout(io.StringIO()):
        timeline_command(["merge", str(folder), "--output", str(directory() / "trace.json")])
    return [(directory() / "trace.json").read_bytes()]


@_target(_trace_seeds, InputError, factor=200)
def trace(data: bytes) -> None:
    """A merged timeline."""
    show.page_document(show.read_trace(_file("trace", data)))


# Hosts and settings.


def _host_seeds() -> list[bytes]:
    return [b"node1 slots=4 max_slots=8  # a comment\nnode2:2\n\nnode3 4\nnode3\n", b"node1:4,node2"]


@_target(_host_seeds, ConfigError, factor=200)
def hosts(data: bytes) -> None:
    """A host file, and the option --hosts."""
    path = _file("hosts", data)
    with contextlib.suppress(ConfigError):
        host_list.find(data.decode(errors="replace"), "", {}).assign(4)
    host_list.find("", str(path), {}).assign(4)


_BATCH = ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "LSB_MCPU_HOSTS")


def _batch_seeds() -> list[bytes]:
    return [
        b"login,n[08-10,12]-ib,gpu[1-2]\0" + b"4(x2),2\0",
        b"\0\0node1 4 node2 2",
        b"\0\0\0node1 4 all.q UNDEFINED\n",
    ]


@_target(_batch_seeds, ConfigError, factor=200, nbytes=1 << 25)  # 65536 hosts
def batch_variables(data: bytes) -> None:
    """The variables of a batch system."""
    *values, file = [*data.split(b"\0"), b"", b"", b"", b""][:4]
    environ = {name: os.fsdecode(value) for name, value in zip(_BATCH, values, strict=True)}
    if file:
        environ["PE_HOSTFILE"] = str(_file("pe", file))
    with contextlib.suppress(ConfigError):
        host_list.find("", "", environ).assign(4)
    host_list.find("", "", {key: value for key, value in environ.items() if key != "SLURM_JOB_NODELIST"}).assign(4)


def _setting_seeds() -> list[bytes]:
    return [b"ALLRED_TIMEOUT_S=30", b"ALLRED_FUSION_BYTES=1.5MiB", b"ALLRED_BACKEND=shm", b"ALLRED_ARENA=256MiB"]


@_target(_setting_seeds, ConfigError, factor=200)
def settings(data: bytes) -> None:
    """A variable ALLRED_*."""
    name, _, value = os.fsdecode(data).partition("=")
    config.explicit_settings({name: value}, {})


def _tf_config_seeds() -> list[bytes]:
    cluster = {"chief": ["a:1"], "ps": ["b:2"], "worker": ["c:3", "d:4"]}
    task = {"type": "worker", "index": 1}
    return [json.dumps({"cluster": cluster, "task": task}).encode(), b'{"cluster": {"worker": 2}, "task": {}}']


@_target(_tf_config_seeds, ConfigError, factor=300)
def tensorflow_config(data: bytes) -> None:
    """The variable TF_CONFIG."""
    spec, _, _ = tf_config({"TF_CONFIG": os.fsdecode(data)})
    spec.addresses()
    spec.as_dict()


# Data files.


def _array_seeds() -> list[bytes]:
    found = []
    for array in (
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((), "f8"),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    ):
        file = io.BytesIO()
        np.save(file, array)
        found.append(file.getvalue())
    return found


@_target(_array_seeds, DataError, OSError, factor=100)
def array_file(data: bytes) -> None:
    """A file of numpy."""
    with no_pickle():
        columns.npy(_file("array.npy", data))


def _idx_seeds() -> list[bytes]:
    import gzip

    plain = b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes(6)
    return [plain, gzip.compress(plain), b"\0\0\x0e\x01" + struct.pack(">I", 1) + bytes(8)]


@_target(_idx_seeds, DataError, factor=3000)  # gzip packs a thousand bytes into one
def idx_file(data: bytes) -> None:
    """An IDX file."""
    columns.idx(_file("idx", data))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    crc = struct.pack("<I", tfrecord_files.masked_crc32c(length))
    return length + crc + data + struct.pack("<I", tfrecord_files.masked_crc32c(data))


def _record_seeds() -> list[bytes]:
    return [_record(b"one") + _record(b"") + _record(b"three")]


@_target(_record_seeds, DataError, factor=100)
def records(data: bytes) -> None:
    """A TFRecord file, as it is and with right checksums of the length."""
    length = data[:8].ljust(8, b"\0")
    sealed = length + struct.pack("<I", tfrecord_files.masked_crc32c(length)) + data[12:]
    for each in (sealed, data):
        list(tfrecord_files.TFRecord([str(_file("records", each))], "skip"))
    list(tfrecord_files.TFRecord([str(_file("records", data))], "raise"))


# Files of monitors.


def _scalar_seeds() -> list[bytes]:
    return [b'{"step": 1, "time": 1.5, "loss": 0.25, "lr": "NaN"}\n{"step": 2, "time": 2.5, "loss": 0.125}\n']


@_target(_scalar_seeds, factor=300)
def scalars(data: bytes) -> None:
    """The scalars of a session, as a monitor and a session that resumes read them."""
    folder = _file("scalars.jsonl", data).parent
    state.Scalars().read([str(folder)])
    for line in data.splitlines(keepends=True):
        summary._is_valid(line, 1)


def _job_seeds() -> list[bytes]:
    return [json.dumps({"job": "j", "port": 1, "token": "t", "process": os.getpid(), "started": "1"}).encode()]


@_target(_job_seeds, AllredError, factor=100)
def job_files(data: bytes) -> None:
    """The files of running jobs and of jobs that have ended."""
    kept, job_directory.directory = job_directory.directory, directory
    try:
        for kind in (job_directory.JOB, job_directory.ENDED):
            _file(f"name{kind}", data)
        for entry in job_directory.entries(job_directory.JOB).values():
            assert isinstance(entry, dict)
        job_directory.remove_entry(_file("name.run", data), {"port": 1})
        assert isinstance(job_directory.read_ended("name"), dict)
    finally:
        job_directory.directory = kept


def quiet() -> None:
    """Print no warnings of allred in this process."""
    log.rank_warning = log.runtime_warning = lambda *arguments, **more: None
