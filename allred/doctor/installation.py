"""What is installed: allred and its C extension, Python, numpy; and the settings of allred, compared over the ranks."""

import dataclasses
import os
import platform
import sys
from typing import Any

import numpy

import allred
from allred import config, native
from allred.doctor.line import FAIL, OK, WARN, Line
from allred.doctor.ranks import Seen, compared, who
from allred.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Installation:
    """The software of a rank; `settings` are words where they cannot be used."""

    allred: str
    python: str
    executable: str
    numpy: str
    extension: bool
    reason: str
    variants: tuple[str, ...]
    settings: dict[str, Any] | str


def look() -> Installation:
    """Look at this process."""
    try:
        settings: dict[str, Any] | str = config.explicit_settings(os.environ, {})
    except ConfigError as error:
        settings = str(error)
    return Installation(
        allred=allred.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        numpy=numpy.__version__,
        extension=native.available,
        reason=native.reason,
        variants=native.variants,
        settings=settings,
    )


def judge(ranks: list[Seen[Installation]]) -> list[Line]:
    """The versions, the extension, the settings."""
    return [_versions(ranks), _extension(ranks), _settings(ranks)]


def _versions(ranks: list[Seen[Installation]]) -> Line:
    def text(facts: Installation) -> str:
        return f"allred {facts.allred}, Python {facts.python}, numpy {facts.numpy}, {facts.executable}"

    versions = {(rank.facts.allred, rank.facts.python, rank.facts.numpy) for rank in ranks}
    if len(versions) > 1:
        remedy = "start the same environment on all hosts: mpirun -np N /path/to/it/bin/python ..."
        return Line(WARN, "software", compared(ranks, text), remedy)
    return Line(OK, "software", compared(ranks, text))


def _extension(ranks: list[Seen[Installation]]) -> Line:
    def text(facts: Installation) -> str:
        return f"built, for {', '.join(facts.variants)}" if facts.extension else f"missing, {facts.reason}"

    missing = [rank for rank in ranks if not rank.facts.extension]
    if missing:
        remedy = "apt-get install gcc python3-dev, then pip install --force-reinstall --no-deps of allred; "
        remedy += "python -m allred.native says whether it is there. Without it ranks speak through MPI only"
        return Line(WARN, "C extension", compared(ranks, text), remedy)
    return Line(OK, "C extension", compared(ranks, text))


def _settings(ranks: list[Seen[Installation]]) -> Line:
    try:
        config.settle([rank.facts.settings for rank in ranks])
    except ConfigError as error:
        remedy = "python -m allred info --config lists all settings, and where their values come from"
        return Line(FAIL, "settings", str(error), remedy)
    chosen = ranks[0].facts.settings
    assert isinstance(chosen, dict)
    found = " ".join(f"ALLRED_{name.upper()}={value}" for name, value in chosen.items()) or "all as they come"
    silent = [rank for rank in ranks if rank.facts.settings != chosen]
    return Line(OK, "settings", found + (f"; {who(silent)} take from rank 0 what they lack" if silent else ""))
