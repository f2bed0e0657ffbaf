"""Settings of allred: name, type, default, unit and meaning of each.

Sources in order of precedence: an argument of `init()`, the environment variable `ALLRED_<NAME>`, the default. The
settings of the chief hold for all ranks.
"""

import dataclasses
import difflib
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

from allred.errors import ConfigError

_PREFIX = "ALLRED_"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _setting(default: Any, meaning: str, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, **extra})


def _count(default: int, meaning: str, unit: str, minimum: int) -> Any:
    return _setting(default, meaning, expected=f"a whole number of {unit}", minimum=minimum)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings in force, the same on every rank of the job, except those that may differ.

    The secret of a process is not included: see `secret`.
    """

    mode: str = _setting(
        "sync",
        "training mode. `sync`: all ranks average gradients and update; `local`: each rank trains alone, and all "
        "average their parameters every `ALLRED_LOCAL_STEPS` steps (docs/slow-links.md); `ps`: parameter servers "
        "(docs/modes.md)",
        choices=("sync", "local", "ps"),
    )
    local_steps: int = _count(32, "mode `local`: number of steps from one round to the next", "steps", 1)
    num_ps: int = _count(1, "mode `ps`: number of parameter servers; these are the first ranks", "ranks", 1)
    consistency: str = _setting(
        "async",
        "mode `ps`: when gradients are applied: `async`, `bounded`, `sync` (docs/modes.md)",
        choices=("async", "bounded", "sync"),
    )
    staleness: int = _count(
        4, "mode `ps`, `bounded`: maximum number of steps that a worker is ahead of the slowest", "steps", 0
    )
    replicas_to_aggregate: int = _count(
        0, "mode `ps`, `sync`: number of gradients per update; 0: one of each worker", "gradients", 0
    )
    placement: str = _setting(
        "bytes",
        "mode `ps`: assignment of parameters to servers: `bytes` (even, large tensors are split), `round_robin`, "
        "`greedy`",
        choices=("bytes", "round_robin", "greedy"),
    )
    use_locking: bool = _setting(
        True,
        "mode `ps`: whether servers process one request at a time, so that a pull returns one version; always 1 with "
        "`sync`, and for optimizers that need whole tensors",
    )
    checkpoint_dir: str = _setting(
        "none", "mode `ps`: directory for a checkpoint when the job gets SIGTERM; `none`: no checkpoint"
    )
    backend: str = _setting(
        "auto",
        "backend of the collectives: `auto`, `single` (one rank), `shm` (shared memory on a node, `ALLRED_TRANSPORT` "
        "between nodes), `mpi`, `nccl` (GPUs are required, docs/gpus.md)",
        choices=("auto", "single", "shm", "mpi", "nccl"),
    )
    transport: str = _setting(
        "auto",
        "how host arrays pass between nodes: `mpi`; `tcp`: connections that allred makes, which authenticate "
        "each other, but do not encrypt data; `auto`: `mpi` if a node has an active InfiniBand, EFA or "
        "Slingshot device, else `tcp`",
        choices=("auto", "mpi", "tcp"),
    )
    network: str = _setting(
        "auto",
        "transport tcp: the interfaces and networks of the connections, in order of preference "
        "(`eth1,10.0.0.0/8`); `auto`: all except loopback. It may differ between hosts. "
        "send and recv between hosts without MPI use the first one",
        may_differ=True,
    )
    nccl_cross: str = _setting(
        "nccl",
        "transport of GPU arrays between nodes: `nccl`, or `mpi` (copied to the host and back)",
        choices=("nccl", "mpi"),
    )
    nccl_16bit: str = _setting(
        "float32",
        "sums of 16-bit floats on GPUs: `float32` (in the order of the ranks, rounded once), or `native` (by "
        "NCCL: faster, rounded after each addition; see docs/gpus.md#numerical-results)",
        choices=("float32", "native"),
    )
    gpu_oversubscribe: bool = _setting(False, "whether ranks may share a GPU; for tests")
    progress: str = _setting(
        "thread",
        "who makes progress with asynchronous operations while no rank waits: a C `thread` (on one node), or "
        "the `caller`",
        choices=("thread", "caller"),
    )
    overlap: str = _setting(
        "auto",
        "when hooked torch optimizers and `opt.reduce` send gradients: during the backward pass (`always`), "
        "at its end (`never`), or during it if a core of the rank is free or the model is on a GPU (`auto`)",
        choices=("auto", "always", "never"),
    )
    bucket_bytes: int = _setting(
        2**20,
        "maximum size of a bucket; gradients smaller than half of it are packed. Not used with backend `shm` "
        "on one node, which packs all gradients into one stream",
        minimum=1,
    )
    arena: str = _setting(
        "auto",
        "size of the memory of each rank for arrays that the ranks of its node map and reduce in place "
        "(`allred.empty`): a size (`4GiB`; at most the memory of the machine or the cgroup), `0`: none, "
        "`auto`: half of the machine's memory, or of the memory limit of its cgroup, divided by the ranks of "
        "the node. Memory is taken when an array is allocated. Only with backend `shm` on one node",
        expected="auto, 0 or a size of at least 16KiB, such as 4GiB",
        size=2**14,  # in bytes, the smallest one
    )
    torch_arena: bool = _setting(
        False,
        "whether gradients and buckets that torch allocates on the CPU lie in this memory too "
        "(docs/torch-optimizer.md#gradients-in-place). Needs a C++ compiler on each host",
    )
    timeout_s: float = _setting(
        1800.0,
        "time limit of a wait in one collective, in seconds; mode `ps`: longest time without a request of a "
        "worker that others wait for (docs/assumptions.md#waits-and-their-time-limits)",
        minimum=0.001,
    )
    nonfinite: str = _setting(
        "raise",
        "reaction to NaN or infinity in a gradient: `raise`, `skip` the step on all ranks, `ignore`; option "
        "`nonfinite` of the decorator",
        choices=("raise", "skip", "ignore"),
    )
    check_steps: int = _count(
        100,
        "all ranks compare all parameters and the optimizer state at the first three steps, then every this "
        "many steps; the steps in between compare 1024 elements; 0: never (docs/mistakes.md)",
        "steps",
        0,
    )
    check: str = _setting(
        "basic",
        "what is compared in every operation: `basic`, or `full`: also the line of the program that calls it",
        choices=("basic", "full"),
    )
    watcher: bool = _setting(
        True, "whether a process on each node watches the ranks and reports stalls, deaths and failures"
    )
    stall_warning_s: float = _setting(
        30.0, "time in an operation, in seconds, before a warning shows what all ranks do", minimum=0.1
    )
    stacks: bool = _setting(
        False,
        "whether tables of long waits and time-outs also show the Python stack of every rank "
        "(docs/failures.md#what-every-rank-was-doing)",
    )
    worker_failure: str = _setting(
        "end",
        "mode `ps`: reaction to a worker that fails, dies, or stalls until the time limit: `end` the job, or `go_on`: "
        "the other workers continue",
        choices=("end", "go_on"),
    )
    pretend_nodes: str = _setting(
        "none", "for tests: numbers of ranks of pretended nodes (`2,2`: two nodes for four ranks)"
    )
    metrics: str = _setting(
        "none",
        "port, or host:port, of the metrics for Prometheus (docs/running.md#metrics); without a host "
        "127.0.0.1. Needs the extra `metrics`",
    )
    elastic_dir: str = _setting(
        "none",
        "directory of the commits of `hvd.elastic`; `none`: commits are in memory "
        "(docs/from-horovod.md#programs-with-hvdelastic); default under `allred run`: `NAME.commits`",
    )
    job: str = _setting("auto", "name of the job for `allred top`; `auto`: the program and its process id")
    starts: int = _count(1, "how often the job was started", "starts", 1)
    runner: str = _setting("none", "where `allred run` receives the reports of the ranks", own=True)
    start_timeout_s: float = _setting(
        1800.0,
        "time limit, in seconds, for the other tasks to start (docs/clusters.md#without-a-launcher)",
        minimum=0.1,
    )
    secret: str = _setting(
        "none",
        "shared secret of the tasks; required if an address can be reached from other machines",
        own=True,
    )
    secret_file: str = _setting("none", "a file with this secret", own=True)
    timeline: str = _setting(
        "none",
        "directory for a timeline (docs/timeline.md): every rank records its operations there; `none`: no timeline",
    )
    banner: bool = _setting(True, "whether the chief prints backend, ranks and versions")


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def explicit_settings(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that were set explicitly on this rank, parsed: variables, overridden by arguments that are not None.
    Raises ConfigError for an unknown `ALLRED_*` variable or an invalid value."""
    found: dict[str, Any] = {}
    for variable in sorted(environ):
        if variable.startswith(_PREFIX):
            name = variable.removeprefix(_PREFIX).lower()
            if name not in _FIELDS or variable != variable.upper():
                raise ConfigError(f"unknown variable {variable}; {_suggest(variable)}")
            if not _FIELDS[name].metadata.get("own"):
                found[name] = _parse(name, environ[variable], f"{variable}={environ[variable]!r}")
    for name, value in arguments.items():
        if value is not None:
            found[name] = _parse(name, value, f"init({name}={value!r})")
    return found


