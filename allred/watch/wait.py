"""Long waits in allred: their reports to the watcher, and their time limits."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from allred import world
from allred.errors import CollectiveTimeout
from allred.runtime import process_end
from allred.runtime.timings import REPORT_WAIT_S, WORDS_CHARS


@dataclasses.dataclass(frozen=True)
class Awaited:
    """The ranks that a wait of mode ps depends on, by their numbers in the world. The time limit counts from their last
    progress.

    servers: servers that may hold the answer back until other ranks make a request (watch/stalls.py).
    ranks: called at the time limit; returns the ranks that cause the wait.
    trains: the wait lasts while other workers train. Without a watcher it has no time limit.
    """

    servers: Sequence[int] = ()
    ranks: Callable[[], Sequence[int]] = tuple
    trains: bool = False


class Wait:
    """A long wait. `what`: the text of the operation. `quiet`: a long wait is intended, so there is no warning.
    `members`: the ranks of the operation, by their numbers in the world; None: all. `awaited`: the ranks that the wait
    depends on, if known. `earlier`: the errors of earlier operations, as text."""

    def __init__(
        self,
        what: str,
        quiet: bool,
        members: Sequence[int] | None = None,
        awaited: Awaited | None = None,
        earlier: str = "",
    ) -> None:
        self._what, self._quiet, self._is_reported = what, quiet, False
        self._earlier = f"; {earlier}" if earlier else ""
        self._awaited = awaited or Awaited()
        self._members = None if members is None else list(members)

    def report(self, waited_s: float, peers: bool) -> None:
        """Report the wait, which has lasted `waited_s`. peers: it cannot complete if one of them has
        ended."""
        watcher = world.watcher()
        if watcher is None:
            return
        watcher.read()
        if waited_s > min(REPORT_WAIT_S, watcher.warn_s / 2) and not self._is_reported:
            what = self._what[:WORDS_CHARS]
            more = {"members": self._members, "earlier": self._earlier}
            watcher.send("waiting", what=what, since_s=waited_s, peers=peers, quiet=self._quiet, **more)
            self._is_reported = True

    def end(self) -> None:
        if self._is_reported and (watcher := world.watcher()) is not None:
            watcher.send("resumed")

    def at_limit(self, limit_s: float) -> Exception | float:
        """Return the error for a wait that has reached its limit, with the state of all ranks if there are watchers;
        or the seconds for which the wait may continue, if a rank is `busy` or the awaited ranks make progress."""
        if (watcher := world.watcher()) is not None:
            servers, ranks = self._awaited.servers, self._awaited.ranks()
            again_s = watcher.await_limit_verdict(self._what, limit_s, servers, ranks, self._earlier)
            if again_s:
                return again_s
            if watcher.has_error:
                return watcher.error()
        if self._awaited.trains and not has_watcher():
            return limit_s
        process_end.call_for_failure()
        return CollectiveTimeout(
            f"{self._what}: not complete after {limit_s:g} s; a rank is late, stopped or gone, or does not call this "
            "operation. If such a wait is intended, increase ALLRED_TIMEOUT_S, or wait inside allred.patience(seconds)"
            f"{self._earlier}"
        )


def has_watcher() -> bool:
    return (watcher := world.watcher()) is not None and watcher.is_alive()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Inside this block the waits of the other ranks have no time limit, and the failure of another rank is not raised
    here: the job ends after the block."""
    mine = world.watcher()
    if mine is not None:
        mine.busy = True
        mine.send("busy", is_busy=True)
    try:
        yield
    finally:
        if mine is not None:
            mine.busy = False
            mine.send("busy", is_busy=False)
