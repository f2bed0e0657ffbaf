"""TCP connections between the ranks of several hosts.

    1  every rank that connects listens on its addresses; MPI tells all ranks the addresses, a token and a shared secret
    2  a rank connects to each peer of a lower host: to the first address of the peer that answers
    3  it proves that it knows the secret; the proof binds both ranks and the token of the listener
    4  the listener proves the same in its answer, which ends the search for an address

A connection that does not prove this within 5 s is closed. Data is not encrypted.
"""

import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from typing import Any

from allred.cluster.interfaces import ipv4_addresses
from allred.errors import ConfigError
from allred.runtime.channel import limit_resending
from allred.runtime.timings import AUTHENTICATE_S

_PROOF_BYTES = 32
_HELLO = struct.Struct("!I32s")  # rank, proof


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


def connect(comm: Any, groups: list[list[int]], network: str, timeout_s: float) -> tuple[dict[int, socket.socket], str]:
    """Connect this rank with the other ranks of its group. Collective over `comm`, an mpi4py communicator.

    groups: lists of ranks of `comm`; a rank is in one of them or in none. Of each pair, the rank that comes later in
    the group connects to the other.
    network: see `addresses`. timeout_s: how long sent data may stay unacknowledged.

    Returns the nonblocking sockets by rank, and "" or why some rank could not connect: the same text on all ranks.
    """
    rank = comm.Get_rank()
    group = next((group for group in groups if rank in group), [])
    index = group.index(rank) if group else 0
    lower, higher = group[:index], group[index + 1 :]
    listeners: list[socket.socket] = []
    problem, token = "", secrets.token_bytes(16)
    try:
        if group:
            listeners = _listen(addresses(network), len(group))
    except (OSError, ConfigError) as error:
        problem = f"rank {rank} on {socket.gethostname()}: {error}"
    secret = comm.bcast(secrets.token_bytes(32))
    here = [listener.getsockname()[:2] for listener in listeners]
    others = comm.allgather((problem, here, token, socket.gethostname()))
    problem = next((text for text, *_ in others if text), "")
    sockets: dict[int, socket.socket] = {}
    if not problem:
        accepted = _Acceptor(listeners, secret, token, rank, set(higher))
        for peer in lower:
            _, there, peer_token, host = others[peer]
            found = _connect_to_first(there, secret, peer_token, rank, peer)
            if isinstance(found, str):
                problem = f"rank {rank} on {socket.gethostname()} cannot connect to rank {peer} on {host}: {found}"
                break
            sockets[peer] = found
        problems = comm.allgather(problem)
        problem = next((text for text in problems if text), "")
        sockets.update(accepted.finish(0.0 if problem else AUTHENTICATE_S))
    for listener in listeners:
        listener.close()
    missing = sorted(set(group) - {rank} - set(sockets))
    if missing and not problem:
        problem = f"rank {rank} on {socket.gethostname()} has no connection from rank {missing[0]}"
    problem = next((text for text in comm.allgather(problem) if text), "")
    for one in sockets.values():
        if problem:
            one.close()
        else:
            one.settimeout(None)
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_resending(one, timeout_s)
    return ({}, problem) if problem else (sockets, "")


def _listen(addresses: list[str], backlog: int) -> list[socket.socket]:
    listeners = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listeners.append(socket.create_server((address, 0), family=family, backlog=backlog))
        except OSError:  # an address that cannot be used, such as one that is not yet valid
            continue
    if not listeners:
        raise OSError(f"no connection can be accepted on {', '.join(addresses)}")
    return listeners


def _proof(secret: bytes, token: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, b"allred host connection" + token + struct.pack("!II", sender, receiver), "sha256")


def _connect_to_first(
    there: list[tuple[str, int]], secret: bytes, token: bytes, rank: int, peer: int
) -> socket.socket | str:
    """Return a connection to the first address that answers with the proof of `peer`; or what each address said."""
    said = []
    for address, port in there:
        try:
            one = socket.create_connection((address, port), timeout=AUTHENTICATE_S)
        except OSError as error:
            said.append(f"{address} port {port}: {error}")
            continue
        try:
            one.sendall(_HELLO.pack(rank, _proof(secret, token, rank, peer)))
            if hmac.compare_digest(_read(one, _PROOF_BYTES), _proof(secret, token, peer, rank)):
                return one
            said.append(f"{address} port {port}: it did not prove that it belongs to this job")
        except OSError as error:
            said.append(f"{address} port {port}: {error}")
        one.close()
    return "; ".join(said) or "it has no address"


def _read(one: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or fewer at the end of the stream. Raises OSError after AUTHENTICATE_S."""
    data, deadline = b"", time.monotonic() + AUTHENTICATE_S
    while len(data) < count:
        one.settimeout(max(deadline - time.monotonic(), 0.001))
        part = one.recv(count - len(data))
        if not part:
            break
        data += part
    return data


class _Acceptor:
    """Accepts connections in threads, so that a stranger that sends nothing delays no one."""

    def __init__(
        self, listeners: list[socket.socket], secret: bytes, token: bytes, rank: int, expected: set[int]
    ) -> None:
        self._secret, self._token, self._rank, self._expected = secret, token, rank, expected
        self._found: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        for listener in listeners if expected else []:
            listener.settimeout(0.2)  # a blocked accept() does not end when the listener is closed
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                one, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._answer, args=(one,), daemon=True).start()

    def _answer(self, one: socket.socket) -> None:
        try:
            hello = _read(one, _HELLO.size)
            peer, proof = _HELLO.unpack(hello)
            if not hmac.compare_digest(proof, _proof(self._secret, self._token, peer, self._rank)):
                raise OSError("no proof")
            with self._changed:
                if self._closed or peer not in self._expected or peer in self._found:
                    raise OSError("not expected")
                one.sendall(_proof(self._secret, self._token, self._rank, peer))
                self._found[peer] = one
                self._changed.notify_all()
        except (OSError, struct.error):
            one.close()

    def finish(self, limit_s: float) -> dict[int, socket.socket]:
        """Return the connections by rank, when all expected ones exist or after the limit."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._found) == len(self._expected), limit_s)
            self._closed = True
            return self._found
