"""The rendezvous of a task that was started without mpirun: it waits until all tasks have connected.

A process at the first task's address serves it (rendezvous_server.py). The result is two connections to this process:
one for exchanges between the tasks (rendezvous_bootstrap.py), or for PMI-1 if the tasks start MPI; and one that reports
the end of this task, and of the others until all have started.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from allred import log
from allred.cluster import mpi
from allred.errors import AllredError, CollectiveTimeout, ConfigError
from allred.launch.rendezvous_server import MAPPING_CHARS, PURPOSE, digest, mapping
from allred.runtime import channel, detached, open_files
from allred.runtime.channel import Channel, HandshakeError, connect
from allred.runtime.timings import ADDRESS_FREE_S, AUTHENTICATE_S, REMIND_TASKS_S, RETRY_S, UNAUTHENTICATED_PEERS
from allred.watch.start import own_address

SocketAddress = tuple[Any, ...]  # the argument of socket.bind
_OTHER_FILES = 32  # of the rendezvous process


@dataclasses.dataclass(frozen=True)
class Joined:
    """The result of the rendezvous. pmi, lifeline: descriptors of the two connections. listener: the socket at this
    task's address; None for the first task, where the process listens."""

    rank: int
    size: int
    pmi: int
    lifeline: int
    listener: socket.socket | None


class Connector:
    """Connects `task` of the cluster with these addresses to the rendezvous process."""

    def __init__(self, addresses: Mapping[str, str], task: str, secret: str) -> None:
        self.addresses, self._task, self._secret = dict(addresses), task, secret
        self._first = next(iter(addresses))
        self._at = f"{self._first} ({addresses[self._first]})"

    def connect(self, where: list[SocketAddress], **hello: Any) -> Channel:
        """Open an authenticated channel and send the hello. Raises ConnectionError if the caller should try again, else
        ConfigError or AllredError."""
        error: OSError | None = None
        for address in where:
            try:
                found = connect(address, PURPOSE, self._secret)
            except HandshakeError as caught:
                raise ConfigError(f"{self._task}: the process at {self._at} {caught}") from None
            except OSError as caught:
                error = caught
                continue
            user = None if self._secret else channel.user_of_peer(found.connection)
            if user is not None and user != os.geteuid():
                found.close()
                if user < 0:
                    raise ConnectionError(f"{self._at}: it has closed the connection")
                raise ConfigError(
                    f"{self._task}: the process at {self._at} is of user {user}, and this one of user {os.geteuid()}; "
                    "set the same ALLRED_SECRET for all tasks"
                )
            found.send(hello)
            return found
        if isinstance(error, ConnectionRefusedError) and self._task == self._first:
            raise AllredError(
                f"{self._task}: the rendezvous process that it started at {self._at} has ended; start it again"
            )
        raise ConnectionError(f"{self._at}: {getattr(error, 'strerror', None) or error}")


class _Waiting:
    """The messages to the user while a task waits, and its time limit. for_whom: the tasks that are missing."""

    def __init__(self, task: str, limit_s: float, for_whom: str) -> None:
        self.for_whom = for_whom
        self._task, self._limit_s, self._begun = task, limit_s, time.monotonic()
        self._remind_at = self._begun + REMIND_TASKS_S
        self._notice = ""

    def seconds_to_wait(self) -> float:
        """Return the seconds until the next message. Raises CollectiveTimeout at the limit."""
        now = time.monotonic()
        waited = now - self._begun
        if waited >= self._limit_s:
            notice = f". Last notice: {self._notice}" if self._notice else ""
            raise CollectiveTimeout(
                f"{self._task} has waited for {waited:.0f} s (ALLRED_START_TIMEOUT_S) for {self.for_whom}{notice}"
            ) from None
        if now >= self._remind_at:
            log.rank_warning(
                f"{self._task} waits for {self.for_whom}; {waited:.0f} s of at most {self._limit_s:g} s have passed"
            )
            self._remind_at += REMIND_TASKS_S
        return max(0.01, min(self._remind_at - now, self._begun + self._limit_s - now))

    def print_notice(self, text: str) -> None:
        self._notice = text
        log.rank_warning(text)


