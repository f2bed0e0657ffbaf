"""Embedding tables when a process is killed or stopped, in mode ps and in mode sync: what the other ranks report, and
that no gradient is lost or applied twice where training continues.
"""

import re

import pytest
from harness import ULFM, full
from ps_jobs import POLICIES, check_end, job
from test_ps_failures import shared_memory

# `train` calls `action` before this call of each of its steps. All gradients are one, so the rows count the updates.
# The table "large" has several cells of ids, vectors and gradients.
TABLES = """
tables = [
    allred.Embedding("large", 64, init=0.0, optimizer=allred.optim.SGD(1.0)),
    allred.Embedding("small", 3, init=0.0, optimizer=allred.optim.SGD(1.0)),
]
opt = allred.distributed(allred.optim.SGD(lr=1.0), tables=tables)
opt.broadcast(params)
ids = np.arange(5000)

def train(steps, call="", action=None):
    for _ in range(steps):
        if call == "lookup": action()
        for table in tables:
            vectors = table.lookup(ids)
            table.gradient(np.ones_like(vectors))
        if call == "prefetch": action()
        tables[0].prefetch(ids)
        if call == "step": action()
        opt.step(params, ones)

def catch(*given):
    try:
        train(*given)
    except allred.AllredError as error:
        print(f"caught {me}:", type(error).__name__, error, flush=True)
        raise

def done(gradients):
    opt.finish()
    while min(server.gradients for server in opt.statistics().servers) < gradients: time.sleep(0.01)
    opt.pull(params)
    updates = {*params["b"].tolist()}
    for table in tables:
        rows = table.export()
        assert rows["ids"].tolist() == ids.tolist()
        updates.update(rows["vectors"].ravel().tolist())
    print(f"done {me}, updates:", *(-number for number in updates), flush=True)
"""

DIES = """
if me == 1:
    train(3)
    train(1, {!r}, lambda: os.kill(os.getpid(), signal.SIGKILL))
catch(10_000)
"""


def check_done(result, updates):
    """Check that these workers have ended well: {worker: updates of parameters and rows}."""
    assert dict(re.findall(r"^done (\d), updates: (.*)$", result.out, re.M)) == updates, result.text


def check_death(result, survivors, killed, before):
    """Check for one line about the death, and an error with the same words on each survivor; nothing is left."""
    words = rf"rank {killed} on \S+ was killed by signal 9 \(SIGKILL\)"
    assert result.code not in (0, None), result.text
    assert len(re.findall(rf"^allred: {words}", result.err, re.M)) == 1, result.text
    assert "Traceback" not in result.err, result.text
    caught = re.findall(rf"^caught (\d): RemoteRankError {words}", result.out, re.M)
    assert sorted(map(int, caught)) == sorted(survivors), result.text
    assert result.out.count("caught") == len(survivors), result.text
    assert not result.left, result.text
    assert not shared_memory() - before


def launched(launcher):
    """Return the options of `job` for a launcher. "ulfm" lets the others live when a rank dies."""
    return {"mpi": "openmpi", "mpirun": ULFM} if launcher == "ulfm" else {"mpi": launcher}


# ---- a process is killed


@pytest.mark.parametrize(
    ("policy", "call", "apart", "launcher"),
    [
        ("async", "lookup", False, "ulfm"),
        pytest.param("bounded", "prefetch", False, "mpich", marks=full),
        ("sync", "step", True, "mpich"),
        *(pytest.param(*each, "ulfm", marks=full) for each in [
            ("async", "step", True),
            ("bounded", "lookup", True),
            ("bounded", "prefetch", False),
            ("sync", "lookup", False),
            ("sync", "step", True),
        ]),
    ],
)  # fmt: skip
def test_a_server_is_killed(policy, call, apart, launcher, tmp_path):
    """Under MPICH no worker lives long enough to report it."""
    before = shared_memory()
    body = f"""
if me == 0:
    train(3)
    catch(1, {call!r}, lambda: os.kill(pid(1), signal.SIGKILL))
catch(10_000)
"""
    result = job(tmp_path, body, 2, 2, apart, 3, TABLES, **launched(launcher), **POLICIES[policy])
    check_death(result, {0, 1} if launcher == "ulfm" else set(), r"1 \(parameter server 1\)", before)


