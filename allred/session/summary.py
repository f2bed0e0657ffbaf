"""Summaries: scalars and histograms by global step, as JSON lines and, if tensorboard is installed, as event files.

    DIR/scalars.jsonl       {"step": 20, "time": 1760000000.5, "loss": 0.25, "accuracy": 0.91}
    DIR/histograms.jsonl    {"step": 20, "time": ..., "name": "fc1.weight", "count": 640, "edges": [...], ...}
    DIR/events.out.tfevents.*                                 tensorboard --logdir DIR

JSON has no NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity", which `float` accepts. Every
call flushes: a killed process loses no line and no event.

The event files are written with tensorboard's RecordWriter, not with its EventFileWriter: that one imports tensorflow
where it is installed (seconds), holds up to ten events in a thread, and reports a full disk only in that thread.
"""

import contextlib
import dataclasses
import json
import math
import operator
import os
import pathlib
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np

from allred import arrays, log, world
from allred.arrays import Array
from allred.errors import InputError

_RESERVED = ("step", "time")
_BUCKETS = 30  # as in TensorBoard
_CHUNK = 1 << 18  # elements converted to float64 at a time
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


@dataclasses.dataclass(frozen=True)
class Histogram:
    """TensorBoard's histogram of an array: 30 buckets of equal width.

    count, minimum, maximum, total, total_squares: of the finite values; 0 if there is none. edges: 31 float64,
    ascending. Bucket i holds edges[i] <= x < edges[i + 1], the last one also its upper edge. If all values are equal,
    all edges are equal, and the last bucket holds all values. counts: 30 int64, of the finite values. nonfinite: the
    number of NaNs and infinities.
    """

    count: int
    minimum: float
    maximum: float
    total: float
    total_squares: float
    edges: Array
    counts: Array
    nonfinite: int


def histogram(name: str, value: Any) -> Histogram:
    """Return the histogram of an array of numbers of any dtype, shape and layout. 10 million float32 take about 0.5 s.

    Raises InputError: not a host array of real numbers; `name` is in the message.

    >>> made = histogram("w", np.array([0.0, 1.0, 3.0, np.nan], np.float16))
    >>> made.count, made.maximum, made.total, made.nonfinite, made.counts[[0, 9, 10, 29]].tolist()
    (3, 3.0, 4.0, 1, [1, 0, 1, 1])
    """
    array = arrays.as_host_array(value)
    if array.dtype.kind not in "fiub" and arrays.name_of(array.dtype) != "bfloat16":
        raise InputError(
            f"histogram: {name!r} is {arrays.describe(array.shape, array.dtype)}; expected an array of real numbers"
        )
    flat = arrays.flat(array)
    count, total, squares, lowest, highest = 0, 0.0, 0.0, np.inf, -np.inf
    with np.errstate(over="ignore"):
        for chunk in _finite_chunks(flat):
            count += chunk.size
            total += float(chunk.sum())
            squares += float(chunk @ chunk)
            lowest, highest = min(lowest, float(chunk.min())), max(highest, float(chunk.max()))
    if count == 0:
        lowest = highest = 0.0
    part = np.arange(_BUCKETS + 1) / _BUCKETS  # not linspace: highest - lowest may overflow
    edges = np.maximum.accumulate(np.clip(lowest * (1 - part) + highest * part, lowest, highest))
    counts = np.zeros(_BUCKETS, np.int64)
    for chunk in _finite_chunks(flat):
        counts += np.histogram(chunk, edges)[0]
    return Histogram(count, lowest, highest, total, squares, edges, counts, flat.size - count)


def _finite_chunks(flat: Array) -> Iterator[Array]:
    """Yield the finite elements as float64, in chunks that are not empty."""
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(np.float64)
        finite = chunk[np.isfinite(chunk)]
        if finite.size:
            yield finite


