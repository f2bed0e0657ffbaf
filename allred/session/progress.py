"""Progress of training: its throughput, and the display: one updated line on a terminal, plain lines elsewhere.

    step 20, loss = 37.97, accuracy = 0.91 (18758.3 examples/sec; 0.005 sec/batch)

rich draws the line on a terminal, and is imported only there. No thread is used and the cursor stays visible, so a
killed process leaves the terminal usable.

Under mpirun the stderr of a rank is a pipe. If the stderr of mpirun is a terminal, the line goes through that pipe: a
rank that wrote to the terminal directly would sometimes erase an incomplete line of mpirun.
"""

import contextlib
import datetime
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

from allred.counters import Shares, shares
from allred.watch import process_state

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_REFRESH_S = 0.1
_INTERVALS = 100  # the window consists of at most about this many intervals; the oldest is dropped


class _Interval(NamedTuple):
    """An entry of the window over which the throughput is averaged."""

    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    waiting_s: float = 0.0
    communicating_s: float = 0.0


class Rates:
    """Measures the throughput of the latest steps.

    Call `record` at the end of every step. The first call only starts the clock, as does the first call after `pause`.
    The global step may increase by more than one between two calls (with parameter servers it counts the updates of all
    workers). A decrease counts as a pause.

    Arguments:
        window_s: seconds of training that are averaged; at least one step.
        clock: a monotonic clock, in seconds.

    >>> now = iter([0.0, 0.5, 1.0])
    >>> rates = Rates(clock=lambda: next(now))
    >>> for step in (1, 2, 3):
    ...     rates.record(step, examples=64, waiting_s=0.25, communicating_s=0.125)
    >>> rates.examples_per_s, rates.s_per_batch, rates.eta_s(max_steps=13)
    (128.0, 0.5, 5.0)
    >>> rates.shares
    Shares(computing=0.25, waiting=0.5, communicating=0.25)
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._window_s = window_s
        self._clock = clock
        self._intervals: deque[_Interval] = deque()
        self._seconds = 0.0  # of all intervals
        self._step = 0
        self._since: float | None = None  # the end of the previous step; None after a pause

    def record(self, step: int, examples: int, waiting_s: float = 0.0, communicating_s: float = 0.0) -> None:
        """Record the end of a step.

        Arguments:
            step: the global step, this one included.
            examples: examples of all ranks since the previous call; 0 if unknown.
            waiting_s: seconds since the previous call in which this rank waited until other ranks arrived.
            communicating_s: seconds of communication of this rank since the previous call, without these waits.
        """
        now, before, advanced = self._clock(), self._since, step - self._step
        self._since, self._step = now, step
        if before is None or advanced < 1:
            return
        interval = _Interval(now - before, advanced, examples, waiting_s, communicating_s)
        self._seconds += interval.seconds
        if self._intervals and self._intervals[-1].seconds < self._window_s / _INTERVALS:
            interval = _sum([self._intervals.pop(), interval])
        self._intervals.append(interval)
        while len(self._intervals) > 1 and self._seconds - self._intervals[0].seconds >= self._window_s:
            self._intervals.popleft()
            self._seconds = _sum(self._intervals).seconds

    def pause(self) -> None:
        """Exclude the time until the next `record`: a checkpoint or an evaluation."""
        self._since = None

    @property
    def examples_per_s(self) -> float | None:
        """Examples per second of all ranks; None while unknown."""
        total = _sum(self._intervals)
        return total.examples / total.seconds if total.examples and total.seconds > 0 else None

    @property
    def s_per_batch(self) -> float | None:
        """Seconds per global step; None while unknown."""
        total = _sum(self._intervals)
        return total.seconds / total.steps if total.steps else None

    @property
    def shares(self) -> Shares | None:
        """The parts of this rank's time as a named tuple (computing, waiting, communicating), whose sum is 1; None
        while unknown. waiting: until other ranks arrived; mode ps: with the servers."""
        total = _sum(self._intervals)
        return shares(total.seconds, total.waiting_s, total.communicating_s)

    def eta_s(self, max_steps: int | None) -> float | None:
        """Seconds until the global step is `max_steps`; None while unknown, or if `max_steps` is None."""
        seconds = self.s_per_batch
        return None if seconds is None or max_steps is None else seconds * max(max_steps - self._step, 0)


def _sum(intervals: Iterable[_Interval]) -> _Interval:
    return _Interval(*map(sum, zip(_Interval(), *intervals, strict=True)))


def display(stream: TextIO | None = None) -> "Display":
    """Return a display: a progress line if the stream is a terminal, or a pipe to mpirun on one; else plain lines.

    Lines are plain also if rich is not installed, TERM is empty or "dumb", or NO_COLOR is set (no-color.org).

    Arguments:
        stream: default stderr. It is not closed.

        progress = allred.session.display()
        progress.show(20, 100, {"loss": 0.25}, rates)
        progress.close()
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
    """Return the line for a log.

    >>> now = iter([0.0, 0.0533])
    >>> rates = Rates(clock=lambda: next(now))
    >>> for step in (10, 20):
    ...     rates.record(step, examples=1000)
    >>> plain_line(20, {"loss": 37.967, "accuracy": 0.91}, rates)
    'step 20, loss = 37.97, accuracy = 0.91 (18761.7 examples/sec; 0.005 sec/batch)'
    """
    throughput = []
    if (examples := rates.examples_per_s) is not None:
        throughput.append(f"{examples:.1f} examples/sec")
    if (seconds := rates.s_per_batch) is not None:
        throughput.append(f"{_seconds(seconds)} sec/batch")
    line = ", ".join([f"step {step}", *_values(values)])
    return f"{line} ({'; '.join(throughput)})" if throughput else line


