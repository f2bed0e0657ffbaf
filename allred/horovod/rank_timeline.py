"""start_timeline and stop_timeline: record rank 0, and write a trace for chrome://tracing.

ALLRED_TIMELINE records all ranks from init() on, and shows which rank waited for which (docs/timeline.md).
"""

import json
import os
import pathlib
import secrets
import socket
import time

from allred import world
from allred.cluster import topology
from allred.comm import functions
from allred.comm.process_set import communicators
from allred.errors import InputError
from allred.horovod.process_sets import check_initialized
from allred.runtime import process_end
from allred.timeline import recorder
from allred.timeline.command import trace_events
from allred.timeline.rank_file import read_timeline
from allred.timeline.recorder import Recorder, Track

_output: pathlib.Path | None = None  # of the timeline that is being recorded


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations of rank 0 until `stop_timeline` or the end of the program; other ranks ignore the call.

    file_path: the trace, a JSON file. mark_cycles: ignored.

    Raises ValueError before `hvd.init()`, if the file cannot be written, or while ALLRED_TIMELINE records.

    Example: `hvd.start_timeline("trace.json")`.
    """
    global _output
    check_initialized("start_timeline()")
    if topology.rank() != 0:
        return
    stop_timeline()
    if recorder.current is not None:
        raise InputError("start_timeline(): ALLRED_TIMELINE records this job already; unset it")
    output = pathlib.Path(os.path.abspath(file_path))
    try:
        made = Recorder(str(_records_of(output)))
    except OSError as error:
        raise InputError(f"start_timeline({file_path!r}): {error.strerror}; choose another path") from error
    now = time.perf_counter_ns()
    made.begin(
        {
            "job": secrets.token_hex(8), "rank": 0, "size": 1, "time": time.time(), "start": now, "name": "rank 0",
            "host": socket.gethostname(), "pid": os.getpid(),
        }
    )  # fmt: skip
    made.add(("clock", now, 0, 0))
    recorder.install(made)
    for communicator in (functions.current(), *communicators()):
        communicator.record(
            Track(made, "all ranks" if communicator is functions.current() else str(communicator.ranks))
        )
    if _output is None:
        process_end.register(_stop)
    _output = output


def stop_timeline() -> None:
    """End the timeline and write its file. Does nothing if none is recorded.

    Raises ValueError before `hvd.init()`.

    Example: `hvd.stop_timeline()`.
    """
    check_initialized("stop_timeline()")
    _stop()


def _stop() -> None:
    global _output
    if _output is None:
        return
    output, _output = _output, None
    process_end.unregister(_stop)
    if world.is_initialized():
        for communicator in (functions.current(), *communicators()):
            communicator.stop_recording()
    recorder.install(None)
    records = _records_of(output)
    trace = {"traceEvents": list(trace_events([read_timeline(records)], {})), "displayTimeUnit": "ms"}
    output.write_text(json.dumps(trace), "utf-8")
    records.unlink()


def _records_of(output: pathlib.Path) -> pathlib.Path:
    """Return the file for the records, which become the trace."""
    return output.with_name(f"{output.name}.records")
