"""init and shutdown, the numbers of the ranks, what the installation can do, and the variables HOROVOD_*.

Variables with the meaning of a setting of allred set it; the others are named once:

    HOROVOD_STALL_CHECK_TIME_SECONDS     ALLRED_STALL_WARNING_S
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS  ALLRED_TIMEOUT_S; 0 means never
    HOROVOD_STALL_CHECK_DISABLE=1        both, as never
    HOROVOD_GLOO_IFACE                   ALLRED_NETWORK

init() reads HOROVOD_TIMELINE itself.
"""

import collections
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from allred import command_line, log, startup, world
from allred.cluster import mpi, topology
from allred.comm.process_set import PROCESS_SETS
from allred.errors import ConfigError, InputError
from allred.torch.horovod import rank_timeline
from allred.torch.horovod.process_sets import ProcessSet, check_initialized, register


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initialize, as `allred.init`. Settings come from the environment variables ALLRED_* and HOROVOD_*. Repeated calls
    are allowed.

    comm: an mpi4py communicator, or a list of ranks of MPI.COMM_WORLD, which call init together; default: all.
    process_sets: a list of hvd.ProcessSet, the same on all ranks; "dynamic" and None: none. `hvd.add_process_set`
    needs no argument.

    Raises ValueError if an argument cannot be used, and in mode ps; and the errors of `allred.init`.

    Example: `hvd.init()`.
    """
    sets = _checked_sets(process_sets)
    if not world.is_initialized():
        apply_variables(os.environ)
        startup.init(None if comm == [] else comm)
        _start_timeline()
    check_mode_sync()
    register(sets)


def check_mode_sync() -> None:
    """Raise InputError in mode ps."""
    if world.config().mode == "ps":
        raise InputError(
            "ALLRED_MODE=ps: programs with Horovod's interface train in mode sync; for parameter servers use "
            "allred.init() and allred.distributed(optimizer)"
        )


def _start_timeline() -> None:
    """Start the timeline of HOROVOD_TIMELINE. If that is not possible, the program runs without it."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        try:
            rank_timeline.start_timeline(path)
        except InputError as error:
            log.rank_warning(f"HOROVOD_TIMELINE={path}: {error}")


def _checked_sets(given: Any) -> list[ProcessSet]:
    """Return the process sets of the argument of `init`."""
    sets = [] if given is None or given == "dynamic" else given
    if isinstance(sets, str) or not all(isinstance(each, ProcessSet) for each in sets):
        raise InputError(f"init(process_sets={given!r}): expected a list of hvd.ProcessSet")
    return list(sets)


def shutdown() -> None:
    """Shut down, as `allred.shutdown`. Does nothing before `hvd.init()`.

    Example: `hvd.shutdown()`.
    """
    if world.is_initialized():
        rank_timeline.stop_timeline()
        startup.shutdown()


def is_initialized() -> bool:
    """Return whether this process is a rank: after `init` and before `shutdown`.

    Example: `hvd.is_initialized()`.
    """
    return world.is_initialized()


def _number(name: str, text: str, example: str) -> Callable[[], int]:
    """Return the function `name`, which returns that number of topology.py."""

    def function() -> int:
        return int(_of_rank(getattr(topology, name)))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {text}. Raises ValueError before `hvd.init()`.\n\n    Example: `{example}`.\n    "
    return function


def _of_rank(number: Callable[[], Any]) -> Any:
    check_initialized("hvd.rank(), hvd.size() and others")
    return number()


rank = _number("rank", "the rank of this process, 0 to size() - 1", "if hvd.rank() == 0: print(loss)")
size = _number("size", "the number of ranks", "lr = 0.01 * hvd.size()")
local_rank = _number(
    "local_rank",
    "the rank of this process on its node, 0 to local_size() - 1",
    "torch.cuda.set_device(hvd.local_rank())",
)
local_size = _number("local_size", "the number of ranks on this node", "hvd.local_size()")
cross_rank = _number(
    "cross_rank",
    "the rank of this process among those of all nodes that have its local rank, 0 to cross_size() - 1",
    "hvd.cross_rank()",
)
cross_size = _number("cross_size", "the number of nodes that have a rank with this local rank", "hvd.cross_size()")


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks.

    Example: `hvd.is_homogeneous()`.
    """
    _of_rank(topology.rank)
    sets = PROCESS_SETS.of(world.current())
    nodes = [] if sets is None else [each.node for each in sets.facts]
    return len(set(collections.Counter(nodes).values())) <= 1


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads. Raises ValueError before `hvd.init()`.

    Example: `hvd.mpi_threads_supported()`.
    """
    _of_rank(topology.rank)
    MPI, _ = mpi.load()  # noqa: N806
    return MPI is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _constant(name: str, value: bool, reason: str) -> Callable[[], bool]:
    """Return the function `name`, which returns `value`."""

    def function() -> bool:
        return value

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {value}: allred {reason}.\n\n    Example: `hvd.{name}()`.\n    "
    return function


