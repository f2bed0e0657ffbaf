"""python -m allred resize: changes the number of ranks of a running job of `allred run`."""

import argparse
import secrets
import time
from collections.abc import Callable

from allred.command_line import Parser, fail, parse
from allred.errors import AllredError
from allred.runtime.channel import Channel, HandshakeError, Listener, Message, connect, open_listener
from allred.runtime.loop import Loop
from allred.runtime.timings import RESIZE_S
from allred.watch import job_monitor

PURPOSE = "resize"


class ResizeRequests:
    """The requests of `allred resize` to a running job.

    answer: called with the request; returns the answer, which the command prints, or raises AllredError."""

    def __init__(self, loop: Loop, name: str, answer: Callable[[Message], str]) -> None:
        if name in job_monitor.job_entries(job_monitor.RUN):
            raise AllredError(f"a job with the name {name!r} runs here already; choose another --name")
        self._answer, secret, listening = answer, secrets.token_hex(16), open_listener("127.0.0.1")
        self._listener = Listener(loop, listening, PURPOSE, secret, self._admit)
        entry = {"port": listening.getsockname()[1], "secret": secret}
        try:
            self._file = job_monitor.write_entry(name, job_monitor.RUN, entry)
        except OSError as error:
            raise AllredError(f"`allred resize` cannot find this job: {error}; choose another --name") from None

    def _admit(self, channel: Channel, messages: list[Message]) -> None:
        try:
            reply = {"text": self._answer(messages[0]), "code": 0}
        except AllredError as error:
            reply = {"text": str(error), "code": 1}
        channel.send(reply)
        channel.close()

    def close(self) -> None:
        self._listener.close()
        job_monitor.remove_entry(self._file)


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
        job = job_monitor.choose_job(options.job, job_monitor.job_entries(job_monitor.RUN), "`allred run`")
        channel = connect(("127.0.0.1", job["port"]), PURPOSE, job["secret"])
        channel.send({"np": options.np})
        reply = channel.receive_one(time.monotonic() + RESIZE_S)
    except (AllredError, HandshakeError, OSError, ValueError) as error:
        return fail(f"python -m allred resize: {error}", 1)
    if reply["code"]:
        return fail(f"python -m allred resize: {reply['text']}", 1)
    print(reply["text"])
    return 0
