"""allred.Server in the world that mpirun has made, and alone. Without a launcher: test_rendezvous.py."""

import pytest
from harness import MPICH_BY_DEFAULT, mpirun, python

from allred import checkpoint

TRAIN = """
import sys
import numpy as np
import allred

class Mine:                     # the server has it by its name, from its own copy of this program
    def __init__(self, lr): self.lr = lr
    def step(self, params, grads):
        for name in params: params[name] -= self.lr * grads[name]
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

old = None
for part in range(3):
    server = allred.Server({"ps": 1, "worker": WORKERS})
    if part == 0:
        print(allred.job_name(), allred.task_index(), allred.is_chief(), server.target, flush=True)
    if allred.job_name() == "ps":
        SERVES
        print(f"served {part}", flush=True)
    elif part < 2:  # then nobody trains
        params = {"w": np.zeros(3)}
        if old is not None:
            try:
                old.step(params, params)
            except allred.AllredError as error:
                print(f"old: {error}", flush=True)
        old = opt = allred.distributed(Mine(0.5), consistency="sync")
        opt.broadcast(params)
        opt.step(params, {"w": np.full(3, 2.0 * allred.task_index() + part)})
        print(f"w {part} {params['w'][0]}", flush=True)
    allred.shutdown()
"""


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_join_serves_with_worker_0_s_optimizer_and_policy_and_returns_also_where_nobody_trains(mpi):
    """Three times in the same processes: init() works after shutdown(), because the server returns from join()."""
    result = mpirun(3, "-c", TRAIN.replace("WORKERS", "2").replace("SERVES", "server.join()"), mpi=mpi)
    assert result.code == 0, result.text
    left = "old: this worker has left the parameter servers (allred.shutdown()); make a new optimizer with "
    assert sorted(result.out.splitlines()) == [
        *[f"{left}allred.distributed"] * 2,
        "ps 0 False allred:///job:ps/task:0",
        "served 0",
        "served 1",
        "served 2",
        "w 0 -0.5",
        "w 0 -0.5",
        "w 1 -1.0",
        "w 1 -1.0",
        "worker 0 True allred:///job:worker/task:0",
        "worker 1 False allred:///job:worker/task:1",
    ], result.text


def test_init_after_shutdown_is_an_error_if_the_servers_have_ended():
    serves = "allred.distributed(Mine(0.5), consistency='sync')"
    result = mpirun(2, "-c", TRAIN.replace("WORKERS", "1").replace("SERVES", serves))
    assert result.code == 1, result.text
    assert "the parameter servers have left, and their programs have ended" in result.err, result.text
    assert "served" not in result.out


NOT_STARTED = """
import allred
try:
    allred.Server({"ps": 1, "worker": 3})
except allred.ConfigError as error:
    print(error)
allred.Server({"ps": 1, "worker": 1}, "worker", 0)
allred.distributed(allred.optim.SGD(1.0))
"""


def test_a_cluster_or_a_task_that_is_not_what_mpirun_started():
    result = mpirun(2, "-c", NOT_STARTED)
    assert result.code == 1, result.text
    words = "this is one of 2 processes, but the cluster has 4 tasks"
    assert result.out.count(words) == 2, result.text
    assert "this is rank 0 of mpirun, /job:ps/task:0; got /job:worker/task:0" in result.err, result.text


REFUSED = [
    ("Server({'ps': 1})", "one job of workers besides 'ps' and 'client'; got none"),
    ("Server({'ps': 1, 'chief': 1, 'worker': 1})", "got 'chief', 'worker'"),
    ("Server({'worker': {1: 'a:1'}})", "the tasks of job 'worker' are [1]; none may be left out"),
    ("Server({'worker': 2}, 'worker', 2)", "job 'worker' has no task 2; it has 0, 1"),
    ("Server({'worker': 2}, 'worker')", "job_name and task_index go together"),
    ("Server({'worker': 2})", "needs job_name and task_index; or start the 2 processes with mpirun -np 2"),
    ("Server({'worker': 2}, 'worker', 0)", "it needs addresses, host:port, instead of numbers of tasks"),
    (
        "Server({'worker': ['nowhere.invalid:1', 'localhost:1']}, 'worker', 1)",
        "nowhere.invalid of /job:worker/task:0",
    ),
    (
        "Server({'worker': ['localhost:1', '10.1.1.1:1']}, 'worker', 1)",
        "write the address that /job:worker/task:0 has",
    ),
    ("init(); allred.Server({'worker': 1})", "allred.Server() calls allred.init() itself"),
]


