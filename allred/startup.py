"""init and shutdown: how a process becomes a rank, and how it leaves the others.

    MPI -> settings of all ranks, compared -> topology -> backend -> World -> watcher -> banner

All ranks exchange their settings before one of them raises, so an unusable setting is the same error on all ranks. A
rank without settings takes those of the chief, because launchers over ssh do not forward variables.

Modules that only some jobs need (mode ps, clients, tasks) are imported where they are used, so that other jobs start
sooner.
"""

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from allred import arena, errors, launcher_variables, log, native, numbering, world
from allred.cluster import mpi, processors, topology
from allred.cluster.processors import Cores
from allred.cluster.spec import CLIENT
from allred.comm import recording, select
from allred.comm.bootstrap import Bootstrap, SingleBootstrap
from allred.comm.communicator import Communicator
from allred.comm.create import NoCollectives, add_devices, create
from allred.comm.process_set import PROCESS_SETS, ProcessSets
from allred.comm.select import TransportFacts
from allred.config import Config, explicit_settings, settle
from allred.errors import AllredError, ConfigError, InputError, RanksChanged
from allred.gpu import streams
from allred.runtime import detached, process_end
from allred.watch import excepthook, exit_callbacks, shm_files
from allred.watch import exit as exit_protocol
from allred.watch import start as watch
from allred.watch.excepthook import status_at_exit
from allred.watch.exit_callbacks import delayed_handlers
from allred.watch.runner_link import address as runner_address
from allred.watch.start import startup_timeout
from allred.wording import count
from allred.world import World

if TYPE_CHECKING:
    from allred.launch.rendezvous_bootstrap import RendezvousConnection
    from allred.membership.recovery import Recovery

