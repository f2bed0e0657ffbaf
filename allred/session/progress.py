"""What a person sees of a training while it runs: one line that changes on a terminal, plain lines in a log.

    step 20, loss = 37.97, accuracy = 0.91 (18758.3 examples/sec; 0.005 sec/batch)

The line on a terminal is drawn by rich, which is imported only there. Nothing here runs in a thread, and the cursor
stays visible, so that a process that is killed leaves the terminal as it was.

Under mpirun a rank's stderr is a pipe to it. Where mpirun's own is a terminal, the line goes through that pipe: if
a rank wrote to the terminal itself, it would now and then erase a line of mpirun's of which the end is not yet written.
"""

import contextlib
import datetime
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

from allred.session.rates import Rates
from allred.watch import process_state

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_REFRESH_S = 0.1  # on a terminal


class Display(Protocol):
    """Where progress is shown. After an error of its stream, such as one that is closed, it stays silent."""

    def show(self, step: int, max_steps: int | None, values: Mapping[str, float], rates: Rates) -> None:
        """The training has come to the global step `step`, of `max_steps` or of no known number.

        Arguments:
            values: what to show, in this order, "loss" first. Names are any text.
            rates: is read now.
        """

    def say(self, text: str) -> None:
        """A line, or several, above the progress line."""

    def close(self) -> None:
        """The last line stays as it is; other output goes on below it. May be called twice."""


def display(stream: TextIO | None = None) -> Display:
    """A progress line where the stream is a terminal, or is stderr and leads through mpirun to one; else plain lines.

    Plain also where rich is not installed, TERM is empty or "dumb", or NO_COLOR is set (no-color.org).

    Arguments:
        stream: default: stderr, where all of allred's lines for a person go. Not closed.
    """
    where = sys.stderr if stream is None else stream
    terminal = _terminal(where)
    if terminal is None:
        return PlainDisplay(where)
    try:
        return TerminalDisplay(where, terminal)
    except ImportError:
        os.close(terminal)
        return PlainDisplay(where)


def plain_line(step: int, values: Mapping[str, float], rates: Rates) -> str:
    """The line of a log.

    >>> now = iter([0.0, 0.0533])
    >>> rates = Rates(clock=lambda: next(now))
    >>> for step in (10, 20):
    ...     rates.record(step, examples=1000)
    >>> plain_line(20, {"loss": 37.967, "accuracy": 0.91}, rates)
    'step 20, loss = 37.97, accuracy = 0.91 (18761.7 examples/sec; 0.005 sec/batch)'
    """
    pace = []
    if (examples := rates.examples_per_s) is not None:
        pace.append(f"{examples:.1f} examples/sec")
    if (seconds := rates.s_per_batch) is not None:
        pace.append(f"{_seconds(seconds)} sec/batch")
    what = ", ".join([f"step {step}", *_values(values)])
    return f"{what} ({'; '.join(pace)})" if pace else what


def number(value: float) -> str:
    """A value as people read it: two decimals; four digits where it is small, or very large.

    >>> [number(value) for value in (37.967, 2.0, 0.0012345, 0.91, 1e9, float("nan"), -0.5)]
    ['37.97', '2.00', '0.001234', '0.91', '1e+09', 'nan', '-0.5']
    """
    return f"{value:.2f}" if 1 <= abs(value) < 1e6 else f"{value:.4g}"


