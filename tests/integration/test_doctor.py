"""`python -m allred doctor` and `info`: one process, two MPIs, wrong environments, and ranks that hang."""

import json

import pytest
from harness import BIN, MPIS, full, mpirun, python, run

NO_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}

# In the order of the report.
TOPICS = ["software", "C extension", "settings", "MPI library", "launcher", "mpirun", "binding", "cores"]
TOPICS += ["BLAS threads", "/dev/shm", "memory", "GPU", "world"]
TRIED = ["shared memory", "backend", "allreduce", "network between hosts", "MPI's sums"]

# A program that changes the doctor on some ranks, then runs it. It measures for a shorter time.
CHANGED = """
import os, signal, sys, time
RANK = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", 0))
{before}
from allred.doctor import command, findings, trials
trials._TIME_S = 0.02
start_phase = command.start_phase
command.start_phase = lambda watchdog, printer, facts, limit_s: start_phase(watchdog, printer, facts, {start_s})
def replace(name, probe):
    topics = command.TOPICS
    topics[:] = [findings.Topic(t.name, probe, t.diagnose) if t.name == name else t for t in topics]
{change}
sys.exit(command.main([*{options}, "--limit-s", "{limit_s}"]))
"""


def changed(change, limit_s=30, start_s=50, before="", options=("--json",)):
    """change: code that changes the doctor; before: code that runs before allred is imported."""
    return CHANGED.format(change=change, limit_s=limit_s, start_s=start_s, before=before, options=options)


def lines_of(result):
    """The findings in stdout. Lines that do not start with { come from the launcher."""
    found = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    for line in found:
        assert list(line) == ["verdict", "topic", "found", "remedy"], result.text
        assert line["verdict"] in ("ok", "note", "warn", "FAIL"), result.text
        assert line["found"], result.text
        assert line["verdict"] in ("ok", "note") or line["remedy"], result.text
    return found


def line_about(result, topic, containing=""):
    (line,) = [line for line in lines_of(result) if line["topic"] == topic and containing in line["found"]]
    return line


def failing(result):
    return [line["topic"] for line in lines_of(result) if line["verdict"] == "FAIL"]


def doctor(ranks=1, mpi="mpich", **options):
    arguments = ("-m", "allred", "doctor", "--json")
    return mpirun(ranks, *arguments, mpi=mpi, **options) if ranks > 1 else python(*arguments, **options)


@pytest.mark.parametrize("mpi", MPIS)
def test_alone(mpi):
    result = run([BIN[mpi] / "python", "-m", "allred", "doctor", "--json"])
    assert result.code == 0, result.text
    topics = [line["topic"] for line in lines_of(result)]
    assert [topic for topic in topics if topic in TOPICS] == TOPICS, result.text
    name = {"mpich": "MPICH ", "openmpi": "Open MPI "}[mpi]
    library = line_about(result, "MPI library")["found"]
    assert library.startswith(name), result.text
    assert f"from {BIN[mpi].parent}/lib" in library, result.text
    assert line_about(result, "launcher")["found"].startswith("none"), result.text
    assert line_about(result, "backend")["found"] == "single (one rank)", result.text
    assert result.err == "", result.text


def check_report(result, mpi, ranks):
    assert result.code == 0, result.text
    topics = [line["topic"] for line in lines_of(result)]
    assert topics == [*TOPICS, *TRIED], result.text
    assert line_about(result, "launcher")["found"] == {"mpich": "MPICH's mpirun", "openmpi": "Open MPI's mpirun"}[mpi]
    assert line_about(result, "world")["found"].startswith(f"{ranks} ranks: {ranks} on "), result.text
    assert line_about(result, "shared memory")["found"] == "memfd through /proc", result.text
    assert line_about(result, "backend")["found"] == "shm (ranks share a node)", result.text
    measured = line_about(result, "allreduce")["found"]
    assert "4 MiB" in measured, result.text
    assert "GB/s; sums are correct" in measured, result.text


@pytest.mark.full  # by default in the next test
@pytest.mark.parametrize("mpi", MPIS)
def test_one_report_for_all_ranks(mpi):
    check_report(doctor(2, mpi), mpi, 2)


