"""A task's end, in `Server.join()`: it runs what clients send, one function after the other, until they have left."""

import sys
import traceback
from typing import Any

from allred import world
from allred.arrays import Array
from allred.client.calling import Calling
from allred.client.message import REMEDY, pack, unpack
from allred.cluster import topology
from allred.errors import InputError
from allred.ps.drive import drive, idle
from allred.ps.post import CALL, REPLY, Post
from allred.watch.start import name_this


def serve(calling: Calling) -> None:
    """Until the last client has left."""
    post, left = Post(calling.comm), 0
    while left < calling.clients:
        source = _await(post)
        parts = drive("a function of a client", post.receive_parts(source, CALL), calling.config.timeout_s)
        name = unpack(parts[:1])
        if name is None:
            left += 1
            continue
        name_this(f"{topology.role()}; it runs {name} for {calling.tasks[source]}")
        answer = _run(name, parts[1:], calling)
        name_this(topology.role())
        post.send_parts(source, REPLY, answer)
        idle(f"{calling.tasks[source]}, to take what {name} returned", post.tend)


def _await(post: Post) -> int:
    """The client that has sent something."""
    found: list[int] = []

    def come() -> bool:
        source = post.arrived(CALL)
        found.extend(() if source is None else (source,))
        return bool(found)

    idle("Server.join(), for a function of a client", come)
    return found[0]


def _run(name: str, parts: list[Array], calling: Calling) -> list[Any]:
    """The answer: whether it returned, words and traceback if it did not, and the value, or the exception."""
    try:
        function, args, kwargs = unpack(parts)
    except Exception as error:  # whatever loading it raises
        refusal = InputError(f"{calling.name} cannot load {name} ({type(error).__name__}: {error}); {REMEDY}")
        return _answer(False, refusal)
    try:
        value = function(*args, **kwargs)
        return [*pack((True, "", ""), ""), *pack(value, f"what {name} returned on {calling.name}")]
    except Exception as error:
        if (watcher := world.watcher()) is not None and watcher.verdict is not None:
            raise  # another task has ended the job
        return _answer(False, error)
    finally:
        sys.stdout.flush()


def _answer(returned: bool, error: Exception) -> list[Any]:
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the line of this file
    where = "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace is not None else ""
    words = f"{type(error).__name__}: {error}"
    try:
        value = pack(error, "")
    except InputError:
        value = []
    return [*pack((returned, words, where), ""), *value]
