"""`allred run`: the start of a program, its output and exit code, signals, restarts, other numbers of ranks."""

import pathlib
import re

import numpy as np
import pytest
from harness import ANY_BLAS_THREADS, BIN, MPICH_BY_DEFAULT, MPIS, run
from hosts import hosts
from test_host_failures import when_ready
from test_shm import full

HERE = pathlib.Path(__file__).parent
PROGRAM = HERE / "run_program.py"
both = pytest.mark.parametrize("mpi", MPIS)
mpich = pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)


def allred_run(mpi, directory, *words, env=None, prefix=(), **more):
    """Run `allred run`, after the words of `prefix`. RUN_PID is a file with its process id."""
    pid = directory / "pid"
    script = f'echo $$ > {pid}; exec "$0" -m allred run --name tested "$@"'
    own = {"RUN_PID": str(pid), "DIRECTORY": str(directory / "checkpoints"), "XDG_RUNTIME_DIR": str(directory)}
    return run(
        [*prefix, "sh", "-c", script, BIN[mpi] / "python", *words], env={**own, **(env or {})}, cwd=directory, **more
    )


def ended(result, code):
    """All processes have ended by themselves, with this exit code."""
    assert result.left == [], result.text
    assert result.code == code, result.text


@both
def test_lines_are_marked_and_written_to_files(mpi, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 3, "--tag", "--logs", "logs", "--mode", "sync", PROGRAM, "lines",
                        env={"MASTER_PORT": "4711", **ANY_BLAS_THREADS})  # fmt: skip
    ended(result, 0)
    lines = ["part0 part1 part2 ", "variables 1 sync", "address 127.0.0.1 4711", "no newline"]
    assert sorted(result.out.splitlines()) == sorted(f"[{rank}] {line}" for rank in range(3) for line in lines)
    for rank in range(3):
        assert f"[{rank}] error of {rank}" in result.err.splitlines(), result.text
        written = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(written) == sorted([*lines, f"error of {rank}"])
    assert "allred run: tested: 3 ranks on localhost; ALLRED_MODE=sync MASTER_ADDR=" in result.err, result.text


