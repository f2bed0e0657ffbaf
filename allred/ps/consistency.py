"""Consistency policies: which gradients a parameter server applies, and how far apart the workers may be.

    Async()                       each gradient is applied when it arrives; no worker waits
    Bounded(staleness=4)          as Async, but no worker runs more than 4 clocks ahead of the slowest
    Sync()                        a step is the mean of one gradient of every live worker
    Sync(replicas_to_aggregate=3) a step is the mean of the first 3 fresh gradients: with 4 workers there is one backup
                                  worker, and the last gradient of each step is dropped
    Sync(replicas_to_aggregate=3, grace_s=2.0)
                                  a step with 3 gradients waits up to 2 seconds for the other workers

A policy is a record. Its coordinator, a state machine on server 0 without clock, socket or array, decides which workers
may continue. The staleness of each gradient, which the statistics contain, is measured in step_handler.py.
"""

import abc
import dataclasses

from allred.errors import InputError
from allred.validators import integer, non_negative
from allred.wording import count


class Coordinator(abc.ABC):
    """The workers 0 to `workers` - 1, and which of them may continue.

    asks: whether `begin` precedes a gradient. waits: whether a worker must wait for `ready` after `done`. live: the
    workers that have not left. global_step: number of updates of the parameters. accepted, dropped: number of gradients
    of each worker; a withdrawn gradient is in neither.

    Each worker may compute at the start, with local step 0 and the initial parameters. A step of worker w:

    1  w pulls the parameters and computes a gradient: `ready` has named it
    2  if the policy `asks`: begin(w). If that returns False, the gradient is dropped and w continues with 4
    3  w sends the gradient to every server; when all have replied: done(w)
    4  if the policy `waits`: w waits until `ready` names it. Else it continues at once

    leave(w) is for a worker that has finished, failed or died. It may be called at any time. By the phase of w:

    computing   nothing of the step counts; no worker waits for w any more
    sending     between begin and done: the gradient is withdrawn as if begin had not been called, because some servers
                may never receive it; servers that have it must forget it. With leave(w, sent=True) it counts as if
                done(w) had been called before: for a gradient that all servers have, or that one has applied and
                cannot forget. A policy that does not ask cannot distinguish computing from sending; there too
                `sent` means that the gradient counts
    waiting     no worker waits for w any more; its gradients stay

    A call in the wrong phase is an error of the server, not of the user: AssertionError, and nothing has changed.
    """

    asks = False
    waits = True

    def __init__(self, workers: int) -> None:
        self.live = set(range(workers))
        self.global_step = 0
        self.accepted = [0] * workers
        self.dropped = [0] * workers
        self._phase = ["computing"] * workers
        self._waiting: list[int] = []  # the first has waited longest

    @property
    def needed(self) -> int:
        """The number of gradients with which the current step ends, without `close`."""
        return 1

    def begin(self, worker: int) -> bool:
        """Return whether the worker's gradient is accepted. Otherwise it is dropped, and the worker waits."""
        raise AssertionError(f"begin: worker {worker} has asked, but in this policy no gradient is ever dropped")

    def done(self, worker: int) -> None:
        """Record that every server has the worker's gradient."""
        self._expect("done", worker, self._carries)
        self._wait(worker)
        self._count(worker)

    def count_served(self, worker: int, number: int) -> None:
        """Record that gradients of the worker were applied, and that the worker never had to wait."""
        self._expect("count_served", worker, "computing")
        self.accepted[worker] += number
        self.global_step += number

    @abc.abstractmethod
    def ready(self) -> list[tuple[int, int]]:
        """Return (worker, its local step) of those that may continue now, each once, the longest wait first."""

    def leave(self, worker: int, sent: bool = False) -> None:
        """Remove a worker. sent: every server has the gradient that it was sending."""
        self._expect("leave", worker, *([self._carries] if sent else ["computing", "sending", "waiting"]))
        if self._phase[worker] == "sending" and not sent:
            self.accepted[worker] -= 1
        if worker in self._waiting:
            self._waiting.remove(worker)
        self._phase[worker] = "gone"
        self.live.remove(worker)
        if sent:
            self._count(worker)
        self._release()

    @property
    def in_grace(self) -> bool:
        """Whether the current step has `replicas_to_aggregate` gradients, and accepts others until `close`."""
        return False

    def close(self) -> None:
        """End the wait for more gradients: the current step ends with those that it has accepted."""
        raise AssertionError("close: in this policy no step has a grace time")

    @property
    def _carries(self) -> str:
        """The phase in which a worker sends a gradient."""
        return "sending" if self.asks else "computing"

    def _count(self, worker: int) -> None:
        self.accepted[worker] += 1
        self.global_step += 1

    def _wait(self, worker: int) -> None:
        self._phase[worker] = "waiting"
        self._waiting.append(worker)

    def _release(self) -> None:  # noqa: B027  (most policies do nothing)
        """Let the other workers continue without a worker that has left."""

    def _expect(self, call: str, worker: int, *phases: str) -> None:
        if worker not in self.live:
            raise AssertionError(f"{call}: worker {worker} is not one of the live workers {sorted(self.live)}")
        if self._phase[worker] not in phases:
            raise AssertionError(
                f"{call}: worker {worker} is {self._phase[worker]}, but has to be {' or '.join(phases)}"
            )


