"""The client's end: functions go out, and what they return comes in, in the order in which each task was asked.

A client that waits for one task takes what the others have to say, too: a task waits until it is rid of its answer.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from allred import world
from allred.arrays import Array
from allred.client.calling import Calling
from allred.client.message import pack, unpack
from allred.client.session import Call
from allred.cluster import report
from allred.comm import functions
from allred.comm.work import Steps, WorkQueue, spin_wait
from allred.errors import AllredError
from allred.ps.drive import idle
from allred.ps.post import CALL, REPLY, Post

_LEAVE_S = 2.0  # for a few bytes


class _Link:
    """To one task: the calls that are not answered yet, the oldest first."""

    def __init__(self, post: Post, rank: int) -> None:
        self.rank = rank
        self.calls: deque[Call] = deque()
        self._post = post
        self._answer: Steps[list[Array]] | None = None
        self._pending: Any = None

    def advance(self) -> None:
        """Take answers as far as they have come."""
        while self.calls:
            if self._answer is None:
                self._answer, self._pending = self._post.receive_parts(self.rank, REPLY), None
            try:
                while self._pending is None or self._pending.done():
                    self._pending = next(self._answer)
                return
            except StopIteration as stop:
                self._answer = None
                _settle(self.calls.popleft(), stop.value)

    def end(self, how: str) -> None:
        """The task is gone, and the others go on."""
        for call in self.calls:
            call.end(error=AllredError(f"{call.title}: rank {self.rank}, {call.place.task_name}, {how}"))
        self.calls.clear()
        self._answer = None


def _settle(call: Call, parts: list[Array]) -> None:
    """Take an answer; serving.py says what it is made of."""
    returned, words, where = unpack(parts[:1])
    value: Any = None
    try:
        value = unpack(parts[1:]) if len(parts) > 1 else None
    except Exception as problem:  # whatever its classes raise
        words, returned = words or f"what {call.name} returned cannot be loaded here: {problem!r}", False
    if returned:
        return call.end(value)
    error = value if isinstance(value, Exception) else AllredError(f"{call.title}: {words}")
    if where:
        error.add_note(f"on {call.place.task_name}:\n{where}")
    call.end(error=error)


class _Ended:
    """A call, to wait for."""

    waits_for_peers, progress_count = True, 0

    def __init__(self, call: Call) -> None:
        self._call = call

    def done(self) -> bool:
        look()
        return self._call.ended

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class _Caller:
    """Of this client. It is kept until the end, for MPI sends from its memory."""

    def __init__(self, calling: Calling) -> None:
        self.calling, self.post = calling, Post(calling.comm)
        self.links = {rank: _Link(self.post, rank) for rank in calling.workers}
        self.calls: list[Call] = []  # those of which it may have to be said that nobody has waited for them

    def look(self) -> bool:
        """Take what has come; whether no call is under way."""
        self.post.tend()
        for rank, link in self.links.items():
            link.advance()
            if (watcher := world.watcher()) is not None and rank in watcher.gone:
                link.end(watcher.gone[rank])
        return not any(link.calls for link in self.links.values())


_left: list[_Caller] = []  # MPI may still send from their memory


def _the_caller() -> _Caller:
    here = world.current().calling
    assert here is not None
    here.caller = here.caller or _Caller(here)
    return here.caller  # type: ignore[no-any-return]


def start(call: Call, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the call's task run a function. Raises InputError if it cannot be sent."""
    parts = pack((function, args, kwargs), f"{call.title}: the function, or an argument,")
    here = _the_caller()
    rank = here.calling.tasks.index(call.place.task_name)
    here.post.send_parts(rank, CALL, [*pack(call.name, "a name"), *parts])
    here.links[rank].calls.append(call)
    here.calls = [each for each in here.calls if each.is_open] + [call]


def look() -> None:
    """Take what has come."""
    _the_caller().look()


def wait(call: Call) -> None:
    """Until it has ended."""

    def steps() -> Steps[None]:
        yield _Ended(call)

    here, ours = _the_caller(), functions.current().queue
    rank = here.calling.tasks.index(call.place.task_name)
    queue = WorkQueue(ours.timeout_s, members=[rank, here.calling.rank])
    queue.quiet = ours.quiet
    queue.start(call.title, steps()).wait()


def leave() -> None:
    """The client's program is at its end: wait for what the tasks still do for it, and let them return from join()."""
    here = _the_caller()
    idle("the functions that this client has started", here.look, quiet=False)
    for call in here.calls:
        if call.unheard is not None:
            report.say_here(f"{call.title} failed, and nobody waited for it:")
            report.say_here("".join(traceback.format_exception_only(call.unheard)).rstrip())
    for rank in here.calling.workers:
        here.post.send_parts(rank, CALL, pack(None, "the end"))
    _left.append(here)
    until = time.monotonic() + _LEAVE_S
    while not here.post.tend() and time.monotonic() < until:
        pass
