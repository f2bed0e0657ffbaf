"""Counts and numbers in messages."""

from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def named(noun: str, numbers: Iterable[int]) -> str:
    """Return a noun with numbers.

    >>> named("rank", [3]), named("rank", {0, 1, 2, 5})
    ('rank 3', 'ranks 0-2,5')
    """
    text = ranges(numbers)
    return f"{noun}{'s' * (not text.isdigit())} {text}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order, as ranges.

    >>> ranges({5, 2, 1, 0})
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
