"""TensorBoard's event file, by the tensorboard package's own record writer. Needs neither tensorflow nor torch.

Not by its EventFileWriter, which imports tensorflow where that is installed (seconds), writes from a thread that may
have up to ten events when the process is killed, and tells of a full disk from there. Here an event is with the kernel
when the call returns. Importing it takes about 0.2 s, and happens when the first file is made.
"""

import os
import pathlib
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from allred.session.histogram import Histogram

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


class EventFile:
    """A new event file in a directory. Readers take what it has instead of what other files there have of later steps.

    Arguments:
        directory: exists.
        step: the global step that the run starts from.

    Raises:
        ImportError: the package tensorboard is not installed.
        OSError: the file cannot be made.
    """

    def __init__(self, directory: pathlib.Path, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._file = open(directory / _name(directory), "xb")  # noqa: SIM115  (open until `close`)
        self._records: Any = RecordWriter(self._file)
        now = time.time()
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=now, step=step + 1, session_log=start))  # purges that step and later ones

    def scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """One value for each name, as float32. Raises OSError."""
        made = [self._summary.Summary.Value(tag=_tag(name), simple_value=value) for name, value in values.items()]
        self._add(step, now, made)

    def histogram(self, step: int, now: float, name: str, made: Histogram) -> None:
        """Raises OSError."""
        proto = self._summary.HistogramProto(
            min=made.minimum, max=made.maximum, num=made.count, sum=made.total, sum_squares=made.total_squares,
            bucket_limit=made.edges[1:].tolist(), bucket=made.counts.tolist(),
        )  # fmt: skip
        self._add(step, now, [self._summary.Summary.Value(tag=_tag(name), histo=proto)])

    def close(self) -> None:
        """Raises OSError."""
        self._file.close()

    def _add(self, step: int, now: float, values: list[Any]) -> None:
        self._write(self._event(wall_time=now, step=step, summary=self._summary.Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _tag(name: str) -> str:
    """Protobuf takes no lone surrogates."""
    return name.encode(errors="backslashreplace").decode()


def _name(directory: pathlib.Path) -> str:
    """Readers take files in the order of their names, so it is later than all others, whatever the clock says."""
    others = [int(match[1]) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    second = max([int(time.time()), *(other + 1 for other in others)])
    return f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
