"""Sync: a step is the mean of several fresh gradients. The rules of TensorFlow's SyncReplicasOptimizer.

    1  a worker computes with a token; its value is the global step for which the gradient counts, the local step.
       At the start all go without, at step 0, and where more gradients are needed than there are workers the missing
       tokens of step 0 lie in the queue
    2  begin: the gradient is dropped if its local step is smaller than the global step, or if the step has accepted
       the `needed` gradients already
    3  done, of the last of them: all servers have updated, and the global step grows by one. Then there are
       max(live workers, needed) tokens of the new step
    4  who is done, or was dropped, waits for a token, first come, first served: a fast worker may take several tokens
       of a step, another none

Where this differs from TensorFlow:

- Exactly `needed` gradients are averaged; TensorFlow's accumulators also take those that come before the mean is taken.
- Tokens left over when a step ends are void. TensorFlow keeps them, and who gets one computes a gradient to be dropped.
- No token is given out when the step has accepted its gradients: that gradient could only be dropped. Who was dropped
  in that moment waits for the end of the step with the rest.
- TensorFlow starts with `replicas_to_aggregate` tokens in the queue, if not told otherwise; here with those missing.
- Who leaves gives back its share; there the others hang (tensorflow issues 5022, 11660, 20342). With
  `replicas_to_aggregate` None a step needs a gradient of each live worker, and the step under way those that the gone
  have given to it as well, so that no other is dropped for them; it may end by the leave. A given number stays, and
  who still lives gives several gradients. After a leave the queue is filled as if the step had begun with those who
  live now: the token of who left goes back where there are fewer workers than needed.
  When nobody lives, gradients of a step that is not complete are lost.

Why there is no deadlock: tokens in the queue, and with live workers that have not begun yet, are never fewer than the
gradients that the step still has to accept. So if all wait, the queue is not empty.
"""

from allred.ps.coordinator import Coordinator


class SyncCoordinator(Coordinator):
    """A step takes `replicas_to_aggregate` gradients; None: one of each live worker.

    issued: tokens that were put in the queue, at the start and at the end of each step.
    """

    asks = True

    def __init__(self, workers: int, replicas_to_aggregate: int | None) -> None:
        super().__init__(workers)
        self._aggregate = replicas_to_aggregate
        self._local_step = [0] * workers
        self._given: list[int] = []  # whose gradients are done in this step
        self.issued = self._lay_out_tokens()

    @property
    def needed(self) -> int:
        """How many gradients make the current step."""
        return self._aggregate or len(self.live.union(self._given))

    def begin(self, worker: int) -> bool:
        """Whether the gradient that the worker has computed is taken. Otherwise it is dropped, and the worker waits."""
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
        """Those that got a token, with its value."""
        count = min(self._tokens, len(self._waiting)) if self._missing else 0
        go, self._waiting = self._waiting[:count], self._waiting[count:]
        self._tokens -= count
        for worker in go:
            self._phase[worker] = "computing"
            self._local_step[worker] = self.global_step
        return [(worker, self.global_step) for worker in go]

    @property
    def _missing(self) -> int:
        """Gradients that the step still has to accept."""
        return self.needed - len(self._given) - self._phase.count("sending")

    def _count(self, worker: int) -> None:
        self._given.append(worker)
        self._end_step()

    def _release(self) -> None:
        self._end_step()
        self._lay_out_tokens()

    def _end_step(self) -> None:
        """If its gradients are all there."""
        if self._given and len(self._given) == self.needed:
            self.global_step += 1
            self._given.clear()
            self.issued += self._lay_out_tokens()

    def _lay_out_tokens(self) -> int:
        """Fill the queue: the step has max(live workers, needed) tokens, less those of its gradients and those held."""
        held = sum(self._phase[w] == "computing" and self._local_step[w] == self.global_step for w in self.live)
        self._tokens = max(0, max(len(self.live), self.needed) - (self.needed - self._missing) - held)
        return self._tokens
