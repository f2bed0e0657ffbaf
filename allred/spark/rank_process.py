"""Starts the program of a rank as a child process, and waits for its outcome."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import weakref
from typing import Any

from allred.launcher_variables import without_launcher
from allred.runtime.timings import RANK_EXIT_S
from allred.spark import outcomes
from allred.spark.outcomes import Outcome
from allred.spark.rank_program import RankSpec


class RankProcess:
    """A running rank. Its standard output goes to the executor's stderr, as that of Spark's Python workers. Its
    sys.path is that of this process, with the files of SparkContext.addPyFile.

    supervised: start a supervisor (supervisor.py), which starts the rank and answers in its place.
    """

    def __init__(self, spec: RankSpec, supervised: bool = False) -> None:
        self.rank = spec.rank
        self.connection, child_end = multiprocessing.Pipe()
        program = f"from allred.spark.{'supervisor' if supervised else 'rank_program'} import main; main()"
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
