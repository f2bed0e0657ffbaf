"""Arguments of TensorFlow's programs that have no effect in allred."""

from collections.abc import Mapping
from typing import Any

from allred import log
from allred.cluster import topology
from allred.errors import InputError

_warned: set[str] = set()


def warn_ignored(who: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Warn once, on the chief, of the arguments in `defaults` that differ from their defaults. Ignores other names."""
    names = [name for name, default in defaults.items() if given[name] is not None and given[name] is not default]
    odd = [name for name in names if not (isinstance(given[name], (int, float, str)) and given[name] == defaults[name])]
    line = f"{who}: these arguments have no effect: {', '.join(odd)} (docs/from-tensorflow.md)"
    if odd and line not in _warned:
        _warned.add(line)
        log.warning(line)


def check_chief(who: str, is_chief: bool | None) -> None:
    """Raise InputError if the argument is_chief is wrong for this rank."""
    if is_chief is not None and bool(is_chief) != topology.is_chief():
        raise InputError(
            f"{who}(is_chief={is_chief!r}) on {topology.role()}: the chief is worker 0; leave is_chief out, or give "
            "task_index == 0"
        )
