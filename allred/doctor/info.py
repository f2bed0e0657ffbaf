"""`python -m allred info`: versions, files, backend and settings. The doctor compares versions and settings of ranks.

A program can print the same after allred.init(): print(*allred.doctor.info.lines(), sep="\\n").
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import numpy

import allred
from allred import arena, command_line, config, native, world
from allred.cluster import mpi
from allred.comm import functions
from allred.doctor.findings import FAIL, OK, WARN, Finding, RankFacts, compare, error_line, rank_names
from allred.doctor.mpi import LibraryFacts, probe_library
from allred.doctor.watchdog import Watchdog
from allred.errors import AllredError, ConfigError

_INIT_LIMIT_S = 30.0
_PREFIX = "ALLRED_"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=command_line.program("info"), description="Versions, paths, backend, settings."
    )
    parser.add_argument("--config", action="store_true", help="every setting: type, default, value and its source")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = command_line.parse(parser.parse_args, arguments)
    if isinstance(options, int):
        return options
    found = settings(os.environ) if options.config else _records_after_init()
    if command_line.first_rank():
        print(*(json.dumps(record) if options.json else text(record) for record in found), sep="\n", flush=True)
    return 0


def text(record: Mapping[str, Any]) -> str:
    """A record of `records` or `settings` as text.

    >>> print(text({"name": "numpy", "value": "2.0"}))
    numpy              2.0
    """
    if "meaning" not in record:
        return f"{record['name']:<18} {record['value']}"
    kind = f"{record['type']}, default {record['default']}" if record["type"] else "not a setting of this version"
    return f"{record['variable']}: {record['value']} ({record['source']})\n    {kind}; {record['meaning']}"


def settings(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every setting of this version, then every other ALLRED_* variable. A pure function.

    >>> settings({"ALLRED_MODE": "sync"})[0]["source"], settings({"ALLRED_X": "1"})[-1]["variable"]
    ('variable', 'ALLRED_X')
    """
    found = [_setting(field, environ) for field in dataclasses.fields(config.Config)]
    known = {record["variable"] for record in found}
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            try:
                config.explicit_settings({variable: environ[variable]}, {})
                meaning = ""
            except ConfigError as error:
                meaning = f"allred.init() rejects it: {error}"
            value = {"value": "(set)", "source": "unknown variable", "meaning": meaning}  # it may be a misspelt secret
            found.append({"variable": variable, "type": "", "default": None, **value})
    return found


def _setting(field: "dataclasses.Field[Any]", environ: Mapping[str, str]) -> dict[str, Any]:
    variable = _PREFIX + field.name.upper()
    meaning, value, source = str(field.metadata["meaning"]), field.default, "default"
    if variable in environ and field.metadata.get("own"):
        value, source = "(set)", "variable"
    elif variable in environ:
        value, source = environ[variable], "variable"
        try:
            value = config.explicit_settings({variable: environ[variable]}, {})[field.name]
        except ConfigError as error:
            source, meaning = "variable, cannot be used", f"{meaning}; {error}"
    choices = field.metadata.get("choices")
    return {
        "variable": variable,
        "type": type(field.default).__name__ + (f" ({', '.join(choices)})" if choices else ""),
        "default": field.default,
        "value": value,
        "source": source,
        "meaning": meaning,
    }


def _records_after_init() -> list[dict[str, Any]]:
    """`records` after allred.init(), which chooses the backend. Collective."""
    library = probe_library()  # starts a process, which is safer before MPI starts
    watchdog = Watchdog(command_line.first_rank())
    late = f"info: allred.init() did not finish within {_INIT_LIMIT_S:g} s; run python -m allred doctor for the cause"
    gone = "info: MPI ended this process; read its error on stderr, or run python -m allred doctor for the cause"
    try:
        with watchdog.phase(_INIT_LIMIT_S, late, gone):
            try:
                allred.init(banner=False)
            except AllredError as error:
                return records(library, error_line(error))
            found = records(library)
            allred.shutdown()
            return found
    finally:
        watchdog.close()


