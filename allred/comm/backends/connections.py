"""TCP connections between the ranks of several hosts.

    1  every rank that connects listens on its addresses; all ranks exchange the addresses and a shared secret
    2  a rank connects to each peer of a lower host: to the first address of the peer that answers as an authenticated
       channel (runtime/channel.py). Its purpose is the number of the peer, so the listener of another rank refuses it
    3  it sends its rank, and the listener accepts each expected rank once, which ends the search for an address

From then on the connection carries plain bytes. Data is not encrypted.
"""

import contextlib
import ipaddress
import secrets
import socket
import threading
import time

from allred.cluster.topology import ipv4_addresses
from allred.comm.bootstrap import Bootstrap
from allred.errors import ConfigError
from allred.runtime import channel, open_files
from allred.runtime.channel import Channel, HandshakeError, Listener, Message, limit_resending
from allred.runtime.loop import Loop
from allred.runtime.timings import AUTHENTICATE_S

_OTHER_FILES = 32  # listeners, and files that other threads open


def addresses(network: str) -> list[str]:
    """Return the addresses of this host that connections may use.

    network: the setting of that name: interfaces and networks such as "eth1,10.0.0.0/8", in order of preference;
    "auto": all addresses except those of loopback interfaces; 127.0.0.1 if there are no others.

    Raises ConfigError if no address fits.
    """
    known = _interface_addresses()
    if network == "auto":
        usable = [address for _, address in known if not ipaddress.ip_address(address).is_loopback]
        return usable or ["127.0.0.1"]
    found: list[str] = []
    for word in (word.strip() for word in network.split(",")):
        found += [address for name, address in known if _fits(word, name, address) and address not in found]
    if not found:
        have = ", ".join(f"{name} {address}" for name, address in known)
        raise ConfigError(
            f"ALLRED_NETWORK={network!r} fits no interface of {socket.gethostname()}; expected names or networks, such "
            f"as eth1,10.0.0.0/8; it has {have or 'none'}"
        )
    return found


def _fits(word: str, name: str, address: str) -> bool:
    if word == name:
        return True
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False)
    except ValueError:  # the name of another interface
        return False


