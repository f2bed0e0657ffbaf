"""The state of another process: its stack, whether it is stopped, and how it ended.

On a signal, a rank writes its own Python stack into a pipe, with faulthandler, also while the interpreter runs C code;
before that the name of the MPI function that it is in, if any.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator

from allred.runtime.timings import STACK_END_S, STACK_S

_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15
_EXIT_CODE_AT = 60
_START_TIME, _STATUS_EXIT_CODE = 19, 49  # of the fields of /proc/PID/stat, from the state on
_TRIES = 20
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun")
_DAEMONS = ("hydra_pmi_proxy", "prted", "orted")  # which mpirun starts on every node
_ENDED = ("?", "Z", "X")  # states; "?": there is no such process
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x([0-9a-f]+)\b.*|Stack \(.*)\n", re.MULTILINE)
_MPI_CALL = re.compile(r"^MPI \w+$", re.MULTILINE)  # a line of csrc/python/mpi_call.c
MAIN_FRAMES, OTHER_FRAMES, OTHER_THREADS = 8, 3, 4  # the most that a table shows
_LIBRARY = re.compile(r"/lib/python|/site-packages/|/allred/|^<frozen")


def describe_end(pidfd: int, pid: int) -> tuple[str, int]:
    """Return how a dead process ended, as text, and an exit code. It need not be a child."""
    status = exit_status(pidfd, pid)
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


def exit_status(pidfd: int, pid: int) -> int | None:
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


def read_stacks(
    ranks: dict[int, tuple[int, int, int]], ask_threads: Callable[[], object] | None = None
) -> dict[int, str]:
    """Return the stack of each rank, as faulthandler writes it. ranks: {rank: (pidfd, signal, pipe)}. Waits at most
    STACK_S seconds, by default until the line of the program is known.

    ask_threads: called when the main threads have written their whole stacks. It asks the ranks for all threads. They
    answer as soon as they execute Python: only then no other thread changes its stack.
    """
    texts, pipes = dict.fromkeys(ranks, ""), {pipe: rank for rank, (_, _, pipe) in ranks.items()}
    for pidfd, number, pipe in ranks.values():
        _read(pipe)  # the rest of an earlier answer
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    deadline = time.monotonic() + STACK_S
    if ask_threads is None:
        _collect(texts, pipes, deadline, whole=False)
    else:
        _collect(texts, pipes, deadline - STACK_S / 2, whole=True)
        ask_threads()
        _collect(texts, pipes, deadline, whole=True)
    return texts


def _collect(texts: dict[int, str], pipes: dict[int, int], deadline: float, whole: bool) -> None:
    """Add to the text of each rank what arrives in its pipe. whole: until nothing arrives for STACK_END_S; else until
    the text has a line of the program."""
    silent, heard = dict(pipes), dict[int, float]()  # when each pipe was read last
    while silent and (now := time.monotonic()) < deadline:
        wait_s = min(STACK_END_S, deadline - now) if whole else deadline - now
        for pipe in select.select(list(silent), [], [], wait_s)[0]:
            new = _read(pipe).decode(errors="replace")
            texts[silent[pipe]] += new
            heard[pipe] = time.monotonic()
            if not new or (not whole and new.endswith("\n") and _user_frames(texts[silent[pipe]])):
                del silent[pipe]  # a stack is written in pieces
        now = time.monotonic()
        for pipe in [pipe for pipe, at in heard.items() if whole and pipe in silent and now > at + STACK_END_S]:
            del silent[pipe]


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except OSError:  # BlockingIOError: nothing there
        return b""


def split_threads(stack: str, main_thread: int) -> tuple[str, list[str]]:
    """Return the stack of the main thread, which has no ident in its heading, and the stacks of the others.
    main_thread: its ident in the list of all threads."""
    parts = _THREAD.split(stack)  # what precedes the first heading, then pairs of ident and stack
    pairs = list(zip(parts[1::2], parts[2::2], strict=True))
    main = "".join(text for ident, text in pairs if not ident)
    return parts[0] + main, [text for ident, text in pairs if ident and int(ident, 16) != main_thread]


def program_line(stack: str) -> str:
    """Return the innermost line of the user's program in a stack of faulthandler, or a line of a library.

    >>> program_line('File "/lib/python3.11/threading.py", line 9 in wait\\nFile "/home/me/train.py", line 87 in step')
    'in Python at train.py:87 (step)'
    >>> program_line('MPI Send_c\\nFile "/home/me/train.py", line 87 in step')
    'in MPI Send at train.py:87 (step)'
    """
    frames = _FRAME.findall(stack)
    if not frames:
        return "running, but not in Python, or without an answer"
    path, line, function = (_user_frames(stack) or frames[-1:])[0]
    where = "Python" if (call := _MPI_CALL.search(stack)) is None else call[0].removesuffix("_c")
    return f"in {where} at {os.path.basename(path)}:{line} ({function})"


def _user_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return the frames outside of libraries, the innermost first: (path, line, function)."""
    return [frame for frame in _FRAME.findall(stack) if not _LIBRARY.search(frame[0])]


def shown_stack(stack: str, others: list[str]) -> str:
    """Return the innermost lines of the program for a table, each indented; "" if the stack has none. others: the
    stacks of the other threads, which are shown if they execute the program."""
    shown = _frame_lines(_user_frames(stack) or _FRAME.findall(stack), MAIN_FRAMES)
    for each in [frames for frames in map(_user_frames, others) if frames][:OTHER_THREADS]:
        shown += ["in another thread:", *(f"  {line}" for line in _frame_lines(each, OTHER_FRAMES))]
    return "\n".join(f"    {line}" for line in shown)


def _frame_lines(frames: list[tuple[str, str, str]], most: int) -> list[str]:
    lines = [f"{path}:{line} ({function})" for path, line, function in frames[:most]]
    return [*lines, f"and {len(frames) - most} more"] if len(frames) > most else lines