class PlainDisplay:
    """A line for each `show`. See Display for its methods."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._silent = False

    def show(self, step: int, max_steps: int | None, values: Mapping[str, float], rates: Rates) -> None:
        self.say(plain_line(step, values, rates))

    def say(self, text: str) -> None:
        if self._silent:
            return
        try:
            self._stream.write(_encodable(f"{text}\n", self._stream))  # print would write the end of the line apart
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # gone, full, or closed: no reason to end a training
            self._silent = True

    def close(self) -> None:
        pass


class TerminalDisplay:
    """One line by rich, drawn anew at most ten times a second. See Display for its methods.

    Meanwhile what Python writes to stdout and stderr goes above the line, where these are the same file. What
    others write (ranks, watchers, C) appears behind the line, and stays if it is written with its end at once: print
    does so to stdout, and not to stderr.

    Arguments:
        stream: where to write.
        terminal: a descriptor of the terminal to which that leads; `close` closes it.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, stream: TextIO, terminal: int) -> None:
        import rich.progress

        self._stream, self._terminal = stream, terminal
        self._progress: Progress | None = None
        self._columns = (
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            rich.progress.BarColumn(bar_width=20),  # the last: where a row is too narrow, the text is what counts
        )
        self._closed = False
        self._drawn = float("-inf")

    def show(self, step: int, max_steps: int | None, values: Mapping[str, float], rates: Rates) -> None:
        if self._closed:
            return
        with self._ended_by_errors():
            progress = self._progress or self._start()
            count = f"step {step}/{max_steps}" if max_steps is not None else f"step {step}"
            text = _encodable("  ".join([count, *_values(values), *_pace(max_steps, rates)]), self._stream)
            progress.update(progress.task_ids[0], total=max_steps, completed=step, text=text, visible=True)
            now = time.perf_counter()
            if now - self._drawn >= _REFRESH_S:
                self._drawn = now
                self._fit(progress.console)
                progress.refresh()

    def say(self, text: str) -> None:
        if self._closed:
            return
        with self._ended_by_errors():
            progress = self._progress or self._start()
            progress.console.print(_encodable(text, self._stream))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()  # rich would drop a line that has no end yet
            with contextlib.suppress(OSError, ValueError):
                self._progress.stop()  # draws the line once more
        os.close(self._terminal)

    def _start(self) -> "Progress":
        """Not before there is something to show: from now on other output goes through rich."""
        import rich.console
        import rich.progress

        console = rich.console.Console(
            file=self._stream, force_terminal=True, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        console.on_broken_pipe = _reraise  # type: ignore[method-assign]  # its own ends the program
        self._fit(console)
        self._progress = rich.progress.Progress(
            *self._columns, console=console, auto_refresh=False,
            redirect_stdout=_same_file(sys.stdout, self._stream),
            redirect_stderr=_same_file(sys.stderr, self._stream),
        )  # fmt: skip
        self._progress.add_task("", text="", visible=False)
        self._progress.start()
        console.show_cursor(True)
        return self._progress

    def _fit(self, console: "Console") -> None:
        """rich would ask stdin, stdout and stderr for the size, which may be pipes, or lead elsewhere."""
        columns, rows = os.get_terminal_size(self._terminal)
        if columns > 0:
            console.size = (columns, rows)

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            self.close()


def _values(values: Mapping[str, float]) -> list[str]:
    names = sorted(values, key=lambda name: name != "loss")  # else in their order
    return [f"{_on_one_line(name)} = {number(values[name])}" for name in names]


def _on_one_line(name: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _pace(max_steps: int | None, rates: Rates) -> Iterator[str]:
    if (examples := rates.examples_per_s) is not None:
        yield f"{examples:.1f} examples/s"
    if (seconds := rates.s_per_batch) is not None:
        yield f"{_seconds(seconds)} s/batch"
    if (share := rates.communication_share) is not None:
        yield f"{100 * share:.0f} % communication"
    if (left := rates.eta_s(max_steps)) is not None:
        yield f"ETA {datetime.timedelta(seconds=round(left))}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.6f}"


def _terminal(stream: TextIO) -> int | None:
    """A new descriptor of the terminal that the stream leads to, directly or through mpirun; None if there is none."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown", ""):
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream.isatty():
            return os.dup(stream.fileno())
        if stream.fileno() == 2 and stat.S_ISFIFO(os.fstat(2).st_mode):
            for pid in filter(process_state.is_launcher, process_state.launcher(os.getpid())):
                if stat.S_ISCHR(os.stat(f"/proc/{pid}/fd/2").st_mode):
                    descriptor = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
                    if os.isatty(descriptor):
                        return descriptor
                    os.close(descriptor)
    return None


def _reraise() -> NoReturn:
    raise


def _same_file(one: TextIO, other: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.path.sameopenfile(one.fileno(), other.fileno())
    return False


def _encodable(text: str, stream: TextIO) -> str:
    """The text, with Python's escapes for what the stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
