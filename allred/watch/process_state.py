"""The state of another process: its stack, whether it is stopped, and how it ended. The launcher of this node's ranks.

A rank writes its own Python stack into a pipe on a signal, with faulthandler, also while the interpreter runs C code.

The launcher is mpirun, and the process through which it starts ranks on this node. If it has ended, nobody ends the
ranks. If another host is unreachable, the watcher ends the launcher, because mpirun may wait for that host forever.
After a job on one node that failed, it ends a launcher that has no process left to wait for: Open MPI's prterun
sometimes does not end if one rank calls MPI_Abort while another finalizes.

A launcher is an ancestor of a rank at the time when the rank connects. A pidfd identifies it, so that no later process
with the same number is meant. The watcher writes on the stderr of the job, which is the launcher's.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import stat
import struct
import time
from collections.abc import Iterator

from allred.runtime.timings import FAILED_LAUNCHER_S, LAUNCHER_SIGNAL_S, STACK_S

_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15
_EXIT_CODE_AT = 60
_START_TIME, _STATUS_EXIT_CODE = 19, 49  # of the fields of /proc/PID/stat, from the state on
_TRIES = 20
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun")
_DAEMONS = ("hydra_pmi_proxy", "prted", "orted")  # which mpirun starts on every node
_ENDED = ("?", "Z", "X")  # states; "?": there is no such process
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/lib/python|/site-packages/|/allred/|^<frozen")


def describe_end(pidfd: int, pid: int) -> tuple[str, int]:
    """Return how a dead process ended, as text, and an exit code. It need not be a child."""
    status = _exit_status(pidfd, pid)
    if status is None:
        return "has died (this kernel does not tell how)", 1
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code} without a report (os._exit, MPI_Abort?)", code or 1
    hint = ""
    if -code == signal.SIGKILL:
        hint = (
            "; if nobody sent it, the machine may be out of memory, or the rank has executed another program (os.exec)"
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a real-time signal"
    return f"was killed by signal {-code} ({name}){hint}", 128 - code


def _exit_status(pidfd: int, pid: int) -> int | None:
    """Return the status as wait(2): from /proc until the parent has waited, then from the pidfd; None if unknown."""
    for _ in range(_TRIES):  # for a moment neither has the status
        status = _status(pid)
        if status[0] == "Z":
            return int(status[_STATUS_EXIT_CODE])
        info = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT) + bytes(56))
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0])
        time.sleep(0.001)
    return None


def is_launcher(pid: int) -> bool:
    """Return whether a process is a launcher, by its name."""
    return name(pid) in _LAUNCHERS


def starts_ranks(pid: int) -> bool:
    """Return whether a process is a launcher or its daemon, by its name."""
    return name(pid) in (*_LAUNCHERS, *_DAEMONS)


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, the parent of that, and so on."""
    while (pid := int(_status(pid)[1])) > 0:
        yield pid


def launcher_ancestors(pid: int) -> list[int]:
    """Return the nearest launcher above a process, and the launcher's daemons below that; [] if there are none."""
    found = []
    for above in ancestors(pid):
        if starts_ranks(above):
            found.append(above)
        if is_launcher(above):
            break
    return found


