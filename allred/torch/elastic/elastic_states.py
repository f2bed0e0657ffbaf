"""The states that `elastic.run` saves, restores and synchronizes, and the sampler.

ObjectState: plain Python objects. TorchState: also torch modules, optimizers and samplers; each is handled by the
handler of its type. ElasticSampler distributes the samples of an epoch that are left over the ranks.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol

import torch
import torch.utils.data

from allred.errors import InputError
from allred.horovod.basics import rank, size
from allred.horovod.horovod_errors import HostsUpdatedInterrupt
from allred.session import state_pickle
from allred.torch.horovod.state_broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from allred.torch.module_checkpoints import UntrainedState


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of a DataLoader. After a restart it skips the samples that were recorded in this epoch; the number of
    ranks may change. Order and distribution are those of Horovod for the same seed.

    Order of an epoch: the processed samples; then the remaining ones, dealt to ranks 0, 1, 2, 0, 1, 2, ...; then the
    first remaining ones again, until all ranks have the same number.

    dataset: an object with a length. shuffle: whether each epoch has another order, from `seed` plus the epoch; the
    seed must be equal on all ranks.

    Give the object to TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample of it is processed. Call it at the end of the epoch before, not at the beginning:
        that would discard the progress of a restored epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch. batch_size: of one rank. batch_idx is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that are left over the ranks. A running iteration is not changed."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        self.indices = [left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)]
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of samples of this rank that are left."""
        return self.num_samples


class SavedState:
    """Base class of State and StateHandler."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last state that was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks. Collective."""
        raise NotImplementedError


class ElasticJob(Protocol):
    """The methods of a RestartableJob that a State calls."""

    def write(self, get_state: Callable[[], Any]) -> None: ...
    def must_stop(self) -> bool: ...


class State(SavedState):
    """Base class: subclasses define save, restore and sync.

    A subclass that has to survive a restart of the processes also defines `committed_state`, which returns picklable
    objects, and `load_committed_state`.

    bcast_object: a function that returns the object of rank 0 on all ranks. get_rank: returns the rank.
    """

    elastic_job: ElasticJob | None = None  # inside of a function that is decorated with `elastic.run`

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
        if self.elastic_job is not None and self.elastic_job.must_stop():
            raise HostsUpdatedInterrupt(False)

    def check_host_updates(self) -> None:
        """As `commit`, but only if the job has to stop. Collective."""
        if self.elastic_job is not None and self.elastic_job.must_stop():
            self.commit()

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


class StateHandler(SavedState):
    """Base class: handles the object `value`. Subclasses define save, restore and sync, as those of a State."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()

    def committed_state(self) -> Any:
        """Return the state for the file of a commit. Called after `save`, so it is that of the object."""
        if not hasattr(self.value, "state_dict"):
            raise InputError(
                f"the commit of a {type(self.value).__name__} cannot be written to a file: it has no state_dict, and "
                f"{type(self).__name__} does not define committed_state and load_committed_state"
            )
        return self.value.state_dict()

    def load_committed_state(self, state: Any) -> None:
        """Restore the result of `committed_state`."""
        self.value.load_state_dict(state)
        self.save()


class StateDictHandler(StateHandler):
    """Handles an object with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """Handles a torch.nn.Module."""

    def sync(self) -> None:
        state = UntrainedState(self.value, ())
        broadcast_parameters(state.tensors(), root_rank=0)
        if others := state.others():
            state.load_others(state_pickle.loads(broadcast_object(state_pickle.dumps(others))))


class OptimizerStateHandler(StateDictHandler):
    """Handles a torch.optim.Optimizer."""

    def restore(self) -> None:
        super().restore()
        self.value.zero_grad()  # gradients of the step that has failed

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """Handles an ElasticSampler."""


HandlerRegistry = list[tuple[type, type[StateHandler]]]

_registry: HandlerRegistry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> HandlerRegistry:
    """Return the list of (type, handler). The first type that an object is an instance of counts."""
    return _registry


def set_handler_registry(registry: HandlerRegistry) -> None:
    """Replace the list, for states that are created afterwards."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a training. All arguments become attributes.

    model: a torch module. optimizer: a torch optimizer, also one of hvd.DistributedOptimizer. kwargs: more of them,
    learning rate schedulers, ElasticSamplers, and other picklable objects.

    `register_reset_callbacks` adds functions that adapt it to another number of ranks.

    Example: `hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)`.
    """

    _handlers: dict[str, StateHandler] = {}  # noqa: RUF012  (replaced in __init__)

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value)) is not None}
        for name in handlers:
            setattr(self, name, kwargs.pop(name))
        self._handlers = handlers
        super().__init__(broadcast_object, rank, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def committed_state(self) -> Any:
        handled = {name: handler.committed_state() for name, handler in self._handlers.items()}
        return {"handled": handled, "attributes": super().committed_state()}

    def load_committed_state(self, state: Any) -> None:
        for name, handler in self._handlers.items():
            handler.load_committed_state(state["handled"][name])
        super().load_committed_state(state["attributes"])


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
