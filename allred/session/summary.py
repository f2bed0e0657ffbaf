"""Summaries, scalars and histograms by global step: JSON lines always, and TensorBoard's files where it is installed.

    DIR/scalars.jsonl       {"step": 20, "time": 1760000000.5, "loss": 0.25, "accuracy": 0.91}
    DIR/histograms.jsonl    {"step": 20, "time": ..., "name": "fc1.weight", "count": 640, "edges": [...], ...}
    DIR/events.out.tfevents.*                                 tensorboard --logdir DIR

JSON has no word for NaN and the infinities, so they are the strings "NaN", "Infinity" and "-Infinity", which `float`
takes. A line is with the kernel when the call returns.
"""

import contextlib
import json
import math
import operator
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from allred.cluster import report
from allred.errors import InputError
from allred.session.events import EventFile
from allred.session.histogram import histogram

_RESERVED = ("step", "time")


class SummaryWriter:
    """Writes the summaries of a run, on one rank.

    A run that goes on from a checkpoint writes into the same directory. What an earlier run wrote of later steps than
    that of the checkpoint is purged: deleted from the JSON lines (which are replaced at once), and left out by
    TensorBoard. So is the end of a line that a killed process left.

    When a file cannot be written any more, that is said once, and the training goes on without summaries.

    Arguments:
        directory: made if it is not there.
        step: the global step that the run starts from.

    Raises:
        InputError: nothing can be written to the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int = 0) -> None:
        self._directory = pathlib.Path(directory)
        self._told = False  # of values that are not finite
        self._broken = False
        self._events: EventFile | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._scalars = _Lines(self._directory / "scalars.jsonl", step)
            self._histograms = _Lines(self._directory / "histograms.jsonl", step)
            self._events = _events(self._directory, step)
        except OSError as error:
            raise InputError(
                f"SummaryWriter: {self._directory} cannot be written: {error}; choose another directory"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line.

        Arguments:
            step: the global step.
            values: by name, any text but "step" and "time". A number, or what `float` makes one of, such as a 0-d
                array. TensorBoard gets them as float32.

        Raises:
            InputError: a name or a value that cannot be. Nothing is written then.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        step, now = operator.index(step), time.time()
        with self._unless_broken() as works:
            if works:
                self._scalars.write({"step": step, "time": now, **numbers})
                if self._events:
                    self._events.scalars(step, now, numbers)

    def histogram(self, step: int, name: str, array: Any) -> None:
        """Write the distribution of an array's values, in 30 buckets.

        Arguments:
            step: the global step.
            name: any text.
            array: of real numbers, bfloat16 included, of any shape; may be empty. Values that are not finite are in no
                bucket: they are counted ("nonfinite" in the line; the scalar name/nonfinite in TensorBoard).

        Raises:
            InputError: no such array.
        """
        step, made, now = operator.index(step), histogram(name, array), time.time()
        if made.nonfinite and not self._told:
            self._told = True
            report.say(
                f"summary: {made.nonfinite} of {made.count + made.nonfinite} values of {name!r} are not finite at step "
                f"{step}; the histogram is of the others. This is said once; {name + '/nonfinite'!r} counts them"
            )
        with self._unless_broken() as works:
            if works:
                fields = {
                    "count": made.count, "minimum": made.minimum, "maximum": made.maximum, "sum": made.total,
                    "sum_squares": made.total_squares, "nonfinite": made.nonfinite,
                    "edges": made.edges.tolist(), "counts": made.counts.tolist(),
                }  # fmt: skip
                self._histograms.write({"step": step, "time": now, "name": name, **fields})
                if self._events:
                    self._events.histogram(step, now, name, made)
                    if made.nonfinite:
                        self._events.scalars(step, now, {f"{name}/nonfinite": made.nonfinite})

    def close(self) -> None:
        """Close the files. May be called twice."""
        with self._unless_broken():
            for file in (self._scalars, self._histograms, self._events):
                if file:
                    file.close()

    @contextlib.contextmanager
    def _unless_broken(self) -> Iterator[bool]:
        try:
            yield not self._broken
        except OSError as error:
            if not self._broken:
                report.say(f"summary: {self._directory} cannot be written any more ({error}); summaries end here")
            self._broken = True


class _Lines:
    """A file of JSON lines, of which those of later steps than `step` are deleted. All of it raises OSError."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        _purge(path, step)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (open until `close`)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _purge(path: pathlib.Path, step: int) -> None:
    """Replace the file by one without the lines of later steps, and without those that are not whole."""
    fresh, dropped = path.with_name(f".{path.name}.tmp"), False
    try:
        with open(path, "rb") as old, open(fresh, "wb") as new:
            for line in old:
                if _stays(line, step):
                    new.write(line)
                else:
                    dropped = True
            new.flush()
            os.fsync(new.fileno())
        if dropped:
            os.replace(fresh, path)
    except FileNotFoundError:
        pass  # the first run
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()


def _stays(line: bytes, step: int) -> bool:
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
        raise InputError(f"scalars: {name!r} is what the line itself holds; choose another name than 'step' and 'time'")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"scalars: {name!r} must be a number, but is {value!r:.80}: {error}") from error


def _events(directory: pathlib.Path, step: int) -> EventFile | None:
    try:
        return EventFile(directory, step)
    except ImportError:
        return None
    except OSError:
        raise
    except Exception as error:  # what a protobuf says that does not fit, for example
        report.say(f"summary: the package tensorboard cannot be used ({error}); summaries are JSON lines only")
        return None