def lines() -> list[str]:
    """The records of this process as text."""
    return [text(record) for record in records(probe_library())]


def records(library: LibraryFacts, problem: str = "") -> list[dict[str, Any]]:
    """Name and value of each version, file and setting. problem: why allred.init() failed."""
    software = probe()
    backend = "allred.init() was not called"
    if allred.is_initialized():
        backend = f"{functions.current().name} ({world.current().reason})"
    found = {
        "allred": software.allred,
        "its files": pathlib.Path(allred.__file__).parent,
        "Python": f"{software.python}, {software.executable}",
        "numpy": software.numpy,
        "mpi4py": library.error or f"{library.mpi4py}, for the ABI {library.abi}",
        "MPI": "none" if library.error else f"{library.name} (MPI {'.'.join(map(str, library.standard))})",
        "MPI's file": library.path or "none",
        "MPI's settings": mpi.describe_settings(),
        "C extension": software.reason,
        "CPU kernels": ", ".join(software.variants) or "numpy",
        "backend": problem or backend,
        "arena": "none: allred.init() failed" if problem else arena.description(),
    }
    return [{"name": name, "value": str(value)} for name, value in found.items()]


@dataclasses.dataclass(frozen=True)
class SoftwareFacts:
    """Versions of a rank, its C extension, and its explicit settings or the error in them."""

    allred: str
    python: str
    executable: str
    numpy: str
    extension: bool
    reason: str  # why the extension is or is not available
    variants: tuple[str, ...]  # instruction sets that the extension was built for
    settings: dict[str, Any] | str


def probe() -> SoftwareFacts:
    try:
        explicit: dict[str, Any] | str = config.explicit_settings(os.environ, {})
    except ConfigError as error:
        explicit = str(error)
    return SoftwareFacts(
        allred=allred.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        numpy=numpy.__version__,
        extension=native.available,
        reason=native.reason,
        variants=native.variants,
        settings=explicit,
    )


def diagnose(ranks: list[RankFacts[SoftwareFacts]]) -> list[Finding]:
    return [_diagnose_versions(ranks), _diagnose_extension(ranks), _diagnose_settings(ranks)]


def _diagnose_versions(ranks: list[RankFacts[SoftwareFacts]]) -> Finding:
    def versions(facts: SoftwareFacts) -> str:
        return f"allred {facts.allred}, Python {facts.python}, numpy {facts.numpy}"

    found = compare(ranks, lambda facts: f"{versions(facts)}, {facts.executable}")
    if len({versions(rank.facts) for rank in ranks}) > 1:
        remedy = "use the same environment on all hosts: mpirun -np N /path/to/env/bin/python ..."
        return Finding(WARN, "software", found, remedy)
    return Finding(OK, "software", found)


def _diagnose_extension(ranks: list[RankFacts[SoftwareFacts]]) -> Finding:
    def extension(facts: SoftwareFacts) -> str:
        return f"built for {', '.join(facts.variants)}" if facts.extension else f"missing: {facts.reason}"

    found = compare(ranks, extension)
    if all(rank.facts.extension for rank in ranks):
        return Finding(OK, "C extension", found)
    remedy = "apt-get install gcc python3-dev, then pip install --force-reinstall --no-deps /path/to/clone; "
    remedy += "check with python -m allred.native. Without the extension ranks communicate through MPI only"
    return Finding(WARN, "C extension", found, remedy)


def _diagnose_settings(ranks: list[RankFacts[SoftwareFacts]]) -> Finding:
    try:
        config.settle([rank.facts.settings for rank in ranks])
    except ConfigError as error:
        remedy = "python -m allred info --config lists all settings and where their values come from"
        return Finding(FAIL, "settings", str(error), remedy)
    explicit = ranks[0].facts.settings
    assert isinstance(explicit, dict)
    found = " ".join(f"{_PREFIX}{name.upper()}={value}" for name, value in explicit.items()) or "all at their defaults"
    without = [rank for rank in ranks if rank.facts.settings != explicit]
    return Finding(OK, "settings", found + f"; rank 0's values are used on {rank_names(without)}" * bool(without))