def format_value(value: float) -> str:
    """Format a value with two decimals, or with four digits if it is small or very large.

    >>> [format_value(value) for value in (37.967, 2.0, 0.0012345, 0.91, 1e9, float("nan"), -0.5)]
    ['37.97', '2.00', '0.001234', '0.91', '1e+09', 'nan', '-0.5']
    """
    return f"{value:.2f}" if 1 <= abs(value) < 1e6 else f"{value:.4g}"


class PlainDisplay:
    """Prints a line for each `show`. After an error of the stream, such as a closed one, it prints nothing more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._silent = False

    def show(self, step: int, max_steps: int | None, values: Mapping[str, float], rates: Rates) -> None:
        """Print the global step and the values, "loss" first. Names are any text."""
        self.say(plain_line(step, values, rates))

    def say(self, text: str) -> None:
        """Print one or more lines."""
        if self._silent:
            return
        try:
            self._stream.write(_encodable(f"{text}\n", self._stream))  # print() would write the newline separately
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # deleted, full or closed: training continues
            self._silent = True

    def close(self) -> None:
        """Do nothing: the lines are complete."""


class TerminalDisplay:
    """One line drawn by rich, at most ten times a second. After an error of the stream it draws nothing more.

    Output of Python to stdout and stderr goes above the line, if these are the same file. Output of other writers
    (ranks, watchers, C code) appears behind the line, and remains if it is written together with its newline: print()
    does so on stdout, and not on stderr.

    stream: the output stream. terminal: a descriptor of the terminal that the stream leads to; `close` closes it.
    Raises ImportError: rich is not installed.
    """

    def __init__(self, stream: TextIO, terminal: int) -> None:
        import rich.progress

        self._stream, self._terminal = stream, terminal
        self._progress: Progress | None = None
        self._columns = (
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            rich.progress.BarColumn(bar_width=20),  # last, so that a narrow terminal shows the text
        )
        self._closed = False
        self._drawn = float("-inf")

    def show(self, step: int, max_steps: int | None, values: Mapping[str, float], rates: Rates) -> None:
        """Show the global step, of `max_steps` if known, and the values, "loss" first. Names are any text."""
        if self._closed:
            return
        with self._close_on_errors():
            progress = self._progress or self._start()
            count = f"step {step}/{max_steps}" if max_steps is not None else f"step {step}"
            text = _encodable("  ".join([count, *_values(values), *_throughput(max_steps, rates)]), self._stream)
            progress.update(progress.task_ids[0], total=max_steps, completed=step, text=text, visible=True)
            now = time.perf_counter()
            if now - self._drawn >= _REFRESH_S:
                self._drawn = now
                self._fit(progress.console)
                progress.refresh()

    def say(self, text: str) -> None:
        """Print one or more lines above the progress line."""
        if self._closed:
            return
        with self._close_on_errors():
            progress = self._progress or self._start()
            progress.console.print(_encodable(text, self._stream))

    def close(self) -> None:
        """End the progress line; other output continues below it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()  # rich would drop an incomplete line
            with contextlib.suppress(OSError, ValueError):
                self._progress.stop()  # draws the line a last time
        os.close(self._terminal)

    def _start(self) -> "Progress":
        """Start rich, at the first output: from now on other output of this process goes through rich."""
        import rich.console
        import rich.progress

        console = rich.console.Console(
            file=self._stream, force_terminal=True, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        console.on_broken_pipe = _reraise  # type: ignore[method-assign]  # the default ends the program
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
        """Set the size: rich would ask stdin, stdout and stderr, which may not be this terminal."""
        columns, rows = os.get_terminal_size(self._terminal)
        if columns > 0:
            console.size = (columns, rows)

    @contextlib.contextmanager
    def _close_on_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            self.close()


Display = PlainDisplay | TerminalDisplay


def _values(values: Mapping[str, float]) -> list[str]:
    names = sorted(values, key=lambda name: name != "loss")
    return [f"{_printable(name)} = {format_value(values[name])}" for name in names]


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _throughput(max_steps: int | None, rates: Rates) -> Iterator[str]:
    if (examples := rates.examples_per_s) is not None:
        yield f"{examples:.1f} examples/s"
    if (seconds := rates.s_per_batch) is not None:
        yield f"{_seconds(seconds)} s/batch"
    if (left := rates.eta_s(max_steps)) is not None:
        yield f"ETA {datetime.timedelta(seconds=round(left))}"
    if rates.shares is not None:
        yield str(rates.shares)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.6f}"


def _terminal(stream: TextIO) -> int | None:
    """Return a new descriptor of the terminal that the stream leads to, directly or through mpirun; else None."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown", ""):
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream.isatty():
            return os.dup(stream.fileno())
        if stream.fileno() == 2 and stat.S_ISFIFO(os.fstat(2).st_mode):
            for pid in filter(process_state.is_launcher, process_state.launcher_ancestors(os.getpid())):
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
    """Return the text with Python's escapes for characters that the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
