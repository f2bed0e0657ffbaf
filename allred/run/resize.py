"""python -m allred resize: changes the number of ranks of a running job of `allred run`."""

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from allred.command_line import Parser, fail, parse
from allred.errors import AllredError
from allred.runtime.channel import Channel, HandshakeError, Listener, Message, connect
from allred.runtime.loop import Loop
from allred.runtime.timings import RESIZE_S
from allred.watch import job_directory

PURPOSE = "resize"


class RequestSocket:
    """The socket of a running job, to which `allred resize` sends a request. The directory admits only the user.

    answer: called with the request; returns the answer, which the command prints, or raises AllredError."""

    def __init__(self, loop: Loop, name: str, answer: Callable[[Message], str]) -> None:
        self._answer = answer
        self._path = job_directory.directory() / f"{name}{job_directory.SOCKET}"
        if name in job_directory.run_sockets():
            raise AllredError(f"a job with the name {name!r} runs here already; choose another --name")
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(str(self._path))
        except OSError as error:
            listening.close()
            raise AllredError(
                f"no socket for `allred resize` at {self._path}: {error}; choose a shorter --name"
            ) from None
        self._listener = Listener(loop, listening, PURPOSE, "", self._admit)

    def _admit(self, channel: Channel, messages: list[Message]) -> None:
        try:
            reply = {"text": self._answer(messages[0]), "code": 0}
        except AllredError as error:
            reply = {"text": str(error), "code": 1}
        channel.send(reply)
        channel.close()

    def close(self) -> None:
        self._listener.close()
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
    except (AllredError, HandshakeError, OSError, ValueError) as error:
        return fail(f"python -m allred resize: {error}", 1)
    if reply["code"]:
        return fail(f"python -m allred resize: {reply['text']}", 1)
    print(reply["text"])
    return 0


def _request(path: Path, request: Message) -> Message:
    channel = connect(str(path), PURPOSE, "")
    channel.send(request)
    return channel.receive_one(time.monotonic() + RESIZE_S)