def rendezvous(
    addresses: Mapping[str, str],
    task: str,
    secret: str,
    limit_s: float,
    listener: socket.socket | None = None,
) -> Joined:
    """Wait until all tasks have connected, `limit_s` seconds at most.

    addresses: of all tasks by name, in rank order. listener: the socket at this task's address, if it is open already.
    Raises ConfigError if this task cannot take part or is refused; CollectiveTimeout at the limit.
    """
    detached.keep_standard_files()
    first = next(iter(addresses))
    where = look_up({first: addresses[first]})
    connector = Connector(addresses, task, secret)
    hello: dict[str, Any] = {"task": task, "digest": digest(addresses), "node": shared_memory_domain()}
    hello |= {"host": socket.gethostname(), "pid": os.getpid(), "user": os.geteuid()}
    try:
        where = look_up(addresses)
        check_addresses(addresses, where, secret)
        listener = listener or listen(task, addresses[task], where[task])
    except ConfigError as error:
        if task != first:
            with contextlib.suppress(AllredError, OSError, ValueError):
                _answer(connector.connect(where[first], **hello, problem=str(error)))  # wait until it was read
        raise
    if task == first:
        _start(addresses, secret, listener)
    waiting = _Waiting(task, limit_s, f"{first} ({addresses[first]})")
    while (lifeline := _wait(connector, where[first], hello, waiting)) is None:
        pass
    rank, size = list(addresses).index(task), len(addresses)
    try:
        pmi = connector.connect(where[first], rank=rank)
        _answer(pmi)
        files = pmi.detach().detach(), lifeline.detach().detach()
    except (OSError, ValueError) as error:
        raise AllredError(
            f"{task}: the connection to the process at {addresses[first]} failed before the tasks started: {error}"
        ) from None
    return Joined(rank, size, *files, None if task == first else listener)


def _answer(to: Channel) -> dict[str, Any]:
    return to.receive_one(time.monotonic() + AUTHENTICATE_S)


def _start(addresses: Mapping[str, str], secret: str, listener: socket.socket) -> None:
    if problem := open_files.problem(2 * len(addresses) + UNAUTHENTICATED_PEERS + _OTHER_FILES):
        raise ConfigError(f"the rendezvous process needs 2 connections for each of {len(addresses)} tasks: {problem}")
    settings = {"addresses": dict(addresses), "secret": secret, "listener": listener.fileno(), "pid": os.getpid()}
    found = detached.start("allred.launch.rendezvous_server", settings, files=[listener.fileno()])
    listener.close()
    if found["problem"]:
        raise ConfigError(f"the rendezvous process of the tasks did not start: {found['problem']}")


def _wait(connector: Connector, where: list[SocketAddress], hello: dict[str, Any], waiting: _Waiting) -> Channel | None:
    """Connect and wait. Return the connection after all tasks have connected; None if the caller should try again."""
    try:
        lifeline = connector.connect(where, **hello)
    except ConnectionError as error:
        waiting.for_whom = str(error)
        time.sleep(min(RETRY_S, waiting.seconds_to_wait()))
        return None
    try:
        while (messages := _next(lifeline, waiting.seconds_to_wait())) is not None:
            for message in messages:
                if "differs" in message:
                    hello["addresses"] = connector.addresses
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                if "notice" in message:
                    waiting.print_notice(str(message["notice"]))
                if isinstance(message.get("missing"), list):
                    waiting.for_whom = " and ".join(map(str, message["missing"]))
                if "go" in message:
                    return lifeline
    except BaseException:
        lifeline.connection.close()
        raise
    lifeline.connection.close()
    return None


def _next(lifeline: Channel, limit_s: float) -> list[dict[str, Any]] | None:
    """Return the messages that arrive within `limit_s` seconds; None at the end of the connection."""
    lifeline.connection.settimeout(limit_s)
    try:
        return lifeline.receive()
    except TimeoutError:
        return []
    except (OSError, ValueError):
        return None


def look_up(addresses: Mapping[str, str]) -> dict[str, list[SocketAddress]]:
    """Return the socket addresses of each task by name, IPv4 first. Raises ConfigError for an unknown host."""
    places, unknown = {}, []
    hosts: dict[str, list[SocketAddress] | str] = {}  # the addresses of each host, or the error: one query for a host
    for task, address in addresses.items():
        host, _, port = address.rpartition(":")
        if host not in hosts:
            try:
                found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
                hosts[host] = [where for *_, where in sorted(found, key=lambda f: f[0])]
            except OSError as error:
                hosts[host] = str(error.strerror)
        of_host = hosts[host]
        if isinstance(of_host, str):
            unknown.append(f"{host} of {task} ({of_host})")
        else:
            places[task] = [(where[0], int(port), *where[2:]) for where in of_host]
    if unknown:
        raise ConfigError(
            f"unknown host on {socket.gethostname()}: {', '.join(unknown)}; write a name or number that all tasks know"
        )
    return places


