"""The program of a rank on Spark: it calls the user's function, and sends the outcome to the process that started it.

Its arguments are the descriptor of a multiprocessing connection and the process id of its parent:

    1  to here     a RankSpec, with the function
    2  from here   the address of this rank; or the outcome, if the rank cannot start
    3  to here     (addresses of all ranks by name, secret)
    4  from here   the outcome, a dict (outcomes.py)

A supervisor has the messages 1 to 3, and then sends None, or an outcome if it cannot connect to the driver.
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
from allred.launch import rendezvous_client
from allred.spark import outcomes
from allred.spark.node_context import NodeContext

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class RankSpec:
    """The arguments of a rank's program.

    function: the result of `barrier_job.pickle_function`. num_ps: the number of parameter servers, which have the
    lowest ranks. passes_context: whether the function gets a NodeContext as its last argument. env: environment
    variables. on_one_host: whether all ranks are on one host. other_host: a host of another rank. feed: the socket of
    the data feed, or "". driver: host, port and secret of the driver, for supervisors.
    """

    function: bytes
    rank: int
    size: int
    num_ps: int
    passes_context: bool
    env: dict[str, str]
    on_one_host: bool = True
    other_host: str = ""
    feed: str = ""
    driver: tuple[str, int, str] = ("", 0, "")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the rank: mode ps, then `env`."""
        mode = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(self.num_ps)} if self.num_ps else {}
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
    spec: RankSpec = connection.recv()
    os.environ.update(spec.environment)
    try:
        check_installed("of an executor")
        listener, address = rendezvous_client.open_listener(spec.on_one_host, spec.other_host)
    except (ConfigError, OSError) as error:
        connection.send(outcomes.of_exception(spec.rank, error))
        raise
    connection.send(address)
    try:
        addresses, secret = connection.recv()
    except EOFError:
        sys.exit(f"allred: rank {spec.rank} on {socket.gethostname()} ends, because another rank did not start")
    os.register_at_fork(after_in_child=connection.close)  # an outcome of a child would be taken for that of the rank
    try:
        if spec.size > 1:
            rendezvous_client.prepare(addresses, rank_name(spec.rank), secret, listener)
        result = _call(spec, addresses)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # a parameter server, at its end
            _send(connection, outcomes.of_result(spec.rank, None))
        else:
            _send(connection, outcomes.of_exception(spec.rank, error))
        raise
    try:
        outcome = outcomes.of_result(spec.rank, result)
    except Exception as error:
        error.add_note(f"rank {spec.rank}: its result, a {type(result).__name__}, cannot be sent to the driver")
        _send(connection, outcomes.of_exception(spec.rank, error))
        raise
    _send(connection, outcome)


def _send(connection: Connection, outcome: outcomes.Outcome) -> None:
    if not connection.closed:  # in a forked child
        connection.send(outcome)


def _call(spec: RankSpec, addresses: dict[str, str]) -> Any:
    """Call the function. Return its result; None if it gets a NodeContext, because nobody receives the result."""
    import cloudpickle

    function, arguments = cloudpickle.loads(spec.function)
    if not spec.passes_context:
        return function(*arguments)
    function(*arguments, NodeContext(spec.rank, spec.num_ps, list(addresses.values()), spec.feed))
    return None


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends: Spark kills the parent to cancel a task."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"allred: the process that started this rank on {socket.gethostname()} has ended")