_servers_ended = False  # whether this process has left mode ps, and the programs of its servers end


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
    """Join the other ranks. Call it once on every rank, before all other functions of allred. It is collective.

    If several ranks run on a node, init limits the threads of BLAS and torch in each to the cores of the node divided
    by its ranks, and sets OMP_NUM_THREADS for libraries that are loaded later. It does not if this variable or a
    similar one is set, and keeps a number that the program has set by `torch.set_num_threads`.

    Without mpirun this process is the only rank. Under torchrun it is a ConfigError: call
    `torch.distributed.init_process_group("allred")` instead, which calls init.

    comm: an mpi4py intracommunicator; init uses a duplicate of it. Or a list of ranks of MPI.COMM_WORLD, which all call
    init. Default: MPI.COMM_WORLD.
    The other arguments override the variables ALLRED_MODE, ALLRED_BACKEND and so on (docs/settings.md).

    Raises ConfigError, with the same text on every rank, if a setting is unknown, cannot be used, or differs between
    ranks; InputError, also on every rank, if the directory of the timeline cannot be written; AllredError if it was
    called before.

    Example: `allred.init(timeout_s=60)`.
    """
    enter(
        comm, mode=mode, num_ps=num_ps, backend=backend, bucket_bytes=bucket_bytes, timeout_s=timeout_s, banner=banner,
        nonfinite=nonfinite, check_steps=check_steps,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The cluster that this process is a task of.

    workers_job: the name of the workers' job. tasks: the names of all tasks, by rank. has_watchers: False if the tasks
    learn of each other's ends without watchers.
    """

    workers_job: str = "worker"
    tasks: tuple[str, ...] = ()
    has_watchers: bool = True

    @property
    def clients(self) -> int:
        """The number of tasks that are clients."""
        return sum(task.startswith(f"/job:{CLIENT}/") for task in self.tasks)


# The connection to the other tasks that no launcher has started, and their cluster.
_tasks: "tuple[RendezvousConnection, Cluster] | None" = None


def join_in_init(connection: "RendezvousConnection", cluster: Cluster) -> None:
    """Let each init() of this process join other tasks. connection: of `rendezvous_bootstrap.connect`."""
    global _tasks
    if _tasks is None:
        os.register_at_fork(after_in_child=_forget_tasks)
    _tasks = connection, cluster


def _forget_tasks() -> None:
    global _tasks
    _tasks = None


def joined_tasks() -> tuple[str, ...]:
    """Return the names of the tasks that init() joins, if no launcher has started them; else none."""
    return _tasks[0].tasks if _tasks is not None else ()


def enter(comm: Any, cluster: Cluster | None = None, **arguments: Any) -> None:
    """As `init`. cluster: the cluster that this process is a task of; None for `init`."""
    if world.is_initialized():
        raise AllredError("allred.init() was called already; drop the second call, or call allred.shutdown() before it")
    if "multiprocessing" in sys.modules:  # as in every process that prefetches
        from allred.data.prefetching import check_not_in_prefetch_process

        check_not_in_prefetch_process("allred.init()")
    detached.keep_standard_files()
    if _servers_ended:
        raise AllredError(
            "allred.init() after allred.shutdown() of mode ps: the parameter servers have left, and their programs "
            "have ended; keep one init() for the whole program, or let servers call allred.Server.join()"
        )
    tasks = _tasks if comm is None else None
    agent = launcher_variables.agent() if comm is None and cluster is None and tasks is None else ""
    if comm is None and cluster is None and tasks is None and not agent:
        mpi.check_torchrun()
    settings: dict[str, Any] | str
    try:
        settings = explicit_settings(os.environ, arguments)
    except ConfigError as error:
        settings = str(error)
    if agent:
        return _join_elastic(agent, settings)
    try:
        watch.spawn_early(settings)
        if tasks is not None:
            connection, before = tasks
            join_in_init(connection, cluster or before)
            _join_tasks(connection, settings, cluster or before)
        else:
            with startup_timeout(settings):
                _join_ranks(*_start_mpi(comm), settings, cluster or Cluster())
    finally:
        watch.discard_spawned()


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts about one rank that all ranks exchange.

    settings: those that were set, or a problem. mpi_rank: in MPI.COMM_WORLD. generation: of the last world of this
    process.
    """

    settings: dict[str, Any] | str
    host: int  # the lowest rank on the same host
    cores: Cores
    transport: TransportFacts
    ignored_host_file: str  # an error, or ""
    mpi_rank: int
    generation: int


@dataclasses.dataclass(frozen=True)
class _Decisions:
    """Settings, nodes and roles of all ranks: the same on all of them."""

    config: Config
    nodes: list[int]  # by rank; the nodes may be pretended
    workers: range  # servers have lower ranks, clients have higher ones
    facts: list[TransportFacts]  # of the workers

    @property
    def servers(self) -> int:
        return self.workers.start

    @property
    def clients(self) -> int:
        return len(self.nodes) - self.workers.stop


def _join_ranks(bootstrap: Bootstrap, library: str, settings: dict[str, Any] | str, cluster: Cluster) -> None:
    facts = _exchange_facts(bootstrap, library, settings)
    _create_world(bootstrap, library, facts, cluster)


def _join_tasks(connection: "RendezvousConnection", settings: dict[str, Any] | str, cluster: Cluster) -> None:
    """Join the other tasks of a rendezvous. They start MPI only if something needs it."""
    from allred.launch import rendezvous_client
    from allred.launch.rendezvous_bootstrap import RendezvousBootstrap

    connection.report("starts")
    if connection.uses_mpi:
        with startup_timeout(settings, connection.lifeline):
            _join_ranks(*_start_mpi(None, connection.lifeline), settings, cluster)
        return connection.report("up")
    if isinstance(settings, dict):
        connection.limit_s = settings.get("timeout_s", Config.timeout_s)
        connection.warn_s = settings.get("stall_warning_s", Config.stall_warning_s)
    bootstrap = RendezvousBootstrap(connection)
    facts = _exchange_facts(bootstrap, "", settings)
    with _raised_by_all(bootstrap):
        config = settle([each.settings for each in facts])
        needs_mpi = config.mode == "ps" or cluster.clients > 0 or "mpi" in (config.backend, config.transport)
        if lacking := [
            task for task, each in zip(connection.tasks, facts, strict=True) if not each.transport.has_kernels
        ]:
            raise ConfigError(
                f"tasks without mpirun need allred's C extension, but {lacking[0]} does not have it (python -m "
                "allred.native shows the reason)"
            )
        if needs_mpi:
            mpis = bootstrap.allgather_object(rendezvous_client.mpi_of_task())
            if problem := rendezvous_client.mpi_problem(dict(zip(connection.tasks, mpis, strict=True))):
                raise ConfigError(problem)
    if needs_mpi:
        with connection.used_by_mpi(), startup_timeout(settings, connection.lifeline):
            _join_ranks(*_start_mpi(None, connection.lifeline), settings, cluster)
    else:
        exit_protocol.take_over_without_mpi(bootstrap.rank, connection.lifeline)
        _create_world(bootstrap, "no MPI", facts, cluster)
    connection.report("up")


_recovery: "Recovery | None" = None  # after init() in a job of `allred run --elastic`


def _join_elastic(agent: str, settings: dict[str, Any] | str) -> None:
    """Join a job of `allred run --elastic`, whose worlds are formed again when ranks die or join."""
    global _recovery
    from allred.launch.rendezvous_bootstrap import RendezvousBootstrap
    from allred.membership.agent_connection import AgentConnection
    from allred.membership.recovery import Recovery

    if _recovery is not None:
        raise AllredError("allred.init() was called again after allred.shutdown(), in a job of `allred run --elastic`")
    connection = AgentConnection(agent)

    def create() -> None:
        bootstrap = RendezvousBootstrap(connection)
        bootstrap.generation = connection.member.generation
        world.note_generation(bootstrap.generation - 1)
        _create_changing_world(bootstrap, settings, Cluster(), "`allred run --elastic`")

    _recovery = Recovery(connection, create, abandon)
    process_end.register(_stop_watcher)
    excepthook.watch(lambda status: None)  # its agent sees the end of this process
    _recovery.join()


def join_group(connection: "RendezvousConnection") -> None:
    """Join the other tasks of a connection, as `init`. They need neither MPI nor watchers, because the connection
    reports their ends. Raises ConfigError for settings that this cannot have."""
    from allred.launch.rendezvous_bootstrap import RendezvousBootstrap

    settings = explicit_settings(os.environ, {"mode": "sync", "banner": False})
    settings["watcher"] = False
    cluster = Cluster(tasks=connection.tasks, has_watchers=False)
    _create_changing_world(RendezvousBootstrap(connection), settings, cluster, "dist._reconfigure")


def _create_changing_world(bootstrap: Bootstrap, settings: dict[str, Any] | str, cluster: Cluster, what: str) -> None:
    """Create and install a world whose ranks may change. what: changes them, for errors."""
    facts = _exchange_facts(bootstrap, "", settings)
    with _raised_by_all(bootstrap):
        config = settle([each.settings for each in facts])
        refused = {
            "mode ps": config.mode == "ps", "backend mpi": "mpi" in (config.backend, config.transport),
            "backend nccl": config.backend == "nccl", "ALLRED_TIMELINE": config.timeline not in ("", "none"),
            "a rank without allred's C extension": not all(each.transport.has_kernels for each in facts),
        }  # fmt: skip
        if any(refused.values()):
            names = ", ".join(name for name, is_used in refused.items() if is_used)
            raise ConfigError(f"{names} cannot be used with {what}")
    try:
        _create_world(bootstrap, "no MPI", facts, cluster)
    except RanksChanged:
        bootstrap.close()
        raise


def _stop_watcher() -> None:
    """At the end of a process of an elastic job."""
    if (watcher := world.watcher()) is not None:
        watcher.send("left")
        watcher.ending()


def abandon() -> None:
    """Leave a world whose ranks change, if there is one. Not collective."""
    here = world.current_or_none()
    if here is None:
        return
    sets = PROCESS_SETS.of(here)
    assert sets is not None
    for communicator in (here.communicator, *sets.made.values()):
        communicator.queue.poison("the ranks of the job have changed")
    _close(here)
    sets.bootstrap.close()


def _exchange_facts(bootstrap: Bootstrap, library: str, settings: dict[str, Any] | str) -> list[_Facts]:
    """Return the facts of all ranks. library: the name of the MPI; "" without one."""
    has_mpi = bootstrap.mpi is not None
    may_use_gpus = isinstance(settings, dict) and settings.get("backend", "auto") in ("auto", "nccl")
    gpus = streams.visible_gpus() if may_use_gpus else streams.NO_GPUS
    own_mpirun = library.startswith("Open MPI") and not runner_address()  # `allred run` passes the hosts itself
    ignored = mpi.ignored_host_file(bootstrap.size) if own_mpirun else ""
    host = bootstrap.lowest_rank_on_node()
    transport = TransportFacts(host, has_mpi, native.available, topology.fabric(), gpus)
    own = mpi.world_rank(bootstrap.rank) if has_mpi else bootstrap.rank
    mine = _Facts(settings, host, processors.own_cores(), transport, ignored, own, world.last_generation)
    return bootstrap.allgather_object(mine)


@contextlib.contextmanager
def _raised_by_all(bootstrap: Bootstrap) -> Iterator[None]:
    """Note that all ranks raise the error of this block, and release `bootstrap`."""
    try:
        yield
    except (ConfigError, InputError) as error:
        bootstrap.close()
        # The first rank prints it; each task, because tasks may have terminals of their own.
        error.raised_by_all = bootstrap.rank if bootstrap.launcher_ends_job else 0
        raise


def _create_world(bootstrap: Bootstrap, library: str, facts: list[_Facts], cluster: Cluster) -> None:
    bootstrap.generation = 1 + max(each.generation for each in facts)
    settings = facts[bootstrap.rank].settings
    with _raised_by_all(bootstrap):
        plan = _plan(facts, cluster, bootstrap.launcher_ends_job)
        if isinstance(settings, dict) and "network" in settings:  # may differ between hosts
            plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, network=settings["network"]))
        bootstrap.open_messages(plan.config.network, plan.config.timeout_s)
        recording.start(plan.config.timeline, bootstrap, plan.workers, plan.config.timeout_s)
        here = _world(plan, facts, bootstrap, cluster)
    world.install(here)
    _connect_servers_and_clients(here, plan, bootstrap, cluster)
    _start_watchers(plan, facts, bootstrap)
    if numbers := _mpi_numbers([each.mpi_rank for each in facts]):
        errors.mpi_numbers = f"ranks 0 to {bootstrap.size - 1} are ranks {numbers} of MPI.COMM_WORLD"
    cores, hosts = [each.cores for each in facts], [each.host for each in facts]
    limits = processors.thread_limits(cores, hosts)
    banner = _banner(here, library, numbers) + _limit_threads(here, limits, bootstrap.rank)
    if here.generation > 1 and here.recovery is not None:  # `allred run` prints that the ranks have changed
        return
    log.info(banner)
    if oversubscription := processors.oversubscription(cores, hosts):
        log.info(f"warning: {oversubscription}")


