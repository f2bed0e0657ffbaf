"""Every setting of allred, once: name, type, default, unit and meaning. Sources, strongest first: an argument of
`init()`, the environment variable `ALLRED_<NAME>`, the default. The chief's settings hold for all ranks (world.py).
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


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings in force. One record for the whole job: it is the same on every rank. What is a process's own, the
    secret, is not in it: `secret` reads that."""

    mode: str = _setting("sync", "how ranks train together", choices=("sync", "ps"), later=("local",))
    num_ps: int = _setting(
        1,
        "mode ps: how many ranks, the first ones, are parameter servers",
        expected="a whole number of ranks",
        minimum=1,
    )
    consistency: str = _setting(
        "async", "mode ps: when gradients are applied (docs/modes.md)", choices=("async", "bounded", "sync")
    )
    staleness: int = _setting(
        4,
        "mode ps, bounded: how many steps a worker may be ahead of the slowest",
        expected="a whole number of steps",
        minimum=0,
    )
    replicas_to_aggregate: int = _setting(
        0,
        "mode ps, sync: how many gradients make a step; 0 is one of each worker",
        expected="a whole number of gradients",
        minimum=0,
    )
    placement: str = _setting(
        "bytes",
        "mode ps: which server has which parameters: bytes (even, large tensors are split), round_robin, greedy",
        choices=("bytes", "round_robin", "greedy"),
    )
    use_locking: bool = _setting(
        True,
        "mode ps: whether servers take one request at a time, so that a pull brings one version (1 or 0); they always "
        "do in policy sync, and for optimizers that need whole tensors",
    )
    checkpoint_dir: str = _setting(
        "none", "mode ps: the directory for a checkpoint when the job is asked to end by SIGTERM; none writes none"
    )
    backend: str = _setting(
        "auto",
        "who moves the arrays: auto takes shm where it can, and nccl for device arrays where there are GPUs and cupy",
        choices=("auto", "single", "shm", "mpi", "nccl"),
    )
    nccl_cross: str = _setting(
        "nccl",
        "how device arrays cross between nodes: nccl, or mpi: copied to the host and back",
        choices=("nccl", "mpi"),
    )
    gpu_oversubscribe: bool = _setting(False, "whether several ranks may share a GPU, which is for tests (1 or 0)")
    progress: str = _setting(
        "thread",
        "who moves operations of allred.*_async that nobody waits for: thread (one of C's, on one node), or caller",
        choices=("thread", "caller"),
    )
    bucket_bytes: int = _setting(
        2**20,
        "gradients smaller than half of this travel together, up to this many bytes (512KiB, 4MiB, ...)",
        minimum=1,
    )
    timeout_s: float = _setting(
        1800.0, "longest wait in one collective, in seconds, before it is an error", minimum=0.001
    )
    nonfinite: str = _setting(
        "raise", "what a NaN or an infinity in a gradient does on all ranks", choices=("raise", "skip", "ignore")
    )
    check_steps: int = _setting(
        100,
        "every so many steps, and at the first three, the ranks compare parameters and optimizer state; 0 is never",
        expected="a whole number of steps",
        minimum=0,
    )
    check: str = _setting(
        "basic",
        "what must agree in every operation: basic, or full: also the line of the program that calls it",
        choices=("basic", "full"),
    )
    watcher: bool = _setting(
        True, "whether a process on each node watches the ranks: who stalls and where, who died, who failed (1 or 0)"
    )
    stall_warning_s: float = _setting(
        30.0, "how long a rank waits in an operation before a warning says what all ranks do, in seconds", minimum=0.1
    )
    worker_failure: str = _setting(
        "end",
        "what happens when a worker of mode ps fails, dies, or stalls until the time limit: the job ends (end), or the "
        "other workers continue without it (go_on)",
        choices=("end", "go_on"),
    )
    pretend_nodes: str = _setting(
        "none", "for tests: the ranks of pretended nodes, in rank order (2,2 makes two nodes of four ranks)"
    )
    start_timeout_s: float = _setting(
        1800.0, "how long a task that was started by hand waits for the others, in seconds", minimum=0.1
    )
    secret: str = _setting(
        "none", "what tasks that were started by hand show each other that they know; it is never sent", own=True
    )
    secret_file: str = _setting("none", "a file with that secret, instead", own=True)
    timeline: str = _setting(
        "none",
        "the directory for a timeline: every rank writes there what it did when (docs/timeline.md); none writes none",
    )
    banner: bool = _setting(True, "whether the chief prints what runs where (1 or 0)")


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def explicit_settings(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was set on purpose on this rank, parsed and checked: variables, overridden by non-None arguments.

    Raises ConfigError for an unknown `ALLRED_*` variable or a value that cannot be used.
    """
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
    """The cluster's secret, from ALLRED_SECRET or the file that ALLRED_SECRET_FILE names; empty if there is none.

    Raises ConfigError if the file cannot be read, is empty, or can be read by others than its owner.
    """
    word, path = (environ.get(f"{_PREFIX}{name}", "none") for name in ("SECRET", "SECRET_FILE"))
    if path in ("none", ""):
        return "" if word == "none" else word
    try:
        with open(path) as file:
            others, text = os.fstat(file.fileno()).st_mode & 0o077, file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_PREFIX}SECRET_FILE={path!r} cannot be read: {error}") from None
    if others or not text:
        what = "can be used by others; chmod 600 it" if others else "is empty; put a secret into it"
        raise ConfigError(f"{_PREFIX}SECRET_FILE={path!r} {what}")
    return text


def _suggest(variable: str) -> str:
    known = [_PREFIX + name.upper() for name in _FIELDS]
    close = difflib.get_close_matches(variable.upper(), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _parse(name: str, value: Any, where: str) -> Any:
    field = _FIELDS[name]
    expected = (
        field.metadata.get("expected")
        or {str: "a word", int: "a size such as 4MiB", float: "a number", bool: "1 or 0"}[type(field.default)]
    )
    choices, later = field.metadata.get("choices"), field.metadata.get("later", ())
    try:
        parsed = _convert(type(field.default), value, counts="expected" in field.metadata)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ConfigError(f"{where} is not {expected}") from None
    if choices and parsed not in choices:
        coming = f" ({', '.join(later)}: planned, not in this version)" if later else ""
        raise ConfigError(f"{where} is not available; choose one of {', '.join(choices)}{coming}")
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
    """A size in bytes from `4096`, `"4096"`, `"64KiB"` or `"1.5MB"`. GiB is 2**30, GB is 10**9. Raises ValueError.

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
    """The job's settings, from what was set on each rank (or the words for why that cannot be used), chief first.

    A pure function of what all ranks know: it gives or raises the same everywhere. Raises ConfigError if a rank's
    settings cannot be used, or differ from the chief's; what a rank has not set, it takes from the chief.
    """
    problems = {rank: settings for rank, settings in enumerate(found) if isinstance(settings, str)}
    if problems:
        rank, problem = next(iter(problems.items()))
        raise ConfigError(problem if len(problems) == len(found) else f"rank {rank}: {problem}")
    every = [settings for settings in found if isinstance(settings, dict)]
    config = Config(**every[0])
    for rank, settings in enumerate(every):
        for name, value in settings.items():
            if value != (chief := getattr(config, name)):
                variable = _PREFIX + name.upper()
                raise ConfigError(
                    f"{name} is {chief!r} on rank 0 but {value!r} on rank {rank}; set it alike on all ranks, for "
                    f"example: mpirun -genv {variable} {chief} ... (MPICH), mpirun -x {variable}={chief} ... (Open MPI)"
                )
    return config
