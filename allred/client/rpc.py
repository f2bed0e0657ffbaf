"""Remote procedure calls between a client and the tasks.

`Dispatcher` is the client's end: it sends functions, and receives the results of each task in the order of its calls.
While it waits for one task it also receives the results of the others, because a task waits until its result has been
received. `serve` is a task's end, in `Server.join()`: it runs one function after the other.

A call consists of the name of the function and of (function, args, kwargs). The answer consists of (returned, message,
traceback) and of the result or the exception. Each part is pickled separately.
"""

import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from allred import log, world
from allred.arrays import Array
from allred.client.call import REMEDY, Call, ClientGroup, pack, unpack
from allred.cluster import topology
from allred.cluster.device import Place
from allred.comm import functions
from allred.comm.work import Polled, Steps, WorkQueue
from allred.errors import AllredError, InputError
from allred.ps.mpi_transport import CALL, REPLY, MpiTransport
from allred.ps.run_steps import run_steps, wait_until
from allred.runtime.timings import LAST_MESSAGE_S
from allred.watch.start import set_role


class _TaskLink:
    """Connection to one task, with its unanswered calls, the oldest first."""

    def __init__(self, transport: MpiTransport, rank: int) -> None:
        self.rank = rank
        self.calls: deque[Call] = deque()
        self._transport = transport
        self._answer: Steps[list[Array]] | None = None
        self._pending: Any = None

    def advance(self) -> None:
        """Receive answers without waiting."""
        while self.calls:
            if self._answer is None:
                self._answer, self._pending = self._transport.receive_parts(self.rank, REPLY), None
            try:
                while self._pending is None or self._pending.done():
                    self._pending = next(self._answer)
                return
            except StopIteration as stop:
                self._answer = None
                _set_result(self.calls.popleft(), stop.value)

    def fail(self, reason: str) -> None:
        """End all calls with an error: the task has left the job."""
        for call in self.calls:
            call.end(error=AllredError(f"{call.title}: rank {self.rank}, {call.place.task_name}, {reason}"))
        self.calls.clear()
        self._answer = None


def _set_result(call: Call, parts: list[Array]) -> None:
    returned, message, trace = unpack(parts[:1])
    value: Any = None
    try:
        value = unpack(parts[1:]) if len(parts) > 1 else None
    except Exception as problem:  # unpickling runs code of the user
        message, returned = message or f"the result of {call.name} cannot be loaded here: {problem!r}", False
    if returned:
        return call.end(value)
    error = value if isinstance(value, Exception) else AllredError(f"{call.title}: {message}")
    if trace:
        error.add_note(f"on {call.place.task_name}:\n{trace}")
    call.end(error=error)


_ended_dispatchers: list["Dispatcher"] = []  # MPI may still send from their memory


class Dispatcher:
    """Sends the functions of this client. `of` returns the one of a group."""

    def __init__(self, group: ClientGroup) -> None:
        self._group, self._transport = group, MpiTransport(group.comm)
        self._links = {rank: _TaskLink(self._transport, rank) for rank in group.workers}
        self._calls: list[Call] = []  # those that are open

    @classmethod
    def of(cls, group: ClientGroup) -> "Dispatcher":
        """Return the dispatcher of the group; creates it at the first call."""
        group.dispatcher = group.dispatcher or cls(group)
        return group.dispatcher  # type: ignore[no-any-return]

    def start(
        self, name: str, place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """Send a function to a task. Raises InputError if it cannot be sent."""
        call = Call(name, place, self)
        parts = pack((function, args, kwargs), f"{call.title}: the function, or an argument,")
        rank = self._rank(call)
        self._transport.send_parts(rank, CALL, [*pack(name, "a name"), *parts])
        self._links[rank].calls.append(call)
        self._calls = [each for each in self._calls if each.is_open] + [call]
        return call

    def _rank(self, call: Call) -> int:
        return self._group.tasks.index(call.place.task_name)

    def poll(self) -> bool:
        """Receive results without waiting. Returns whether all calls have ended."""
        self._transport.progress()
        for rank, link in self._links.items():
            link.advance()
            if (watcher := world.watcher()) is not None and rank in watcher.gone:
                link.fail(watcher.gone[rank])
        return not any(link.calls for link in self._links.values())

    def wait(self, call: Call) -> None:
        def has_ended() -> bool:
            self.poll()
            return call.ended

        def steps() -> Steps[None]:
            yield Polled(has_ended, waits_for_peers=True)

        current = functions.current().queue
        queue = WorkQueue(current.timeout_s, members=[self._rank(call), self._group.rank])
        queue.quiet = current.quiet
        queue.start(call.title, steps()).wait()

    def leave(self) -> None:
        """At the end of the client's program: wait for all calls, and let the tasks return from join()."""
        wait_until("the functions that this client has started", self.poll, quiet=False)
        for call in self._calls:
            if call.unretrieved_error is not None:
                log.rank_warning(f"{call.title} failed, and its error was not retrieved:")
                log.rank_warning("".join(traceback.format_exception_only(call.unretrieved_error)).rstrip())
        for rank in self._group.workers:
            self._transport.send_parts(rank, CALL, pack(None, "the end"))
        _ended_dispatchers.append(self)
        self._transport.flush(LAST_MESSAGE_S)


def serve(group: ClientGroup) -> None:
    """Run functions until the last client has left."""
    transport, left = MpiTransport(group.comm), 0
    while left < group.clients:
        wait_until("Server.join(), for a function of a client", lambda: transport.arrived(CALL) is not None)
        source = transport.arrived(CALL)
        assert source is not None  # a message stays until it is received
        parts = run_steps("a function of a client", transport.receive_parts(source, CALL), group.config.timeout_s)
        name = unpack(parts[:1])
        if name is None:
            left += 1
            continue
        set_role(f"{topology.role()}; it runs {name} for {group.tasks[source]}")
        answer = _run(name, parts[1:], group)
        set_role(topology.role())
        transport.send_parts(source, REPLY, answer)
        wait_until(f"{group.tasks[source]}, to receive the result of {name}", transport.progress)


def _run(name: str, parts: list[Array], group: ClientGroup) -> list[Any]:
    """Run a function and return the parts of the answer."""
    try:
        function, args, kwargs = unpack(parts)
    except Exception as error:  # unpickling runs code of the user
        refusal = InputError(f"{group.name} cannot load {name} ({type(error).__name__}: {error}); {REMEDY}")
        return _error_answer(refusal)
    try:
        value = function(*args, **kwargs)
        return [*pack((True, "", ""), ""), *pack(value, f"the result of {name} on {group.name}")]
    except Exception as error:
        if (watcher := world.watcher()) is not None and watcher.verdict is not None:
            raise  # another task has ended the job
        return _error_answer(error)
    finally:
        sys.stdout.flush()


def _error_answer(error: Exception) -> list[Any]:
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the line of this file
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace is not None else ""
    message = f"{type(error).__name__}: {error}"
    try:
        value = pack(error, "")
    except InputError:
        value = []
    return [*pack((False, message, text), ""), *value]