def secret(environ: Mapping[str, str]) -> str:
    """Secret of the cluster, from ALLRED_SECRET or the file ALLRED_SECRET_FILE; "" if there is none. Raises ConfigError
    if the file cannot be read, is empty, or is accessible to other users than its owner."""
    word, path = (environ.get(f"{_PREFIX}{name}", "none") for name in ("SECRET", "SECRET_FILE"))
    if path in ("none", ""):
        return "" if word == "none" else word
    try:
        with open(path) as file:
            others, text = os.fstat(file.fileno()).st_mode & 0o077, file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_PREFIX}SECRET_FILE={path!r} cannot be read: {error}") from None
    if others or not text:
        what = "is accessible to other users; chmod 600 it" if others else "is empty; write a secret into it"
        raise ConfigError(f"{_PREFIX}SECRET_FILE={path!r} {what}")
    return text


def _suggest(variable: str) -> str:
    known = [name.upper() for name in _FIELDS]
    close = difflib.get_close_matches(variable.upper().removeprefix(_PREFIX), known, n=1, cutoff=0.7)
    if close:
        return f"did you mean {_PREFIX}{close[0]}?"
    return f"known variables are {', '.join(_PREFIX + name for name in known)}"


def choices(name: str) -> tuple[str, ...]:
    """Return the values of a setting that has a list of them."""
    values: tuple[str, ...] = _FIELDS[name].metadata["choices"]
    return values


