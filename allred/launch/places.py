"""Where tasks are: the addresses of a cluster looked up, what has to be so between them, and this task's own taken."""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from allred.errors import ConfigError

_FREE_S = 2.0  # for an earlier job's process to give the address back

Place = tuple[Any, Any]  # family, and what socket.bind takes


def look_up(addresses: Mapping[str, str]) -> dict[str, list[Place]]:
    """Of each task, by name, where its address leads, IPv4 first. Raises ConfigError for hosts that are not known."""
    places, unknown = {}, []
    for task, address in addresses.items():
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            unknown.append(f"{host} of {task} ({error.strerror})")
            continue
        places[task] = [(family, where) for family, _, _, _, where in sorted(found, key=lambda f: f[0])]
    if unknown:
        raise ConfigError(
            f"unknown host on {socket.gethostname()}: {', '.join(unknown)}; write a name or number that all tasks know"
        )
    return places


def is_loopback(places: list[Place]) -> bool:
    """Whether only this machine reaches it."""
    return all(ipaddress.ip_address(where[0].partition("%")[0]).is_loopback for _, where in places)


def check(addresses: Mapping[str, str], places: Mapping[str, list[Place]], secret: str) -> None:
    """Raises ConfigError where a secret is missing, some tasks cannot reach the first, or two are at one place."""
    there: dict[Any, str] = {}
    for task in places:
        other = there.setdefault(places[task][0], task)
        if other != task:
            raise ConfigError(
                f"{addresses[other]} of {other} and {addresses[task]} of {task} are the same place; give each task a "
                "port of its own"
            )
    near = [task for task in places if is_loopback(places[task])]
    far = [task for task in places if task not in near]
    if near and far:
        raise ConfigError(
            f"{addresses[near[0]]} of {near[0]} is this machine's loopback ({places[near[0]][0][1][0]}), which "
            f"{far[0]} at {addresses[far[0]]} cannot reach; write the address that {near[0]} has in the network"
        )
    if far and not secret:
        raise ConfigError(
            f"{addresses[far[0]]} of {far[0]} can be reached from other machines: set ALLRED_SECRET, or "
            "ALLRED_SECRET_FILE, to the same secret for all tasks, so that nobody else can join them"
        )


def take(task: str, address: str, places: list[Place]) -> socket.socket:
    """Listen at this task's address, and at no other. Raises ConfigError if that cannot be."""
    family, where = places[0]
    until = time.monotonic() + _FREE_S
    while True:
        try:
            return socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.1)
                continue
            why = os.strerror(error.errno) if error.errno else str(error)
            hint = "choose another port"
            if error.errno == errno.EADDRINUSE:
                which = f"ss -ltnp 'sport = :{where[1]}' shows which"
                hint = f"{task} runs here already, an earlier job ends still, or another program has the port ({which})"
            if error.errno == errno.EADDRNOTAVAIL:
                hint = f"this machine is {socket.gethostname()}; start {task} on the machine that has this address"
            raise ConfigError(f"{task} cannot listen at {address} ({where[0]}): {why}; {hint}") from None


def node() -> str:
    """What processes that can share memory have in common: kernel, /dev/shm, and the namespaces of net, IPC, PIDs."""
    found = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        found.append(file.read().strip())
    with contextlib.suppress(OSError):
        found.append(str(os.stat("/dev/shm").st_dev))
    for space in ("net", "ipc", "pid"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/ns/{space}"))
    return " ".join(found)
