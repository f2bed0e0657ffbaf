"""What a process is doing, and how it ended, seen from outside: it may hold the GIL, be stopped, or be dead.

Where in its program a rank is, it says itself: on a signal, faulthandler writes the Python stack into a pipe, even
while the interpreter is busy in C.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time

STACK_S = 0.5  # for ranks to write their stacks

_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15
_EXIT_CODE_AT = 60
_STATUS_EXIT_CODE = 49
_TRIES = 20
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun")
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def how_it_ended(pidfd: int, pid: int) -> tuple[str, int]:
    """In words, and as an exit code, of a process that is dead and need not be a child."""
    status = _exit_status(pidfd, pid)
    if status is None:
        return "has died (this kernel does not tell how)", 1
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code} without a word (os._exit, MPI_Abort?)", code or 1
    hint = "; if nobody sent it, the machine may be out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({_signal_name(-code)}){hint}", 128 - code


def _exit_status(pidfd: int, pid: int) -> int | None:
    """As wait(2) would give it: from /proc as long as the parent has not waited, then from the pidfd, if the kernel is
    not too old for that."""
    for _ in range(_TRIES):  # between the two there is a moment when neither knows
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def launcher(pid: int) -> list[int]:
    """The processes by which mpirun has started it: its parent, and what is above that, if it is mpirun's too."""
    found = [int(_status(pid)[1])]
    above = int(_status(found[0])[1])
    if is_launcher(above):
        found.append(above)
    return found


def is_launcher(pid: int) -> bool:
    """Whether it is mpirun or the like, by its name."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip() in _LAUNCHERS
    except OSError:
        return False


def _status(pid: int) -> list[str]:
    """State, parent and so on of a process, as proc(5) has them."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["?", "0"]


def halted(pid: int) -> str:
    """Why a process cannot run, in words; empty if it can."""
    return {
        "T": f"stopped (kill -CONT {pid} lets it go on)",
        "t": "stopped by a debugger",
        "D": "in a system call that does not return (a disk, a network file system)",
    }.get(_status(pid)[0], "")


def stacks(ranks: dict[int, tuple[int, int, int]]) -> dict[int, str]:
    """Where each rank is in its program, in words: {rank: (pidfd, signal number, pipe)}. Waits for STACK_S at most."""
    texts, silent = dict.fromkeys(ranks, ""), {pipe: rank for rank, (_, _, pipe) in ranks.items()}
    for pidfd, number, pipe in ranks.values():
        _read(pipe)  # what is left of an earlier answer
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    deadline = time.monotonic() + STACK_S
    while silent and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(silent), [], [], left)[0]:
            new = _read(pipe).decode(errors="replace")
            texts[silent[pipe]] += new
            if not new or (new.endswith("\n") and _own(texts[silent[pipe]])):  # a stack is written piece by piece
                del silent[pipe]
    return {rank: place(text) for rank, text in texts.items()}


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except OSError:  # BlockingIOError: nothing there
        return b""


def place(stack: str) -> str:
    """The innermost line of the user's program in a stack as faulthandler writes it, and what it has called there.

    >>> place('  File "/lib/python3.11/threading.py", line 9 in wait\\n  File "/home/me/train.py", line 87 in step\\n')
    'in Python at train.py:87 (step), in wait of threading.py'
    """
    frames = _FRAME.findall(stack)
    if not frames:
        return "running, but not in Python, or without an answer"
    own = (_own(stack) or frames[-1:])[0]
    path, line, function = own
    inner = "" if own == frames[0] else f", in {frames[0][2]} of {os.path.basename(frames[0][0])}"
    return f"in Python at {os.path.basename(path)}:{line} ({function}){inner}"


def _own(stack: str) -> list[tuple[str, str, str]]:
    """The frames of the user's program, the innermost first: path, line, function."""
    return [frame for frame in _FRAME.findall(stack) if not _library(frame[0])]


def _library(path: str) -> bool:
    return "/lib/python" in path or "/site-packages/" in path or "/allred/" in path or path.startswith("<frozen")
