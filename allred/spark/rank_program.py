"""The program of a rank on Spark: it calls the user's function, and sends the outcome to the process that started it.

Its argument is the descriptor of a multiprocessing connection:

    1  to here     Start, with the function
    2  from here   the address of this rank; or the outcome, if the rank cannot start
    3  to here     (addresses of all ranks by name, secret)
    4  from here   the outcome, a dict (outcomes.py)
"""

import ctypes
import dataclasses
import importlib.util
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from allred.errors import ConfigError
from allred.launch import pending
from allred.spark import outcomes
from allred.spark.node_context import NodeContext

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Start:
    """The arguments of a rank's program.

    function: pickled by cloudpickle: a function and its arguments. servers: the number of parameter servers, which have
    the lowest ranks. node: whether the function gets a NodeContext as its last argument. feed: the socket of the data
    feed, or "". env: environment variables. one_node: whether all ranks are on one node. peer: the host of another.
    driver: host, port and secret of the driver, for supervisors.
    """

    function: bytes
    rank: int
    size: int
    servers: int
    node: bool
    env: dict[str, str]
    one_node: bool
    peer: str
    feed: str = ""
    driver: tuple[str, int, str] = ("", 0, "")

    @property
    def settings(self) -> dict[str, str]:
        """The variables of the rank."""
        mode = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(self.servers)} if self.servers else {}
        return {**mode, **self.env}


def check_installed(where: str) -> None:
    """Raise ConfigError if a package of the extra `spark` is missing. where: names the Python, for the message."""
    needed = ("pyspark", "pyarrow", "pandas", "cloudpickle")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"allred.spark needs {', '.join(missing)}, which the Python {where} ({sys.executable}) does not have; "
            "pip install 'allred[spark]' there, or set PYSPARK_PYTHON to a Python that has it"
        )


def rank_name(rank: int) -> str:
    return f"rank {rank}"


def main() -> None:
    """Run the program."""
    connection = Connection(int(sys.argv[1]))
    _end_with_parent(int(sys.argv[2]))
    sys.argv = ["spark"]  # the name of the job for monitors
    start: Start = connection.recv()
    os.environ.update(start.settings)
    size_is_one = start.size == 1
    try:
        check_installed("of an executor")
        listener, address = pending.open_listener(start.one_node, start.peer)
    except (ConfigError, OSError) as error:
        connection.send(outcomes.raised(start.rank, error))
        raise
    connection.send(address)
    try:
        addresses, secret = connection.recv()
    except EOFError:
        sys.exit(f"allred: rank {start.rank} on {socket.gethostname()} ends, because another rank did not start")
    try:
        if not size_is_one:
            pending.prepare(addresses, rank_name(start.rank), secret, listener)
        result = _call(start, addresses)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # a parameter server, at its end
            connection.send(outcomes.returned(start.rank, None))
        else:
            connection.send(outcomes.raised(start.rank, error))
        raise
    try:
        outcome = outcomes.returned(start.rank, result)
    except Exception as error:
        error.add_note(f"rank {start.rank}: its result, a {type(result).__name__}, cannot be sent to the driver")
        connection.send(outcomes.raised(start.rank, error))
        raise
    connection.send(outcome)


def _call(start: Start, addresses: dict[str, str]) -> Any:
    import cloudpickle

    function, arguments = cloudpickle.loads(start.function)
    if start.node:
        node = NodeContext(start.rank, start.servers, list(addresses.values()), start.feed)
        return function(*arguments, node)
    return function(*arguments)


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends: Spark kills the parent to cancel a task."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"allred: the process that started this rank on {socket.gethostname()} has ended")
