"""The object that a distributed optimizer, or gradient function, asks at each step. It looks for silent mistakes.

Every step: one pass over this rank's gradients, and flags in the header that the ranks show each other anyway. At the
steps of a check, or where a rank has reason for one: one more header, which carries two hashes. Nothing else travels
unless something is wrong.
"""

from collections.abc import Sequence
from typing import Any

from allred import world
from allred.cluster import report
from allred.comm import functions
from allred.compression import Compression
from allred.errors import DriftError, InputError, NonFiniteError
from allred.fusion.plan import Plan
from allred.modes.detect import drift, finite
from allred.modes.detect.batch_arguments import BatchArguments
from allred.modes.detect.outside import updates_of
from allred.modes.detect.repeated import BITS, Repeated
from allred.reducer import Inspector

_CHECK = 4  # a flag beside those of finite.py: this rank asks for a check
_BATCHES = 8  # another flag: this rank uses batch arguments that have not been compared yet
_FIRST = 3  # steps, each of which is checked


class Checks(Inspector):
    """Of one wrapper. `title`: what errors begin with. `nonfinite`: a policy; None is the setting.

    optimizer: the wrapped one. None is a gradient function's: it has no parameters to compare, and no step to skip.
    compression: what gradients travel as.
    """

    def __init__(
        self,
        title: str,
        nonfinite: str | None = None,
        optimizer: Any = None,
        compression: Compression = Compression.none,
    ) -> None:
        policies = finite.POLICIES
        if nonfinite is not None and nonfinite not in policies:
            raise InputError(f"nonfinite={nonfinite!r} is not a policy; use one of {', '.join(policies)}")
        self.skipped = 0  # steps
        self._title, self._nonfinite = title, nonfinite
        self._optimizer, self._compression = optimizer, compression
        self._updates = None if optimizer is None else updates_of(optimizer)
        self._repeated = Repeated(title)
        self._batches = BatchArguments(title)
        self._params: Any = None
        self._samples: int | None = None
        self._step = 0  # agreed on so far
        self._equal_at = 0  # the last step before which all ranks were equal

    @property
    def policy(self) -> str:
        """What happens to gradients that are not finite."""
        return self._nonfinite or world.config().nonfinite

    @property
    def settings(self) -> str:
        return f"nonfinite={self.policy}"

    def begin(self, params: Any) -> None:
        """A step of the optimizer begins, with these parameters."""
        self._params = params

    def end(self, updated: bool) -> None:
        """The step is over."""
        self._params = None
        if updated and self._updates:
            self._updates.stepped(self, self._title)

    def asks(self, samples: int | None) -> bool:
        self._samples = samples
        self._found: dict[str, str] = {}
        self._asked = _CHECK * self._due() | _BATCHES * self._batches.new(self._step + 1)
        return bool(self._asked)

    def _due(self) -> bool:
        """Whether the ranks check this step, or this rank has a reason for a check."""
        ranks, every = functions.current().size, world.config().check_steps
        step = self._step + 1
        due = step <= _FIRST or (every and step % every == 0)
        return bool(ranks > 1 and every and (due or (self._updates and self._updates.outside())))

    def before(self, plan: Plan, values: Sequence[Any], samples: int | None) -> int:
        self.asks(samples)
        return self._asked | self._scan(plan, values)

    def _scan(self, plan: Plan, values: Sequence[Any]) -> int:
        if self.policy == "ignore" or self._samples == 0:  # without samples they count for nothing
            return 0
        return finite.scan(plan, values, functions.current().size, self._compression)

    def look(self, plan: Plan, values: Sequence[Any]) -> int:
        flags = self._scan(plan, values)
        if flags & finite.NONFINITE:
            self._found |= finite.describe(plan, values)
        return flags

    def closed(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        self._step += 1
        if any(flag & finite.NONFINITE for flag in flags):
            return self._refuse_nonfinite(self._found)
        return self.reduced(flags, plan, values)

    def agreed(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        if any(flag & _BATCHES for flag in flags):
            self._batches.compare(self._step + 1)
        if any(flag & _CHECK for flag in flags):
            self._check(plan, values)
        self._step += 1
        if any(flag & finite.NONFINITE for flag in flags):
            found = finite.describe(plan, values) if flags[functions.current().active.rank] & finite.NONFINITE else {}
            return self._refuse_nonfinite(found)
        return True

    def _refuse_nonfinite(self, found: dict[str, str]) -> bool:
        everyone = functions.allgather_object(found, f"{self._title}: not finite")
        return self._refuse(finite.verdict(everyone, functions.current().active.ranks))

    def reduced(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        self._repeated.remember(values)
        if any(flag & finite.LARGE for flag in flags) and (problem := finite.overflow(plan, values, self._compression)):
            return self._refuse(problem)
        return True

    def _refuse(self, problem: str) -> bool:
        """Gradients must not be used: skip the step, or raise."""
        if self.policy == "skip" and self._optimizer is not None:
            self.skipped += 1
            if self.skipped == 1:
                report.say(f"{self._title}: step {self._step} is skipped, and so will be others, if {problem}")
            return False
        skip = "; nonfinite='skip' (ALLRED_NONFINITE=skip) leaves such steps out" if self._optimizer is not None else ""
        raise NonFiniteError(
            f"{self._title}: {problem}. Look at that rank's batch, or lower the learning rate{skip}; "
            "nonfinite='ignore' lets them pass"
        )

    def _check(self, plan: Plan, values: Sequence[Any]) -> None:
        """Compare what must be equal on all ranks, and what must not. Raises DriftError or InputError on all."""
        parts, note, problem = [], 0, ""
        try:
            trained = {tensor.name for tensor, value in zip(plan.tensors, values, strict=True) if value is not None}
            if self._optimizer is not None:
                parts = drift.parts_of(self._params, trained, self._optimizer)
            shown = self._repeated.show(values) if self._samples != 0 else 0
            note = drift.fingerprint(parts) >> BITS << BITS | shown
        except Exception as error:  # of the user's state_dict, say: the other ranks wait in the check
            problem = f"comparing the ranks' parameters: {type(error).__name__}: {error}"
        title = f"{self._title}: check of the ranks' parameters"
        notes = functions.current().check("step", title, note=note, problem=problem).wait()
        if len({note >> BITS for note in notes}) > 1:
            self._compare(parts)
        self._repeated.compare([note % 2**BITS for note in notes])
        self._equal_at = self._step + 1

    def _compare(self, parts: list[drift.Part]) -> None:
        outside = self._updates.outside() if self._updates else 0
        mine = drift.table(parts), outside, self._step + 1, self._equal_at
        everyone = functions.allgather_object(mine, f"{self._title}: what differs")
        tables, counts, steps, equal_at = (
            list(each) for each in zip(*everyone, strict=True)
        )  # who had joined is behind
        ranks = functions.current().active.ranks
        if problem := drift.verdict(tables, max(steps), max(equal_at), counts, ranks, len(set(steps)) > 1):
            raise DriftError(f"{self._title}: {problem}")
