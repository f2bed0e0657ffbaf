"""`python -m allred info`: what is here, without a verdict. `info --config`: every setting, from the record `Config`.

A program may print the same about itself, after allred.init(): print(*allred.doctor.info.lines(), sep="\\n").
"""

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import allred
from allred import config
from allred.bench import setting
from allred.cluster import mpi
from allred.comm import functions
from allred.doctor import installation, library
from allred.doctor.arguments import parsed
from allred.doctor.guard import Guard
from allred.doctor.line import words
from allred.errors import AllredError, ConfigError

_START_LIMIT_S = 30.0
_PREFIX = "ALLRED_"


def main(arguments: list[str]) -> int:
    """Print it on one rank; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m allred info", description="Versions, paths, backend, settings.")
    parser.add_argument("--config", action="store_true", help="every setting: type, default, value and its source")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parsed(parser, arguments)
    if isinstance(options, int):
        return options
    records = settings(os.environ) if options.config else _started()
    if setting.first_rank():
        print(*(json.dumps(record) if options.json else text(record) for record in records), sep="\n", flush=True)
    return 0


def text(record: Mapping[str, Any]) -> str:
    """A record for a person: a name and its value, or a setting.

    >>> print(text({"name": "numpy", "value": "2.0"}))
    numpy              2.0
    """
    if "meaning" not in record:
        return f"{record['name']:<18} {record['value']}"
    kind = f"{record['type']}, default {record['default']}" if record["type"] else "no setting of this version"
    return f"{record['variable']}: {record['value']} ({record['source']})\n    {kind}; {record['meaning']}"


def settings(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every setting of this version, then every other ALLRED_* variable. A pure function.

    >>> settings({"ALLRED_MODE": "sync"})[0]["source"], settings({"ALLRED_X": "1"})[-1]["variable"]
    ('variable', 'ALLRED_X')
    """
    records = [_setting(field, environ) for field in dataclasses.fields(config.Config)]
    known = {record["variable"] for record in records}
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            try:
                config.explicit_settings({variable: environ[variable]}, {})
                meaning = ""
            except ConfigError as error:
                meaning = f"allred.init() is going to refuse it: {error}"
            value = {"value": "(set)", "source": "unknown variable", "meaning": meaning}  # it may be a misspelt secret
            records.append({"variable": variable, "type": "", "default": None, **value})
    return records


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
    kind = type(field.default).__name__
    choices = field.metadata.get("choices")
    kind = f"{kind} ({', '.join(choices)})" if choices else kind
    return {
        "variable": variable,
        "type": kind,
        "default": field.default,
        "value": value,
        "source": source,
        "meaning": meaning,
    }


def _started() -> list[dict[str, Any]]:
    """`records` after allred.init(), so that the backend is chosen. Collective."""
    loaded = library.look()  # in a process of its own, better started before MPI
    guard = Guard(setting.first_rank())
    late = f"info: allred.init() has not come to an end within {_START_LIMIT_S:g} s; python -m allred doctor says more"
    gone = "info: MPI ended this process; its words stand on stderr, and python -m allred doctor says more"
    try:
        with guard.phase(_START_LIMIT_S, late, gone):
            try:
                allred.init(banner=False)
            except AllredError as error:
                return records(loaded, words(error))
            found = records(loaded)
            allred.shutdown()
            return found
    finally:
        guard.close()


def lines() -> list[str]:
    """What is here, for a person."""
    return [text(record) for record in records(library.look())]


def records(loaded: library.Library, problem: str = "") -> list[dict[str, Any]]:
    """What is here. problem: why allred.init() failed; without it the backend is named where init() was called."""
    software = installation.look()
    backend = "allred.init() was not called"
    if allred.is_initialized():
        backend = f"{functions.current().name} ({functions.reason()})"
    found = {
        "allred": software.allred,
        "its files": pathlib.Path(allred.__file__).parent,
        "Python": f"{software.python}, {software.executable}",
        "numpy": software.numpy,
        "mpi4py": f"{loaded.mpi4py}, for the ABI {loaded.abi}" if not loaded.error else loaded.error,
        "MPI": f"{loaded.name} (MPI {'.'.join(map(str, loaded.standard))})" if not loaded.error else "none",
        "MPI's file": loaded.path or "none",
        "MPI's settings": mpi.given(),
        "C extension": software.reason,
        "CPU kernels": ", ".join(software.variants) or "numpy",
        "backend": problem or backend,
    }
    return [{"name": name, "value": str(value)} for name, value in found.items()]
