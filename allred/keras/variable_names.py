"""Names of the variables of a model, which do not depend on the models that were made before.

Keras numbers layers without a name in the order in which a process makes them: `dense_7/kernel`. Here they are numbered
within a model, as in a process that makes no other one: `dense/kernel`, `dense_1/kernel`. Layers that the program has
named keep their names. The name of the model itself is left out: Keras uses it in the names of variables of some
models, but not after the model was loaded.
"""

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

from allred.modes.gradient_averager import unique

_NUMBERED = re.compile(r"(.+?)(_\d+)?")


def names_of(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable of Keras or TensorFlow; all are different."""
    paths = [getattr(variable, "path", None) or variable.name.partition(":")[0] for variable in variables]
    return list(_names(tuple(paths)))


def numbers_of(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable of an optimizer. Their own names contain the numbers of layers."""
    return [f"variable {number}" for number in range(len(variables))]


@functools.lru_cache
def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    parts = [path.split("/") for path in paths]
    while all(len(each) > 2 for each in parts) and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    return tuple(unique(numbered(["/".join(each) for each in parts], _names_without_number())))


def _names_without_number() -> set[str]:
    """Return the names that Keras gives to layers and variables without a name, before the number."""
    found, kinds = {"model", "seed_generator", "variable"}, []
    for library in ("keras", "tf_keras"):
        layers = getattr(sys.modules.get(library), "layers", None)
        kinds += [] if layers is None else [layers.Layer]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found.add(_snake_case(kind.__name__))
    return found


def _snake_case(name: str) -> str:
    """Return the name of a class as Keras writes it.

    >>> _snake_case("Conv2DTranspose"), _snake_case("LSTMCell")
    ('conv2d_transpose', 'lstm_cell')
    """
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def numbered(paths: Sequence[str], stems: set[str]) -> list[str]:
    """Return paths whose parts `stem_number`, for these stems, are numbered in the order of their first occurrence.

    >>> numbered(["dense_7/kernel", "dense_7/bias", "dense_9/kernel", "head_2/kernel"], {"dense"})
    ['dense/kernel', 'dense/bias', 'dense_1/kernel', 'head_2/kernel']
    """
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for part in (part for path in paths for part in path.split("/")):
        if part not in renamed:
            match = _NUMBERED.fullmatch(part)
            stem = match[1] if match else part
            if stem in stems:
                number = counts[stem] = counts.get(stem, -1) + 1
                renamed[part] = f"{stem}_{number}" if number else stem
            else:
                renamed[part] = part
    return ["/".join(renamed[part] for part in path.split("/")) for path in paths]