class AsyncCoordinator(Coordinator):
    """Every gradient is applied when it arrives. A worker may continue from `done` on, also without `ready`."""

    waits = False

    def ready(self) -> list[tuple[int, int]]:
        """Return the workers that were done since the last call, with their clocks."""
        released, self._waiting = self._waiting, []
        return [(worker, self.accepted[worker]) for worker in released]

    def _wait(self, worker: int) -> None:
        if worker not in self._waiting:  # the list must not grow if `ready` is never called
            self._waiting.append(worker)


class BoundedCoordinator(Coordinator):
    """Bounded staleness: no worker starts a step while it is more than `staleness` clocks ahead of the slowest.

    The clock of a worker is the number of its gradients that were applied. A worker with clock c may continue when
    c - m <= s, where m is the smallest clock of the live workers and s the staleness. So the clocks of live workers
    differ by at most s + 1, and by that only while the fastest waits. The slowest may always continue: no deadlock.

    This bounds the staleness of gradients too. A worker that pulled at clock c found the others at c - s or more, and
    until its own gradient is applied none exceeds c + s + 1: at most (n - 1)(2s + 1) updates of the others come
    between, with n workers. Ho et al., More effective distributed ML via a stale synchronous parallel parameter server,
    NIPS 2013.

    max_lead: the largest lead, in clocks, with which a worker has continued so far.
    """

    def __init__(self, workers: int, staleness: int) -> None:
        super().__init__(workers)
        self.max_lead = 0
        self._staleness = staleness

    def ready(self) -> list[tuple[int, int]]:
        """Return the workers whose clocks are close enough to the slowest, with their clocks."""
        slowest = min((self.accepted[worker] for worker in self.live), default=0)
        released = [worker for worker in self._waiting if self.accepted[worker] - slowest <= self._staleness]
        for worker in released:
            self._waiting.remove(worker)
            self._phase[worker] = "computing"
            self.max_lead = max(self.max_lead, self.accepted[worker] - slowest)
        return [(worker, self.accepted[worker]) for worker in released]


