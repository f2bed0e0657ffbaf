"""Which ranks are at fault when a wait reaches its time limit: pure functions of what the watchers have heard.

A worker of mode ps waits for a server, which holds its answer back until other workers have made their requests. The
server tells its watcher, with the event `holds`, which workers these are and for how long each has made no request.
So the limit of such a wait counts from the last request of the worker that is waited for, and a slow worker that
still trains is never at fault.
"""

import math
from collections.abc import Mapping, Sequence

from allred.watch.records import Record

AGAIN_S = 0.5  # at least, between two looks at one wait


def at_fault(
    servers: Sequence[int], limit_s: float, ranks: Mapping[int, Record], now: float
) -> tuple[list[int], float]:
    """The ranks that have been silent for `limit_s`, and, if there are none, in how many seconds to look again.

    A server that sends no events is at fault alone: what it has told last is out of date. A worker that waits itself is
    not at fault, for its own wait has a limit.
    """
    lost = [server for server in servers if server in ranks and now >= ranks[server].active + limit_s]
    if lost:
        return lost, 0.0
    due = {
        rank: since + limit_s
        for server in servers
        if server in ranks
        for rank, since in ranks[server].silent.items()
        if rank in ranks and not ranks[rank].end and not ranks[rank].waits_in
    }
    late = sorted(rank for rank, at in due.items() if now >= at)
    answers = (ranks[server].active + limit_s for server in servers if server in ranks)
    return late, 0.0 if late else max(AGAIN_S, min([*due.values(), *answers], default=math.inf) - now)


def ended_since(ranks: Mapping[int, Record]) -> float | None:
    """Since when ranks that have ended wait in MPI_Finalize for others that show nothing; None if that is not so, or if
    those that have not ended wait themselves, or are known to be waited for."""
    left = [seen.end_at for seen in ranks.values() if seen.end == "left"]
    others = [seen for seen in ranks.values() if not seen.end]
    if not left or not others or any(seen.waits_in or seen.silent for seen in others):
        return None
    return max(min(left), *(seen.active for seen in others))
