"""Starts the program of a rank as a child process, and waits for its outcome."""

import contextlib
import multiprocessing
import os
import subprocess
import sys

from allred.launcher_variables import without_launcher
from allred.spark import outcomes
from allred.spark.outcomes import Outcome
from allred.spark.rank_program import Start

EXIT_S = 15.0  # for a rank to end after a failure. After success it waits for the others, as under mpirun


class RankProcess:
    """A running rank. Its standard output goes to the executor's stderr, as that of Spark's Python workers.

    It imports what this process can import, also files that the user has sent with SparkContext.addPyFile.

    program: the module that starts the rank: rank_program.py, or supervisor.py, which has the same messages."""

    def __init__(self, start: Start, program: str = "allred.spark.rank_program") -> None:
        self.rank = start.rank
        self.connection, theirs = multiprocessing.Pipe()
        start_main = f"from {program} import main; main()"
        words = [sys.executable, "-c", start_main, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                env={**without_launcher(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        self.connection.send(start)

    def address(self) -> tuple[str, Outcome | None]:
        """Return the address of the rank; or "" and its outcome, if it cannot start."""
        try:
            found = self.connection.recv()
        except (EOFError, ConnectionError):
            return "", outcomes.ended(self.rank, self.process.wait())
        if isinstance(found, dict):
            self.end()
            return "", found
        return found, None

    def join(self, addresses: dict[str, str], secret: str) -> None:
        """Pass on the addresses of all ranks."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((addresses, secret))

    def outcome(self) -> Outcome:
        """Wait for the end of the rank. Return its outcome."""
        sent = self.sent_outcome()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S if sent is None or sent["code"] else None)
        return self.final_outcome(sent)

    def sent_outcome(self) -> Outcome | None:
        """Wait for the outcome that the rank sends at its end. Return None if it has ended without."""
        with contextlib.suppress(EOFError, ConnectionError):
            sent: Outcome = self.connection.recv()
            return sent
        return None

    def final_outcome(self, sent: Outcome | None) -> Outcome:
        """Kill the rank if it runs. Return the outcome that follows from its exit code and from the one it has sent."""
        code = self.end()
        return outcomes.ended(self.rank, code) if sent is None or (code and not sent["code"]) else sent

    def cancel(self) -> None:
        """End a rank that waits for the addresses."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        self.end()

    def end(self) -> int:
        """Kill the rank if it runs. Return its exit code, negative for a signal."""
        self.process.kill()
        return self.process.wait()
