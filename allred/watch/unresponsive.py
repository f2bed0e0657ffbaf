"""Finds the ranks that cause a wait to reach its time limit. Pure functions of the events that the watchers received.

A worker of mode ps waits for a server, which holds its answer back until other workers have made their requests. The
event `holds` of the server names these workers and the seconds since the last request of each. The time limit of
the wait counts from these requests, so a slow worker that still trains never causes an error.
"""

import math
from collections.abc import Mapping, Sequence

from allred.watch.records import Record

AGAIN_S = 0.5  # the shortest interval between two checks of one wait


def unresponsive_ranks(
    servers: Sequence[int], limit_s: float, ranks: Mapping[int, Record], now: float
) -> tuple[list[int], float]:
    """Return the ranks that have been silent for `limit_s` seconds, and if there are none, the seconds until the next
    check.

    If a server sends no events, only this server is returned: its last event is out of date. A worker that waits itself
    is not returned: its own wait has a time limit.
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


def finalize_wait_since(ranks: Mapping[int, Record]) -> float | None:
    """Return the time since which ended ranks wait in MPI_Finalize for ranks that send no events. None if no rank has
    ended or all have, or if a rank that has not ended waits itself or holds answers back."""
    left = [seen.end_at for seen in ranks.values() if seen.end == "left"]
    others = [seen for seen in ranks.values() if not seen.end]
    if not left or not others or any(seen.waits_in or seen.silent for seen in others):
        return None
    return max(min(left), *(seen.active for seen in others))
