"""Runs a rank with its output passed through a filter, which marks each line with the rank and copies it into a file.

    python rank_output.py TAG LOGS PROGRAM ARGUMENTS...     TAG: 1 or 0; LOGS: a directory, or "" for no files

This process becomes the program, so that launchers and watchers see the rank itself. A child process is the filter. It
ends when all writers have closed their end. mpirun's own options mix the parts of lines of several ranks.
"""

import contextlib
import os
import selectors
import signal
import sys

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def main(tag: str, logs: str, *program: str) -> None:
    """Start the filter, then become the program."""
    process = os.environ.get("ALLRED_AGENT", "").split()[1:2]  # of an elastic job: its number, the first rank it had
    rank = next(iter([*process, *(os.environ[name] for name in _RANK if name in os.environ)]), "0")
    log = open_log(logs, rank) if logs else -1
    pipes = {1: os.pipe(), 2: os.pipe()}
    if os.fork() == 0:
        os.setsid()  # an agent kills what is left of a rank's session; this process ends with the pipes
        for _, write in pipes.values():
            os.close(write)
        close_others({0, 1, 2, log, *(read for read, _ in pipes.values())})
        copy_output({read: out for out, (read, _) in pipes.items()}, f"[{rank}] " if tag == "1" else "", log)
        os._exit(0)
    for out, (read, write) in pipes.items():
        os.close(read)
        os.dup2(write, out)
        os.close(write)
    if log >= 0:
        os.close(log)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"allred run: cannot start {program[0]}: {error.strerror}\n".encode())
        os._exit(127)


def open_log(directory: str, rank: str) -> int:
    """Open the file of this rank: a new one at the first start of the job, at its end after a restart."""
    os.makedirs(directory, exist_ok=True)
    kept = os.O_APPEND if os.environ.get("ALLRED_STARTS", "1") != "1" else os.O_TRUNC
    return os.open(os.path.join(directory, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | kept | os.O_APPEND, 0o666)


def close_others(kept: set[int]) -> None:
    """Close the descriptors that are not in `kept`: the launcher waits for the end of its connection to the rank."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def copy_output(streams: dict[int, int], mark: str, log: int) -> None:
    """Copy complete lines until all writers have closed their end. streams: {pipe: stdout or stderr}."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    begun = dict.fromkeys(streams, b"")
    selector = selectors.DefaultSelector()
    for pipe in streams:
        selector.register(pipe, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if not data:
                selector.unregister(key.fd)
            *lines, begun[key.fd] = (begun[key.fd] + data).split(b"\n")
            if not data and begun[key.fd]:
                lines.append(begun[key.fd])
            if text := b"".join(mark.encode() + line + b"\n" for line in lines):
                write_all(streams[key.fd], text)
            if log >= 0 and lines:
                write_all(log, b"".join(line + b"\n" for line in lines))


def write_all(descriptor: int, data: bytes) -> None:
    """Write; the program continues if there is no reader."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(*sys.argv[1:])
