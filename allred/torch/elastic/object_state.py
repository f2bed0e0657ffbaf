"""State: what `elastic.run` saves, restores and synchronizes. ObjectState: a state of plain Python objects."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from allred.errors import InputError
from allred.torch.elastic.restartable_job import RestartableJob
from allred.torch.horovod.horovod_errors import HostsUpdatedInterrupt


class State:
    """Base class: subclasses define save, restore and sync.

    A subclass that has to survive a restart of the processes also defines `committed_state`, which returns picklable
    objects, and `load_committed_state`.

    bcast_object: a function that returns the object of rank 0 on all ranks. get_rank: returns the rank.
    """

    elastic_job: RestartableJob | None = None  # inside of a function that is decorated with `elastic.run`

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions without arguments, such as one that adapts the learning rate to the number of ranks.

        They are called on all ranks, with the restored state: after the job has started again with another number of
        ranks, and after an error of an operation, before the function is called again.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state: in memory, and under `allred run` in a file. Collective: all ranks call it after the same
        step. If the job has to stop (`allred resize`, changed hosts, SIGTERM, SIGUSR1, Ctrl-C), the program ends with
        exit code 0 on all ranks.

        It copies all tensors; call it once in many steps."""
        self.save()
        if self.elastic_job is not None:
            self.elastic_job.write(self.committed_state)
        self._interrupt_if_stopped()

    def check_host_updates(self) -> None:
        """As `commit`, but only if the job has to stop. Collective."""
        if self.elastic_job is not None and self.elastic_job.must_stop():
            self.commit()

    def _interrupt_if_stopped(self) -> None:
        if self.elastic_job is not None and self.elastic_job.must_stop():
            raise HostsUpdatedInterrupt(False)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last state that was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for another number of ranks. Called before the reset callbacks."""

    def committed_state(self) -> Any:
        """Return the saved state for the file of the commit. Called after `save`."""
        raise InputError(
            f"{type(self).__name__} has no committed_state and load_committed_state, so its commits cannot be written "
            "to a file; define them, or set ALLRED_ELASTIC_DIR=none: then a restarted job starts from the beginning"
        )

    def load_committed_state(self, state: Any) -> None:
        """Restore the result of `committed_state`. Called on rank 0, before `sync`."""
        raise NotImplementedError


class ObjectState(State):
    """A state of picklable objects, which become attributes: ObjectState(hvd.broadcast_object, hvd.rank,
    epoch=0) has the attribute `epoch`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def committed_state(self) -> Any:
        return self._saved_state

    def load_committed_state(self, state: Any) -> None:
        self._saved_state.update(state)
        ObjectState.restore(self)