def _limit_threads(here: World, limits: list[int | None], rank: int) -> str:
    """Limit the threads of this process. Return the words of the banner about all ranks. limits: by rank."""
    from allred.cluster import threads  # imports threadpoolctl

    if (limit := limits[rank]) is not None:
        threads.LIMIT.set(here, threads.ThreadLimit(limit))
    if not (numbers := sorted({each for each in limits if each is not None})):
        return ""
    shown = count(numbers[0], "thread") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} threads"
    return f"; BLAS and torch limited to {shown} per rank"


def _start_mpi(comm: Any, lifeline: int = -1) -> tuple[Bootstrap, str]:
    """Start MPI. Return the Bootstrap of all ranks, on a communicator for allred alone, and the name of the MPI, or
    "no MPI"."""
    MPI, ours = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        if isinstance(comm, Sequence) and list(comm) != [0]:
            raise InputError(f"init(comm={comm!r}): there is one rank, 0, because no MPI could be loaded")
        return SingleBootstrap(), "no MPI"
    exit_protocol.take_over(MPI, finalizes=ours, lifeline=lifeline)
    is_list = isinstance(comm, Sequence) and not isinstance(comm, str)
    if is_list:
        comm = mpi.communicator_of(MPI.COMM_WORLD, comm)
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise InputError(f"init(comm=...) takes an mpi4py intracommunicator or a list of ranks, got {comm!r}")
    library = mpi.library_name(MPI.Get_library_version())
    if comm is None or comm.Get_size() == 1:
        mpi.check_world(MPI.COMM_WORLD.Get_size(), library)
    duplicate, request = (MPI.COMM_WORLD if comm is None else comm).Idup()
    while not request.Test():
        os.sched_yield()
    shm_files.delete_own()
    if is_list:
        comm.Free()
    from allred.comm.backends.mpi_bootstrap import MpiBootstrap

    return MpiBootstrap(duplicate, launcher_ends_job=lifeline < 0), library


