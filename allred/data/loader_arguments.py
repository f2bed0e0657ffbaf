"""The arguments of a loader that must be equal on all ranks. Pure."""

from typing import Any, NamedTuple


class LoaderArguments(NamedTuple):
    """The arguments that decide which samples are in each global batch, and the number of batches.

    function: "batches" or "stream". values: the name and value of each argument.

    >>> print(LoaderArguments("batches", (("rows", 5), ("seed", None))))
    batches(rows=5, seed=None)
    """

    function: str
    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value!r}' for name, value in self.values)})"