def _parse(name: str, value: Any, where: str) -> Any:
    field = _FIELDS[name]
    expected = (
        field.metadata.get("expected")
        or {str: "a string", int: "a size such as 4MiB", float: "a number", bool: "1 or 0"}[type(field.default)]
    )
    choices = field.metadata.get("choices")
    try:
        parsed = _convert(type(field.default), value, counts="expected" in field.metadata)
        if (smallest := field.metadata.get("size")) and parsed != field.default:
            parsed = str(nbytes := parse_bytes(parsed))
            if 0 < nbytes < smallest:
                raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ConfigError(f"{where} is not {expected}") from None
    if choices and parsed not in choices:
        raise ConfigError(f"{where} is not available; choose one of {', '.join(choices)}")
    minimum = field.metadata.get("minimum")
    if minimum is not None and not parsed >= minimum:
        raise ConfigError(f"{where} is too small; it must be at least {minimum}")
    return parsed


def _convert(kind: type, value: Any, counts: bool) -> Any:
    if kind is bool:
        return {"1": True, "0": False, "true": True, "false": False}[str(value).lower()]
    if kind is int and counts:
        return int(value) if isinstance(value, str) else operator.index(value)
    if kind is int:
        return parse_bytes(value)
    if kind is str and not isinstance(value, str):
        raise TypeError
    return kind(value)


def parse_bytes(value: int | str) -> int:
    """Parse a size in bytes: `4096`, `"4096"`, `"64KiB"` or `"1.5MB"`. GiB is 2**30, GB is 10**9. Raises ValueError.

    >>> parse_bytes("64KiB")
    65536
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if not match or match[2] not in _UNITS or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    size = float(match[1]) * _UNITS[match[2]]
    if not size.is_integer():
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def settle(found: list[dict[str, Any] | str]) -> Config:
    """Return the settings of the job, the same on every rank. A setting that may differ between ranks, or that a rank
    did not set, has the chief's value.

    found: explicit settings of each rank in rank order, or the error text if they are invalid.

    Raises ConfigError if the settings of a rank are invalid or differ from those of the chief.
    """
    problems = {rank: settings for rank, settings in enumerate(found) if isinstance(settings, str)}
    if problems:
        rank, problem = next(iter(problems.items()))
        raise ConfigError(problem if len(problems) == len(found) else f"rank {rank}: {problem}")
    every = [settings for settings in found if isinstance(settings, dict)]
    config = Config(**every[0])
    for rank, settings in enumerate(every):
        for name, value in settings.items():
            if value != (chief := getattr(config, name)) and not _FIELDS[name].metadata.get("may_differ"):
                variable = _PREFIX + name.upper()
                raise ConfigError(
                    f"{name} is {chief!r} on rank 0 but {value!r} on rank {rank}; set the same value on all ranks, for "
                    f"example: mpirun -genv {variable} {chief} ... (MPICH), mpirun -x {variable}={chief} ... (Open MPI)"
                )
    return config
