"""The creation of a world: from the Bootstrap of all ranks to communicators, watchers and the banner; and its end.

    facts of all ranks, exchanged -> settings, compared -> nodes and roles -> backend -> World -> watcher -> banner

All ranks exchange their settings before one of them raises, so an unusable setting is the same error on all ranks. A
rank without settings takes the chief's settings, because launchers over ssh do not forward variables.

Modules that only some jobs need (mode ps, clients) are imported where they are used, so that other jobs start sooner.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from typing import Any

from allred import arena, errors, log, native, numbering, world
from allred.cluster import mpi, processors, topology
from allred.cluster.processors import Cores
from allred.cluster.spec import CLIENT
from allred.comm import recording, select
from allred.comm.bootstrap import Bootstrap
from allred.comm.communicator import Communicator
from allred.comm.create import NoCollectives, add_devices, create
from allred.comm.process_set import PROCESS_SETS, ProcessSets
from allred.comm.select import TransportFacts
from allred.config import Config, settle
from allred.counters import Counters
from allred.errors import AllredError, ConfigError, InputError
from allred.gpu import streams
from allred.runtime import process_end
from allred.watch import start as watch
from allred.watch.excepthook import status_at_exit
from allred.watch.runner_link import address as runner_address
from allred.wording import count
from allred.world import World

servers_ended = False  # whether this process has left mode ps, and the programs of its servers end


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


@dataclasses.dataclass(frozen=True)
class Facts:
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


def exchange_facts(bootstrap: Bootstrap, library: str, settings: dict[str, Any] | str) -> list[Facts]:
    """Return the facts of all ranks. library: the name of the MPI; "" without one."""
    has_mpi = bootstrap.mpi is not None
    may_use_gpus = isinstance(settings, dict) and settings.get("backend", "auto") in ("auto", "nccl")
    gpus = streams.visible_gpus() if may_use_gpus else streams.NO_GPUS
    own_mpirun = library.startswith("Open MPI") and not runner_address()  # `allred run` passes the hosts itself
    ignored = mpi.ignored_host_file(bootstrap.size) if own_mpirun else ""
    host = bootstrap.lowest_rank_on_node()
    transport = TransportFacts(host, has_mpi, native.available, topology.fabric(), gpus)
    own = mpi.world_rank(bootstrap.rank) if has_mpi else bootstrap.rank
    mine = Facts(settings, host, processors.own_cores(), transport, ignored, own, world.last_generation)
    return bootstrap.allgather_object(mine)


@contextlib.contextmanager
def raised_by_all(bootstrap: Bootstrap) -> Iterator[None]:
    """Note that all ranks raise the error of this block, and release `bootstrap`."""
    try:
        yield
    except (ConfigError, InputError) as error:
        bootstrap.close()
        # The first rank prints it; each task, because tasks may have terminals of their own.
        error.raised_by_all = bootstrap.rank if bootstrap.launcher_ends_job else 0
        raise


def create_world(
    bootstrap: Bootstrap, library: str, facts: list[Facts], cluster: Cluster, recovery: Any = None
) -> None:
    """Create the world of the ranks of a Bootstrap, and install it. Collective.

    library: the name of the MPI, or "no MPI". recovery: the `Recovery` of an elastic job. Raises ConfigError, the same
    on all ranks."""
    bootstrap.generation = 1 + max(each.generation for each in facts)
    settings = facts[bootstrap.rank].settings
    with raised_by_all(bootstrap):
        plan = _plan(facts, cluster, bootstrap.launcher_ends_job)
        if isinstance(settings, dict) and "network" in settings:  # may differ between hosts
            plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, network=settings["network"]))
        bootstrap.open_messages(plan.config.network, plan.config.timeout_s)
        recording.start(plan.config.timeline, bootstrap, plan.workers, plan.config.timeout_s)
        here = _world(plan, facts, bootstrap, cluster, recovery)
    world.install(here)
    _connect_servers_and_clients(here, plan, bootstrap, cluster)
    _start_watchers(plan, facts, bootstrap, recovery)
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


def _plan(facts: list[Facts], cluster: Cluster, launcher_ends_job: bool) -> _Decisions:
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


def _world(plan: _Decisions, facts: list[Facts], bootstrap: Bootstrap, cluster: Cluster, recovery: Any) -> World:
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
        recovery=recovery,
        counters=Counters(native.add_numbers),
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
            process_end.register(leave_servers)
    if plan.clients:
        from allred.client.call import CLIENT_GROUP, ClientGroup

        CLIENT_GROUP.set(here, ClientGroup(bootstrap.mpi.Dup(), rank, cluster.tasks, plan.clients, plan.config))
        if rank >= workers.stop:
            process_end.register(leave_workers)


def _start_watchers(plan: _Decisions, facts: list[Facts], bootstrap: Bootstrap, recovery: Any) -> None:
    everyone = numbering.number(plan.nodes, bootstrap.rank)
    reach = "network" if len({each.host for each in facts}) > 1 else "host" if everyone.nodes > 1 else ""
    expendable = tuple(plan.workers) if plan.servers else ()
    serve = None if recovery is None else recovery.serve_watcher
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


def close_world(here: World) -> None:
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


def leave_servers() -> None:
    """Tell the servers that this worker leaves. If it failed, its watcher reports that."""
    global servers_ended
    here = world.current_or_none()
    if here is not None and here.config.mode == "ps" and not status_at_exit():
        from allred.ps import context

        if context.is_active():
            servers_ended = context.leave()


def leave_workers() -> None:
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
