"""Which of several failed ranks on Spark was the first, and its error."""

import re

import pytest

from allred import RemoteRankError
from allred.spark import outcomes


def raised(rank, error, at):
    try:
        raise error
    except type(error) as caught:
        return outcomes.of_exception(rank, caught) | {"time": at}


def test_no_failure():
    pytest.importorskip("cloudpickle")
    found = [outcomes.of_result(1, "b"), outcomes.of_result(0, "a")]
    assert outcomes.first_failure(found) is None
    assert outcomes.results(found) == ["a", "b"]


def test_the_first_own_failure_is_the_cause():
    """Rank 0 was ended by the failure of rank 2, rank 1 has sent no outcome, rank 3 failed later."""
    remote = RemoteRankError("rank 2 on b raised ValueError: x", 2, "b", 1, "its traceback")
    found = [
        raised(0, remote, at=1), outcomes.of_exit_code(1, 1) | {"time": 0}, raised(2, ValueError("x"), at=2),
        raised(3, OSError("y"), at=3),
    ]  # fmt: skip
    assert outcomes.first_failure(found)["rank"] == 2
    with pytest.raises(RemoteRankError, match=r"^rank 2 on .* raised ValueError: x\nTraceback") as caught:
        outcomes.results(found)
    assert (caught.value.rank, caught.value.code, caught.value.exception) == (2, 1, "ValueError: x")
    assert outcomes.first_failure(found[:2])["rank"] == 0
    with pytest.raises(RemoteRankError, match=r"^rank 2 on b raised ValueError: x"):  # as rank 0 reported it
        outcomes.results(found[:2])


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        (-9, 137, "was killed by signal 9 (SIGKILL)"),
        (-40, 168, "was killed by signal 40"),
        (3, 3, "ended with exit code 3 (its last lines"),
        (0, 1, "ended with exit code 0 (its"),
    ],
)
def test_a_rank_that_sent_no_outcome(code, expected, text):
    found = outcomes.of_exit_code(1, code)
    assert found["code"] == expected
    assert re.match(rf"rank 1 on \S+ {re.escape(text)}", found["text"])


@pytest.mark.parametrize(("code", "expected"), [(5, 5), ("text", 1)])
def test_sys_exit(code, expected):
    found = raised(0, SystemExit(code), at=0)
    assert found["code"] == expected
    assert found["text"].endswith(f" called sys.exit({code!r})")


def test_the_line_of_an_exception():
    """Without notes, and short: it passes in a message."""
    error = ValueError("x" * 5000)
    error.add_note("a note")
    found = raised(0, error, at=0)
    assert re.fullmatch(r"ValueError: x{1000,2000}", found["exception"])
    assert "a note" in found["traceback"]
