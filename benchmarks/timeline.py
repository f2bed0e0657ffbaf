"""What recording costs: `mpirun -np 2 python benchmarks/timeline.py [BYTES ...]`.

An allreduce with a timeline against the same without, in the same processes, in turns of some milliseconds
(allred/bench/measure.py says how). The thread that writes runs beside both; its share of the time is on its own line.
On a machine that others use too, look at p10: the samples in which nobody came between.
"""

import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

import allred
from allred.bench import measure
from allred.comm import collectives
from allred.timeline import recorder

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
            print(f"to write a record: {writing_ns():.0f} ns of the thread that writes")
        comm.Barrier()
        allred.shutdown()


def line(size: int, comm: Any) -> None:
    """Measure one size."""
    communicator, array = collectives.current(), np.zeros(size // 4, np.float32)
    noted, plain = communicator.allreduce_now, type(communicator).allreduce_now
    ways = {
        "off": lambda: plain(communicator, array, True, allred.Sum, "w"),
        "on": lambda: noted(array, True, allred.Sum, "w"),
    }
    found = measure.measure(ways, comm, SECONDS)
    for percent in (10, 50):
        off, on = (found[way].us(percent) for way in ("off", "on"))
        if comm.Get_rank() == 0:
            change = f"{on - off:+6.2f} us {100 * (on / off - 1):+6.2f} %"
            print(f"{size:>9} B  p{percent}  off {off:10.2f} us  on {on:10.2f} us  {change}", flush=True)


def writing_ns() -> float:
    """CPU time to write a record, from writing many."""
    with tempfile.TemporaryDirectory() as directory:
        mine = recorder.Recorder(f"{directory}/rank-0.timeline")
        what = "all ranks", "allreduce"
        for number in range(100_000):
            mine.add((what, "w", time.perf_counter_ns(), number, 4))
        start = time.process_time_ns()
        mine._write_records()
        return (time.process_time_ns() - start) / 100_000


if __name__ == "__main__":
    main()
