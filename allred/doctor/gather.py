"""What all ranks have to say, brought to rank 0, and its answer, each with a time limit.

Point to point and not by a collective, so that rank 0 knows who is missing. On a communicator of the doctor's own, over
plain mpi4py: it must not depend on what it examines. Where there is no MPI the communicator is None.
"""

import time
from collections.abc import Iterator
from typing import Any

from allred.errors import CollectiveTimeout

_PAUSE_S = 0.001


def to_first(comm: Any, value: Any, limit_s: float) -> dict[int, Any]:
    """On rank 0: the values of all ranks that came within limit_s, by rank. Elsewhere: this rank's own.

    Raises CollectiveTimeout where rank 0 does not take the value.
    """
    if comm is None:
        return {0: value}
    if comm.Get_rank() == 0:
        found = {0: value}
        for _ in _ticks(limit_s):
            while (message := comm.improbe()) is not None:
                from mpi4py import MPI

                status = MPI.Status()
                received = message.recv(status=status)
                found[status.Get_source()] = received
            if len(found) == comm.Get_size():
                break
        return dict(sorted(found.items()))
    request = comm.isend(value, dest=0)
    for _ in _ticks(limit_s):
        if request.test()[0]:
            return {comm.Get_rank(): value}
    raise CollectiveTimeout(f"rank 0 did not take what rank {comm.Get_rank()} has found within {limit_s:g} s")


def from_first(comm: Any, value: Any, limit_s: float) -> Any:
    """Rank 0's value, on all ranks. Raises CollectiveTimeout where it did not come within limit_s."""
    if comm is None:
        return value
    if comm.Get_rank() == 0:
        requests = [comm.isend(value, dest=rank) for rank in range(1, comm.Get_size())]
        for _ in _ticks(limit_s):
            requests = [request for request in requests if not request.test()[0]]
            if not requests:
                return value
        raise CollectiveTimeout(f"{len(requests)} ranks did not take rank 0's answer within {limit_s:g} s")
    for _ in _ticks(limit_s):
        if (message := comm.improbe(source=0)) is not None:
            return message.recv()
    raise CollectiveTimeout(f"rank 0 did not answer rank {comm.Get_rank()} within {limit_s:g} s")


def _ticks(limit_s: float) -> Iterator[None]:
    """Short pauses until the time is over; the first one comes at once."""
    until = time.monotonic() + limit_s
    yield
    while time.monotonic() < until:
        time.sleep(_PAUSE_S)
        yield
