"""The program of a rank on Spark, and the process that starts it as a child and waits for its outcome.

The program calls the user's function, and sends the outcome. Its arguments are the descriptor of a multiprocessing
connection and the process id of its parent:

    1  to the program     a RankSpec, with the function
    2  from the program   the address of this rank; or the outcome, if the rank cannot start
    3  to the program     (addresses of all ranks by name, secret)
    4  from the program   the outcome, a dict (outcomes.py)

A supervisor has the messages 1 to 3, and then sends None, or an outcome if it cannot connect to the driver.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from typing import Any

from allred.errors import ConfigError
from allred.launch import rendezvous_bootstrap, rendezvous_client
from allred.launcher_variables import without_launcher
from allred.runtime.timings import RANK_EXIT_S
from allred.spark import outcomes
from allred.spark.node_context import NodeContext
from allred.spark.outcomes import Outcome
from allred.startup import join_in_init
from allred.world_creation import Cluster

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
            "install them there (pip install pyspark pyarrow 'pandas<3' cloudpickle), or set PYSPARK_PYTHON to a "
            "Python that has them"
        )


def rank_name(rank: int) -> str:
    return f"rank {rank}"


class RankProcess:
    """A running rank. Its standard output goes to the executor's stderr, as that of Spark's Python workers. Its
    sys.path is that of this process, with the files of SparkContext.addPyFile.

    supervised: start a supervisor (supervisor.py), which starts the rank and answers in its place.
    """

    def __init__(self, spec: RankSpec, supervised: bool = False) -> None:
        self.rank = spec.rank
        self.connection, child_end = multiprocessing.Pipe()
        program = f"from allred.spark.{'supervisor' if supervised else 'rank_process'} import main; main()"
        command = [sys.executable, "-c", program, str(child_end.fileno()), str(os.getpid())]
        with child_end:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[child_end.fileno()], start_new_session=True,
                env={**without_launcher(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        self.end_descriptor = os.pidfd_open(self.process.pid)  # readable when the process has ended
        self._close_descriptor = weakref.finalize(self, os.close, self.end_descriptor)
        self.connection.send(spec)

    def address(self) -> tuple[str, Outcome | None]:
        """Return the address of the rank; or "" and its outcome, if it cannot start."""
        found = self._receive()
        if isinstance(found, str):
            return found, None
        self._wait(RANK_EXIT_S)
        return "", self.kill_and_report(found)

    def join(self, addresses: dict[str, str], secret: str) -> None:
        """Pass on the addresses of all ranks."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((addresses, secret))

    def connected(self) -> Outcome | None:
        """Wait until a supervisor has connected to the driver. Return an outcome if that fails."""
        failure: Any = self._receive(self)
        return outcomes.of_exit_code(self.rank, self.kill()) if failure is self else failure

    def stop_before_join(self) -> None:
        """End a rank that waits for the addresses."""
        self.connection.close()
        self._wait(RANK_EXIT_S)
        self.kill()

    def outcome(self) -> Outcome:
        """Wait for the end of the rank. Return its outcome."""
        sent = self.receive_outcome()
        self._wait(RANK_EXIT_S if sent is None or sent["code"] else None)
        return self.kill_and_report(sent)

    def receive_outcome(self) -> Outcome | None:
        """Wait for the outcome that the rank sends at its end. Return None if it has ended without."""
        found: Outcome | None = self._receive()
        return found

    def kill_and_report(self, sent: Outcome | None) -> Outcome:
        """Kill the rank if it runs. Return the outcome that follows from its exit code and from the one it has sent."""
        code = self.kill()
        return outcomes.of_exit_code(self.rank, code) if sent is None or (code and not sent["code"]) else sent

    def kill(self) -> int:
        """Kill the rank if it runs, and processes that it has started. Return its exit code, negative for a signal."""
        if self.process.returncode is None:  # else another process may have its id
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._close_descriptor()
        return self.process.wait()

    def _receive(self, ended: Any = None) -> Any:
        """Return the next message; `ended` if the rank has ended. A child that the rank has forked may keep the other
        end of the connection open, so this does not wait for it to be closed."""
        multiprocessing.connection.wait([self.connection, self.end_descriptor])
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv()
        return ended

    def _wait(self, limit_s: float | None) -> None:
        """Wait for the end of the process, and keep its id in use, for `kill`."""
        if self._close_descriptor.alive:
            multiprocessing.connection.wait([self.end_descriptor], limit_s)


# The program.


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
    os.register_at_fork(after_in_child=connection.close)  # a child must not report the outcome of the rank
    try:
        if spec.size > 1:
            joined = rendezvous_bootstrap.connect(addresses, rank_name(spec.rank), secret, listener)
            join_in_init(joined, Cluster())
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