def _plan(facts: list[_Facts], cluster: Cluster, launcher_ends_job: bool) -> _Decisions:
    """Decide from the facts of all ranks. Raises ConfigError, the same on all ranks."""
    config = settle([each.settings for each in facts])
    if len({each.host for each in facts}) == 1 and facts[0].ignored_host_file:
        raise ConfigError(facts[0].ignored_host_file)
    if cluster.has_watchers and not launcher_ends_job and not config.watcher:
        raise ConfigError(
            "ALLRED_WATCHER=0 is for jobs with a launcher, which ends all ranks when one dies; tasks that were "
            "started without a launcher have only the watchers"
        )
    nodes = numbering.pretend(config.pretend_nodes, len(facts)) or [each.host for each in facts]
    stop = len(facts) - cluster.clients
    workers = range(_servers(config, stop), stop)
    of_workers = [dataclasses.replace(facts[rank].transport, node=nodes[rank]) for rank in workers]
    select.plan(of_workers, config)  # raises
    return _Decisions(config, nodes, workers, of_workers)


def _servers(config: Config, ranks: int) -> int:
    """Return the number of parameter servers."""
    if config.mode != "ps":
        return 0
    if config.num_ps >= ranks:
        raise ConfigError(
            f"mode ps with {count(config.num_ps, 'parameter server')} and no worker: {count(ranks, 'rank')} "
            f"in all; start at least {config.num_ps + 1}"
        )
    return config.num_ps


