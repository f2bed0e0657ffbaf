"""The files of killed jobs in /dev/shm. Each job has its own /dev/shm, without the files of other jobs."""

import json

import pytest
from harness import BIN, run

PROGRAM = """
import os, pathlib, signal, sys, time
import allred
allred.init(banner=False)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
if sys.argv[2] == "one rank is killed" and allred.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "a rank raises" and allred.rank() == 1:
    raise OSError("on purpose")
for _ in range(600):
    allred.barrier()
    time.sleep(0.1)
"""

# Creates a file that no rank maps, runs the job, and prints the files that are left.
DRIVER = """
import os, pathlib, signal, subprocess, sys, time
directory, case, *command = sys.argv[1:]
shm, pids = pathlib.Path("/dev/shm"), pathlib.Path(directory, "pids")
pids.mkdir()
(shm / "mpich_shm_1234abcd_0").write_bytes(bytes(4096))
mpirun = subprocess.Popen([*command, str(pids), case])
def wait(condition):
    deadline = time.monotonic() + 40
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
if case == "all are killed":
    wait(lambda: len(os.listdir(pids)) == 2)
    print(len(list(shm.glob("mpich_shm_*"))), "files")
    for pid in [mpirun.pid, *map(int, os.listdir(pids))]:
        os.kill(pid, signal.SIGKILL)
mpirun.wait()
wait(lambda: len(os.listdir(shm)) == 1)
print(*sorted(os.listdir(shm)))
"""


@pytest.fixture
def alone():
    """The beginning of a command that runs with an empty /dev/shm of its own."""
    words = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if run([*words, "true"]).code:
        pytest.skip("unshare cannot make a mount namespace here")
    return words


@pytest.mark.parametrize(
    "case",
    ["all are killed", "one rank is killed", pytest.param("a rank raises", marks=pytest.mark.full), "init raises"],
)
def test_mpichs_file_of_a_dead_job_is_deleted_and_no_other(alone, tmp_path, case):
    (tmp_path / "program.py").write_text(PROGRAM)
    mpirun = [BIN["mpich"] / "mpirun", "-np", 2, BIN["mpich"] / "python", tmp_path / "program.py"]
    env = {"ALLRED_MODE": "unknown"} if case == "init raises" else {}
    result = run([*alone, BIN["mpich"] / "python", "-c", DRIVER, tmp_path, case, *mpirun], env=env, timeout_s=90)
    assert case != "all are killed" or "1 files" in result.out, result.text
    assert case != "init raises" or "ConfigError" in result.err, result.text
    assert result.out.splitlines()[-1] == "mpich_shm_1234abcd_0", result.text
    assert not result.left, result.text


def test_a_full_dev_shm_is_reported_before_mpi_starts(alone):
    command = 'mount -o remount,size=1m /dev/shm; exec "$@"'
    program = "import allred; allred.init()"
    mpirun = [BIN["mpich"] / "mpirun", "-np", 2, BIN["mpich"] / "python", "-c", program]
    result = run([*alone, "sh", "-c", command, "sh", *mpirun])
    assert result.code != 0, result.text
    assert result.err.count("has 1 MiB left. MPICH may need 28 MiB for 2 ranks; ") == 1, result.text


def test_the_doctor_counts_files_of_killed_jobs_and_its_command_deletes_them(alone):
    """The file of a rank without a watcher stays; a file that a process has open is not counted."""
    killed = "import os; from mpi4py import MPI; os.kill(os.getpid(), 9)"
    shell = 'exec 3<>/dev/shm/mpich_shm_1234abcd_0; "$0" -c "$1"; "$0" -m allred doctor --json; '
    shell += '"$0" -m allred.watch.shm_files; ls /dev/shm'
    result = run([*alone, "sh", "-c", shell, BIN["mpich"] / "python", killed])
    (line,) = [json.loads(text) for text in result.out.splitlines() if '"/dev/shm"' in text]
    assert (line["verdict"], line["remedy"]) == ("note", "python -m allred.watch.shm_files"), result.text
    assert "in 1 file of killed MPICH jobs" in line["found"], result.text
    deleted, left = result.out.splitlines()[-2:]
    assert deleted.startswith("deleted 1 files of MPICH in /dev/shm that no process used, "), result.text
    assert left == "mpich_shm_1234abcd_0", result.text


ONE_RANK = """
import os, signal, sys
import allred
allred.init(banner=False)
print(os.listdir("/dev/shm"), allred.allreduce(2.0), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("killed", -9), pytest.param("normal", 0, marks=pytest.mark.full)])
def test_one_rank_leaves_no_file(alone, tmp_path, end, code):
    """Without a watcher."""
    result = run([*alone, BIN["mpich"] / "python", "-c", ONE_RANK, end], env={"ALLRED_TIMEOUT_S": "60"})
    assert result.out == "[] 2.0\n", result.text
    assert result.code == code, result.text
