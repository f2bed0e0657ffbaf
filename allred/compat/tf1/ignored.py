"""Arguments that TensorFlow's programs give, and that have no effect here."""

from collections.abc import Mapping
from typing import Any

from allred.cluster import report, topology
from allred.errors import InputError

_told: set[str] = set()


def tell(who: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Say once which of the arguments in `defaults` were given, on the chief. Others than these are not looked at."""
    names = [name for name, default in defaults.items() if given[name] is not None and given[name] is not default]
    odd = [name for name in names if not (isinstance(given[name], (int, float, str)) and given[name] == defaults[name])]
    line = f"{who}: of no effect here: {', '.join(odd)} (docs/from-tensorflow.md)"
    if odd and line not in _told:
        _told.add(line)
        report.say(line)


def check_chief(who: str, is_chief: bool | None) -> None:
    """allred knows who the chief is. Raises InputError for a program that thinks otherwise."""
    if is_chief is not None and bool(is_chief) != topology.is_chief():
        raise InputError(
            f"{who}(is_chief={is_chief!r}) on {topology.role()}: the chief is worker 0; leave is_chief out, or give "
            "task_index == 0"
        )