class SyncCoordinator(Coordinator):
    """Sync: a step is the mean of `replicas_to_aggregate` fresh gradients; None: one gradient of each live worker.

    The rules of TensorFlow's SyncReplicasOptimizer:

        1  A worker computes with a token, whose value is the global step that the gradient is for, its local step. At
           the start all workers compute without a token, at step 0. If more gradients are needed than there are
           workers, the queue holds the missing tokens of step 0.
        2  begin: the gradient is dropped if its local step is smaller than the global step, or if the step has accepted
           its `needed` gradients already.
        3  done, of the last gradient: all servers have updated, and the global step grows by one. The queue then gets
           max(live workers, needed) tokens of the new step.
        4  A worker that is done, or whose gradient was dropped, waits for a token, first come, first served: a fast
           worker may take several tokens of a step, and another none.

    With `has_grace` a step accepts one gradient of each live worker, and no worker gets a second token of a step. From
    `replicas_to_aggregate` gradients on it is `in_grace`, and `close` ends it.

    docs/from-tensorflow.md lists the differences from TensorFlow. A worker that leaves gives back its share. After a
    leave the queue is filled as if the step had begun with the live workers.

    There is no deadlock: the tokens in the queue and with live workers before `begin` are never fewer than the
    gradients that the step has to accept. So the queue is not empty when all workers wait.

    issued: number of tokens put in the queue, at the start and at the end of each step.
    """

    asks = True

    def __init__(self, workers: int, replicas_to_aggregate: int | None, has_grace: bool = False) -> None:
        super().__init__(workers)
        self._aggregate, self._has_grace = replicas_to_aggregate, has_grace
        self._is_closed = False  # the current step
        self._local_step = [0] * workers
        self._given: list[int] = []  # workers whose gradients are done in this step
        self.issued = self._fill_queue()

    @property
    def needed(self) -> int:
        if self._is_closed:
            return len(self._given) + self._phase.count("sending")
        of_all = len(self.live.union(self._given))
        return of_all if self._has_grace else self._aggregate or of_all

    @property
    def in_grace(self) -> bool:
        return self._has_grace and not self._is_closed and len(self._given) >= (self._aggregate or 1)

    def close(self) -> None:
        if not self.in_grace:
            raise AssertionError(f"close: the step has {len(self._given)} gradients, and needs {self._aggregate}")
        self._is_closed = True
        self._end_step()

    def begin(self, worker: int) -> bool:
        self._expect("begin", worker, "computing")
        fresh = self._local_step[worker] == self.global_step and self._missing > 0
        if fresh:
            self.accepted[worker] += 1
            self._phase[worker] = "sending"
        else:
            self.dropped[worker] += 1
            self._wait(worker)
        return fresh

    def ready(self) -> list[tuple[int, int]]:
        """Return the workers that get a token now, with its value."""
        able = [worker for worker in self._waiting if not (self._has_grace and worker in self._given)]
        released = able[: self._tokens] if self._missing else []
        self._tokens -= len(released)
        for worker in released:
            self._waiting.remove(worker)
            self._phase[worker] = "computing"
            self._local_step[worker] = self.global_step
        return [(worker, self.global_step) for worker in released]

    @property
    def _missing(self) -> int:
        """The number of gradients that the step has to accept."""
        return self.needed - len(self._given) - self._phase.count("sending")

    def _count(self, worker: int) -> None:
        self._given.append(worker)
        self._end_step()

    def _release(self) -> None:
        self._end_step()
        self._fill_queue()

    def _end_step(self) -> None:
        """End the step if it has all its gradients."""
        if self._given and len(self._given) == self.needed:
            self.global_step += 1
            self._given.clear()
            self._is_closed = False
            self.issued += self._fill_queue()

    def _fill_queue(self) -> int:
        """Fill the queue to max(live workers, needed) tokens, without those of accepted gradients and of workers."""
        held = sum(self._phase[w] == "computing" and self._local_step[w] == self.global_step for w in self.live)
        self._tokens = max(0, max(len(self.live), self.needed) - (self.needed - self._missing) - held)
        return self._tokens