@mpich
@pytest.mark.parametrize(("what", "code", "text"), [
    ("raise", 1, "rank 1 on .* failed with exit code 1: ValueError: wrong"),
    pytest.param("exit", 5, r"rank 1 on .* failed with exit code 5: sys.exit\(5\)", marks=full),
    ("kill", 137, "rank 1 on .* was killed by signal 9"),
    ("shutdown", 0, ""),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_rank_that_failed(mpi, what, code, text, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 2, PROGRAM, what)
    ended(result, code)
    assert re.search(f"allred run: {text}" if text else "", result.err), result.text


@pytest.mark.parametrize(("words", "code"), [
    (["-np", 1, PROGRAM, "exit"], 5),
    (["-np", 2, PROGRAM, "early", 3], 3),
    (["-np", 2, PROGRAM, "early", 0], 0),
    pytest.param(["-np", 1, PROGRAM, "early", 0], 0, marks=full),
    (["-np", 2, "no-such-program"], 127),
])  # fmt: skip
def test_exit_codes_of_one_rank_and_of_programs_that_do_not_call_init(words, code, tmp_path):
    result = allred_run("mpich", tmp_path, *words)
    ended(result, code)
    if code and "exit" not in words:
        assert f"mpirun ended with exit code {code} before allred.init() was complete on a rank" in result.err, (
            result.text
        )
    alone = "allred run: warning: 2 ranks ended with success, and none called allred.init(); "
    assert (alone in result.err) == (code == 0 and words[1] == 2), result.text


def test_dry_run_prints_the_command(tmp_path):
    result = allred_run("mpich", tmp_path, "-np", 2, "--dry-run", "--mode", "ps", "train.py", "--lr", "0.1")
    ended(result, 0)
    assert result.out.startswith("ALLRED_MODE=ps "), result.text
    assert " MASTER_ADDR=127.0.0.1 MASTER_PORT=" in result.out
    assert result.out.endswith(f"rank_variables.sh {BIN['mpich'] / 'python'} train.py --lr 0.1\n"), result.text


@both
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", pytest.param("SIGUSR1", marks=full)])
def test_a_signal_lets_the_session_write_a_checkpoint(mpi, name, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 2, PROGRAM, "signal", name)
    ended(result, 0)
    assert re.search(r"^start 1: 2 ranks, steps 0 to \d+$", result.out, re.MULTILINE), result.text
    assert f"allred run: {name}: the ranks receive it" in result.err, result.text
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    assert 5 <= int(checkpoint.name.partition("-")[2]) < 300


@both
def test_a_warning_of_the_batch_system_is_kept_for_the_session_and_kills_no_rank(mpi, tmp_path):
    """SIGUSR1 before init(), behind the session, and after shutdown()."""
    result = allred_run(mpi, tmp_path, "-np", 2, PROGRAM, "around")
    ended(result, 0)
    [steps] = re.findall(r"^start 1: 2 ranks, steps 0 to (\d+)$", result.out, re.MULTILINE)
    assert int(steps) < 100, result.text


def test_a_program_without_allred_receives_the_warning_when_all_ranks_handle_it(tmp_path):
    result = allred_run("mpich", tmp_path, "-np", 2, PROGRAM, "handler")
    ended(result, 0)
    assert result.out.splitlines() == ["received"] * 2, result.text


@pytest.mark.parametrize(
    ("after_s", "what"),
    [pytest.param(0, "the process by which mpirun", marks=full), (3, r"process \d+, by which mpirun")],
)
def test_a_lost_daemon_of_mpirun_before_init_ends_the_job(tmp_path, after_s, what):
    """MPICH's mpirun does not notice, and waits forever. The stopped rank is killed too. At once, `allred run` may not
    have seen the daemon before."""
    result = allred_run("mpich", tmp_path, "-np", 2, PROGRAM, "orphans", after_s)
    ended(result, 1)
    assert re.search(rf"({what}|process \d+, by which mpirun) had started ranks on this host,? was killed", result.err)


@both
def test_a_second_ctrl_c_leaves_no_process(mpi, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 3, PROGRAM, "deaf")
    assert result.left == [], result.text
    assert result.code != 0
    assert "a second signal, SIGINT: ending all processes" in result.err, result.text


@full  # by default test_every_sample_counts_once_in_a_job_that_is_killed_and_resized
@mpich
def test_resized_jobs_lose_and_repeat_no_step(mpi, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 2, "--max-np", 3, PROGRAM, "resize", "3,1")
    ended(result, 0)
    found = re.findall(r"^start (\d): (\d) ranks, steps (\d+) to (\d+)$", result.out, re.MULTILINE)
    assert [(start, size) for start, size, _, _ in found] == [("1", "2"), ("2", "3"), ("3", "1")], result.text
    assert [begin for _, _, begin, _ in found] == ["0", *[end for *_, end in found][:-1]]
    assert found[-1][-1] == "300"


def test_a_changed_host_file_resizes_the_job(tmp_path):
    """It grows up to --max-np, and leaves slots that are no longer listed. A change is kept until a session is open."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    options = ["--hostfile", "hosts", "--max-np", 3]
    result = allred_run("mpich", tmp_path, *options, PROGRAM, "hosts", "7,1,2")
    ended(result, 0)
    found = re.findall(r"^start (\d): (\d) ranks, steps (\d+) to (\d+)$", result.out, re.MULTILINE)
    assert [(start, size) for start, size, _, _ in found] == [("1", "2"), ("2", "3"), ("3", "1"), ("4", "2")], (
        result.text
    )
    assert [begin for _, _, begin, _ in found] == ["0", *[end for *_, end in found][:-1]]
    assert result.err.count("; the job keeps its hosts\n") == 1, result.text
    assert "hosts has changed; the job has no open allred.Session" in result.err, result.text


def test_a_job_without_a_session_is_not_resized(tmp_path):
    result = allred_run("mpich", tmp_path, "-np", 2, PROGRAM, "no session")
    ended(result, 0)
    assert "tested has no open allred.Session" in result.err, result.text


@mpich
def test_the_same_exception_at_the_same_step_ends_the_job(mpi, tmp_path):
    result = allred_run(mpi, tmp_path, "-np", 2, "--restarts", 9, PROGRAM, "same")
    ended(result, 1)
    assert "ValueError: step 7 is wrong; restart 1 of 9 in 0.5 s" in result.err, result.text
    assert "; the job ends: the same exception occurred twice at step 7" in result.err, result.text


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("mpi", "kills"),
    [("mpich", 2), ("openmpi", 2), ("mpich", 20), ("openmpi", 20)],
)
@full  # by default in test_ledger.py
def test_every_sample_counts_once_in_a_job_that_is_killed_and_resized(mpi, kills, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("localhost slots=4\n")
    options = ["-np", 4, "--min-np", 2, "--hostfile", file, "--restarts", kills]
    result = allred_run(mpi, tmp_path, *options, HERE / "restart_program.py", tmp_path, kills, "2,3,4", timeout_s=250)
    ended(result, 0)
    assert (np.loadtxt(tmp_path / "seen") == 6).all(), result.text
    sizes = {int(path.read_text().split()[1]) for path in tmp_path.glob("first-*")}
    assert len(sizes) > 1
    assert sizes <= {2, 3, 4}
    assert f"restart {kills} of {kills} in " in result.err, result.text


@pytest.mark.parametrize(("mpi", "lost"), [
    ("mpich", 1), *(pytest.param(*each, marks=full) for each in [("openmpi", 2), ("openmpi", 1), ("mpich", 2)])
])  # fmt: skip
def test_a_host_that_is_lost_is_left_out(mpi, lost, tmp_path):
    """`allred run` is on another host than the ranks. Host 1 has rank 0, whose watcher reports."""
    with hosts(3, tmp_path) as here:
        agent = str(tmp_path / "agent")
        env = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent, "PRTE_MCA_plm_ssh_agent": agent}
        env |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "ALLRED_TIMEOUT_S": "10"}
        names = ",".join(f"{name}:1" for name in here.names[1:])
        options = ["-np", 2, "--min-np", 1, "--hosts", names, "--restarts", 2]
        with when_ready(tmp_path, lambda: here.set_link(lost, "down")):
            words = [*options, PROGRAM, "lose", tmp_path / "ready"]
            result = allred_run(mpi, tmp_path, *words, env=env, prefix=here.inside(0), timeout_s=150)
        here.wait_for_end()
    assert result.code == 0, result.text
    assert f"without {here.names[lost]}: unreachable" in result.err, result.text
    found = re.findall(r"^start (\d): (\d) ranks, steps (\d+) to (\d+)$", result.out, re.MULTILINE)
    assert [(start, size, end) for start, size, _, end in found] == [("2", "1", "300")], result.text
