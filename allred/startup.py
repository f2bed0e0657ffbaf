"""init and shutdown: how a process becomes a rank, and how it leaves the others.

    MPI, or a rendezvous of tasks -> Bootstrap of all ranks -> world_creation.py

Modules that only some jobs need (tasks, elastic jobs) are imported where they are used, so that other jobs start
sooner.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allred import launcher_variables, world, world_creation
from allred.cluster import mpi, topology
from allred.comm import recording
from allred.comm.bootstrap import Bootstrap, SingleBootstrap
from allred.comm.process_set import PROCESS_SETS
from allred.config import Config, explicit_settings, settle
from allred.errors import AllredError, ConfigError, InputError
from allred.runtime import detached
from allred.watch import exit as exit_protocol
from allred.watch import exit_callbacks, shm_files
from allred.watch import start as watch
from allred.watch.exit_callbacks import delayed_handlers
from allred.watch.start import startup_timeout
from allred.world_creation import (
    Cluster,
    close_world,
    create_world,
    exchange_facts,
    leave_servers,
    leave_workers,
    raised_by_all,
)

if TYPE_CHECKING:
    from allred.launch.rendezvous_bootstrap import RendezvousConnection


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
    if world_creation.servers_ended:
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
        from allred.changing_worlds import join_elastic

        return join_elastic(agent, settings)
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


def _join_ranks(bootstrap: Bootstrap, library: str, settings: dict[str, Any] | str, cluster: Cluster) -> None:
    facts = exchange_facts(bootstrap, library, settings)
    create_world(bootstrap, library, facts, cluster)


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
    facts = exchange_facts(bootstrap, "", settings)
    with raised_by_all(bootstrap):
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
            mpi_of_tasks, hosts = dict(zip(connection.tasks, mpis, strict=True)), [each.host for each in facts]
            if problem := rendezvous_client.mpi_problem(mpi_of_tasks, hosts):
                raise ConfigError(problem)
    if needs_mpi:
        with connection.used_by_mpi(), startup_timeout(settings, connection.lifeline):
            _join_ranks(*_start_mpi(None, connection.lifeline), settings, cluster)
    else:
        exit_protocol.take_over_without_mpi(bootstrap.rank, connection.lifeline)
        create_world(bootstrap, "no MPI", facts, cluster)
    connection.report("up")


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
    leave_servers()
    leave_workers()
    is_sound, sets = not communicator.queue.poisoned, PROCESS_SETS.of(here)
    close_world(here)
    if sets is not None and is_sound:
        sets.bootstrap.close()
    if here.recovery is not None and is_sound:
        here.recovery.finish()
