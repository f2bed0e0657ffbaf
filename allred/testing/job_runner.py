"""Runner of programs under mpirun, in a separate session, with a time limit and cleanup of all processes.

A test of ranks that hang or die must not hang itself or leave processes behind. All processes of a command inherit an
environment variable with a unique value. They are found by it in /proc, also if they left the session, are stopped, or
have lost their mpirun. mpirun receives SIGTERM first, because it cleans up its ranks; then remaining processes are
killed.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from allred.cluster import launcher

_MARK = "TESTING_RUN"
_LAUNCHER_PREFIXES = ("PMI", "OMPI_COMM", "PRTE_LAUNCHED", "HYDI_")  # variables of a test that is itself a rank
_TERMINATE_S = 10.0  # for mpirun to clean up
_EXIT_S = 5.0  # for remaining processes when the command has ended
_SHELL_IGNORES = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # ignored under nohup (SIGHUP) and `&` in a script

# Error of Open MPI's mpirun, about once in a thousand starts, before it starts any rank.
_LAUNCHER_FAILED = "The PMIx server's listener thread failed to start."

Word = str | int | os.PathLike[str]


@dataclasses.dataclass
class Result:
    """Result of a program.

    Attributes:
        code: exit code, negative for a signal.
        out, err: stdout and stderr.
        seconds: duration.
        left: pid and command of each process that had to be killed.
    """

    code: int
    out: str
    err: str
    seconds: float
    left: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """Exit code, duration, killed processes and output, for the message of a failing assertion."""
        left = "".join(f"\n--- still running, killed: {line}" for line in self.left)
        return f"exit code {self.code} after {self.seconds:.1f} s{left}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def mpirun(
    ranks: int,
    *arguments: Word,
    timeout_s: float = 60,
    env: Mapping[str, str | None] | None = None,
    mpirun: Word | Sequence[Word] | None = None,
    python: Word = sys.executable,
    **options: Any,
) -> Result:
    """Run `mpirun -np ranks python arguments...` and wait until it ends.

    Arguments:
        mpirun: the launcher, or a list of the launcher and its options, such as ["mpirun", "--oversubscribe"]. Default:
            the mpirun next to this Python (of an MPI installed from its wheel), else the one on PATH.
        timeout_s, env, options: as in `run`.

    Raises:
        FileNotFoundError: there is no mpirun.
        TimeoutError: as in `run`.
    """
    command = [*_words(mpirun or _default_mpirun()), "-np", ranks, python, *arguments]
    return run(command, timeout_s, env, **options)


def _words(launcher: Word | Sequence[Word]) -> list[Word]:
    return [launcher] if isinstance(launcher, (str, int, os.PathLike)) else [*launcher]


def _default_mpirun() -> str:
    if found := launcher.mpirun_next_to_python() or launcher.mpirun_on_path():
        return found
    raise FileNotFoundError("no mpirun next to this Python or on PATH; pip install mpich, or pass mpirun=...")


def run(
    command: Sequence[Word], timeout_s: float = 60, env: Mapping[str, str | None] | None = None, **options: Any
) -> Result:
    """Run a command in a new session with empty stdin, and wait until it ends.

    The command has the default actions of SIGINT, SIGHUP and SIGQUIT, also if this process ignores them (nohup). A
    command that fails because Open MPI's mpirun could not start any rank is run once more.

    Arguments:
        command: program and arguments.
        timeout_s: time limit in seconds.
        env: variables to add to those of this process; None removes one.
        options: as in subprocess.Popen, for example cwd.

    Raises TimeoutError: the command did not end in time. It was killed; the text has its output.
    """
    result = _run_once(command, timeout_s, env, **options)
    if result.code != 0 and _LAUNCHER_FAILED in result.err:
        result = _run_once(command, timeout_s, env, **options)
    return result


def _run_once(
    command: Sequence[Word], timeout_s: float, env: Mapping[str, str | None] | None, **options: Any
) -> Result:
    mark, start = uuid.uuid4().hex, time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        env=_environment({**(env or {}), _MARK: mark}),
        **_with_default_signals(options),
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
        return Result(process.returncode, out, err, time.monotonic() - start, _kill(mark, _EXIT_S))
    except subprocess.TimeoutExpired:
        ended = process.poll() is not None
        out, err, left = _end(process, mark)
        result = Result(process.returncode, out, err, time.monotonic() - start, left)
        what = "ended, but its child processes kept its output open" if ended else "did not end"
        raise TimeoutError(f"{' '.join(map(str, command))}: {what} after {timeout_s:g} s: {result.text}") from None
    except BaseException:  # Ctrl-C does not reach the command, which is in another session
        _end(process, mark)
        raise


def _with_default_signals(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for subprocess.Popen that reset the signals which the command would inherit as ignored."""
    if all(signal.getsignal(number) != signal.SIG_IGN for number in _SHELL_IGNORES):
        return options

    def reset() -> None:
        for number in _SHELL_IGNORES:
            signal.signal(number, signal.SIG_DFL)

    return {"preexec_fn": reset, **options}


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


def _end(process: subprocess.Popen[str], mark: str) -> tuple[str, str, list[str]]:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return *process.communicate(timeout=_TERMINATE_S), _kill(mark, _EXIT_S)
    left = _kill(mark, 0)
    return *process.communicate(), left


def _kill(mark: str, patience_s: float) -> list[str]:
    """Kill processes that are still running after `patience_s`. Return a line for each."""
    deadline = time.monotonic() + patience_s
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid} {words}" for pid, words in found.items()]


def _marked(mark: str) -> dict[int, str]:
    """Pid and command of every living process that inherited the mark."""
    found, words = {}, f"{_MARK}={mark}".encode()
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            if entry.name.isdecimal() and words in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