def is_loopback(places: list[SocketAddress]) -> bool:
    """Return whether only this machine can connect to it."""
    return all(ipaddress.ip_address(where[0].partition("%")[0]).is_loopback for where in places)


def check_addresses(addresses: Mapping[str, str], places: Mapping[str, list[SocketAddress]], secret: str) -> None:
    """Raise ConfigError if a secret is missing, a task cannot connect to the first, or two have the same address."""
    there: dict[Any, str] = {}
    for task in places:
        other = there.setdefault(places[task][0], task)
        if other != task:
            raise ConfigError(
                f"{addresses[other]} of {other} and {addresses[task]} of {task} are the same address; give each task a "
                "different port"
            )
    loopback = {where[0][0]: is_loopback(where) for where in places.values()}  # by the first address
    near = [task for task, where in places.items() if loopback[where[0][0]]]
    far = [task for task, where in places.items() if not loopback[where[0][0]]]
    if near and far:
        raise ConfigError(
            f"{addresses[near[0]]} of {near[0]} is this machine's loopback ({places[near[0]][0][0]}), which "
            f"{far[0]} at {addresses[far[0]]} cannot reach; write the address that {near[0]} has in the network"
        )
    if far and not secret:
        raise ConfigError(
            f"{addresses[far[0]]} of {far[0]} can be reached from other machines: set ALLRED_SECRET, or "
            "ALLRED_SECRET_FILE, to the same secret for all tasks, so that nobody else can join them"
        )


def listen(task: str, address: str, places: list[SocketAddress]) -> socket.socket:
    """Listen at this task's address only. Raises ConfigError if that fails."""
    where = places[0]
    until = time.monotonic() + ADDRESS_FREE_S
    while True:
        try:
            return socket.create_server(where[:2], family=channel.family(where), backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(RETRY_S)
                continue
            why = os.strerror(error.errno) if error.errno else str(error)
            hint = "choose another port"
            if error.errno == errno.EADDRINUSE:
                which = f"ss -ltnp 'sport = :{where[1]}' shows which"
                hint = f"{task} runs here already, an earlier job ends still, or another program has the port ({which})"
            if error.errno == errno.EADDRNOTAVAIL:
                hint = f"this machine is {socket.gethostname()}; start {task} on the machine that has this address"
            raise ConfigError(f"{task} cannot listen at {address} ({where[0]}): {why}; {hint}") from None


def shared_memory_domain() -> str:
    """Return the kernel, /dev/shm and the net, IPC and PID namespaces; processes with equal ones can share memory."""
    found = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        found.append(file.read().strip())
    with contextlib.suppress(OSError):
        found.append(str(os.stat("/dev/shm").st_dev))
    for space in ("net", "ipc", "pid"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/ns/{space}"))
    return " ".join(found)


def open_listener(on_one_host: bool, other_host: str) -> tuple[socket.socket, str]:
    """Listen at a free port. Return the socket and its address, host:port. on_one_host: whether all tasks are on this
    host. other_host: the host of another task."""
    host = "127.0.0.1" if on_one_host else own_address([other_host])
    listener = channel.open_listener(host)
    return listener, f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def mpi_of_task() -> tuple[str, str]:
    """Return the name of the MPI library, and why it cannot be started without a launcher; "" if it can."""
    library, is_running = mpi.load_library()
    if is_running:
        return library, (
            "MPI is running already, started by `from mpi4py import MPI` in this program or a library, and tasks that "
            "mpirun has not started cannot be joined then; call allred.Server() before it, or use mpirun"
        )
    if not library or library.startswith("Open MPI"):
        return library, f"this Python has {library or 'no MPI'}: pip install mpich"
    return library, ""


def mpi_problem(mpis: Mapping[str, tuple[str, str]], hosts: Sequence[int]) -> str:
    """Return why the tasks cannot start MPI; "" if they can. mpis: `mpi_of_task` of each, by name. hosts: of each."""
    what = "mode ps, clients, backend mpi and transport mpi, without mpirun, need MPICH"
    (first, (library, _)), *_ = mpis.items()
    for task, (other, problem) in mpis.items():
        if problem:
            return f"{what}; {task}: {problem}"
        if other != library:
            return f"{what}; {first} has {library}, but {task} has {other}; install the same in all environments"
    if len(mapping(hosts)) > MAPPING_CHARS:
        return (
            f"{what}, which cannot read the hosts of {len(hosts)} tasks in this order; list the tasks of each host one "
            "after the other, the same number for each host, or use mpirun"
        )
    return ""
