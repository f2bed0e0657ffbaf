"""`StepTimer`: measures the time, samples and bytes of the steps of one optimizer on this rank."""

import time

from allred.comm.communicator import Communicator


class StepTimer:
    """Times of steps in seconds. A step lasts from the end of the step before to its own end."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0  # of all ranks
        self.seconds = 0.0
        self.communicating_s = 0.0  # without waits for other ranks
        self.waiting_s = 0.0  # until other ranks arrived
        self.sent_bytes = 0  # of gradients, after compression
        self._start = 0.0
        self._before = (0.0, 0.0, 0)

    def begin(self, communicator: Communicator) -> None:
        """Start the communication of a step. The first step starts here too: the time before is not training."""
        self._start = self._start or time.perf_counter()
        queue = communicator.queue
        self._before = queue.waited_s, queue.waited_for_peers_s, communicator.sent_bytes

    def end(self, communicator: Communicator, samples: int) -> None:
        """End a step, after its update. samples: of all ranks."""
        queue, now = communicator.queue, time.perf_counter()
        waited_s, peers_s = queue.waited_s - self._before[0], queue.waited_for_peers_s - self._before[1]
        self.steps += 1
        self.samples += samples
        self.seconds += now - self._start
        self.communicating_s += waited_s - peers_s
        self.waiting_s += peers_s
        self.sent_bytes += communicator.sent_bytes - self._before[2]
        self._start = now

    def text(self) -> str:
        """`80 steps in 0.52 s: 28000 examples/s; of a step 12 % communicating, 8 % waiting for other ranks`."""
        if not self.seconds:
            return "no steps yet"
        rate = (
            f"{self.samples / self.seconds:.0f} examples/s"
            if self.samples
            else f"{self.steps / self.seconds:.1f} steps/s"
        )
        shares = [100 * part / self.seconds for part in (self.communicating_s, self.waiting_s)]
        return (
            f"{self.steps} steps in {self.seconds:.2f} s: {rate} over all ranks; of a step "
            f"{shares[0]:.0f} % communicating, {shares[1]:.0f} % waiting for other ranks"
        )
