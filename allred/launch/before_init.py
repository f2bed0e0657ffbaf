"""Starts without a launcher: a rendezvous before init(), whose result the next init() uses to start MPI."""

import os
import socket
from collections.abc import Mapping

from allred import config, native
from allred.cluster import mpi
from allred.launch import rendezvous_client
from allred.launch.rendezvous_client import Joined
from allred.watch.start import own_address

_joined: Joined | None = None  # of the next init()
_listeners: list[socket.socket] = []  # kept open until the end, so that no other program takes the address


def open_listener(on_one_host: bool, other_host: str) -> tuple[socket.socket, str]:
    """Listen at a free port. Return the socket and its address, host:port. on_one_host: whether all tasks are on this
    host. other_host: the host of another task."""
    host = "127.0.0.1" if on_one_host else own_address([other_host])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    return listener, f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def prepare(addresses: Mapping[str, str], task: str, secret: str, listener: socket.socket | None = None) -> None:
    """Wait until all tasks have called it; then the next init() joins them.

    addresses: host:port of all tasks by name, in rank order. listener: the socket at this task's address, if it is open
    already. Raises ConfigError if this task cannot take part, CollectiveTimeout at the time limit.
    """
    global _joined
    settings = config.explicit_settings(os.environ, {})
    limit_s = settings.get("start_timeout_s", config.Config.start_timeout_s)
    library, problem = _mpi()
    _joined = rendezvous_client.rendezvous(addresses, task, secret, limit_s, library, problem, listener)
    if _joined.listener is not None:
        _listeners.append(_joined.listener)
    os.environ.update(_joined.environment)


def take_joined() -> Joined | None:
    """Return the result of `prepare` for init(), once; None without a rendezvous."""
    global _joined
    joined, _joined = _joined, None
    return joined


def _mpi() -> tuple[str, str]:
    """Return the name of the MPI library, and why tasks cannot start without a launcher; "" if they can."""
    library, is_running = mpi.load_library()
    if is_running:
        return library, (
            "MPI is running already, started by `from mpi4py import MPI` in this program or a library, and tasks that "
            'mpirun has not started cannot be joined then; call allred.Server() or init_process_group("allred") before '
            "it, or use mpirun"
        )
    if not library or library.startswith("Open MPI"):
        return library, (
            f"tasks that mpirun has not started need MPICH, and this Python has {library or 'no MPI'}: "
            "pip install 'allred[mpich]', or use mpirun"
        )
    if native.arm_exit is None:
        return library, f"tasks that mpirun has not started need allred's C extension: {native.reason}"
    return library, ""
