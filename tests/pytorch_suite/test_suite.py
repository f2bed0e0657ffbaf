"""PyTorch's own tests of its backends, with backends gloo and allred, give the outcomes in outcomes.tsv."""

import pathlib

import pytest
import rank_server

pytest.importorskip("torch")

RANKS, BACKENDS = (2, 3), ("gloo", "allred")
COLUMNS = [(ranks, backend) for ranks in RANKS for backend in BACKENDS]
TABLE = pathlib.Path(__file__).parent / "outcomes.tsv"


def read_table():
    """Return {test: (the backend as which it is chosen, {(ranks, backend): outcome}, reason)}."""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {test: (as_, dict(zip(COLUMNS, found, strict=True)), reason) for test, as_, *found, reason in rows[1:]}


ROWS = read_table()
RUN = [
    pytest.param(test, ranks, backend, id=f"{test}-{backend}-{ranks}")
    for test, (_, outcomes, _) in ROWS.items()
    if set(outcomes.values()) != {rank_server.SKIPPED}  # they find no GPU
    for ranks, backend in COLUMNS
]


@pytest.fixture(scope="session")
def server():
    with rank_server.Server() as server:
        yield server


@pytest.mark.full
@pytest.mark.limit(rank_server.LIMIT_S + 30)
@pytest.mark.parametrize(("test", "ranks", "backend"), RUN)
def test_outcome_is_the_one_in_the_table(server, test, ranks, backend):
    chosen_as, expected, _ = ROWS[test]
    outcome, text = server.run(backend, ranks, test, chosen_as)
    assert outcome == expected[ranks, backend], text


def test_table_has_the_tests_of_the_installed_torch(server):
    assert {test: chosen_as for test, (chosen_as, *_) in ROWS.items()} == cpu_tests(server)


def cpu_tests(server):
    """Return {test: "gloo", or "mpi" if the suite has it only for that one} without tests for other devices."""
    gloo, mpi = ({test for test, reason in server.tests(name, 3).items() if not reason} for name in ("gloo", "mpi"))
    return {test: "gloo" if test in gloo else "mpi" for test in sorted(gloo | mpi)}


def test_each_difference_has_a_reason():
    for test, (_, outcomes, reason) in ROWS.items():
        same = all(outcomes[ranks, "gloo"] == outcomes[ranks, "allred"] for ranks in RANKS)
        assert same or reason, test