def children(with_zombies: bool = False) -> dict[int, list[int]]:
    """Return {pid of a process: pids of its children}. A zombie may still have threads that run."""
    found: dict[int, list[int]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        state, parent, *_ = _status(pid)
        if state not in _ENDED or (with_zombies and state == "Z"):
            found.setdefault(int(parent), []).append(pid)
    return found


def handles(pid: int, number: int) -> bool:
    """Return whether a process handles or ignores a signal, rather than ending by it."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        masks = dict(line.split(":\t") for line in file if line.startswith("Sig"))
        return bool((int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)) >> (number - 1) & 1)
    return False


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended."""
    return _status(pid)[0] not in _ENDED


def name(pid: int) -> str:
    """Return the name of a process; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; see proc(5)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["?", "0"]


def start_time(pid: int) -> str:
    """Return the time at which a process was started, which distinguishes it from later ones with its id; "" if it has
    ended."""
    return "".join(_status(pid)[_START_TIME : _START_TIME + 1])


def halted(pid: int) -> str:
    """Return why a process cannot run; "" if it can."""
    return {
        "T": f"stopped (kill -CONT {pid} continues it)",
        "t": "stopped by a debugger",
        "D": "in a system call that does not return (a disk, a network file system)",
    }.get(_status(pid)[0], "")


def program_lines(ranks: dict[int, tuple[int, int, int]]) -> dict[int, str]:
    """Return which line of the program each rank executes, as text. ranks: {rank: (pidfd, signal, pipe)}. Waits at
    most STACK_S seconds."""
    texts, silent = dict.fromkeys(ranks, ""), {pipe: rank for rank, (_, _, pipe) in ranks.items()}
    for pidfd, number, pipe in ranks.values():
        _read(pipe)  # the rest of an earlier answer
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    deadline = time.monotonic() + STACK_S
    while silent and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(silent), [], [], left)[0]:
            new = _read(pipe).decode(errors="replace")
            texts[silent[pipe]] += new
            if not new or (new.endswith("\n") and _user_frames(texts[silent[pipe]])):  # a stack is written in pieces
                del silent[pipe]
    return {rank: program_line(text) for rank, text in texts.items()}


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except OSError:  # BlockingIOError: nothing there
        return b""


def program_line(stack: str) -> str:
    """Return the innermost line of the user's program in a stack of faulthandler, and the innermost library function.

    >>> program_line('File "/lib/python3.11/threading.py", line 9 in wait\\nFile "/home/me/train.py", line 87 in step')
    'in Python at train.py:87 (step), in wait of threading.py'
    """
    frames = _FRAME.findall(stack)
    if not frames:
        return "running, but not in Python, or without an answer"
    path, line, function = frame = (_user_frames(stack) or frames[-1:])[0]
    inner = "" if frame == frames[0] else f", in {frames[0][2]} of {os.path.basename(frames[0][0])}"
    return f"in Python at {os.path.basename(path)}:{line} ({function}){inner}"


def _user_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return the frames outside of libraries, the innermost first: (path, line, function)."""
    return [frame for frame in _FRAME.findall(stack) if not _LIBRARY.search(frame[0])]


# Launchers.


class Launchers:
    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by process id

    @property
    def pids(self) -> list[int]:
        """The processes, those that mpirun started first."""
        return list(self._pidfds)

    def record(self, pid: int) -> dict[str, int]:
        """Open a pidfd for each launcher that is an ancestor of process `pid`. Return {name: pidfd} of the new ones. A
        pidfd becomes readable when the launcher ends."""
        new = {}
        for launcher in launcher_ancestors(pid):
            if launcher not in self._pidfds:
                with contextlib.suppress(OSError):  # it has just ended
                    self._pidfds[launcher] = os.pidfd_open(launcher)
                    new[f"{name(launcher)} (process {launcher})"] = self._pidfds[launcher]
        return new

    def end(self) -> None:
        """Wait until the launchers have ended; after LAUNCHER_SIGNAL_S end them by SIGTERM, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._wait()
            for pidfd in self._pidfds.values():
                with contextlib.suppress(OSError):  # another user's, or it has just ended
                    signal.pidfd_send_signal(pidfd, number)

    def end_childless(self) -> None:
        """Wait until the launchers have ended; after FAILED_LAUNCHER_S end those that have no child process."""
        self._wait(FAILED_LAUNCHER_S)
        parents = children()
        for pid in list(self._pidfds):
            if pid in parents or halted(pid):
                os.close(self._pidfds.pop(pid))
        self.end()

    def _wait(self, limit_s: float = LAUNCHER_SIGNAL_S) -> None:
        """Wait at most `limit_s`, and close the pidfds of those that have ended."""
        until, poll = time.monotonic() + limit_s, select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        while self._pidfds and (left_s := until - time.monotonic()) > 0:
            ended = {pidfd for pidfd, _ in poll.poll(1000 * left_s)}
            for pid, pidfd in list(self._pidfds.items()):
                if pidfd in ended:
                    poll.unregister(pidfd)
                    os.close(self._pidfds.pop(pid))


_NULL = os.makedev(1, 3)


def open_stderr(launchers: list[int], ranks: list[int]) -> int:
    """Return a descriptor of the job's stderr, -1 if there is none. This process has none of its own.

    launchers: processes of the launcher, the outermost last. Preferred is a pipe or terminal of the launcher, then of a
    rank: the launcher lives longer; but if its stderr is a file, it may overwrite the line.
    """
    kinds = {pid: _kind(pid) for pid in (*reversed(launchers), *ranks)}
    streams = [pid for pid, kind in kinds.items() if kind == "stream"]
    files = [pid for pid, kind in kinds.items() if kind == "file"]
    return next((opened for pid in (*streams, *files) if (opened := _open(pid)) >= 0), -1)


def _kind(pid: int) -> str:
    try:
        status = os.stat(f"/proc/{pid}/fd/2")
    except OSError:
        return ""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
        return ""
    return "file" if stat.S_ISREG(status.st_mode) else "stream"


def _open(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1