@dataclasses.dataclass(frozen=True)
class Async:
    """Asynchronous updates: each gradient is applied when it arrives, with any staleness; no worker waits.

    >>> Async().describe()
    'async: each gradient is applied when it arrives'
    """

    def describe(self) -> str:
        """Return a description for the banner."""
        return "async: each gradient is applied when it arrives"

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker."""
        return AsyncCoordinator(_workers(workers))


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Bounded staleness: no worker starts a step while it is more than `staleness` clocks ahead of the slowest.

    staleness: an integer >= 0, in clocks; the clock of a worker is the number of its gradients that were applied. With
    0, no worker starts a step before all have completed the step before. Its parameters may already contain gradients
    of faster workers for the same step, which Sync() excludes. Raises InputError.

    >>> Bounded(staleness=4).describe()
    'bounded staleness: no worker runs more than 4 clocks ahead of the slowest'
    """

    staleness: int = 4

    def __post_init__(self) -> None:
        # Fields become plain ints; the user may have passed a numpy integer.
        remedy = "0 keeps all workers together, and Async() has no bound"
        object.__setattr__(self, "staleness", integer("Bounded: staleness", self.staleness, 0, remedy))

    def describe(self) -> str:
        """Return a description for the banner."""
        clocks = "1 clock" if self.staleness == 1 else f"{self.staleness} clocks"
        return f"bounded staleness: no worker runs more than {clocks} ahead of the slowest"

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker."""
        return BoundedCoordinator(_workers(workers), self.staleness)


@dataclasses.dataclass(frozen=True)
class Sync:
    """Synchronous steps: a step is the mean of several fresh gradients; late ones are dropped and counted.

    replicas_to_aggregate: number of gradients in a step, an integer >= 1. Fewer than the workers: the others are backup
    workers. More: workers give several. None: one gradient of every worker that has not left.
    total_num_replicas: number of workers, as in TensorFlow; None: any.
    grace_s: seconds, >= 0, that a step stays open for other gradients after it has replicas_to_aggregate; it ends
    earlier when every live worker has given one. Then each worker gives at most one gradient in a step. None: a step
    ends as soon as it has replicas_to_aggregate.
    Raises InputError for other numbers, and for grace_s without replicas_to_aggregate.

    >>> Sync(replicas_to_aggregate=3, total_num_replicas=4).describe()
    'sync: a step is the mean of the first 3 fresh gradients, later ones are dropped; 4 workers, 1 of them backup'
    """

    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None
    grace_s: float | None = None

    def __post_init__(self) -> None:
        if self.grace_s is not None:
            object.__setattr__(self, "grace_s", non_negative("Sync", "grace_s", self.grace_s))
            if self.replicas_to_aggregate is None:
                raise InputError("Sync: grace_s needs replicas_to_aggregate, the number of gradients before it begins")
        for field, meaning in (
            ("replicas_to_aggregate", "one gradient of every worker"),
            ("total_num_replicas", "any"),
        ):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, integer(f"Sync: {field}", value, 1, f"None means {meaning}"))

    def describe(self) -> str:
        """Return a description for the banner."""
        needed, total = self.replicas_to_aggregate, self.total_num_replicas
        text = "sync: a step is the mean of "
        text += (
            "one gradient of every live worker"
            if needed is None
            else f"the first {count(needed, 'fresh gradient')}, later ones are dropped"
        )
        if self.grace_s is not None:
            first = count(needed or 0, "gradient")
            text = f"sync: a step is the mean of {first} and of others in the next {self.grace_s:g} s"
        if total is not None:
            text += f"; {count(total, 'worker')}"
            if needed is not None and needed < total:
                text += f", {total - needed} of them backup"
            elif needed is not None and needed > total:
                text += ", several gradients of each"
        return text

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker, or if not `total_num_replicas`."""
        if self.total_num_replicas not in (None, _workers(workers)):
            raise InputError(
                f"Sync: total_num_replicas is {self.total_num_replicas}, but the number of workers is {workers}; "
                f"leave it out, or start {self.total_num_replicas} workers"
            )
        return SyncCoordinator(workers, self.replicas_to_aggregate, self.grace_s is not None)


Policy = Async | Bounded | Sync


def _workers(count: int) -> int:
    if count < 1:
        raise InputError(f"a parameter server needs at least 1 worker, but has {count}; start more ranks")
    return count
