"""The part of `JobState` that ends the job: after the verdict all ranks unwind and linger, then one is released."""

from collections.abc import Collection

from allred.runtime import timings
from allred.watch.records import Records


class Release:
    """launcher: whether a launcher started the ranks; it ends all of them when one ends the job. gone: expendable
    ranks that have failed or died."""

    def __init__(self, records: Records, gone: Collection[int], launcher: bool) -> None:
        self._ranks, self._gone, self._launcher = records, gone, launcher
        self._clock: float | None = None  # when the first rank began to linger
        self._released: int | None = None
        self._released_at = 0.0
        self._abort_s, self._has_lost_launcher = timings.ABORT_S, False
        self._hold_at, self._print_hold_at, self._hold_printed = 0.0, float("inf"), False

    @property
    def begun(self) -> bool:
        return self._released is not None

    def lose_host(self) -> None:
        """A host is unreachable: kill the ranks soon after the release."""
        self._abort_s = timings.ABORT_SOON_S

    def lose_launcher(self) -> None:
        """A launcher has ended: kill ranks that do not unwind."""
        self._has_lost_launcher = True

    def start_clock(self) -> None:
        """Let the other ranks unwind for UNWIND_S from now."""
        self._clock = self._ranks.now

    def unwound(self, rank: int) -> None:
        """Handle the event `unwound`. Without a launcher the rank is released if another one was."""
        if self._clock is None:
            self.start_clock()
        if self.begun and not self._launcher:
            self._ranks.out.append((rank, {"kind": "release"}))

    def check(self, culprit: int) -> list[int]:
        """Return the ranks to release now: the culprit, else another lingering rank; without a launcher all of them."""
        if self._released is not None:
            self._kill_if_late(self._released)
            return []
        if busy := self._ranks.busy():
            self._hold(busy)
            return []
        late = self._clock is not None and self._ranks.now >= self._clock + timings.UNWIND_S
        if self._ranks.running and not late:
            return []
        lingering = self._ranks.ended("unwound")
        if not lingering:
            if (self._gone or self._has_lost_launcher) and late:
                self._ranks.out.append((None, {"kind": "kill"}))  # they may be in MPI_Finalize, which does not return
                self._clock = float("inf")
            return []
        chosen = culprit if culprit in lingering else lingering[0]
        last_at = max((self._ranks[rank].end_at for rank in lingering if rank != chosen), default=0.0)
        if not late and self._ranks.now < last_at + timings.OUTPUT_S:
            return []
        self._released, self._released_at = chosen, self._ranks.now
        return [chosen] if self._launcher else lingering

    def _kill_if_late(self, released: int) -> None:
        record = self._ranks[released]
        is_dead = record.end == "dead" and self._ranks.now >= record.end_at + timings.ABORT_SOON_S
        if is_dead or self._ranks.now >= self._released_at + self._abort_s:
            self._ranks.out.append((None, {"kind": "kill"}))
            self._released_at = record.end_at = float("inf")

    def _hold(self, busy: list[int]) -> None:
        """Delay the end of the job until these ranks have finished work that must not be interrupted."""
        now = self._ranks.now
        if self._clock is not None:
            self._clock = now
        if now >= self._hold_at:
            self._hold_at = now + timings.HOLD_PERIOD_S
            living = [rank for rank, record in self._ranks.items() if record.end != "dead"]
            self._ranks.out += [(rank, {"kind": "hold"}) for rank in living]
        if self._print_hold_at == float("inf"):
            self._print_hold_at = now + timings.PRINT_HOLD_S
        elif now >= self._print_hold_at and not self._hold_printed:
            self._hold_printed = True
            self._ranks.print(busy[0], f"rank {busy[0]} still writes; the job ends when it is done")
