"""The arenas of the ranks of one node, mapped by all of them (allred/arena.py).

A process maps the arena of a peer once, for all communicators; the mapping exists as long as one of them uses it.
"""

import mmap
import os
import resource
from weakref import WeakValueDictionary

from allred import arena
from allred.comm.backends import segment
from allred.comm.bootstrap import Bootstrap

_OTHER_FILES = 128  # descriptors that a rank may need for other files; a mapping of a peer has one

_mapped: WeakValueDictionary[segment.Offer, mmap.mmap] = WeakValueDictionary()


def share(bootstrap: Bootstrap) -> list[mmap.mmap] | None:
    """Map the arenas of the ranks of `bootstrap`, all on one node; None on all if one has no arena or cannot map all.

    Collective and blocking. Entry r is the arena of rank r: a byte at address a on rank r has the offset
    a - (address of the arena on rank r). The entry of this rank is its own mapping, not a second one.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    own = arena.memory() if bootstrap.size + _OTHER_FILES <= files else None
    given = bootstrap.allgather_object(None if own is None else segment.describe(own[1], len(own[0])))
    offers = [offer for offer in given if offer is not None]
    if own is None or len(offers) < bootstrap.size:
        if own is None and bootstrap.size + _OTHER_FILES > files:
            arena.note_failure(f"each rank needs a file for each rank, and may open {files} (ulimit -n)")
        arena.note_failure(f"rank {given.index(None)} of this node has no arena; run python -m allred info there")
        return None
    _mapped[offers[bootstrap.rank]] = own[0]
    found = [_mapped.get(offer) or _keep(offer, segment.accept(offer)) for offer in offers]
    missing = bootstrap.allgather_object([rank for rank, memory in enumerate(found) if memory is None])
    for rank in sorted(set().union(*missing)):
        fd = segment.over_socket(bootstrap, own[1] if rank == bootstrap.rank else -1, rank)
        if found[rank] is None:
            found[rank] = _keep(offers[rank], segment.accept(offers[rank], fd))
        elif fd >= 0:
            os.close(fd)
    mapped = bootstrap.allgather_object(None not in found)
    if all(mapped):
        return [memory for memory in found if memory is not None]
    arena.note_failure(f"rank {mapped.index(False)} of this node cannot map the arenas of the others")
    return None


def _keep(offer: segment.Offer, memory: mmap.mmap | None) -> mmap.mmap | None:
    if memory is not None:
        _mapped[offer] = memory
    return memory