@pytest.mark.parametrize("call", ["lookup", pytest.param("step", marks=full)])
@pytest.mark.parametrize("policy", [pytest.param("async", marks=full), "bounded", pytest.param("sync", marks=full)])
def test_a_worker_is_killed(policy, call, tmp_path):
    before = shared_memory()
    result = job(tmp_path, DIES.format(call), 2, 1, False, 3, TABLES, **POLICIES[policy])
    check_death(result, set(), r"2 \(worker 1\)", before)


@pytest.mark.parametrize(
    ("policy", "call"),
    [
        ("async", "step"),
        *(pytest.param(*each, marks=full) for each in [("bounded", "step"), ("sync", "step"), ("sync", "lookup")]),
    ],
)
def test_the_others_go_on_with_all_gradients(policy, call, tmp_path):
    """Worker 1 dies between two requests, after a prefetch whose vectors it has not read if `call` is "step"."""
    before = shared_memory()
    body = f"""
train(3)
if me == 1: train(1, {call!r}, lambda: os.kill(os.getpid(), signal.SIGKILL))
train(5)
done(19)
"""
    result = job(tmp_path, body, 3, 2, False, 3, TABLES, **launched("ulfm"), worker_failure="go_on", **POLICIES[policy])
    check_death(result, set(), r"3 \(worker 1\)", before)
    check_done(result, dict.fromkeys("02", "8.0" if policy == "sync" else "19.0"))


@pytest.mark.parametrize(
    ("call", "launcher"),
    [
        ("lookup", "ulfm"),
        *(pytest.param(*each, marks=full) for each in [("step", "ulfm"), ("prefetch", "ulfm"), ("step", "mpich")]),
    ],
)
def test_a_rank_of_mode_sync_is_killed(call, launcher, tmp_path):
    before = shared_memory()
    result = job(tmp_path, DIES.format(call), 3, 0, False, 3, TABLES, mode="sync", **launched(launcher))
    check_death(result, {0, 2} if launcher == "ulfm" else set(), "1", before)


# ---- a process is stopped for a while


@pytest.mark.parametrize(
    ("policy", "call", "servers", "apart"),
    [
        pytest.param("async", "step", 1, False, marks=full),
        ("bounded", "prefetch", 2, True),
        ("sync", "lookup", 2, False),
        *(pytest.param(*each, marks=full) for each in [
            ("async", "lookup", 2, True),
            ("bounded", "lookup", 1, False),
            ("sync", "prefetch", 1, False),
            ("sync", "step", 2, True),
        ]),
    ],
)  # fmt: skip
def test_a_server_and_a_worker_are_stopped_and_continue(policy, call, servers, apart, tmp_path):
    """The last server at a given call of worker 0, then worker 1 anywhere in its steps."""
    body = f"""
def stop(world_rank, seconds):
    os.kill(pid(world_rank), signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid(world_rank), signal.SIGCONT)).start()

train(2)
for world_rank, seconds in ({servers} - 1, {2.5 if call == "lookup" else 0.7}), ({servers} + 1, 0.7):
    allred.barrier()
    if me == 0: train(1, {call!r}, lambda: stop(world_rank, seconds))
    train(5 - (me == 0))
done(24)
"""
    result = job(tmp_path, body, 2, servers, apart, 3, TABLES, stall_warning_s=0.5, **POLICIES[policy])
    check_end(result, 0)
    check_done(result, dict.fromkeys("01", "12.0" if policy == "sync" else "24.0"))
    if call == "lookup":
        stopped = rf"rank {servers - 1} \(parameter server {servers - 1}\) +\S+ +stopped \(kill -CONT"
        waits = r"^allred: rank \d has waited for \d+ s in a lookup of embeddings"
        assert re.search(rf"{waits}\n(?:  rank.*\n)*  {stopped}", result.err, re.M), result.text
