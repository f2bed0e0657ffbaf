"""The cost of recording a timeline: `mpirun -np 2 python benchmarks/timeline.py [BYTES ...]`.

Measures an allreduce with and without a timeline in the same processes, interleaved (allred/bench/measure.py). The
writing thread runs during both; the last line gives its CPU time per record. On a shared machine compare p10: these
samples were not disturbed by other programs.
"""

import mmap
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

import allred
from allred.bench import measure
from allred.comm import functions
from allred.comm.backends.shm import CHUNK_BYTES, ShmBackend
from allred.comm.communicator import Communicator
from allred.native._kernels import segment_bytes
from allred.timeline import recorder
from allred.timeline.recorder import Track

SECONDS = 10.0


def main() -> None:
    """Print a line for each size."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ALLRED_TIMELINE"] = comm.bcast(directory)
        allred.init(banner=False)
        for size in [int(size) for size in sys.argv[1:]] or [4, 65536, 2**20, 2**24]:
            line(size, comm)
        if comm.Get_rank() == 0:
            print(f"writing thread: {writing_ns():.0f} ns per record")
        comm.Barrier()
        allred.shutdown()


def line(size: int, comm: Any) -> None:
    """Measure one size."""
    communicator, array = functions.current(), np.zeros(size // 4, np.float32)
    allreduce, note = communicator.allreduce_blocking, communicator.backend.segment.set_tracing
    calls = {
        "off": lambda: (note(False), allreduce(array, True, allred.Sum, "w")),
        "on": lambda: (note(True), allreduce(array, True, allred.Sum, "w")),
    }
    found = measure.interleave(calls, comm, SECONDS)
    for percent in (10, 50):
        off, on = (found[name].us(percent) for name in ("off", "on"))
        if comm.Get_rank() == 0:
            change = f"{on - off:+6.2f} us {100 * (on / off - 1):+6.2f} %"
            print(f"{size:>9} B  p{percent}  off {off:10.2f} us  on {on:10.2f} us  {change}", flush=True)


def writing_ns() -> float:
    """CPU time to write a record, the mean of 100 000 records with 100 names."""
    with tempfile.TemporaryDirectory() as directory:
        one = recorder.Recorder(f"{directory}/rank-0.timeline")
        backend = ShmBackend(0, 1, mmap.mmap(-1, segment_bytes(1, CHUNK_BYTES)))
        communicator, array = Communicator(backend, 1.0), np.zeros(1)
        communicator.record(Track(one, "one rank"))
        for number in range(100_000):
            communicator.allreduce_blocking(array, True, allred.Sum, f"layer {number % 100}")
        start = time.process_time_ns()
        one._write_records()
        return (time.process_time_ns() - start) / 100_000


if __name__ == "__main__":
    main()