def _world(plan: _Decisions, facts: list[_Facts], bootstrap: Bootstrap, cluster: Cluster) -> World:
    """Create the communicators of this rank, and its World. Collective."""
    config, rank, workers = plan.config, bootstrap.rank, plan.workers
    if rank in workers:
        communicator, of_workers = _communicator(plan, bootstrap)
    else:
        communicator, of_workers = NoCollectives(config.timeout_s, is_client=rank >= workers.stop), plan.facts
        arena.disable("this rank reduces no gradients")
    cores, hosts = [each.cores for each in facts], [each.host for each in facts]
    if processors.each_has_a_core(cores, hosts, rank):
        communicator.backend.let_callers_sleep()
    if rank in workers and plan.nodes[rank] in plan.nodes[: workers.start]:  # servers read gradients from arenas
        arena.enable(config.arena, plan.nodes.count(plan.nodes[rank]))
    communicator.checks_places = config.check == "full"
    recording.attach(communicator, "all ranks")
    if rank in workers:
        of_workers = add_devices(communicator, of_workers, config)
    choice = select.plan(of_workers, config)
    of_sets = dataclasses.replace(config, transport=choice.between or config.transport)
    here = World(
        topology=numbering.number(plan.nodes, rank, plan.servers, plan.clients),
        communicator=communicator,
        config=config,
        reason="; ".join(choice.reasons),
        workers_job=cluster.workers_job,
        cores=processors.share(cores, hosts, rank),
        generation=bootstrap.generation,
        in_cluster=bool(cluster.tasks),
        recovery=_recovery,
    )
    PROCESS_SETS.set(here, ProcessSets(bootstrap, plan.servers, communicator, plan.facts, of_sets))
    here.queues.add(communicator.queue)
    return here


def _communicator(plan: _Decisions, bootstrap: Bootstrap) -> tuple[Communicator, list[TransportFacts]]:
    """Create the communicator of the workers, and their arenas. Collective among them."""
    choice = select.plan(plan.facts, plan.config)
    arena.disable(_why_no_arena(choice.backend, len(plan.workers)))
    if choice.backend == "shm":
        arena.enable(plan.config.arena, len(plan.workers))
    communicator, facts = create(bootstrap.subset(plan.workers), plan.facts, plan.config)
    if communicator.name != choice.backend:
        arena.disable("no two ranks could share memory")
    return communicator, facts


def _why_no_arena(backend: str, size: int) -> str:
    """Return why arrays are not reduced in place, unless the workers have arenas. size: the number of workers."""
    if size == 1:
        return "one rank has no other to share memory with"
    return "backend mpi" if backend == "mpi" else "the ranks are on several nodes"


def _connect_servers_and_clients(here: World, plan: _Decisions, bootstrap: Bootstrap, cluster: Cluster) -> None:
    """Create the communicators of mode ps and of clients. Collective."""
    rank, workers = bootstrap.rank, plan.workers
    if plan.servers:
        from allred.ps.context import CONTEXT, Context

        ranks = tuple(plan.nodes[: workers.stop])
        ps = Context(bootstrap.mpi.Dup(), rank, plan.servers, ranks, plan.config, joins=here.in_cluster)
        CONTEXT.set(here, ps if rank < workers.stop else None)
        if rank in workers:
            process_end.register(_leave_servers)
    if plan.clients:
        from allred.client.call import CLIENT_GROUP, ClientGroup

        CLIENT_GROUP.set(here, ClientGroup(bootstrap.mpi.Dup(), rank, cluster.tasks, plan.clients, plan.config))
        if rank >= workers.stop:
            process_end.register(_leave_workers)


