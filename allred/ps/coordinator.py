"""Who may go on: what server 0 makes of the steps of all workers. A state machine without clock, socket or array.

Workers are numbered from 0. At the start each may compute, with local step 0 and the parameters that all start from.
A step of worker w:

    1  w pulls the parameters and computes a gradient: it has permission to, since `ready` has named it
    2  if the policy `asks`: begin(w). False: the gradient is dropped, and w goes on with 4
    3  w sends the gradient to every server; when all have acknowledged it: done(w)
    4  if the policy `waits`: w waits until `ready` names it. Else it goes on at once

leave(w) is for a worker that has finished, failed or died. It may come at any moment:

    computing   nothing of the step counts; nobody waits for it any more
    sending     between begin and done: the gradient is withdrawn as if begin had never been called, since some servers
                may never get it, and those that have it must forget it. If it has arrived everywhere: leave(w,
                sent=True), and it counts as if done(w) had come first; likewise if a server has applied it already
                and so cannot forget it: then the others apply the step without it. A policy that does not ask
                cannot tell computing from sending; there too `sent` says that the gradient counts
    waiting     it is no longer waited for; what it has given stays

A call that does not fit is a mistake of the server, not of a user: AssertionError, and nothing has changed.
"""

import abc


class Coordinator(abc.ABC):
    """The workers 0 to `workers` - 1, and who of them may go on.

    asks: whether `begin` comes before a gradient is sent. waits: whether a worker has to wait for `ready` after `done`.
    live: the workers that have not left. global_step: updates of the parameters so far.
    accepted, dropped: gradients of each worker, by its number; one that was withdrawn is in neither.
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
        """How many gradients make the current step."""
        return 1

    def begin(self, worker: int) -> bool:
        """Whether the gradient that the worker has computed is taken. Otherwise it is dropped, and the worker waits."""
        raise AssertionError(f"begin: worker {worker} has asked, but in this policy no gradient is ever dropped")

    def done(self, worker: int) -> None:
        """The worker's gradient has arrived at every server."""
        self._expect("done", worker, self._carries)
        self._wait(worker)
        self._count(worker)

    @abc.abstractmethod
    def ready(self) -> list[tuple[int, int]]:
        """(worker, its local step) of those that may go on now, each told once; who has waited longest comes first."""

    def leave(self, worker: int, sent: bool = False) -> None:
        """The worker takes part no more. `sent`: the gradient it was about to be done with has arrived everywhere."""
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
    def _carries(self) -> str:
        """The phase in which a worker has a gradient under way."""
        return "sending" if self.asks else "computing"

    def _count(self, worker: int) -> None:
        """A gradient has arrived."""
        self.accepted[worker] += 1
        self.global_step += 1

    def _wait(self, worker: int) -> None:
        self._phase[worker] = "waiting"
        self._waiting.append(worker)

    def _release(self) -> None:  # noqa: B027  (most policies have nothing to do)
        """Somebody has left: let the others go on without."""

    def _expect(self, call: str, worker: int, *phases: str) -> None:
        if worker not in self.live:
            raise AssertionError(f"{call}: worker {worker} is not one of the live workers {sorted(self.live)}")
        if self._phase[worker] not in phases:
            raise AssertionError(
                f"{call}: worker {worker} is {self._phase[worker]}, but has to be {' or '.join(phases)}"
            )
