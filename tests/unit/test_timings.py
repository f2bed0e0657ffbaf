"""The table of times and limits: its orders are assertions of the module; nothing else defines or repeats a time."""

import ast
import pathlib
import re

import pytest

import allred
from allred.runtime import timings

ROOT = pathlib.Path(allred.__file__).parent
NAMES = {name for name in vars(timings) if name.isupper()}
FAILURE_HANDLING = ("watch", "launch", "run", "runtime", "spark/supervisor.py", "spark/cluster_monitor.py")
# Intervals of loops that wait for one thing of another program, and no limit of anything.
LOCAL = {"runtime/channel.py: _MOST_MS", "runtime/channel.py: _TCP_RTO_MAX_MS"}  # of Linux
LOCAL |= {"spark/cluster_monitor.py: _TICK_S"}  # how soon a thread that ends the wait is noticed


def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def constants(text: str) -> list[str]:
    """The module's names for numbers of seconds."""
    found = []
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        found += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [name for name in found if re.fullmatch(r"_?[A-Z_]+_(S|MS|NS)", name)]


def test_failure_handling_takes_its_times_from_the_table():
    of_failures = {
        path: text
        for path, text in sources().items()
        if path.startswith(FAILURE_HANDLING) and path != "runtime/timings.py"
    }
    assert {f"{path}: {name}" for path, text in of_failures.items() for name in constants(text)} == LOCAL


def test_comments_name_times_of_the_table():
    found = {
        f"{path}: {name}"
        for path, text in sources().items()
        if path.startswith(FAILURE_HANDLING)
        for name in re.findall(r"\b[A-Z][A-Z_]*_S\b", text)
        if name not in NAMES and not name.startswith("ALLRED_")
    }
    assert found == set()


def test_every_time_is_used():
    text = "".join(text for path, text in sources().items() if path != "runtime/timings.py")
    assert {name for name in NAMES if not re.search(rf"\b{name}\b", text)} == {"JSON_BYTES"}, "only in assertions"


def test_every_time_and_limit_has_a_unit():
    units = ("_S", "_BYTES", "_CHARS", "_PEERS", "_COUNT")
    assert [name for name in NAMES if not name.endswith(units)] == []


@pytest.mark.parametrize(
    ("name", "seconds"), [("DRAIN_US", timings.DRAIN_S * 1e6), ("RELEASE_LIMIT_NS", timings.FOLLOWER_LEAVE_S * 1e9)]
)
def test_c_has_the_same_times(name, seconds):
    source = (ROOT.parent / "csrc/python/exit.c").read_text()
    assert int(re.search(rf"#define {name} (\d+)", source)[1]) == seconds


def test_an_order_that_does_not_hold_is_an_error():
    table = sources()["runtime/timings.py"]
    wrong = re.sub(r"(?m)^UNWIND_S = .*", "UNWIND_S = 3.0", table)
    assert wrong != table
    with pytest.raises(AssertionError, match="a rank aborts the job before the others have unwound"):
        exec(wrong, {})
