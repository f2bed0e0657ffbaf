"""A rank that fails ends the job: soon, non-zero, with its traceback shown once."""

import pathlib

import pytest
from failures import FAILURES, MPI_FIRST, WITHOUT_EXTENSION, count_tracebacks
from harness import MPICH_BY_DEFAULT, MPIS, full, mpirun

PROGRAM = """
import os, signal, sys, time
{before}
import numpy as np
import allred

def fail():
    {failure}

allred.init(banner=False)
allred.barrier()
if allred.rank() == 1:
    time.sleep(0.2)  # the others are where they are meant to be
    fail()
allred.allreduce(np.ones(10))
print("never")
"""


def program(failure="raise", before=""):
    return PROGRAM.format(before=before, failure=FAILURES[failure][0])


def check(result, failure):
    code = FAILURES[failure][1]
    assert result.code == code, result.text
    assert "never" not in result.out, result.text
    assert count_tracebacks(result) == result.err.count("ValueError: boom") == (failure == "raise"), result.text
    assert result.err.count("allred: rank 1 on ") == 1, result.text
    assert f"left with exit code {code}; ending the job" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("failure", ["raise", "sys.exit"])
@pytest.mark.parametrize(
    "before", [WITHOUT_EXTENSION, MPI_FIRST, pytest.param(f"{MPI_FIRST}; {WITHOUT_EXTENSION}", marks=full)]
)
def test_without_the_extension_and_where_mpi_was_imported_first(mpi, failure, before):
    check(mpirun(2, "-c", program(failure, before=before), mpi=mpi, timeout_s=40), failure)


GROUP = """
from mpi4py import MPI
import allred
group = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank > 0)
allred.init(group)
allred.barrier()
if allred.size() == 2:
    try: allred.allreduce([1.0] * (allred.rank() + 1))
    except allred.MismatchError as error: assert error.__notes__ == ["ranks 0 to 1 are ranks 1, 2 of MPI.COMM_WORLD"]
    else: assert False
if MPI.COMM_WORLD.rank == 2: raise ValueError("boom")
allred.allreduce(1.0)
"""


@pytest.mark.parametrize("before", ["", pytest.param(WITHOUT_EXTENSION, marks=full)], ids=["C", "Python"])
def test_messages_of_a_group_have_the_numbers_in_mpi_in_brackets(before):
    result = mpirun(3, "-c", f"import sys; {before}\n{GROUP}", timeout_s=40)
    assert result.code == 1, result.text
    assert "2 ranks (1, 2 of MPI.COMM_WORLD) on" in result.err, result.text
    assert "allred: rank 1 (rank 2 of MPI.COMM_WORLD) on " in result.err, result.text
    assert "rank 2 on" not in result.err, result.text


