"""The variables HOROVOD_*: those with the meaning of a setting of allred set it; the others are named once.

    HOROVOD_STALL_CHECK_TIME_SECONDS     ALLRED_STALL_WARNING_S
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS  ALLRED_TIMEOUT_S; 0 means never
    HOROVOD_STALL_CHECK_DISABLE=1        both, as never
    HOROVOD_GLOO_IFACE                   ALLRED_NETWORK

init() reads HOROVOD_TIMELINE itself.
"""

from collections.abc import Mapping, MutableMapping

from allred import command_line, log
from allred.errors import ConfigError

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


def apply(environ: MutableMapping[str, str]) -> None:
    """Set the variables ALLRED_* that follow from HOROVOD_*, except those that are set already. The first rank prints
    once which variables have no effect. Raises ConfigError, see `translate`."""
    settings, ignored = translate(environ)
    for name, value in settings.items():
        environ.setdefault(name, value)
    new = [name for name in ignored if name not in _named]
    _named.update(new)
    if new and command_line.first_rank():
        log.rank_warning(f"these variables have no effect in allred: {', '.join(new)} (docs/from-horovod.md)")


def translate(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables ALLRED_* that follow from HOROVOD_*, and the names of those HOROVOD_* without effect. Raises
    ConfigError for a time that is not a whole number of seconds, or a switch that is not 0 or 1.

    >>> translate({"HOROVOD_STALL_CHECK_TIME_SECONDS": "90", "HOROVOD_CYCLE_TIME": "5"})
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
