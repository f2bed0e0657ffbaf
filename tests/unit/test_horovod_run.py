"""The outcomes of the ranks of horovod.run, without a job: files, exceptions, the error that the caller gets."""

import pickle

import pytest

from allred.client.call import pack
from allred.compat.horovodrun import function, function_rank
from allred.compat.horovodrun.function import JobError, _shared_directory, results, run
from allred.errors import InputError, RemoteRankError


class NeedsTwoArguments(Exception):  # noqa: N818
    """An exception that pickle cannot load."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def throw(error):
    raise error


def raised(error):
    """Return the exception as function_rank.py catches it: its own frame is the first one of the traceback."""
    try:
        throw(error)
    except BaseException as caught:
        return caught


def written(directory, *found):
    for outcome in found:
        function.write_outcome(str(directory), outcome)
    return function.read_outcomes(str(directory))


def test_results_are_in_rank_order(tmp_path):
    found = written(tmp_path, *(function.outcome_of_result(rank, {"rank": rank}) for rank in (10, 2, 0)))
    assert results(found, 0) == [{"rank": 0}, {"rank": 2}, {"rank": 10}]


def test_outcomes_are_those_of_the_last_start(tmp_path, monkeypatch):
    for start, size in ((9, 3), (10, 2)):
        monkeypatch.setenv("ALLRED_STARTS", str(start))
        found = written(tmp_path, *(function.outcome_of_result(rank, start) for rank in range(size)))
    assert results(found, 0) == [10, 10]


def test_the_first_error_that_is_not_that_of_another_rank_is_raised(tmp_path):
    reported = function.outcome_of_error(0, raised(RemoteRankError("rank 1 on n1 failed", 1, "n1", 1)))
    found = written(
        tmp_path, reported, function.outcome_of_error(1, raised(KeyError("first"))),
        function.outcome_of_error(2, raised(ValueError("second"))), function.outcome_of_result(3, 0),
    )  # fmt: skip
    with pytest.raises(KeyError, match="first") as caught:
        results(found, 1)
    assert caught.value.__notes__[0].startswith("on rank 1 (")
    assert caught.value.__notes__[0].endswith("KeyError: 'first'\n")
    with pytest.raises(RemoteRankError, match=r"^rank 1 on n1 failed$"):
        results([reported], 1)


@pytest.mark.parametrize(("error", "text"), [
    (NeedsTwoArguments(1, 2), "NeedsTwoArguments: 1 and 2"), (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
])  # fmt: skip
def test_an_error_that_cannot_be_raised_here_is_described(error, text, tmp_path):
    found = written(tmp_path, function.outcome_of_error(0, raised(error)))
    with pytest.raises(RemoteRankError, match=rf"(?s)rank 0 on .* raised .*{text}\nTraceback .*in throw"):
        results(found, 3)


def test_a_job_without_outcomes_is_an_error():
    with pytest.raises(JobError, match="exit code 137"):
        results([], 137)
    assert issubclass(JobError, RuntimeError)


def test_the_call_is_written_to_a_directory_of_all_hosts(tmp_path, monkeypatch):
    """horovodrun ends before it starts a rank: the script lists the working directory, and fails."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError):
        run(divmod, (7, 2), host_discovery_script="ls > found; exit 1")
    assert "horovod-run-" in (tmp_path / "found").read_text()
    monkeypatch.setenv("LSB_JOBID", "1")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "n1.invalid 4 n2.invalid 4")
    assert _shared_directory(None, None) == str(tmp_path)
    assert _shared_directory("localhost:2", None) is None


def write_call(directory, parts):
    (directory / "call").write_bytes(pickle.dumps(([], parts)))


def test_a_rank_writes_what_the_function_returns(tmp_path):
    write_call(tmp_path, [bytes(part) for part in pack((divmod, (7, 2), {}), "a call")])
    function_rank.main(str(tmp_path))
    assert results(function.read_outcomes(str(tmp_path)), 0) == [(3, 1)]


def test_a_function_that_a_rank_cannot_import_is_an_error_that_names_cloudpickle(tmp_path):
    write_call(tmp_path, [b"c__main__\nno_such_function\n."])
    with pytest.raises(InputError, match=r"cannot be loaded on a rank .*no_such_function.* install cloudpickle"):
        function_rank.main(str(tmp_path))
    with pytest.raises(InputError, match="install cloudpickle"):
        results(function.read_outcomes(str(tmp_path)), 1)


def test_a_directory_that_is_not_shared_is_an_error(tmp_path):
    with pytest.raises(InputError, match="must be shared by all hosts"):
        function_rank.main(str(tmp_path))
