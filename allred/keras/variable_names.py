"""Names of the variables of a model, which do not depend on the models that were made before.

Keras numbers layers without a name in the order in which a process makes them: `dense_7/kernel`. Here they are numbered
within a model, as in a process that makes no other one: `dense/kernel`, `dense_1/kernel`.
"""

import re
from collections.abc import Sequence
from typing import Any

from allred.modes.gradient_averager import unique

_NUMBERED = re.compile(r"(.+?)(_\d+)?")


def names_of(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable of Keras or TensorFlow; all are different."""
    paths = [getattr(variable, "path", None) or variable.name.partition(":")[0] for variable in variables]
    return unique(numbered(paths))


def numbers_of(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable of an optimizer. Their own names contain the numbers of layers."""
    return [f"variable {number}" for number in range(len(variables))]


def numbered(paths: Sequence[str]) -> list[str]:
    """Return paths whose parts are numbered in the order of their first occurrence.

    >>> numbered(["dense_7/kernel", "dense_7/bias", "dense_9/kernel"])
    ['dense/kernel', 'dense/bias', 'dense_1/kernel']
    """
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for part in (part for path in paths for part in path.split("/")):
        if part not in renamed:
            match = _NUMBERED.fullmatch(part)
            stem = match[1] if match else part
            number = counts[stem] = counts.get(stem, -1) + 1
            renamed[part] = f"{stem}_{number}" if number else stem
    return ["/".join(renamed[part] for part in path.split("/")) for path in paths]
