"""`SteadyStep`: a step like the one before, on all ranks, is one operation.

In such a step nothing is exchanged but the gradients. What the ranks compare in a step (title, settings, tensors,
whether samples are counted, a part of the parameters) travels as a hash in the header of the allreduce, and so do the
numbers of samples, from which C computes the weights of the ranks. If the hashes are equal, the operation reduces the
gradients. If they are not, no byte has moved, and all ranks go on with the header exchange of a first step
(`reduce_gradients` in sync.py), which finds what differs.

Each rank decides for itself whether it begins a step in this way. If only some ranks do, all go on with the header
exchange (`Group._resolve`).
"""

from allred import native
from allred.arrays import Array
from allred.comm import header, node_memory
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.fusion import Plan
from allred.modes.detect.mistake_checks import MistakeChecks
from allred.modes.options import StepInput
from allred.modes.step_header import MoreFlags

_LARGEST_SAMPLES = 2**32  # up to this number the weights are exact, on up to 2**21 ranks


class SteadyStep:
    """The facts that the next step is compared with. lines: text that must be the same on all ranks. checks_finite:
    whether results are checked. can_weigh: whether C can weight these dtypes. settings: see `reduce_gradients`.
    residual: see `Reducer.residual`."""

    def __init__(
        self, communicator: Communicator, given: StepInput, plan: Plan, title: str, lines: str, op: ReduceOp, wire: int,
        checks_finite: bool, can_weigh: bool, settings: str, residual: Array | None,
    ) -> None:  # fmt: skip
        self.samples = 0  # of all ranks in the last step; 0 if they were not counted
        self.weight: float | None = None  # of this rank in the last step
        self.plan, self._tensors, self._settings = plan, given.tensors, settings
        self._residual = residual
        self._communicator, self._can_weigh, self._window_starts = communicator, can_weigh, plan.starts
        self._arguments, self._averages = (op, title, wire, checks_finite), op is ReduceOp.AVERAGE
        self._facts = header.mix(header.hash_lines(title, lines, plan.lines), checks_finite)
        self._agreed = 0  # the last result of `_hash`
        self._agreed_key: tuple[bool, int | None, int] = (False, None, -1)  # its arguments

    def _hash(self, is_counted: bool, samples: int | None, flags: int) -> int:
        """Return the hash of what must be the same on all ranks. is_counted: whether samples are known. samples: their
        number, if C cannot weight the ranks."""
        agreed = header.mix(self._facts, 1) if is_counted else self._facts
        agreed = agreed if samples is None else header.mix(agreed, samples)
        return header.mix(agreed, flags)

    def reduce(
        self, communicator: Communicator, checks: MistakeChecks, given: StepInput, settings: str, more: MoreFlags | None
    ) -> bool:
        """Reduce the gradients in place if this step is like the last one on all ranks. Returns False, with nothing
        changed, if the step of any rank differs: then all ranks run the header exchange. Collective with it."""
        samples, values, leaves = given.samples, given.values, given.leaves
        if (
            given.tensors is not self._tensors
            or communicator is not self._communicator
            or settings != self._settings
            or checks.requests(communicator, samples)
            or not (samples is None or 0 < samples < _LARGEST_SAMPLES)
            or not native.disjoint([*leaves, *values])
            or (node_memory.ranges and node_memory.any_shared(values))
        ):
            return False
        window = native.hash_window(leaves, self._window_starts, checks.steps) if checks.compares else 0
        if window is None:
            return False
        flags = 0 if more is None else more.flags()
        counts = samples if samples is not None and self._averages and not self._can_weigh else None
        if (key := (samples is not None, counts, flags)) != self._agreed_key:
            self._agreed, self._agreed_key = self._hash(*key), key
        if not communicator.step_allreduce(
            values, *self._arguments, self._agreed, window, samples or 0, self._residual
        ):
            return False
        if more is not None:
            more.check([flags] * communicator.size, communicator.ranks)
        total = self.samples = communicator.samples
        self.weight = None
        if samples is not None and self._averages and total != samples * communicator.size:
            self.weight = samples * communicator.size / total
        return True
