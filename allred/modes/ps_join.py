"""Serving on a parameter server: with the optimizer of this rank, or with that of worker 0 in `Server.join()`."""

import contextlib
import pickle
import signal

from allred import world
from allred.cluster import topology
from allred.errors import InputError
from allred.modes.options import StepOptions
from allred.optim import SGD
from allred.ps import context
from allred.ps.mpi_transport import CALL, REPLY, MpiTransport
from allred.ps.protocol import ControlRequest, Register
from allred.ps.run_steps import run_steps, wait_until
from allred.ps.server_loop import ServerLoop


def serve_until_done(optimizer: object, options: StepOptions, first: ControlRequest | None = None) -> None:
    """Serve until the last worker has left, and return. options: those of `allred.distributed`. first: a request of
    worker 0 that was received before."""
    here = context.current()
    policy, locks = options.policy(here.config), options.locks(optimizer, here.config)
    ServerLoop(here, optimizer, policy, locks, options.agreement(optimizer, here.config)).serve(first)


def join() -> None:
    """Serve until the last worker has left, with the optimizer and the options of worker 0, and return. They arrive
    with its first request, the registration. Raises InputError if they cannot be loaded here."""
    here = context.current()
    here.servers_return = True
    transport = MpiTransport(here.comm)
    request = _first_request(transport, here)
    options = StepOptions("opt")
    optimizer: object = SGD(lr=0.0)  # if worker 0 has left without training
    if isinstance(request, Register):
        try:
            options, optimizer = _load(request.optimizer, topology.role())
        except InputError as error:
            transport.send(here.servers, REPLY, error)
            while not transport.progress():
                pass
            raise
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve_until_done(optimizer, options, request)
    finally:
        with contextlib.suppress(ValueError):  # only the main thread can set handlers
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _first_request(transport: MpiTransport, here: context.Context) -> ControlRequest | None:
    """Wait without a limit for a request of worker 0; None if it has died and the other workers continue."""

    def is_decided() -> bool:
        watcher = world.watcher()
        gone = watcher is not None and here.servers in watcher.gone
        return gone or bool(here.comm.Iprobe(here.servers, CALL))

    wait_until("Server.join(), for the first optimizer of worker 0", is_decided)
    if not here.comm.Iprobe(here.servers, CALL):
        return None
    receive = transport.receive(here.servers, CALL)
    request: ControlRequest = run_steps("the first request of worker 0", receive, here.config.timeout_s)
    return request


def _load(pickled: bytes | str, role: str) -> tuple[StepOptions, object]:
    """Return worker 0's options and optimizer. pickled: a str is the reason why there are none."""
    if isinstance(pickled, bytes):
        try:
            options, optimizer = pickle.loads(pickled)
            return options, optimizer
        except Exception as error:  # any error of a class of the user
            pickled = f"it cannot be loaded there ({type(error).__name__}: {error})"
    raise InputError(
        f"{role} is in Server.join(), which serves with the optimizer of worker 0, and cannot have that: {pickled}. "
        "Define its class in a module, not in a function, and without lambdas; or let servers run the script up to "
        "allred.distributed(optimizer) instead of join()"
    )
