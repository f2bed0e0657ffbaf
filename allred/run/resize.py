"""python -m allred resize: changes the number of ranks of a running job of `allred run`."""

import argparse
import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from allred.command_line import Parser, fail, parse
from allred.errors import AllredError
from allred.runtime.timings import RESIZE_S
from allred.watch import job_directory


class RequestSocket:
    """The socket of a running job, on which `allred resize` sends a request: a line of JSON.

    answer: called with the request; returns the answer, which the command prints, or raises AllredError."""

    def __init__(self, selector: selectors.BaseSelector, name: str, answer: Callable[[dict[str, int]], str]) -> None:
        self._answer = answer
        self._path = job_directory.directory() / f"{name}{job_directory.SOCKET}"
        if name in job_directory.run_sockets():
            raise AllredError(f"a job with the name {name!r} runs here already; choose another --name")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(self._path))
        except OSError as error:
            self._socket.close()
            raise AllredError(
                f"no socket for `allred resize` at {self._path}: {error}; choose a shorter --name"
            ) from None
        self._socket.listen(8)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not a request
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(1.0)
                request = json.loads(connection.makefile().readline())
                try:
                    reply = {"text": self._answer(request), "code": 0}
                except AllredError as error:
                    reply = {"text": str(error), "code": 1}
                connection.sendall(json.dumps(reply).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m allred resize",
        description="Changes the number of ranks of a job that `python -m allred run` has started on this host: its "
        "session writes a checkpoint after the current step, and the job starts again with the new number.",
    )
    parser.add_argument("job", nargs="?", default="", help="its name; not needed if one job runs")
    parser.add_argument("np", type=int, help="the new number of ranks")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    options = parse(_parser, arguments)
    if isinstance(options, int):
        return options
    try:
        path = job_directory.choose(options.job, job_directory.run_sockets(), "`allred run`")
        reply = _request(path, {"np": options.np})
    except (AllredError, OSError, ValueError) as error:
        return fail(f"python -m allred resize: {error}", 1)
    if reply["code"]:
        return fail(f"python -m allred resize: {reply['text']}", 1)
    print(reply["text"])
    return 0


def _request(path: Path, request: dict[str, int]) -> dict[str, str]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(RESIZE_S)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply: dict[str, str] = json.loads(connection.makefile().readline())
        return reply
