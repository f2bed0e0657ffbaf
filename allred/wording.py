"""Counts and numbers in messages."""

from collections.abc import Iterable

MOST_RANGES = 20  # of `named`


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def named(noun: str, numbers: Iterable[int], most: int = MOST_RANGES) -> str:
    """Return a noun with numbers: the first `most` ranges of them, and how many more there are.

    >>> named("rank", [3]), named("rank", {0, 1, 2, 5}), named("rank", {0, 1, 5, 7, 9}, most=2)
    ('rank 3', 'ranks 0-2,5', 'ranks 0-1,5 and 2 more ranks')
    """
    runs = _runs(sorted(numbers))
    text, rest = _text(runs[:most]), sum(high - low + 1 for low, high in runs[most:])
    more = f" and {count(rest, f'more {noun}')}" if rest else ""
    return f"{noun}{'s' * (not text.isdigit())} {text}{more}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order, as ranges.

    >>> ranges({5, 2, 1, 0})
    '0-2,5'
    """
    return ranges_in_order(sorted(numbers))


def ranges_in_order(numbers: Iterable[int]) -> str:
    """Return numbers in the order given, as ranges.

    >>> ranges_in_order([4, 0, 1, 2])
    '4,0-2'
    """
    return _text(_runs(numbers))


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and the last of each run of successive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _text(runs: list[list[int]]) -> str:
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