def _start_watchers(plan: _Decisions, facts: list[_Facts], bootstrap: Bootstrap) -> None:
    everyone = numbering.number(plan.nodes, bootstrap.rank)
    reach = "network" if len({each.host for each in facts}) > 1 else "host" if everyone.nodes > 1 else ""
    expendable = tuple(plan.workers) if plan.servers else ()
    serve = None if _recovery is None else _recovery.serve_watcher
    launcher = bootstrap.launcher_ends_job
    watch.start(bootstrap, everyone, plan.config, reach, expendable=expendable, launcher=launcher, serve=serve)
    if plan.servers or plan.clients:
        watch.set_role(topology.role())
    elif (number := facts[bootstrap.rank].mpi_rank) != bootstrap.rank:
        watch.set_role(f"rank {number} of MPI.COMM_WORLD")


_LISTED = 16  # numbers in MPI.COMM_WORLD that messages show


def _mpi_numbers(ranks: list[int]) -> str:
    """Return the numbers of the ranks in MPI.COMM_WORLD as text, "" if they are the same."""
    if ranks == list(range(len(ranks))):
        return ""
    return ", ".join([*map(str, ranks[:_LISTED]), *["..."] * (len(ranks) > _LISTED)])


def _banner(here: World, library: str, mpi_numbers: str) -> str:
    from allred import __version__

    shape, config = here.topology, here.config
    ranks, servers = count(shape.size, "rank"), shape.servers
    clients = shape.clients
    if servers or clients:
        ranks = count(shape.size, "worker")
        ranks += f", {count(servers, 'parameter server')}" * (servers > 0)
        ranks += f", {count(clients, 'client')}" * (clients > 0)
    nodes = f"{shape.nodes} nodes, chief on {socket.gethostname()}" if shape.nodes > 1 else socket.gethostname()
    if mpi_numbers:
        ranks += f" ({mpi_numbers} of MPI.COMM_WORLD)"
    extension = "C extension" if native.available else "no C extension (python -m allred.native says why)"
    return (
        f"{__version__}: {ranks} on {nodes}; mode {config.mode}; backend {here.communicator.name} ({here.reason}); "
        f"{library}; {extension}"
    )


@delayed_handlers()
def shutdown() -> None:
    """Leave the other ranks. It is collective. Optional at the end of a program.

    An open session ends, which writes its last checkpoint. Afterwards init() may be called again; after mode ps only if
    the parameter servers were in `Server.join()`, because other servers have ended.

    Raises NotInitializedError before init().

    Example: `allred.shutdown()`, then `allred.init(backend="mpi")`.
    """
    here = world.current()
    communicator = here.communicator
    exit_callbacks.call(sys.exc_info()[1])
    if not communicator.queue.poisoned and topology.rank() < topology.size():
        communicator.check("shutdown", "shutdown()").wait()
        recording.compare_clocks_again()
    _leave_servers()
    _leave_workers()
    is_sound, sets = not communicator.queue.poisoned, PROCESS_SETS.of(here)
    _close(here)
    if sets is not None and is_sound:
        sets.bootstrap.close()
    if here.recovery is not None and is_sound:
        here.recovery.finish()


def _close(here: World) -> None:
    """Close the world, except for the Bootstrap."""
    from allred.cluster import threads  # imports threadpoolctl

    watch.stop()
    sets = PROCESS_SETS.of(here)
    if sets is not None:
        sets.close()
    here.communicator.close()
    recording.stop()
    arena.disable()
    if (limit := threads.LIMIT.of(here)) is not None:
        limit.restore()
    world.install(None)
    errors.mpi_numbers = ""


def _leave_servers() -> None:
    """Tell the servers that this worker leaves. If it failed, its watcher reports that."""
    global _servers_ended
    here = world.current_or_none()
    if here is not None and here.config.mode == "ps" and not status_at_exit():
        from allred.ps import context

        if context.is_active():
            _servers_ended = context.leave()


def _leave_workers() -> None:
    """At the end of a client: the workers return from Server.join()."""
    here = world.current_or_none()
    if here is None or not here.topology.clients:
        return
    from allred.client.call import CLIENT_GROUP

    group = CLIENT_GROUP.of(here)
    if group is not None and group.is_client and os.getpid() == group.process and not status_at_exit():
        from allred.client.rpc import Dispatcher  # imports MPI

        with contextlib.suppress(AllredError):  # another error ended the job, and was reported
            Dispatcher.of(group).leave()