def test_what_is_refused_at_once():
    """All calls in one process: a refused call leaves nothing behind."""
    calls = [f"allred.{call}" for call, _ in REFUSED]
    code = "import allred\nfor call in {}:\n    try: exec(call)\n    except allred.AllredError as error: print(error)"
    result = python("-c", code.format(calls))
    assert (result.code, len(result.out.splitlines())) == (0, len(calls)), result.text
    for line, (_, words) in zip(result.out.splitlines(), REFUSED, strict=True):
        assert words in line, result.text


ALONE = """
import json, os
import allred

def show(server):
    print(allred.job_name(), allred.task_index(), allred.size(), server.target)
    server.join()
    allred.shutdown()

show(allred.Server.create_local_server())
show(allred.Server({"ml": ["localhost:2222"]}, "ml"))
chief = {"cluster": {"chief": ["localhost:2222"]}, "task": {"type": "chief", "index": 0}}
os.environ["TF_CONFIG"] = json.dumps(chief)
show(allred.Server.from_tf_config())
"""


def test_alone():
    result = python("-c", ALONE)
    assert result.out.splitlines() == [
        "local 0 1 allred:///job:local/task:0",
        "ml 0 1 allred://localhost:2222/job:ml/task:0",
        "worker 0 1 allred://localhost:2222/job:worker/task:0",
    ], result.text


VARIABLES = """
import sys
import numpy as np
import allred

def train(server, **options):
    with allred.device(allred.replica_device_setter(cluster=cluster)):
        w = allred.variable(np.zeros(1000), name="weights")
        step = allred.variable(0, name="step")
        b = allred.variable(np.zeros(10), name="bias")
    with allred.device(f"/job:ps/task:{server}"):
        late = allred.variable(0.0)
    model = [w, {"b": b, "late": late}]
    opt = allred.distributed(allred.optim.SGD(1.0), consistency="sync", **options)
    opt.broadcast(model)
    opt.step(model, [np.ones(1000), {"b": np.ones(10), "late": 2.0}])
    print(w[0], b[0], float(late), flush=True)
    opt.save(sys.argv[1], model)

cluster = allred.ClusterSpec({"ps": 2, "worker": 2})
for part in range(3):
    server = allred.Server(cluster)
    if allred.job_name() == "ps":
        server.join()
    else:
        try:
            train(allred.task_index() if part == 2 else 1, **{"placement": "bytes"} if part == 1 else {})
        except allred.InputError as error:
            print(error, flush=True)
    allred.shutdown()
"""


def test_variables_live_where_allred_device_has_put_them_if_that_is_clear(tmp_path):
    """Parts of a job: good places, a placement besides, and different places on the workers, which end the job."""
    result = mpirun(4, "-c", VARIABLES, tmp_path)
    assert result.code == 1, result.text
    assert set(checkpoint.read_checkpoint(checkpoint.newest(tmp_path)).params) == {"weights", "1.b", "1.late"}
    words = "opt.broadcast(): '0' was made inside allred.device, and allred.distributed was given a placement"
    assert (result.out.count("-1.0 -1.0 -2.0\n"), result.out.count(words)) == (2, 2), result.text
    words = "allred.device around variables, or a function given as placement, must say the same on all ranks"
    assert words in result.err, result.text
    for line in (
        "server 0: 2 tensors, 8.08 kB, 99.9%", "server 1: 1 tensor, 8 B, 0.1%", "weights: /job:ps/task:0/cpu:0",
        "bias: /job:ps/task:0/cpu:0", "1.late: /job:ps/task:1/cpu:0",
        "given a server, but not among the parameters of this optimizer, so they stay here: 'step'",
    ):  # fmt: skip
        assert f"allred: {line}\n" in result.err, result.text
