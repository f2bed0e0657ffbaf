"""Last phase of a job: rounds of operations in which one rank after the other calls join().

The seed defines the round in which each rank joins, and whether the operation of a round runs on all ranks or on a
process set of ranks that have not joined.
"""

import random
from typing import Any

import numpy as np

import allred

ROUNDS = 5  # maximum of a rank


def run(seed: int, rank: int, ranks: int) -> str:
    """Run the rounds. Return the description of a wrong result, or "". Raises the errors of allred."""
    rng = random.Random(f"{seed} tail")
    lengths = [rng.randint(0, ROUNDS) for _ in range(ranks)]
    operations = [0] * ranks  # number of operations on all ranks that each rank took part in
    for number in range(max(lengths)):
        left = [r for r in range(ranks) if lengths[r] > number]
        members = sorted(rng.sample(left, rng.randint(1, len(left)))) if rng.random() < 0.5 else left
        count, kind, started = rng.choice((0, 1, 1009, 2**17 + 1)), rng.choice(sorted(KINDS)), rng.random() < 0.3
        if members == left:
            operations = [done + (r in left) for r, done in enumerate(operations)]
        if rank not in members:
            continue
        options = {"process_set": allred.ProcessSet(members)} if members != left else {}
        got, wanted = KINDS[kind](rank, members, count, started, options)
        if not np.array_equal(got, wanted):
            return f"round {number}, {kind} of {count} on {members}, rank {rank}: {got!r:.200}, not {wanted!r:.200}"
    last, wanted = allred.join(), operations.index(max(operations))
    return "" if last == wanted else f"join() returned {last}, expected {wanted}; operations: {operations}"


def _allreduce(rank: int, members: list[int], count: int, started: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    mine = np.full(count, rank + 1)
    if started:
        work = allred.allreduce_async_(mine, allred.Sum, **options)
        return allred.synchronize(work), np.full(count, sum(members) + len(members))
    return allred.allreduce(mine, allred.Sum, **options), np.full(count, sum(members) + len(members))


def _mean(rank: int, members: list[int], count: int, started: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    group = [np.full(count, 6.0 * (rank + 1)), np.array(12.0 * rank)]  # exact for 1 to 4 ranks
    work = allred.grouped_allreduce_async(group, **options) if started else None
    got = work.wait() if work else allred.grouped_allreduce(group, **options)
    mean, other = (sum(each * (r + plus) for r in members) / len(members) for each, plus in ((6.0, 1), (12.0, 0)))
    return np.append(got[0], got[1]), np.append(np.full(count, mean), other)


def _allgather(rank: int, members: list[int], count: int, started: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    mine, wanted = np.full(count + rank, rank), np.concatenate([np.full(count + r, r) for r in members])
    return (allred.allgather_async(mine, **options).wait() if started else allred.allgather(mine, **options)), wanted


def _broadcast(rank: int, members: list[int], count: int, started: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    root = members[count % len(members)]
    return allred.broadcast(np.full(count, rank), root, **options), np.full(count, root)


def _objects(rank: int, members: list[int], count: int, started: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    return allred.allgather_object(rank, **options), members


KINDS = {"allreduce": _allreduce, "mean": _mean, "allgather": _allgather, "broadcast": _broadcast, "objects": _objects}