CAUGHT = "\ntry: sys.exit(2)\nexcept SystemExit as error: assert error.code == 2"
AGAIN = "\ntry: sys.exit(0)\nexcept SystemExit as error: sys.exit(error)"
THREAD = "\nimport threading\nthread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()"
FINALIZED = "allred.shutdown()\nfrom mpi4py import MPI\nMPI.Finalize()"
GOOD = {
    "end": "",
    "shutdown": "allred.shutdown()",
    "shutdown, exit(256)": "allred.shutdown()\nsys.exit(256)",
    "exit(0)": "sys.exit(0)",
    "exit()": "sys.exit()",
    "exit(256)": "sys.exit(256)",
    "caught": CAUGHT,
    "raised again": AGAIN,
    "in a thread": THREAD,
    "finalized": FINALIZED,
    "finalized, exit()": FINALIZED + "\nsys.exit()",
}
TOGETHER = [  # by rank; shutdown() and MPI.Finalize() are collective
    ("caught", "in a thread", "raised again"),
    pytest.param(("shutdown", "shutdown, exit(256)"), marks=full),
    ("finalized", "finalized, exit()"),
    pytest.param(("end", "exit(0)", "exit()", "exit(256)"), marks=full),
]
BEFORE = {"plain": "", "no extension": WITHOUT_EXTENSION, "MPI first": MPI_FIRST}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("before", ["plain", "MPI first", pytest.param("no extension", marks=full)])
@pytest.mark.parametrize("ends", TOGETHER, ids="; ".join)
def test_a_good_end_is_quiet_even_if_one_rank_leaves_early(mpi, before, ends):
    """Each rank ends in its own way, one after another. The last one has no extension."""
    code = (
        "import os, sys, time\n"
        "number = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"if number == {len(ends) - 1}: {WITHOUT_EXTENSION}\n"
        f"{BEFORE[before]}\nimport allred\nallred.init(banner=False)\n"
        "time.sleep(0.2 * allred.rank())\n"
        f"print('done', flush=True)\nexec({[GOOD[end] for end in ends]!r}[allred.rank()])\n"
    )
    result = mpirun(len(ends), "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 0, result.text
    assert result.out.count("done") == len(ends), result.text
    assert result.err == "", result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_failures_of_children_and_threads_and_calls_of_the_hook_do_not_end_the_job(mpi):
    """A forked child fails; a program, which inherits mpirun's variables and with os.system all descriptors that may be
    inherited; and a thread that calls sys.excepthook. Rank 1 has no extension. The job is still alive 3.5 s later."""
    child = "import allred, sys; sys.exit(3)"
    code = (
        "import os, shlex, subprocess, sys, threading, time\n"
        "number = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"if number == 1: {WITHOUT_EXTENSION}\n"
        f"else: assert subprocess.run([sys.executable, '-c', {child!r}]).returncode == 3\n"
        "import allred\nallred.init(banner=False)\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        f"if number == 0: assert os.system(sys.executable + ' -c ' + shlex.quote({child!r})) == 3 << 8\n"
        f"else: assert subprocess.run([sys.executable, '-c', {child!r}], close_fds=False).returncode == 3\n"
        "threading.excepthook = lambda args: sys.excepthook(args.exc_type, args.exc_value, args.exc_traceback)\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "time.sleep(3.5)\nassert allred.allreduce(1.0, allred.Sum) == 2\nprint('alive', flush=True)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert (result.code, result.out.count("alive")) == (0, 2), result.text
    assert result.err.count("ZeroDivisionError") == 2, result.text
    assert "allred: " not in result.err, result.text


def test_a_world_of_one_just_fails():
    result = mpirun(1, "-c", "import allred; allred.init(banner=False); raise ValueError('boom')", timeout_s=40)
    assert result.code == 1
    assert result.err.count("ValueError: boom") == 1
    assert "allred:" not in result.err


@pytest.mark.parametrize("before", ["", pytest.param(WITHOUT_EXTENSION, marks=full)], ids=["plain", "no extension"])
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("end", [pytest.param("", marks=full), "sys.exit(0)"])
def test_after_a_time_limit_the_job_ends_and_not_well(mpi, end, before):
    """Even if the script goes on and ends with 0: MPI cannot be finalized with an operation that never completes."""
    code = (
        f"import sys, time\n{before}\nimport allred\nfrom allred.comm import functions\nallred.init(banner=False)\n"
        "if allred.rank() == 1: time.sleep(600)\n"
        "try: functions.current().barrier().wait(timeout_s=0.3)\n"
        "except allred.CollectiveTimeout as error: print(error, flush=True)\n"
        "allred.shutdown()\n"
        "assert not allred.is_initialized()\n"
    )
    result = mpirun(2, "-c", code + end, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    assert "barrier() #" in result.out, result.text
    assert ": not complete after 0.3 s" in result.out, result.text
    assert "allred: rank 0 on " in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        pytest.param("raise ValueError('boom')", 1, marks=full),
        ("sys.exit(3)", 3),
        pytest.param("allred.init(no_such_setting=1)", 1, marks=full),
        pytest.param("open('/no/file')", 1, marks=full),
    ],
)
def test_before_init_while_the_others_wait_in_it(mpi, failure, code):
    program = (
        "import os, sys, time\nimport allred\n"
        "rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"if rank == 1: time.sleep({2 * (mpi == 'openmpi')}); {failure}\n"
        "allred.init()\n"
    )
    result = mpirun(2, "-c", program, mpi=mpi, timeout_s=40)
    # prterun of Open MPI 5.0.11 may abort itself if it ends the job while rank 0 connects to it, so rank 1 fails later.
    if not (mpi == "openmpi" and "prterun: pthread_mutex_lock.c" in result.err):
        assert result.code == code, result.text
    assert result.err.count("Traceback") == (code == 1), result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("failure", ["raise", pytest.param("sys.exit", marks=full)])
@pytest.mark.parametrize("before", ["", pytest.param(WITHOUT_EXTENSION, marks=full)], ids=["plain", "no extension"])
def test_a_rank_whose_threads_go_on_is_ended_too_even_if_the_users_excepthook_is_silent(mpi, failure, before):
    threads = f"{before}\nimport threading; threading.Thread(target=threading.Event().wait).start()"
    silent = "\nsys.excepthook = lambda *_: None"
    result = mpirun(2, "-c", program(failure, before=threads + silent), mpi=mpi, timeout_s=40)
    assert result.code == FAILURES[failure][1], result.text
    assert result.err.count("not left after 3 s: threads or atexit functions run; ending the job") == 1, result.text


SLOW_ATEXIT = "import atexit; atexit.register(time.sleep, 25)"
SLOW_DELETION = """
class Slow:
    def __del__(self, sleep=time.sleep): sleep(25)
slow = Slow()
"""


@pytest.mark.parametrize(("mpi", "failure", "slow"), [
    ("mpich", "raise", SLOW_DELETION), ("mpich", "sys.exit", SLOW_ATEXIT),
    pytest.param("openmpi", "sys.exit", SLOW_DELETION, marks=full),
])  # fmt: skip
def test_a_failed_rank_whose_interpreter_ends_slowly_is_ended_with_its_code(mpi, failure, slow):
    """These run after the function that init() registers with atexit."""
    result = mpirun(2, "-c", program(failure, before=slow), mpi=mpi, timeout_s=40)
    assert result.code == FAILURES[failure][1], result.text
    assert result.err.count("allred: rank 1 on ") == 1, result.text
    assert "but has not left after" in result.err, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    ("hook", "place", "before"),
    [
        ("lambda *_: 1 / 0", "after", WITHOUT_EXTENSION),
        *(
            pytest.param(hook, place, before, marks=full)
            for hook in ("lambda *_: 1 / 0", "lambda *_: None")
            for place in ("before", "after")
            for before in ("", WITHOUT_EXTENSION)
        ),
    ],
)
def test_an_error_ends_the_job_also_if_the_users_excepthook_fails(mpi, hook, place, before):
    first, second = (f"sys.excepthook = {hook}", "") if place == "before" else ("", f"sys.excepthook = {hook}")
    code = (
        f"import sys\n{before}\n{first}\nimport allred\nallred.init(banner=False)\n{second}\n"
        "if allred.rank() == 1: raise ValueError('boom')\nallred.barrier()\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text


HOOK = "lambda *args: (print('HOOK', args[0].__name__, flush=True), sys.__excepthook__(*args))"
CHAIN = "(lambda before: lambda *args: (print('HOOK', args[0].__name__, flush=True), before(*args)))(sys.excepthook)"
RUNNER = """
try: main()
except BaseException:
    sys.excepthook(*sys.exc_info())
    try: sys.exit(1)
    except SystemExit as error: status = error.code
sys.exit(status)
"""
THREAD_RUNS = "import threading; threading.Thread(target=threading.Event().wait).start()"
WAYS = {  # arguments of Python; before init(); after it; the end; the exceptions that a hook of the program sees
    "mpi4py": (["-m", "mpi4py"], "", "", "main()", []),
    "mpi4py, hook before init": (["-m", "mpi4py"], f"sys.excepthook = {HOOK}", "", "main()", ["ValueError"]),
    "hook that calls the one before": (
        [], "", f"sys.excepthook = {CHAIN}", "main()", ["RemoteRankError", "ValueError"],
    ),
    "hook that replaces, and a thread": (
        [], "", f"sys.excepthook = {HOOK}; {THREAD_RUNS}", "main()", ["RemoteRankError", "ValueError"],
    ),
    "coverage": ([], "", "", RUNNER, []),
}  # fmt: skip
RARE_WAYS = ("mpi4py, hook before init", "hook that calls the one before")


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("way", [pytest.param(way, marks=full) if way in RARE_WAYS else way for way in WAYS])
def test_every_way_to_run_a_program_shows_the_traceback_rank_and_exit_code(mpi, way):
    """Each hook of the program is called once. The error of the others names the exception."""
    arguments, before, after, end, seen = WAYS[way]
    code = (
        f"import sys\nimport allred\n{before}\nallred.init(banner=False)\n{after}\n"
        "def main():\n"
        "    if allred.rank() == 1: raise ValueError('boom')\n"
        "    try: allred.barrier()\n"
        "    except allred.RemoteRankError as error: assert 'ValueError: boom' in str(error); raise\n"
        f"{end}\n"
    )
    result = mpirun(2, *arguments, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    assert sorted(line for line in result.out.splitlines() if "HOOK" in line) == [f"HOOK {name}" for name in seen]
    tracebacks = 2 if "replaces" in way else 1  # only that hook prints the error of the other rank
    assert result.err.count("\nValueError: boom\n") == tracebacks, result.text  # once as a note of the other error
    assert "AssertionError" not in result.err, result.text
    assert result.err.count("allred: rank 1 on ") == 1, result.text
    assert result.err.count("allred: ") == 1, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_signal_handler_that_raises_does_not_stop_the_report_of_an_error(mpi):
    """As torch's handler of SIGCHLD, for a DataLoader worker that dies while the rank reports."""
    code = (
        "import os, signal\nimport allred\nallred.init(banner=False)\n"
        "def handler(*_): raise RuntimeError('a worker has died')\n"
        "class Boom(ValueError):\n"
        "    def __str__(self):\n"
        "        os.kill(os.getpid(), signal.SIGCHLD)\n"
        "        return 'boom'\n"
        "signal.signal(signal.SIGCHLD, handler)\n"
        "if allred.rank() == 1: raise Boom\n"
        "try: allred.barrier()\n"
        "except allred.RemoteRankError as error: print(error, flush=True); raise\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    assert "Boom: boom" in result.out, result.text
    assert result.err.count("Boom: boom") == 1, result.text
    assert "a worker has died" not in result.err, result.text


def test_an_exit_in_an_atexit_function_is_shown_as_in_python():
    code = "import atexit, sys, allred\nallred.init(banner=False)\natexit.register(sys.exit, 3)\n"
    result = mpirun(2, "-c", code, timeout_s=40)
    assert result.code == 0, result.text
    assert result.err.count("SystemExit: 3") == 2, result.text
    assert "_Exit:" not in result.err, result.text


@full
def test_python_m_mpi4py_leaves_an_explicit_exit_status_to_the_exit_of_the_rank():
    code = "import allred\nallred.init(banner=False)\nif allred.rank() == 1: raise SystemExit(3)\nallred.barrier()"
    result = mpirun(2, "-m", "mpi4py", "-c", code, timeout_s=40)
    assert result.code == 3, result.text
    assert "allred: rank 1 on " in result.err, result.text
    assert "left with exit code 3; ending the job" in result.err, result.text


def test_output_that_is_closed_does_not_keep_the_job_alive():
    code = (
        f"import os, sys\n{WITHOUT_EXTENSION}\nimport allred\nallred.init(banner=False)\n"
        "if allred.rank() == 1:\n    sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2); sys.exit(3)\n"
        "allred.barrier()\n"
    )
    result = mpirun(2, "-c", code, timeout_s=40)
    assert result.code == 3, result.text


def test_ranks_that_are_blocked_in_a_call_of_nccl_end():
    """NCCL cannot be aborted then, so no rank can raise the error."""
    result = mpirun(2, pathlib.Path(__file__).with_name("nccl_blocked_program.py"))
    assert result.code == 1, result.text
    assert "allreduce 'w': not complete on the GPU after 1 s" in result.err, result.text
    assert "is blocked in a call that never completes; ending the job" in result.err, result.text
    assert result.left == [], result.text