def _interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of all interfaces that are up: IPv4, then IPv6 except link-local addresses."""
    found = [*ipv4_addresses().items()]
    try:
        with open("/proc/net/if_inet6") as lines:
            rows = [line.split() for line in lines]
    except OSError:  # no IPv6
        rows = []
    for digits, *_, name in rows:
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.append((name, str(address)))
    return found


def connect(
    bootstrap: Bootstrap, groups: list[list[int]], network: str, timeout_s: float
) -> tuple[dict[int, socket.socket], str]:
    """Connect this rank with the other ranks of its group. Collective among the ranks of `bootstrap`.

    groups: lists of ranks; a rank is in one of them or in none. Of each pair, the rank that comes later in the group
    connects to the other.
    network: see `addresses`. timeout_s: how long sent data may stay unacknowledged.

    Returns the nonblocking sockets by rank, and "" or why some rank could not connect: the same text on all ranks.
    """
    rank = bootstrap.rank
    group = next((group for group in groups if rank in group), [])
    index = group.index(rank) if group else 0
    lower, higher = group[:index], group[index + 1 :]
    listeners: list[socket.socket] = []
    problem = ""
    try:
        if group:
            if lacks := open_files.allow(len(group) + _OTHER_FILES):
                raise ConfigError(lacks)
            listeners = _listen(addresses(network), len(group))
    except (OSError, ConfigError) as error:
        problem = f"rank {rank} on {socket.gethostname()}: {error}"
    secret = bootstrap.broadcast_object(secrets.token_hex(32))
    here = [listener.getsockname()[:2] for listener in listeners]
    others = bootstrap.allgather_object((problem, here, socket.gethostname()))
    problem = next((text for text, *_ in others if text), "")
    sockets: dict[int, socket.socket] = {}
    if not problem:
        accepted = None
        try:
            accepted = _Acceptor(listeners, secret, _purpose(rank), set(higher))
        except (OSError, RuntimeError) as error:  # too many open files or threads
            problem = f"rank {rank} on {socket.gethostname()} cannot accept connections: {error}"
        finish = (lambda limit_s: {}) if accepted is None else accepted.finish
        with contextlib.ExitStack() as on_error:  # another rank of an elastic job has died
            on_error.callback(lambda: _close([*finish(0.0).values(), *sockets.values()]))
            for peer in [] if problem else lower:
                _, there, host = others[peer]
                found = _connect_to_first(there, secret, _purpose(peer), rank)
                if isinstance(found, str):
                    problem = f"rank {rank} on {socket.gethostname()} cannot connect to rank {peer} on {host}: {found}"
                    break
                sockets[peer] = found
            problems = bootstrap.allgather_object(problem)
            on_error.pop_all()
        problem = next((text for text in problems if text), "")
        sockets.update(finish(0.0 if problem else AUTHENTICATE_S))
    for listener in listeners:
        listener.close()
    missing = sorted(set(group) - {rank} - set(sockets))
    if missing and not problem:
        problem = f"rank {rank} on {socket.gethostname()} has no connection from rank {missing[0]}"
    problem = next((text for text in bootstrap.allgather_object(problem) if text), "")
    for one in sockets.values():
        if problem:
            one.close()
        else:
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)  # the time limit is that of sent data
            limit_resending(one, timeout_s)
    return ({}, problem) if problem else (sockets, "")


def _purpose(rank: int) -> str:
    return f"rank {rank}"


def _close(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()


def _listen(addresses: list[str], backlog: int) -> list[socket.socket]:
    listeners = []
    for address in addresses:
        try:
            listeners.append(channel.open_listener(address, backlog))
        except OSError:  # an address that cannot be used, such as one that is not yet valid
            continue
    if not listeners:
        raise OSError(f"no connection can be accepted on {', '.join(addresses)}")
    return listeners


def _connect_to_first(there: list[tuple[str, int]], secret: str, purpose: str, rank: int) -> socket.socket | str:
    """Return a connection to the first address at which the rank with this purpose accepts this one; or what each
    address said."""
    said = []
    for address, port in there:
        try:
            found = channel.connect((address, port), purpose, secret)
        except HandshakeError:
            said.append(f"{address} port {port}: it did not prove that it belongs to this job")
            continue
        except OSError as error:
            said.append(f"{address} port {port}: {error}")
            continue
        try:
            found.send({"rank": rank})
            found.receive_one(time.monotonic() + AUTHENTICATE_S)
            return found.detach()
        except (OSError, ValueError) as error:
            said.append(f"{address} port {port}: {error}")
            found.close()
    return "; ".join(said) or "it has no address"


class _Acceptor:
    """Accepts the connections of other ranks, in a thread, while this rank connects to others."""

    def __init__(self, listeners: list[socket.socket], secret: str, purpose: str, expected: set[int]) -> None:
        self._loop, self._expected = Loop(), expected
        self._found: dict[int, socket.socket] = {}
        self._is_over = not expected
        self._listeners = [Listener(self._loop, each, purpose, secret, self._admit) for each in listeners]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            self._loop.turn()

    def _admit(self, peer: Channel, messages: list[Message]) -> None:
        rank = messages[0]["rank"]
        if rank not in self._expected or rank in self._found:
            return peer.close()
        peer.send({"accepted": True})
        self._found[rank] = peer.detach()
        self._is_over = len(self._found) == len(self._expected)

    def finish(self, limit_s: float) -> dict[int, socket.socket]:
        """Return the connections by rank, when all expected ones exist or after the limit."""
        self._thread.join(limit_s)
        self._is_over = True
        self._loop.wake()
        self._thread.join()
        for each in self._listeners:
            each.close()
        self._loop.close()
        return self._found
