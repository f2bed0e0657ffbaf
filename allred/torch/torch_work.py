"""TorchWork and TorchFuture: started operations with torch's interfaces Work and Future.

A Work is completed inside a call: a wait, the start of another operation, is_completed(). In a backward pass,
operations with a future are completed at its end, before the callbacks that DistributedDataParallel registers there.
C++ code of torch waits for a future without a call of its Python methods: then a thread completes it, `_FutureThread`.
"""

import collections
import contextlib
import datetime
import functools
import math
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from allred import world
from allred.comm.work import Work
from allred.errors import AllredError, CollectiveTimeout, InputError, RanksChanged
from allred.runtime.process_end import top_frame
from allred.torch.optimizer_hooks import uncompiled
from allred.watch import exit_callbacks

FUTURES_INTERVAL_S = 0.005  # at which a thread looks at futures that are not complete


def as_torch_error(error: BaseException) -> None:
    """Make an error of allred an instance of torch's DistBackendError, a RuntimeError, too: programs catch these around
    collectives. It stays an instance of its own class."""
    if isinstance(error, AllredError) and not isinstance(error, dist.DistBackendError):
        if isinstance(error, CollectiveTimeout):
            error.args = (f"[allred] Timed out waiting for {error}",)  # torch's words
        error.__class__ = _torch_class(type(error))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _torch_class(own: type[AllredError]) -> type[AllredError]:
    class TorchError(own, dist.DistBackendError):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> Any:  # pickle finds classes by their names
            return own.__new__, (own, *self.args), vars(self)

    TorchError.__name__, TorchError.__qualname__, TorchError.__module__ = own.__name__, own.__qualname__, own.__module__
    return TorchError


# The function on top of Python's stack while C++ code runs in a backward pass.
_BACKWARD_CODE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


class Blocking:
    """An operation that starts in `wait`: to start it and to wait in one call is faster."""

    place, limit_s = "", math.inf
    error: Exception | None = None

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def wait(self, timeout_s: float | None) -> Any:
        return self._call()

    def done(self) -> bool:
        return False

    def silence(self) -> None:
        pass

    def run_in_thread(self, timeout_s: float | None, started: float) -> bool:
        return False


# An operation, and the function applied to its result.
StartedOperation = tuple[Work[Any] | Blocking, Callable[[Any], object] | None]


class UnstartedError(InputError):
    """Operations of a call cannot be started on this rank. count: how many of them; other ranks may start them."""

    def __init__(self, problem: str, count: int) -> None:
        super().__init__(problem)
        self.count = count


def start_each(calls: Sequence[Callable[[], StartedOperation]]) -> list[StartedOperation]:
    """Start operations in order. Raises UnstartedError where one cannot be started."""
    parts: list[StartedOperation] = []
    for call in calls:
        try:
            parts.append(call())
        except InputError as error:
            raise UnstartedError(str(error), len(calls) - len(parts)) from error
    return parts


