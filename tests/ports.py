"""Port numbers for programs that a test starts."""

import socket

_reserved: list[socket.socket] = []


def reserved_ports(count: int) -> list[int]:
    """Different ports, at which only a program that is given the number can listen.

    A bound socket keeps each until this process ends, so Linux never chooses it for an outgoing connection or for
    another program's port 0. It does not listen: connections are refused until a program listens there. The program
    has to set SO_REUSEADDR, which servers do.
    """
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
    _reserved.extend(probes)
    return [probe.getsockname()[1] for probe in probes]