class SummaryWriter:
    """Writes the summaries of a run, on one rank.

    A run that resumes from a checkpoint writes into the same directory. Records of an earlier run after the step of the
    checkpoint are purged: removed from the JSON lines (atomically), and ignored by TensorBoard. An incomplete last line
    of a killed process is removed too.

    If a file cannot be written any more, a warning is printed once, and training continues without summaries.

        writer = allred.session.SummaryWriter("logs")
        writer.scalars(20, {"loss": 0.25})
        writer.histogram(20, "fc1.weight", weight)
        writer.close()

    Arguments:
        directory: created if missing.
        step: the global step at the start of the run.

    Raises InputError: the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int = 0) -> None:
        self._directory = pathlib.Path(directory)
        self._warned_nonfinite = False
        self._failed = False
        self._events: _EventFile | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._scalars = _open_lines(self._directory / "scalars.jsonl", step)
            self._histograms = _open_lines(self._directory / "histograms.jsonl", step)
            self._events = _event_file(self._directory, step)
        except OSError as error:
            raise InputError(
                f"SummaryWriter: {self._directory} cannot be written: {error}; choose another directory"
            ) from error
        if (watcher := world.watcher()) is not None and watcher.rank == 0:  # monitors show the scalars
            watcher.send("summaries", directory=os.path.abspath(self._directory))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line.

        Arguments:
            step: the global step.
            values: numbers by name, any text but "step" and "time". Types that `float` converts are accepted, such as
                0-d arrays. TensorBoard receives float32; it shows names such as "time/waiting" in the group "time", and
                names without a slash in the group "train".

        Raises InputError: a wrong name or value. Nothing is written.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        step, now = operator.index(step), time.time()
        with self._write_errors() as writes:
            if writes:
                _write_line(self._scalars, {"step": step, "time": now, **numbers})
                if self._events:
                    self._events.scalars(step, now, numbers)

    def histogram(self, step: int, name: str, array: Any) -> None:
        """Write the distribution of the values of an array, in 30 buckets.

        Arguments:
            step: the global step.
            name: any text.
            array: real numbers, bfloat16 included, of any shape; may be empty. Values that are not finite are in no
                bucket: they are counted ("nonfinite" in the line; the scalar name/nonfinite in TensorBoard).

        Raises InputError: not an array of real numbers.
        """
        step, made, now = operator.index(step), histogram(name, array), time.time()
        if made.nonfinite and not self._warned_nonfinite:
            self._warned_nonfinite = True
            log.warning(
                f"summary: {made.nonfinite} of {made.count + made.nonfinite} values of {name!r} are not finite at step "
                f"{step}; the histogram leaves them out. No further warning; {name + '/nonfinite'!r} counts them"
            )
        with self._write_errors() as writes:
            if writes:
                fields = {
                    "count": made.count, "minimum": made.minimum, "maximum": made.maximum, "sum": made.total,
                    "sum_squares": made.total_squares, "nonfinite": made.nonfinite,
                    "edges": made.edges.tolist(), "counts": made.counts.tolist(),
                }  # fmt: skip
                _write_line(self._histograms, {"step": step, "time": now, "name": name, **fields})
                if self._events:
                    self._events.histogram(step, now, name, made)
                    if made.nonfinite:
                        self._events.scalars(step, now, {f"{name}/nonfinite": made.nonfinite})

    def close(self) -> None:
        """Close the files. May be called twice."""
        with self._write_errors():
            for file in (self._scalars, self._histograms, self._events):
                if file:
                    file.close()

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[bool]:
        """Yield whether to write. The first OSError is printed, and ends the summaries."""
        try:
            yield not self._failed
        except OSError as error:
            if not self._failed:
                log.warning(f"summary: {self._directory} cannot be written any more ({error}); summaries end here")
            self._failed = True


def _write_line(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False) + "\n")


def _open_lines(path: pathlib.Path, step: int) -> TextIO:
    """Open a file of JSON lines, and remove incomplete lines and those of steps after `step`. Raises OSError."""
    copy, purged = path.with_name(f".{path.name}.tmp"), False
    try:
        with open(path, "rb") as old, open(copy, "wb") as new:
            for line in old:
                if _is_valid(line, step):
                    new.write(line)
                else:
                    purged = True
            new.flush()
            os.fsync(new.fileno())
        if purged:
            os.replace(copy, path)
    except FileNotFoundError:
        pass  # the first run
    finally:
        copy.unlink(missing_ok=True)
    return open(path, "a", encoding="utf-8", buffering=1)


def _is_valid(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _strict(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(name: str, value: Any) -> float:
    if name in _RESERVED:
        raise InputError(f"scalars: {name!r} is a field of each line; choose another name than 'step' and 'time'")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"scalars: {name!r} must be a number, but is {value!r:.80}: {error}") from error


class _EventFile:
    """A new event file. Readers ignore the records of older files in the directory after `step`.

    Raises ImportError: tensorboard is not installed; importing it takes about 0.2 s. Raises OSError: also of all
    methods.
    """

    def __init__(self, directory: pathlib.Path, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        # readers sort files by name, so the new name must be greater than all others, whatever the clock says
        others = [int(match[1]) for name in os.listdir(directory) if (match := _EVENT_FILE.fullmatch(name))]
        second = max([int(time.time()), *(other + 1 for other in others)])
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(directory / name, "xb")  # noqa: SIM115  (open until `close`)
        self._records: Any = RecordWriter(self._file)
        now = time.time()
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=now, step=step + 1, session_log=start))  # purges that step and later ones

    def scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._add(step, now, [value(tag=_scalar_tag(name), simple_value=x) for name, x in values.items()])

    def histogram(self, step: int, now: float, name: str, made: Histogram) -> None:
        proto = self._summary.HistogramProto(
            min=made.minimum, max=made.maximum, num=made.count, sum=made.total, sum_squares=made.total_squares,
            bucket_limit=made.edges[1:].tolist(), bucket=made.counts.tolist(),
        )  # fmt: skip
        self._add(step, now, [self._summary.Summary.Value(tag=_tag(name), histo=proto)])

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, now: float, values: list[Any]) -> None:
        self._write(self._event(wall_time=now, step=step, summary=self._summary.Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _tag(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()  # protobuf rejects lone surrogates


def _scalar_tag(name: str) -> str:
    """Return a tag in a group: TensorBoard shows those with the same text before the first slash together."""
    return _tag(name if "/" in name else f"train/{name}")


def _event_file(directory: pathlib.Path, step: int) -> _EventFile | None:
    try:
        return _EventFile(directory, step)
    except ImportError:
        return None
    except OSError:
        raise
    except Exception as error:  # an incompatible protobuf, for example
        log.warning(f"summary: the package tensorboard cannot be used ({error}); summaries are JSON lines only")
        return None