class TorchWork(_distributed_c10d.Work):
    """One or several operations that were started together.

    parts: the operations, until they are complete. outputs: the tensors that they write, kept alive until then.
    timeout_s: the time limit in seconds; None for the setting. on_end: called, possibly more than once, when nothing is
    left to wait for. on_loss: called if the ranks of an elastic job change before the operations are complete; then
    they count as complete. None: this is an error.
    """

    def __init__(
        self,
        parts: Sequence[StartedOperation],
        outputs: Sequence[torch.Tensor],
        timeout_s: float | None,
        on_end: Callable[[], object] = lambda: None,
        on_loss: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()
        self.parts, self._outputs, self._timeout_s, self._on_end = list(parts), list(outputs), timeout_s, on_end
        self._on_loss = on_loss
        self._started = time.perf_counter()
        self._error: BaseException | None = None
        self._failed: Work[Any] | Blocking | None = None  # the operation with this error, until a wait has raised it
        self._future: TorchFuture | None = None
        self._released: list[weakref.ref[torch.Tensor]] = []  # the outputs, after `release_outputs`
        self.source = -1  # of a received message: the sender's index in the group
        self.was_waited_for = False  # by `wait`, or is_completed() was True
        self._lock = threading.RLock()  # of the parts: a thread may complete them

    @uncompiled
    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait until the operations are complete. Raises their error."""
        self.was_waited_for = True
        with self._lock:
            if (failed := self._failed) is not None:
                self._failed = None
                with contextlib.suppress(Exception):  # the same error
                    failed.wait(None)
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._complete(timeout.total_seconds() or self._timeout_s)
        return True

    def complete_in_thread(self) -> bool:
        """Make progress in another thread than the program's, and return whether nothing is left to do."""
        if not self._lock.acquire(blocking=False):  # the program waits
            return False
        try:
            self._complete_quietly(lambda work: work.run_in_thread(self._timeout_s, self._started))
        finally:
            self._lock.release()
        return not self.parts

    def _complete(
        self, timeout_s: float | None, ready: Callable[[Work[Any] | Blocking], bool] = lambda work: True
    ) -> None:
        """Wait for the operations in order, while the next one is ready."""
        try:
            while self.parts and ready(self.parts[0][0]):
                work, finish = self.parts[0]
                result = work.wait(timeout_s)
                if finish is not None:
                    finish(result)
                del self.parts[0]
        except Exception as error:
            self._fail(error)
            if self._error is not None:
                raise
            return
        if not self.parts:
            self._set_future()
            self._on_end()

    def _complete_quietly(self, ready: Callable[[Work[Any] | Blocking], bool]) -> None:
        """As `_complete`, but raise nothing: `wait` raises the error. An operation that has failed is not waited for,
        because the program has not seen its error yet."""
        with contextlib.suppress(Exception):
            self._complete(self._timeout_s, lambda work: ready(work) and work.error is None)
        if self.parts and (error := self.parts[0][0].error) is not None:
            self._failed = self.parts[0][0]
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for work, _ in self.parts[1:]:
            work.silence()
        self.parts = []
        if self._on_loss is not None and isinstance(error, RanksChanged):
            self._failed = None
            self._on_loss(error)
        else:
            as_torch_error(error)
            self._error = error
            self._outputs = []  # the error's frames refer to this object, and would keep the tensors
        self._set_future()
        self._on_end()

    def take_operations(self) -> list[StartedOperation]:
        """Return the operations that are not complete, which another Work takes over."""
        parts, self.parts = self.parts, []
        self._on_end()
        return parts

    def _set_future(self) -> None:
        future, self._future = self._future, None  # without a cycle of references, which would keep the outputs
        if future is not None and isinstance(self._error, Exception):
            future.set_exception(self._error)
        elif future is not None and self._error is None:
            future.set_result(self.result())

    def get_future(self) -> "TorchFuture":
        """Return a future of the output tensors."""
        if self._is_for_fp16_hook(sys._getframe(1)):
            self.wait()
            return torch.jit.fork(self.result)  # type: ignore[no-any-return]
        with self._lock:
            future = self._future = self._future or TorchFuture(self)
            if not self.parts:
                self._set_future()
            else:
                in_backward = torch._C._current_autograd_node() is not None
                if in_backward:
                    torch.autograd.Variable._execution_engine.queue_callback(self.wait)
                    self._on_end()  # the callback keeps this object; a backward pass that fails releases it
                _future_thread.add(self, in_backward)
        return future

    def _is_for_fp16_hook(self, caller: types.FrameType) -> bool:
        """Return whether the caller may be DistributedDataParallel's fp16 hook in C++. It expects a list of tensors in
        C++, which only a complete future can have; other callers in C++ convert the value."""
        in_backward = caller.f_code is _BACKWARD_CODE and torch._C._current_autograd_node() is not None
        return in_backward and bool(self._outputs) and self._outputs[0].dtype is torch.float16

    @uncompiled
    def is_completed(self) -> bool:
        """Return whether the operations are complete or have failed. Waits only after the time limit, or if another
        rank has failed: then `exception` returns the error of the wait, and `wait` raises it."""
        if self.parts and (self._is_late() or world.error() is not None):
            with contextlib.suppress(Exception):
                self.wait()
        self.was_waited_for = self.complete_if_done()
        return self.was_waited_for

    def complete_if_done(self) -> bool:
        """Return whether the operations are complete or have failed; never waits."""
        with self._lock:
            if self.parts and self._all_done():
                self._complete_quietly(lambda work: True)
        return not self.parts

    def _is_late(self) -> bool:
        return time.perf_counter() - self._started > (self._timeout_s or self.parts[0][0].limit_s)

    def _all_done(self) -> bool:
        try:
            return all(work.done() for work, _ in self.parts)
        except AllredError:  # the communicator cannot be used; a wait raises the same error
            return True

    def release_outputs(self) -> None:
        """Keep the outputs no longer than others do, if the operations are complete."""
        if self.parts:
            return
        self._released, self._outputs = [weakref.ref(tensor) for tensor in self._outputs], []

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs or [tensor for each in self._released if (tensor := each()) is not None]

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


class _TakenFuture(NamedTuple):
    """The future of a work. thread, ident: native identifier and ident of the thread that took it. in_backward: the end
    of a backward pass completes the work. It does not complete works that start there, as in the first step of
    DistributedDataParallel with static_graph."""

    work: weakref.ref[TorchWork]
    thread: int
    ident: int
    in_backward: bool


# taken: in the thread that completes works, the future that it completes. If its callbacks start further operations,
# their futures belong to the thread that took this one.
_completing = threading.local()


class _FutureThread:
    """Completes works for a thread that sleeps after it has taken their futures: a wait in C++ does not call Python.
    While that thread runs, only it completes them, in a wait or at the end of a backward pass: callbacks may start
    operations, whose order must be the same on all ranks."""

    def __init__(self) -> None:
        self._new: collections.deque[_TakenFuture] = collections.deque()
        self._thread: threading.Thread | None = None
        self._has_new, self._stops = threading.Event(), threading.Event()

    def add(self, work: TorchWork, in_backward: bool) -> None:
        completing: _TakenFuture | None = getattr(_completing, "taken", None)
        own = (threading.get_native_id(), threading.get_ident())
        thread, ident = (completing.thread, completing.ident) if completing is not None else own
        taken = _TakenFuture(weakref.ref(work), thread, ident, in_backward)
        self._new.append(taken)
        self._has_new.set()
        if self._thread is None:
            exit_callbacks.register(self._stop, any_thread=True)
            run = functools.partial(_complete_works, self._new, self._has_new, self._stops)
            self._thread = threading.Thread(target=run, name="allred-futures", daemon=True)
            self._thread.start()

    def _stop(self, _: BaseException | None) -> None:
        thread, events = self._thread, (self._stops, self._has_new)
        self.__init__()  # type: ignore[misc]
        for event in events:
            event.set()
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(FUTURES_INTERVAL_S)


def _complete_works(new: "collections.deque[_TakenFuture]", has_new: threading.Event, stops: threading.Event) -> None:
    """Run in the thread until `stops` is set."""
    left: list[_TakenFuture] = []
    states: dict[int, str] = {}
    while not stops.wait(FUTURES_INTERVAL_S):
        if not left:
            has_new.wait()
        has_new.clear()
        while new:
            left.append(new.popleft())
        before, states = states, {thread: _thread_state(thread) for thread in {each.thread for each in left}}
        asleep = {thread for thread, state in states.items() if "(sleeping)" in state and before.get(thread) == state}
        left = [each for each in left if not _complete(each, asleep)]


def _complete(taken: _TakenFuture, asleep: Collection[int]) -> bool:
    """Complete the work if its thread is asleep, but not in allred or in the C++ code of a backward pass whose end
    completes it. Return whether nothing is left to do."""
    work = taken.work()  # a group keeps it until it is complete
    if work is None or not work.parts:
        return True
    is_asleep = taken.thread in asleep
    frame = top_frame(taken.ident) if is_asleep else None
    is_busy = frame is not None and (
        (taken.in_backward and frame.f_code is _BACKWARD_CODE)
        or frame.f_globals.get("__name__", "").startswith("allred.")
    )
    if not is_asleep or is_busy:
        return False
    _completing.taken = taken
    try:
        return work.complete_in_thread()
    finally:
        _completing.taken = None


def _thread_state(thread: int) -> str:
    """Return the state of a thread of this process and its numbers of context switches. If they are the same after an
    interval, it has slept all the time."""
    try:
        with open(f"/proc/self/task/{thread}/status") as file:
            return "".join(line for line in file if line.startswith("State") or "ctxt_switches" in line)
    except OSError:
        return "(sleeping)"  # it has ended


_future_thread = _FutureThread()
os.register_at_fork(after_in_child=_future_thread.__init__)  # type: ignore[misc]


class TorchFuture(torch.futures.Future):
    """The future of a TorchWork, or the result of its `then`. Waiting for it completes the work."""

    def __init__(self, work: TorchWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Wait for the work, and return the value."""
        if not self.done():
            self._work.wait()
        return super().wait()

    def then(self, callback: Callable[["TorchFuture"], Any]) -> "TorchFuture":
        """Return a future of callback(self), which is called when this future is complete."""
        after = TorchFuture(self._work)

        def run(_: object) -> None:
            try:
                after.set_result(callback(self))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(run)
        return after


def _set_work_of_forward_pass(reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """`join` of DistributedDataParallel without static world size reads the result of a Work in C++, which a Python
    class cannot give: give it a Work of a future."""
    if isinstance(work, TorchWork) and not use_static_world_size:
        work = _c10d._create_work_from_future(work.get_future())
    _torch_set_work(reducer, work, use_static_world_size)


_c10d: Any = _distributed_c10d
_torch_set_work = _c10d.Reducer._set_forward_pass_work_handle
_c10d.Reducer._set_forward_pass_work_handle = _set_work_of_forward_pass
