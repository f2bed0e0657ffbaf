"""`Server.join()` on a parameter server: it has no optimizer of its own, so it serves with that of worker 0, which
comes with the first call of worker 0, its registration.
"""

import pickle

from allred import world
from allred.cluster import topology
from allred.errors import InputError
from allred.modes.options import StepOptions
from allred.optim import SGD
from allred.ps import running
from allred.ps.calls import Call, Registration
from allred.ps.drive import drive, idle
from allred.ps.post import CALL, REPLY, Post


def serve() -> None:
    """Until the last worker has left. Raises InputError if worker 0's optimizer cannot be had here."""
    here = running.current()
    post = Post(here.comm)
    call = _first_call(post, here)
    options = StepOptions("opt")
    optimizer: object = SGD(lr=0.0)  # where worker 0 has left without training anything
    if call is not None and call[0] == "register":
        registration = call[1][0]
        assert isinstance(registration, Registration)
        try:
            options, optimizer = _described(registration.description, topology.role())
        except InputError as error:
            post.send(here.servers, REPLY, error)
            while not post.tend():
                pass
            raise
    options.serve(optimizer, call)


def _first_call(post: Post, here: running.Running) -> Call | None:
    """Of worker 0, however long that takes; None if it has died, and the others go on."""

    def come() -> bool:
        watcher = world.watcher()
        gone = watcher is not None and here.servers in watcher.gone
        return gone or bool(here.comm.Iprobe(here.servers, CALL))

    idle("Server.join(), for the first optimizer of worker 0", come)
    if not here.comm.Iprobe(here.servers, CALL):
        return None
    call: Call = drive("the first call of worker 0", post.receive(here.servers, CALL), here.config.timeout_s)
    return call


def _described(description: bytes | str, role: str) -> tuple[StepOptions, object]:
    if isinstance(description, str):
        why = description
    else:
        try:
            options, optimizer = pickle.loads(description)
        except Exception as error:  # whatever loading a class of the user's raises
            why = f"it cannot be loaded there ({type(error).__name__}: {error})"
        else:
            return options, optimizer
    raise InputError(
        f"{role} is in Server.join(), which serves with the optimizer of worker 0, and cannot have that: {why}. Define "
        "its class in a module, not in a function, and without lambdas; or let servers run the script up to "
        "allred.distributed(optimizer) instead of join()"
    )