mpi_enabled = _constant("mpi_enabled", True, "uses MPI")
mpi_built = _constant("mpi_built", True, "uses MPI")
gloo_enabled = _constant("gloo_enabled", False, "does not use gloo")
gloo_built = _constant("gloo_built", False, "does not use gloo")
ddl_built = _constant("ddl_built", False, "does not use IBM's DDL")
ccl_built = _constant("ccl_built", False, "does not use oneCCL")
rocm_built = _constant("rocm_built", False, "does not use ROCm")


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22703, if cupy can load NCCL; else 0.

    Example: `hvd.nccl_built()`.
    """
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError):
        return 0


def cuda_built() -> bool:
    """Return whether tensors on GPUs can be reduced without copies to the host: whether cupy can load NCCL.

    Example: `hvd.cuda_built()`.
    """
    return nccl_built() > 0


# The variables HOROVOD_*.

_NEVER_S = 1_000_000  # 11 days; milliseconds fit into an int of C
_WARNING_S = 60  # default of Horovod
# Not named, without effect here: variables that init() reads, or that are always in force; that horovodrun sets for the
# ranks, or that choose its controller; and those of the installation of Horovod, which stay set in containers.
_SILENT = (
    *("TIMELINE", "DYNAMIC_PROCESS_SETS", "ELASTIC"),
    *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "SECRET_KEY"),
    *("CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT"),
    *("NCCL_HOME", "NCCL_INCLUDE", "NCCL_LIB", "NCCL_LINK", "CUDA_HOME", "ROCM_HOME", "CMAKE", "DEBUG"),
    *("GPU", "GPU_OPERATIONS", "ALLOW_MIXED_GPU_IMPL"),
)
_SILENT_PREFIXES = tuple(
    f"HOROVOD_{prefix}"
    for prefix in ("WITH_", "WITHOUT_", "BUILD_", "GPU_ALL", "GPU_BROADCAST", "GPU_REDUCESCATTER", "MPICXX_")
)
_MAPPED = ("STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "GLOO_IFACE")
_KNOWN = {f"HOROVOD_{name}" for name in (*_SILENT, *_MAPPED)}

_named: set[str] = set()  # variables that a message has named


def apply_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables ALLRED_* that follow from HOROVOD_*, except those that are set already. The first rank prints
    once which variables have no effect. Raises ConfigError, see `translate_variables`."""
    settings, ignored = translate_variables(environ)
    for name, value in settings.items():
        environ.setdefault(name, value)
    new = [name for name in ignored if name not in _named]
    _named.update(new)
    if new and command_line.first_rank():
        log.rank_warning(f"these variables have no effect in allred: {', '.join(new)} (docs/from-horovod.md)")


def translate_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables ALLRED_* that follow from HOROVOD_*, and the names of those HOROVOD_* without effect. Raises
    ConfigError for a time that is not a whole number of seconds, or a switch that is not 0 or 1.

    >>> translate_variables({"HOROVOD_STALL_CHECK_TIME_SECONDS": "90", "HOROVOD_CYCLE_TIME": "5"})
    ({'ALLRED_STALL_WARNING_S': '90'}, ['HOROVOD_CYCLE_TIME'])
    """
    settings = {}
    warning_s = _seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    shutdown_s = _seconds(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if _is_on(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        warning_s, shutdown_s = _NEVER_S, 0
    if warning_s is not None:
        settings["ALLRED_STALL_WARNING_S"] = str(max(warning_s, 1))
    if shutdown_s is not None:
        # Horovod takes a time before the warning as never.
        is_limit = shutdown_s and shutdown_s >= (_WARNING_S if warning_s is None else warning_s)
        settings["ALLRED_TIMEOUT_S"] = str(shutdown_s if is_limit else _NEVER_S)
    if network := environ.get("HOROVOD_GLOO_IFACE"):
        settings["ALLRED_NETWORK"] = network
    found = [name for name in sorted(environ) if name.startswith("HOROVOD_") and name not in _KNOWN]
    return settings, [name for name in found if not name.startswith(_SILENT_PREFIXES)]


def _seconds(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number; write seconds, such as 60, or 0")
    return int(text)


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r} is not a switch; write 1 or 0")
    return text == "1"
