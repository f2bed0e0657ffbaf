"""Jobs of mode ps under a real mpirun: a script with a common beginning (`job`), or several cases one after another in
the same processes (`run_cases`).
"""

import dataclasses
import json
import re

from harness import BIN, mpirun, run

POLICIES = {
    "async": {"consistency": "async"},
    "bounded": {"consistency": "bounded", "staleness": 1},
    "sync": {"consistency": "sync"},
    "backup": {"consistency": "sync", "replicas_to_aggregate": 2},
}

# Each rank leaves its process's number in a file of the directory argv[1], named by its world rank.
HEAD = """
import os, pathlib, signal, sys, threading, time
{before}
import numpy as np
import allred
allred.init()
here = pathlib.Path(sys.argv[1])
me, workers = allred.rank(), allred.size()
(here / f"writing-{{allred.world_rank()}}").write_text(str(os.getpid()))
(here / f"writing-{{allred.world_rank()}}").rename(here / f"pid-{{allred.world_rank()}}")

def pid(world_rank):
    return int((here / f"pid-{{world_rank}}").read_text())

params = {{"w": np.zeros({elements}), "b": np.zeros(3, np.float32)}}
ones = {{"w": np.ones({elements}), "b": np.ones(3, np.float32)}}
"""
MAKE = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)

def train(steps, pause_s=0.0):
    for _ in range(steps):
        time.sleep(pause_s)
        opt.step(params, ones)

def done(*words):
    print("done", me, *words, flush=True)
"""

# Instead of MAKE, with one server and two workers: worker 1 is cut short in the middle of a gradient. The third step of
# the server lasts until then. `others` is called in worker 0, and `cut_short(number of a signal)` in worker 1.
CUT_SHORT = """
def await_file(name):
    until = time.monotonic() + 30
    while not (here / name).exists() and time.monotonic() < until: time.sleep(0.01)

class Slow:
    def __init__(self): self.count = 0
    def step(self, params, grads):
        self.count += 1
        params["w"] -= grads["w"]
        if self.count == 3:
            (here / "slow").touch()
            await_file("cut short")

opt = allred.distributed(Slow())
opt.broadcast(params)

def train(steps):
    for _ in range(steps): opt.step(params, ones)

def done(*words):
    print("done", me, *words, flush=True)

def others():
    def watch():
        until = time.monotonic() + 30
        while open(f"/proc/{pid(2)}/stat").read().rpartition(")")[2].split()[0] != "T" and time.monotonic() < until:
            time.sleep(0.01)
        (here / "cut short").touch()

    train(1)
    allred.barrier()
    if STOPS: threading.Thread(target=watch).start()
    train(1)

def cut_short(number):
    train(1)
    allred.barrier()
    await_file("slow")
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    try:
        train(1)
    finally:
        (here / "cut short").touch()
        time.sleep(0.5)  # so the server begins the request before it hears of the failure
"""


def job(
    here,
    body,
    workers=3,
    servers=1,
    apart=False,
    elements=200_000,
    make=MAKE,
    before="",
    mpi="mpich",
    words=(),
    **settings,
):
    """Run a script on so many ranks. apart: all goes by MPI. `mpirun`: other words to start it by."""
    options = {key: settings.pop(key) for key in ("mpirun",) if key in settings}
    env = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(servers or 1), "ALLRED_BANNER": "0"}
    env |= {f"ALLRED_{key.upper()}": str(value) for key, value in settings.items()}
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    script = HEAD.format(before=before, elements=elements) + make + body
    options["timeout_s"] = 40
    if "mpirun" in options:
        command = [*options.pop("mpirun"), "-np", workers + servers, BIN[mpi] / "python", "-c", script, here, *words]
        return run(command, env=env, **options)
    return mpirun(workers + servers, "-c", script, here, *words, mpi=mpi, env=env, **options)


@dataclasses.dataclass
class Case:
    """A part of a job: what its workers run. env: variables that are set during the case."""

    body: str
    servers: int = 1
    env: dict[str, str] = dataclasses.field(default_factory=dict)


# The servers return from Server.join() after each case. A body prints with `say`.
CASES = """
import json, os, pathlib, signal, sys, threading, time
import numpy as np
import allred
{before}
def refuses(call, *given, **named):
    try:
        call(*given, **named)
    except allred.AllredError as error:
        return f"{{type(error).__name__}}: {{error}}"
    raise AssertionError("no error")

ranks, here = int(sys.argv[1]), pathlib.Path(sys.argv[2])
for number, (body, servers, env) in enumerate(json.loads(sys.argv[3])):
    os.environ.update(env)
    server = allred.Server({{"ps": servers, "worker": ranks - servers}})
    pid_file = here / f"{{number}}-{{allred.world_rank()}}"
    pid_file.with_suffix(".new").write_text(str(os.getpid()))
    pid_file.with_suffix(".new").rename(pid_file)
    if allred.job_name() == "ps":
        server.join()
    else:
        me = allred.rank()

        def say(*words, number=number, me=me):
            print(f"case {{number}} worker {{me}}:", *words, flush=True)

        def pid(world_rank, number=number):
            return int((here / f"{{number}}-{{world_rank}}").read_text())

        given = {{"params": {{"w": np.ones(4), "b": np.ones(2)}}, "ones": {{"w": np.ones(4), "b": np.ones(2)}}}}
        try:
            exec(body, {{**globals(), **given}})
        except BaseException:
            print("failed:", body, file=sys.stderr, flush=True)
            raise
    allred.shutdown()
    for name in env:
        del os.environ[name]
"""


def run_cases(here, cases, ranks=2, mpi="mpich", before="", **settings):
    """Run {name: Case} in one job. Return its result, and what the workers printed: {name: {worker: text}}."""
    env = {"ALLRED_BANNER": "0", **{f"ALLRED_{key.upper()}": str(value) for key, value in settings.items()}}
    given = json.dumps([dataclasses.astuple(case) for case in cases.values()])
    result = mpirun(ranks, "-c", CASES.format(before=before), ranks, here, given, mpi=mpi, env=env, timeout_s=100)
    check_end(result, 0)
    assert "Traceback" not in result.err, result.text
    said = {name: {} for name in cases}
    names = list(cases)
    for number, worker, text in re.findall(r"^case (\d+) worker (\d+): (.*)$", result.out, re.M):
        of_case = said[names[int(number)]]
        of_case[int(worker)] = f"{of_case.get(int(worker), '')}{text}\n"
    return result, said


def check_end(result, code, mpi="mpich"):
    """Exit code, and nothing left. prterun crashes now and then where a rank aborts while another finalizes [ran]."""
    assert result.code == code or (mpi == "openmpi" and result.code == -11 and code), result.text
    assert not result.left, result.text


def done(result):
    return {int(who) for who in re.findall(r"^done (\d)", result.out, re.M)}


def check_failure(result, code, words, mpi="mpich", tracebacks=1):
    """It ended by one failure, which is told once, after everything else."""
    check_end(result, code, mpi)
    assert result.err.count("Traceback (most recent call last)") == tracebacks, result.text
    assert result.err.count(words) >= 1, result.text
    told = result.err.rindex("Traceback (most recent call last)") if tracebacks else 0
    after = [line for line in result.err[told:].splitlines() if line.startswith("allred: ")]
    assert len(after) <= 1 or not tracebacks, result.text
