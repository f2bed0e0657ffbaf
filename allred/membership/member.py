"""`Member`: what one process may do, according to the agreement (agreement.py). It has no clock, socket or thread.

    phase      step      the process may                                        next phase
    joining    -1        wait                                                   Form: building
    building   s         build the communicators of `generation`                built(): receiving or running
    receiving  -1        receive the state; in the first world, the source      received(): running
                         makes the initial state
    running    s         take part in operations of `generation`, and commit    finished(): ended
    ready      s         wait; it writes nothing that others can see            Form: building
    ended                end as `end` says                                      -

Stop and Restart lead to ended from each phase. Poison sets `is_poisoned` in the phases building, receiving and running.
Then the process may still complete the operation in which it waits, but starts no other one: it leaves the operation at
its next wait, halts its queue and calls halted(), which leads to ready. It may call halted() without Poison, too, after
an error in a connection.

While it receives state it has none: its parameters are partly overwritten.
"""

from allred.membership.agreement import Finished, Form, Order, Poison, Ready, Restart, Running, Stop


class Member:
    """The state of one process. Methods that return a message: send it to the coordinator.

    name: of the process. step: the committed step; -1: no state. form: of the world `generation`. end: why it ends.
    A call in the wrong phase is an error of the caller: AssertionError, and nothing has changed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = "joining"
        self.is_poisoned = False
        self.generation = 0
        self.step = -1
        self.form: Form | None = None
        self.end: Stop | Restart | None = None

    @property
    def may_start(self) -> bool:
        """Whether the process may start an operation of its generation."""
        return self.phase == "running" and not self.is_poisoned

    def receive(self, message: Order) -> None:
        """Handle a message of the coordinator."""
        if isinstance(message, Poison):
            if message.generation == self.generation and self.phase in ("building", "receiving", "running"):
                self.is_poisoned = True
        elif isinstance(message, Form):
            self._expect("Form", "joining", "ready")
            self.phase, self.generation, self.form, self.is_poisoned = "building", message.generation, message, False
        elif self.phase != "ended":
            self.phase, self.end = "ended", message

    def built(self) -> Running | None:
        """The communicators are complete. The transfer of state starts now, if this process needs it."""
        self._expect("built", "building")
        assert not self.is_poisoned, f"built: the world {self.generation} of {self.name} is poisoned"
        assert self.form is not None
        if self.name in self.form.receivers or self.form.step < 0:
            self.phase, self.step = "receiving", -1
            return None
        self.phase = "running"
        return Running(self.generation)

    def received(self, step: int) -> Running:
        """The state is complete. step: its committed step."""
        self._expect("received", "receiving")
        assert self.form is not None
        assert self.form.step in (-1, step), f"received: step {step}, but world {self.generation} has {self.form.step}"
        self.phase, self.step = "running", step
        return Running(self.generation)

    def committed(self) -> None:
        """The next step is complete: its allreduce, and the update of the parameters."""
        self._expect("committed", "running")
        self.step += 1

    def halted(self) -> Ready:
        """The process has left its operation, and its queue is halted."""
        self._expect("halted", "building", "receiving", "running")
        self.phase = "ready"
        return Ready(self.generation, self.step)

    def finished(self) -> Finished:
        """The barrier after the last step is complete."""
        self._expect("finished", "running")
        self.phase, self.end = "ended", Stop("the training has finished")
        return Finished(self.generation)

    def _expect(self, call: str, *phases: str) -> None:
        assert self.phase in phases, f"{call}: {self.name} is {self.phase}, but has to be {' or '.join(phases)}"
