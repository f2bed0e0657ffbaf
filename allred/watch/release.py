"""The part of the `Job` that ends it: after the verdict the ranks unwind and linger until one of them is released."""

from collections.abc import Collection

from allred.watch.records import Records

GRACE_S = 2.0  # for the others to unwind
PRINT_S = 0.1  # from there for mpirun to pass on what they have printed: it takes the ranks' output in any order
ABORT_S = 8.0  # from the release to the end; then the watchers end the ranks
GONE_S = 1.0  # from the end of the one that was to abort the job, to the same
HOLD_S = 0.5  # between words to ranks that linger: the job is not to end yet; less than line.RELEASE_S
TELL_HOLD_S = 5.0  # then the user hears of it


class Release:
    """`launcher`: whether one has started the ranks, which ends them all when one of them ends the job. `gone`: spare
    ranks that have failed or died."""

    def __init__(self, records: Records, gone: Collection[int], launcher: bool) -> None:
        self._ranks, self._gone, self._launcher = records, gone, launcher
        self._clock: float | None = None  # when the first rank began to linger
        self._released: int | None = None
        self._released_at = 0.0
        self._hold_at, self._tell_hold_at, self._hold_told = 0.0, float("inf"), False

    @property
    def begun(self) -> bool:
        """Whether a rank was released."""
        return self._released is not None

    def start_clock(self) -> None:
        """Give the others GRACE_S to unwind from now."""
        self._clock = self._ranks.now

    def unwound(self, rank: int) -> None:
        """A rank lingers. Without a launcher, it is released if another one was."""
        if self._clock is None:
            self.start_clock()
        if self.begun and not self._launcher:
            self._ranks.out.append((rank, {"kind": "release"}))

    def check(self, culprit: int) -> list[int]:
        """The ranks to release now: the culprit, else another rank that lingers; without a launcher all that linger."""
        if self._released is not None:
            self._kill_if_late(self._released)
            return []
        if busy := self._ranks.busy():
            self._hold(busy)
            return []
        late = self._clock is not None and self._ranks.now >= self._clock + GRACE_S
        lingering = self._ranks.ended("unwound")
        if not lingering:
            if self._gone and late:
                self._ranks.out.append((None, {"kind": "kill"}))  # MPI_Finalize, where they may be, does not return
                self._clock = float("inf")
            return []
        chosen = culprit if culprit in lingering else lingering[0]
        others_unwind = any(
            not record.end or (record.end == "unwound" and rank != chosen and self._ranks.now < record.end_at + PRINT_S)
            for rank, record in self._ranks.items()
        )
        if others_unwind and not late:
            return []
        self._released, self._released_at = chosen, self._ranks.now
        return [chosen] if self._launcher else lingering

    def _kill_if_late(self, released: int) -> None:
        record = self._ranks[released]
        gone = record.end == "dead" and self._ranks.now >= record.end_at + GONE_S  # and the launcher lets the others be
        if gone or self._ranks.now >= self._released_at + ABORT_S:
            self._ranks.out.append((None, {"kind": "kill"}))
            self._released_at = record.end_at = float("inf")

    def _hold(self, busy: list[int]) -> None:
        """The job ends when they have done what must not be cut short."""
        now = self._ranks.now
        if self._clock is not None:
            self._clock = now
        if now >= self._hold_at:
            self._hold_at = now + HOLD_S
            living = [rank for rank, record in self._ranks.items() if record.end != "dead"]
            self._ranks.out += [(rank, {"kind": "hold"}) for rank in living]
        if self._tell_hold_at == float("inf"):
            self._tell_hold_at = now + TELL_HOLD_S
        elif now >= self._tell_hold_at and not self._hold_told:
            self._hold_told = True
            self._ranks.say(busy[0], f"rank {busy[0]} still writes; the job ends when it is done")
