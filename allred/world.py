"""init and shutdown: the one place where a process becomes a rank.

    MPI -> settings of all ranks, compared -> topology -> backend -> banner

A setting that cannot be used, or that differs from the chief's, is known to every rank before anyone raises, so no
rank is left waiting. A rank on which nothing was set takes what the chief has: launchers over ssh do not forward
variables.
"""

import atexit
import contextlib
import dataclasses
import os
import socket
import sys
from typing import Any

from allred import detached, native
from allred.client import calling
from allred.cluster import mpi, processors, report, topology
from allred.cluster.spec import CLIENT
from allred.comm import functions, process_set, recording
from allred.comm.backends import select
from allred.comm.communicator import Communicator
from allred.comm.create import NoCollectives, add_devices, create
from allred.config import Config, explicit_settings, settle
from allred.data import iterations, prefetch_processes
from allred.errors import AllredError, ConfigError, InputError
from allred.gpu import binding
from allred.modes.detect import outside
from allred.ps import running
from allred.watch import exit as exit_protocol
from allred.watch import exit_callbacks
from allred.watch import start as watch
from allred.watch.alarm import waiting_for_ranks
from allred.watch.uncaught import status_at_exit


def init(
    comm: Any = None,
    *,
    mode: str | None = None,
    num_ps: int | None = None,
    backend: str | None = None,
    bucket_bytes: int | str | None = None,
    timeout_s: float | None = None,
    nonfinite: str | None = None,
    check_steps: int | None = None,
    banner: bool | None = None,
) -> None:
    """Join the other ranks. Call it once, on every rank, before anything else of allred; it is collective.

    Without mpirun the world is this process alone, and everything works all the same.

    comm: an mpi4py intracommunicator, of which a duplicate is used instead of one of COMM_WORLD.
    The other arguments override the variables ALLRED_MODE, ALLRED_BACKEND and so on; `allred.config.Config` has them.

    Raises ConfigError, with the same text on every rank, if a setting is unknown, cannot be used, or differs between
    ranks; InputError, likewise, if the timeline's directory cannot be written; AllredError if it was called already.
    """
    enter(
        comm, mode=mode, num_ps=num_ps, backend=backend, bucket_bytes=bucket_bytes, timeout_s=timeout_s, banner=banner,
        nonfinite=nonfinite, check_steps=check_steps,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What `Server` knows beforehand. `workers_job`: what the job of the workers is called. `life`: where no launcher
    has started this task, the descriptor by which the others hear of its end, and it of theirs; else -1. `tasks`: the
    names of all, by rank."""

    workers_job: str = "worker"
    life: int = -1
    tasks: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        """How many tasks are clients."""
        return sum(task.startswith(f"/job:{CLIENT}/") for task in self.tasks)


def enter(comm: Any, cluster: Cluster | None = None, **arguments: Any) -> None:
    """`init`, also for a task of a cluster."""
    if is_initialized():
        raise AllredError("allred.init() was called already; drop the second call, or call allred.shutdown() before it")
    prefetch_processes.check_not_in_prefetch_process("allred.init()")
    detached.keep_standard_files()
    if running.left():
        raise AllredError(
            "allred.init() after allred.shutdown() of mode ps: the parameter servers have left, and do not come back; "
            "keep one init() for the whole program"
        )
    settings: dict[str, Any] | str
    try:
        settings = explicit_settings(os.environ, arguments)
    except ConfigError as error:
        settings = str(error)
    iterations.reset()
    with waiting_for_ranks(settings, -1 if cluster is None else cluster.life):
        _meet(comm, settings, cluster)


def _meet(comm: Any, settings: dict[str, Any] | str, cluster: Cluster | None) -> None:
    life = -1 if cluster is None else cluster.life
    duplicate, library = _join(comm, life)
    control = create("single" if duplicate is None else "mpi", duplicate, Config.timeout_s, [])
    node = 0 if duplicate is None else topology.node_id(duplicate)
    gathered = control.allgather_object((settings, node, native.available, processors.look(), _seen(settings))).wait()
    hosts = [node for _, node, *_ in gathered]
    try:
        config = settle([settings for settings, *_ in gathered])
        if life >= 0 and not config.watcher:
            raise ConfigError(
                "ALLRED_WATCHER=0 is for jobs with a launcher, which ends all ranks when one dies; tasks that were "
                "started by hand have only the watchers"
            )
        nodes = topology.pretend(config.pretend_nodes, control.size) or hosts
        clients = 0 if cluster is None else cluster.clients
        servers = _servers(config, control.size - clients)
        workers = slice(servers, control.size - clients)
        kernels = [available for _, _, available, *_ in gathered[workers]]
        name, reason = select.choose(config.backend, nodes[workers], duplicate is not None, kernels)
        seen = [gpus for *_, gpus in gathered[workers]]
        select.devices(config, seen, nodes[workers])  # raises, before there is anything to close
        recording.start(config.timeline, control, duplicate, range(workers.start, workers.stop))
    except (ConfigError, InputError):
        control.close()
        raise
    communicator: Communicator = control
    works = workers.start <= control.rank < workers.stop
    if not works:
        communicator = NoCollectives(config.timeout_s, control.rank >= workers.stop)
        name = communicator.name
    elif name != control.name or servers or clients:
        ours = None if name == "single" else _workers(duplicate, workers)
        communicator = create(name, ours, config.timeout_s, nodes[workers])
    if communicator.name != name:
        reason = "no two ranks could share memory; on one node that takes /proc or a Unix socket between them"
    communicator.queue.timeout_s = control.queue.timeout_s = config.timeout_s
    communicator.checks_places = config.check == "full"
    recording.attach(communicator, "all ranks")
    if works:
        gpus = add_devices(communicator, config, seen, nodes[workers])
        reason = f"{reason}; {gpus}" if gpus else reason
    world = topology.number(nodes, control.rank, servers, clients)
    topology.install(world, "worker" if cluster is None else cluster.workers_job)
    functions.install(communicator, config, reason)
    if servers:
        ranks = tuple(nodes[: workers.stop])
        here = running.Running(duplicate.Dup(), control.rank, servers, ranks, config, joins=cluster is not None)
        if control.rank < workers.stop:
            running.install(here)
        if works:
            atexit.register(_leave_servers)
    calls = None
    if clients and cluster is not None:
        calls = calling.Calling(duplicate.Dup(), control.rank, cluster.tasks, clients, config)
        if control.rank >= workers.stop:
            atexit.register(_leave_workers)
    calling.install(calls, in_cluster=cluster is not None)
    report.speak(world.rank == 0, config.banner)
    reach = "network" if len(set(hosts)) > 1 else "host" if world.nodes > 1 else ""
    everyone, spares = topology.number(nodes, control.rank), range(workers.start, workers.stop) if servers else ()
    watch.start(control, everyone, config, reach, spares=tuple(spares), launcher=life < 0)
    if servers or clients:
        watch.name_this(topology.role())
    process_set.install(
        process_set.Base(duplicate, control, servers, communicator, nodes[workers], kernels, seen, config)
    )
    cores = [found for *_, found, _ in gathered]
    processors.install(cores, hosts, control.rank)
    report.inform(_banner(library))
    if oversubscription := processors.oversubscription(cores, hosts):
        report.inform(f"warning: {oversubscription}")


def _seen(settings: dict[str, Any] | str) -> binding.VisibleGpus:
    """The GPUs that this rank may use, if its settings let it."""
    asked = isinstance(settings, dict) and settings.get("backend", "auto") in ("auto", "nccl")
    return binding.visible_gpus() if asked else binding.NO_GPUS


def _servers(config: Config, ranks: int) -> int:
    """How many ranks are parameter servers."""
    if config.mode != "ps":
        return 0
    if config.num_ps >= ranks:
        raise ConfigError(
            f"mode ps with {config.num_ps} parameter server{'s' * (config.num_ps > 1)} and no worker: {ranks} rank"
            f"{'s' * (ranks > 1)} in all; start at least {config.num_ps + 1}"
        )
    return config.num_ps


def _workers(comm: Any, workers: slice) -> Any:
    """A communicator of the workers, for them alone; collective among them."""
    if workers == slice(0, comm.Get_size()):
        return comm.Dup()
    return comm.Create_group(comm.Get_group().Incl(range(workers.start, workers.stop)))


def _leave_servers() -> None:
    """At the end of a worker: the servers need not wait for it. One that fails is told of by its watcher."""
    if running.running() and not status_at_exit():
        running.leave()


def _leave_workers() -> None:
    """At the end of a client: the workers return from Server.join()."""
    world = calling.current()
    if world is not None and world.is_client and os.getpid() == world.process and not status_at_exit():
        from allred.client import caller  # imports MPI

        with contextlib.suppress(AllredError):  # the job ends otherwise: that is told already
            caller.leave()


def _join(comm: Any, life: int) -> tuple[Any, str]:
    """A communicator for allred alone, or None where there is no MPI; and the MPI in words."""
    MPI, ours = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        return None, "no MPI"
    exit_protocol.own(MPI, finalizes=ours, life=life)
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise InputError(f"init(comm=...) takes an mpi4py intracommunicator, got {comm!r}")
    library = mpi.library_name(MPI.Get_library_version())
    if comm is None or comm.Get_size() == 1:
        mpi.check_world(MPI.COMM_WORLD.Get_size(), library)
    duplicate, request = (MPI.COMM_WORLD if comm is None else comm).Idup()
    while not request.Test():
        os.sched_yield()
    return duplicate, library


def _banner(library: str) -> str:
    from allred import __version__

    world, config, reason = topology.current(), functions.config(), functions.reason()
    ranks, servers = f"{world.size} rank{'s' * (world.size > 1)}", world.servers
    clients = world.world_size - world.size - servers
    if servers or clients:
        ranks = f"{world.size} worker{'s' * (world.size > 1)}"
        ranks += f", {servers} parameter server{'s' * (servers > 1)}" * (servers > 0)
        ranks += f", {clients} client{'s' * (clients > 1)}" * (clients > 0)
    nodes = f"{world.nodes} nodes, chief on {socket.gethostname()}" if world.nodes > 1 else socket.gethostname()
    extension = "C extension" if native.available else "no C extension (python -m allred.native says why)"
    return (
        f"{__version__}: {ranks} on {nodes}; mode {config.mode}; backend {functions.current().name} ({reason}); "
        f"{library}; {extension}"
    )


def is_initialized() -> bool:
    """Whether this process is a rank: after init(), before shutdown()."""
    return functions.installed()


def shutdown() -> None:
    """Leave the other ranks; collective. Then init() may be called again, except after mode ps, of which the servers
    have ended their programs. At the end of a script it is not needed. It ends an open session, which writes its last
    checkpoint.

    Raises NotInitializedError before init().
    """
    communicator = functions.current()
    exit_callbacks.call(sys.exc_info()[1])
    if not communicator.queue.poisoned and topology.rank() < topology.size():
        communicator.check("shutdown", "shutdown()").wait()
        recording.compare_clocks_again()
    outside.say_unused()
    _leave_servers()
    _leave_workers()
    calling.install(None)
    watch.stop()
    process_set.install(None)
    communicator.close()
    recording.stop()
    functions.install(None)
    topology.install(None)
    processors.uninstall()
    report.speak(False)
