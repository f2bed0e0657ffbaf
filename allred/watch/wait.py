"""A wait in allred that has become long: what this rank's watcher hears of it, and how it ends."""

import contextlib
from collections.abc import Iterator

from allred.errors import CollectiveTimeout
from allred.watch import line

WHAT_CHARS = 500
TELL_S = 1.0  # most waits are shorter, and nobody needs to hear of them


class Wait:
    """`what`: the operation, in words. `quiet`: it is meant to take long, so nobody is to be warned."""

    def __init__(self, what: str, quiet: bool) -> None:
        self._what, self._quiet, self._told = what, quiet, False

    def go_on(self, waited_s: float, peers: bool) -> None:
        """It has lasted so long. `peers`: it waits for other ranks to begin the operation, rather than for bytes."""
        if line.current is None:
            return
        line.current.read()
        if waited_s > min(TELL_S, line.current.warn_s / 2) and not self._told:
            what = self._what[:WHAT_CHARS]
            line.current.tell("waiting", what=what, since_s=waited_s, peers=peers, quiet=self._quiet)
            self._told = True

    def end(self) -> None:
        """It is over."""
        if line.current is not None and self._told:
            line.current.tell("going")

    def limit(self, limit_s: float) -> Exception | None:
        """The error for a wait that has reached its limit: with what all ranks are doing, where there are watchers.
        None: a rank does something that takes as long as it takes (`busy`), so the wait has to begin anew."""
        if line.current is not None:
            if line.current.limit(self._what, limit_s):
                return None
            if line.current.verdict is not None:
                return line.current.error()
        return CollectiveTimeout(
            f"{self._what}: not complete after {limit_s:g} s; a rank is late, stopped or gone, or does not call this "
            "operation. If so long a wait is meant, raise ALLRED_TIMEOUT_S, or wait inside allred.patience(seconds)"
        )


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """What this rank does meanwhile may take as long as it takes: the others' waits have no limit, and the failure of
    another rank is not raised in it; the job ends behind it."""
    mine = line.current
    if mine is not None:
        mine.busy = True
        mine.tell("busy", is_so=True)
    try:
        yield
    finally:
        if mine is not None:
            mine.busy = False
            mine.tell("busy", is_so=False)