def test_one_report_for_all_ranks_names_the_rank_that_differs():
    before = "os.environ['OPENBLAS_NUM_THREADS'] = '2' if RANK == 2 else '1'"
    result = mpirun(3, "-c", changed("", before=before))
    check_report(result, "mpich", 3)
    line = line_about(result, "BLAS threads")
    assert line["verdict"] == "warn", result.text
    assert line["found"].startswith("rank 2 on "), result.text
    assert ": 2 threads (openblas); other ranks: 1 thread (openblas)" in line["found"], result.text
    assert line["remedy"] == "unset OPENBLAS_NUM_THREADS before mpirun; init() limits the threads", result.text


def test_report_for_people_and_without_the_extension():
    hide = "sys.modules['allred.native._kernels'] = None"
    env = {"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "2"}
    result = mpirun(2, "-c", changed("", before=hide, options=()), env=env)
    assert result.code == 0, result.text
    assert result.out.startswith("ok    software      allred "), result.text
    assert result.out.count("ok    world ") == 1, result.text
    assert result.out.rstrip().endswith(" 0 FAIL"), result.text
    assert result.err == "", result.text  # no banner
    assert "python -m allred.native" in result.out.partition("\nwarn  C extension ")[2], result.text
    assert "mpi (rank 0 lacks the C extension" in result.out.partition("\nwarn  backend ")[2], result.text
    assert "sums are correct" in result.out, result.text


# ---- ranks that differ


def mixed(*environments, tail=("-m", "allred", "doctor", "--json")):
    """One rank of MPICH for each environment."""
    command = [BIN["mpich"] / "mpirun"]
    for variables in environments:
        command += ["-np", "1"]
        for name, value in variables.items():
            command += ["-env", name, value]
        command += [BIN["mpich"] / "python", *tail, ":"]
    return run(command[:-1])


def test_settings_that_differ_fail_with_the_error_of_init():
    result = mixed({"ALLRED_TIMEOUT_S": "5"}, {"ALLRED_TIMEOUT_S": "6"})
    assert result.code == 1, result.text
    assert failing(result) == ["settings"], result.text
    assert "timeout_s is 5.0 on rank 0 but 6.0 on rank 1" in line_about(result, "settings")["found"]
    assert line_about(result, "allreduce")["found"].startswith("not tried"), result.text


# ---- wrong environments


def test_an_unknown_setting_and_another_mpirun_first_on_the_path_and_a_diagnosis_that_raises():
    """One process for three findings of different topics."""
    env = {"PATH": f"{BIN['openmpi']}:/usr/bin:/bin", "ALLRED_BUCKETS": "1"}
    result = python("-c", changed("replace('memory', lambda: 'no facts')"), env=env)
    assert result.code == 1, result.text
    assert failing(result) == ["settings"], result.text
    assert "did you mean ALLRED_BUCKET_BYTES?" in line_about(result, "settings")["found"], result.text
    line = line_about(result, "mpirun")
    assert line["verdict"] == "warn", result.text
    assert f"the first mpirun on PATH is {BIN['openmpi'] / 'mpirun'} (Open MPI)" in line["found"], result.text
    assert line["remedy"].startswith(f"export PATH={BIN['mpich']}:$PATH"), result.text
    line = line_about(result, "memory")
    assert line["verdict"] == "note", result.text
    assert line["found"].startswith("could not be examined: AttributeError"), result.text


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_without_any_mpi(ranks):
    result = doctor(ranks, env=NO_MPI)
    assert failing(result) == ["MPI library"], result.text
    line = line_about(result, "MPI library")
    assert "RuntimeError: cannot load MPI library; /nonexistent/libmpi.so: cannot open" in line["found"], result.text
    assert line["remedy"].startswith("unset MPI4PY_LIBMPI"), result.text
    assert "Traceback" not in result.text
    assert result.code == 1 or ranks > 1, result.text  # MPICH's mpirun ignores exit codes before MPI_Init


def test_worlds_of_one_under_the_launcher_of_another_mpi():
    result = run([BIN["mpich"] / "mpirun", "-np", 2, BIN["openmpi"] / "python", "-m", "allred", "doctor", "--json"])
    assert result.code == 1, result.text
    assert failing(result) == ["world"], result.text
    line = line_about(result, "world")
    assert "2 processes were started, but Open MPI 5" in line["found"], result.text
    assert "sees 2 worlds of one rank" in line["found"], result.text
    assert line["remedy"] == f"{BIN['openmpi'] / 'mpirun'} -np 2 python ...", result.text


def test_an_mpi_that_ends_the_process_while_it_starts():
    """Open MPI's mpirun may drop output when the first rank ends, so the warning is printed earlier."""
    result = run([BIN["openmpi"] / "mpirun", "-np", 2, BIN["mpich"] / "python", "-m", "allred", "doctor", "--json"])
    assert result.code != 0, result.text
    line = line_about(result, "launcher", "Open MPI's mpirun can start ranks of MPICH ")
    assert line["verdict"] == "warn", result.text
    assert line["remedy"] == f"{BIN['mpich'] / 'mpirun'} -np 2 python ...", result.text
    assert failing(result) in (["world"], []), result.text


# ---- probes that fail, wrong sums, and ranks that hang


WRONG = """
import allred
from allred.comm.backends import shm
if RANK == 1: replace('memory', lambda: open('/nonexistent/file'))
trials.segment.share = shm.share = lambda *_: None
right, mpi_sums, fill = allred.allreduce_, trials.mpi_sums, trials.verify.fill
def wrong(array, op):
    right(array, op)
    array[0] += allred.rank()
def wrong_of_mpi(comm):
    trials.verify.fill = lambda group, rank: fill(group, 0)
    return mpi_sums(comm)
allred.allreduce_, trials.mpi_sums = wrong, wrong_of_mpi
"""


def test_one_report_of_a_probe_that_raises_and_no_shared_memory_and_wrong_sums():
    """One job for four findings of different topics."""
    result = mpirun(2, "-c", changed(WRONG))
    assert result.code == 1, result.text
    line = line_about(result, "memory", "could not be examined: FileNotFoundError")
    assert line["verdict"] == "note", result.text
    assert "(rank 1 on " in line["found"], result.text
    assert line_about(result, "shared memory")["found"].startswith("ranks 0-1 on "), result.text
    backend = line_about(result, "backend")
    assert (backend["verdict"], "no two ranks could share memory" in backend["found"]) == ("warn", True), result.text
    assert failing(result) == ["allreduce", "MPI's sums"], result.text
    assert "4 B: wrong on rank 1 on " in line_about(result, "allreduce")["found"], result.text
    assert line_about(result, "MPI's sums")["found"].startswith("wrong on ranks 0-1 on "), result.text


HANGS = [  # MPI; change on rank 1; topic; words; time that a trial has beyond --limit-s
    *(
        pytest.param(
            *(mpi, "replace('memory', lambda: time.sleep(60))", "world", "MPI did not start within 2 s", 1.0),
            marks=pytest.mark.full,
        )
        for mpi in MPIS
    ),
    pytest.param(
        *("openmpi", "command.gather = lambda *_: time.sleep(60)", "ranks", "no answer from rank 1 of 2 within 3 s"),
        1.0,
        marks=pytest.mark.full,
    ),
    (
        *("mpich", "trials.share = lambda _: os.kill(os.getpid(), signal.SIGSTOP)"),
        *("shared memory", "not finished after 1 s", -2.0),  # rank 0 uses its core fully while it waits
    ),
    pytest.param(
        *("openmpi", "trials.init = lambda _: time.sleep(60)", "allred.init()", "not finished after ", 1.0),
        marks=pytest.mark.full,
    ),
    pytest.param(
        *("mpich", "trials.time_allreduce = lambda _: time.sleep(60)", "allreduce", "CollectiveTimeout: ", 1.0),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("mpi", "change", "topic", "found", "extra_s"), HANGS)
def test_the_doctor_ends_if_a_rank_hangs(mpi, change, topic, found, extra_s):
    code = changed(
        f"command._WATCHDOG_EXTRA_S = {extra_s}\nif RANK == 1: {change}",
        limit_s=3,
        start_s=2 if topic == "world" else 50,
    )
    result = mpirun(2, "-c", code, mpi=mpi)
    assert result.code != 0, result.text
    assert found in line_about(result, topic)["found"], result.text
    assert failing(result)[0] == topic, result.text
    assert line_about(result, "memory")["verdict"] in ("ok", "note"), result.text  # the report is printed


def test_a_rank_that_dies_while_mpi_starts():
    """MPICH's mpirun only: Open MPI's kills the other ranks within milliseconds, and may drop their output."""
    result = mpirun(2, "-c", changed("if RANK == 1: replace('memory', lambda: os._exit(3))", start_s=3))
    assert result.code != 0, result.text
    assert failing(result) in (["world"], ["ranks"]), result.text  # ranks: rank 0 was still probing


@full
def test_a_trial_that_raises_on_one_rank_is_reported_with_its_error():
    change = "command._WATCHDOG_EXTRA_S = 1.0\nif RANK == 1: trials.time_allreduce = lambda _: 1 / 0"
    result = mpirun(2, "-c", changed(change, limit_s=3))
    assert result.code != 0, result.text
    line = line_about(result, "allreduce", "ZeroDivisionError: division by zero (rank 1 on ")
    assert line["verdict"] == "FAIL", result.text
    assert line_about(result, "allreduce", "CollectiveTimeout")["verdict"] == "FAIL", result.text


# ---- info


INFO = """
import os
from allred.doctor import info
os.environ["ALLRED_BUCKETS"] = "1"
info.main(["--json"])
del os.environ["ALLRED_BUCKETS"]
info.main([])
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_info_after_init_and_if_init_fails(mpi):
    result = mpirun(2, "-c", INFO, mpi=mpi)
    assert result.code == 0, result.text
    failed = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    [problem] = [record["value"] for record in failed if record["name"] == "backend"]
    assert problem.startswith("ConfigError: unknown variable ALLRED_BUCKETS"), result.text
    found = {line[:18].strip(): line[19:] for line in result.out.splitlines() if not line.startswith("{")}
    assert found["MPI"].startswith({"mpich": "MPICH ", "openmpi": "Open MPI "}[mpi]), result.text
    assert found["MPI's settings"] == {"mpich": "none needed", "openmpi": "OMPI_MCA_btl=^ofi, given at its start"}[mpi]
    assert found["backend"] == "shm (ranks share a node)", result.text
    assert found["arena"].startswith(("at most ", "none: ALLRED_ARENA=0")), result.text
    assert (result.out.count("numpy "), result.out.count('"numpy"')) == (1, 1), result.text
    assert result.err == "", result.text


def test_info_of_a_program_that_started_mpi_before():
    code = "from mpi4py import MPI; import allred; from allred.doctor import info; print(*info.lines(), sep='\\n')"
    result = run([BIN["openmpi"] / "python", "-c", code])
    assert result.code == 0, result.text
    assert "too late for OMPI_MCA_btl=self: MPI was started before allred.init()" in result.out, result.text


INFO_WITHOUT_MPI = """
import os
from allred.doctor import info
info.main(["--json"])
os.environ.update(ALLRED_TIMEOUT_S="5", ALLRED_X="1")
info.main(["--config"])
"""


def test_info_and_its_settings_need_no_mpi():
    result = python("-c", INFO_WITHOUT_MPI, env=NO_MPI)
    assert result.code == 0, result.text
    records = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    found = {record["name"]: record["value"] for record in records}
    assert (found["MPI"], found["backend"]) == ("none", "single (one rank)"), result.text
    assert found["arena"] == "none: one rank has no other to share memory with", result.text
    assert "cannot load MPI library" in found["mpi4py"], result.text
    assert "ALLRED_TIMEOUT_S: 5.0 (variable)\n    float, default 1800.0; time limit of" in result.out, result.text
    assert "ALLRED_MODE: sync (default)" in result.out, result.text
    assert "ALLRED_X: (set) (unknown variable)\n    not a setting of this version" in result.out, result.text


@pytest.mark.full  # test_bench.py has the same of the other command
def test_arguments():
    for option, text in [("--jsno", "unrecognized arguments: --jsno"), ("--limit-s=nan", "seconds > 0, got 'nan'")]:
        wrong = mpirun(2, "-m", "allred", "doctor", option)
        assert wrong.code == 2, wrong.text
        assert wrong.err.count(text) == 1, wrong.text
    helped = mpirun(2, "-m", "allred", "info", "--help")
    assert (helped.code, helped.out.count("usage:")) == (0, 1), helped.text
