"""Variables with a name and a device, as in TensorFlow: arrays for which the program chooses a parameter server.

The optimizer that trains them takes these choices (`places`) as its placement, and checkpoints take the names. There is
no other store of variables.
"""

import collections
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allred import world
from allred.arrays import Array
from allred.cluster import device, topology
from allred.cluster.device import Chooser, Place
from allred.cluster.spec import CLIENT, SERVERS, ClusterSpec
from allred.errors import InputError, NotInitializedError
from allred.fusion import Tensor

_SHOWN = 8  # variables in a report
_known: dict[int, tuple["weakref.ref[Array]", str, Place]] = {}  # by id


def variable(value: Any, name: str = "", dtype: Any = None) -> Array:
    """Create an array for the parameter server that `allred.device` selects, in mode ps.

        with allred.device("/job:ps/task:1"):
            w = allred.variable(np.zeros((784, 10)), name="w")
        opt = allred.distributed(allred.optim.Adagrad(lr=0.01))
        opt.broadcast({"w": w})

    It is a numpy array, this worker's copy, which `opt.step` and `opt.pull` update. Pass the array itself to the
    optimizer, not a copy. With "/job:ps" without a task, or without a device, the optimizer places it.

    value: an array or number, or a function without arguments that returns it. name: used in messages. It is
        also the name in checkpoints if it is unique and the parameters are a list or tuple, which gives no names.
        dtype: by default the value's dtype.
    Raises InputError for a device that is not in the cluster, or is another worker.
    """
    array = np.array(value() if callable(value) else value, dtype=dtype)
    place = device.of_variable(Tensor(name, array.shape, array.dtype))
    _check(place, name)
    key = id(array)
    _known[key] = weakref.ref(array, lambda _: _known.pop(key, None)), name, place
    return array


def _check(place: Place, name: str) -> None:
    try:
        here = world.current().topology
    except NotInitializedError:
        return  # the optimizer checks
    own = Place(topology.job_name(), topology.task_index())
    if own.job == CLIENT and place.job == SERVERS:
        raise InputError(
            f"allred.variable({name!r}): a client cannot create variables on parameter servers; make it in a "
            "function that the workers run"
        )
    whole = place.within(own)
    if whole.task_name == own.task_name or (place.job == SERVERS and (place.task or 0) < here.servers):
        return
    servers = f"servers are 0 to {here.servers - 1}" if here.servers else "there are none"
    raise InputError(
        f"allred.variable({name!r}): {whole.task_name} is no parameter server of this cluster, nor this task; {servers}"
    )


def places(named: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Return {name: server} of the leaves for which the program chose a server."""
    found = {}
    for name, leaf in named:
        _, _, place = _known.get(id(leaf), (None, "", None))
        if place is not None and place.job == SERVERS and place.task is not None:
            found[name] = place.task
    return found


def checkpoint_names(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return {path: name in checkpoints} of the leaves that the program has named only by `variable`: their paths have
    no key of a dict. A name that is not unique is not used.

    >>> checkpoint_names([("0", w := variable([1.0], name="w")), ("layer.w", w), ("1", 2.0)])
    {'0': 'w'}
    """
    named = list(named)
    given = {path: _known[id(leaf)][1] for path, leaf in named if id(leaf) in _known}
    given = {path: name for path, name in given.items() if name and path.replace(".", "0").isdecimal() | (not path)}
    uses = collections.Counter(given.get(path, path) for path, _ in named)
    return {path: name for path, name in given.items() if uses[name] == 1}


def move(old: Any, new: Array) -> None:
    """Give the array `new` the name and place of the variable `old`, which it replaces."""
    if id(old) in _known:
        _, name, place = _known[id(old)]
        key = id(new)
        _known[key] = weakref.ref(new, lambda _: _known.pop(key, None)), name, place


def describe(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return lines of text: the chosen devices of these leaves, and the variables with a server that are not among
    them."""
    there = {id(leaf): name for name, leaf in named}
    lines, others = [], []
    for key, (_, name, place) in _known.items():
        if key in there and place.job == SERVERS and place.task is not None:
            lines.append(f"{name or there[key]}: {place}")
        elif key not in there and place.job == SERVERS:
            others.append(repr(name or "without a name"))
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 :] = [f"... and {len(lines) - _SHOWN + 1} more variables where allred.device has put them"]
    if others:
        names = ", ".join(others[:_SHOWN])
        lines.append(f"given a server, but not among the parameters of this optimizer, so they stay here: {names}")
    return lines


class _Setter:
    """Device function for `allred.device`, returned by `replica_device_setter`."""

    def __init__(self, tasks: int, worker: Place, strategy: Callable[[Tensor], int]) -> None:
        self._tasks, self._worker, self._strategy = tasks, worker, strategy

    def of_function(self) -> Place:
        return self._worker

    def of_variable(self, tensor: Tensor) -> Place:
        task = self._strategy(tensor)
        if isinstance(task, bool) or task not in range(self._tasks):
            raise InputError(
                f"replica_device_setter: ps_strategy gave {task!r} for {tensor}; the servers are 0 to {self._tasks - 1}"
            )
        return Place(SERVERS, int(task))


def replica_device_setter(
    ps_tasks: int = 0,
    *,
    worker_device: str = "/job:worker",
    cluster: Any = None,
    ps_strategy: str | Callable[[Tensor], int] = "round_robin",
) -> Chooser | None:
    """Return a device function for `allred.device`: it distributes variables over the parameter servers.

        with allred.device(allred.replica_device_setter(cluster=cluster)):
            weights = allred.variable(np.zeros((784, 10)), name="weights")      # /job:ps/task:0
            bias = allred.variable(np.zeros(10), name="bias")                   # /job:ps/task:1

    ps_tasks: the number of servers; ignored with `cluster`. worker_device: the device of functions. cluster: an
    `allred.ClusterSpec`, or its argument. ps_strategy: "round_robin"; "greedy", each on the server with the fewest
    bytes so far; or a function from a variable (name, shape, dtype) to the number of a server.
    Returns None without servers: `allred.device(None)` then selects this task. Raises InputError for invalid arguments.
    """
    if cluster is not None:
        spec = ClusterSpec(cluster)
        ps_tasks = spec.num_tasks(SERVERS) if SERVERS in spec.jobs else 0
    if isinstance(ps_tasks, bool) or not isinstance(ps_tasks, int) or ps_tasks < 0:
        raise InputError(f"replica_device_setter(ps_tasks={ps_tasks!r}): expected a number of parameter servers")
    if ps_strategy not in ("round_robin", "greedy") and not callable(ps_strategy):
        raise InputError(
            f"replica_device_setter(ps_strategy={ps_strategy!r}): expected 'round_robin', 'greedy', or a function from "
            "a variable to a server's number"
        )
    worker = device.parse(worker_device)
    if not ps_tasks:
        return None
    loads = [0] * ps_tasks

    def choose(tensor: Tensor) -> int:
        """Return the server with the fewest variables, or bytes."""
        task = loads.index(min(loads))
        loads[task] += tensor.nbytes if ps_strategy == "greedy" else 1
        return task

    return _Setter(ps_tasks, worker, ps_strategy if callable(ps_strategy) else choose)
