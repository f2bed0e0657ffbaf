"""allred.Server in the world that mpirun has made, and alone. Started by hand: test_rendezvous.py."""

import json

import pytest
from harness import mpirun, python

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

cluster = allred.ClusterSpec({"worker": 2, "ps": 1})
server = allred.Server(cluster)
print(allred.job_name(), allred.task_index(), allred.is_chief(), server.target, flush=True)
if allred.job_name() == "ps":
    server.join()
    print("served", flush=True)
else:
    params = {"w": np.zeros(3)}
    opt = allred.distributed(Mine(0.5), consistency="sync")
    opt.broadcast(params)
    opt.step(params, {"w": np.full(3, 2.0 * allred.task_index())})
    print("w", params["w"][0], flush=True)
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_server_that_joins_serves_with_worker_0_s_optimizer_and_policy(mpi):
    result = mpirun(3, "-c", TRAIN, mpi=mpi)
    assert result.code == 0, result.text
    lines = sorted(result.out.splitlines())
    assert lines == [
        "ps 0 False allred:///job:ps/task:0",
        "served",
        "w -0.5",
        "w -0.5",
        "worker 0 True allred:///job:worker/task:0",
        "worker 1 False allred:///job:worker/task:1",
    ], result.text


def test_a_server_that_joins_where_nobody_trains():
    code = "import allred\nserver = allred.Server({'ps': 1, 'worker': 1})\n"
    result = mpirun(2, "-c", code + "if allred.job_name() == 'ps': server.join(); print('served')")
    assert (result.code, result.out) == (0, "served\n"), result.text


AGAIN = """
import numpy as np
import allred

old = None
for part in range(2):
    server = allred.Server({"ps": 1, "worker": 2})
    if allred.job_name() == "ps":
        SERVES
        print(f"served {part}", flush=True)
    else:
        params = {"w": np.zeros(3)}
        if old is not None:
            try:
                old.step(params, params)
            except allred.AllredError as error:
                print(f"old: {error}", flush=True)
        old = opt = allred.distributed(allred.optim.SGD(0.5), consistency="sync")
        opt.broadcast(params)
        opt.step(params, {"w": np.ones(3) + part})
        print(f"w {part} {params['w'][0]}", flush=True)
    allred.shutdown()
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_init_works_after_shutdown_if_the_servers_return_from_join(mpi):
    result = mpirun(3, "-c", AGAIN.replace("SERVES", "server.join()"), mpi=mpi)
    assert result.code == 0, result.text
    left = "old: this worker has left the parameter servers (allred.shutdown()); make a new optimizer with "
    assert sorted(result.out.splitlines()) == [
        *[f"{left}allred.distributed"] * 2, "served 0", "served 1", "w 0 -0.5", "w 0 -0.5", "w 1 -1.0", "w 1 -1.0",
    ], result.text  # fmt: skip


def test_init_after_shutdown_is_an_error_if_the_servers_have_ended():
    result = mpirun(3, "-c", AGAIN.replace("SERVES", "allred.distributed(allred.optim.SGD(0.5), consistency='sync')"))
    assert result.code == 1, result.text
    assert "the parameter servers have left, and their programs have ended" in result.err, result.text
    assert "served" not in result.out


@pytest.mark.parametrize(
    ("cluster", "given", "words"),
    [
        ({"ps": 1, "worker": 3}, "", "the launcher started 2 processes, but the cluster has 4 tasks"),
        ({"ps": 1, "worker": 1}, ", 'worker', 0", "this is rank 0 of mpirun, /job:ps/task:0; got /job:worker/task:0"),
    ],
)
def test_a_cluster_that_is_not_what_mpirun_started(cluster, given, words):
    result = mpirun(
        2, "-c", f"import allred\nallred.Server({cluster}{given})\nallred.distributed(allred.optim.SGD(1.0))"
    )
    assert result.code == 1, result.text
    assert words in result.err, result.text


REFUSED = [
    ("Server({'ps': 1})", "one job of workers besides 'ps' and 'client'; got none"),
    ("Server({'ps': 1, 'chief': 1, 'worker': 1})", "got 'chief', 'worker'"),
    ("Server({'worker': {1: 'a:1'}})", "the tasks of job 'worker' are [1]; none may be left out"),
    ("Server({'worker': 2}, 'worker', 2)", "job 'worker' has no task 2; it has 0, 1"),
    ("Server({'worker': 2}, 'worker')", "job_name and task_index go together"),
    ("Server({'worker': 2})", "(mpirun -np 2 ...), and to be started by hand it takes job_name and task_index"),
    ("Server({'worker': 2}, 'worker', 0)", "it takes addresses, host:port, instead of numbers of tasks"),
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


def test_alone():
    code = "import allred\ns = {}\nprint(allred.job_name(), allred.task_index(), allred.size(), s.target)\ns.join()"
    result = python("-c", code.format("allred.Server.create_local_server()"))
    assert result.out == "local 0 1 allred:///job:local/task:0\n", result.text
    result = python("-c", code.format("allred.Server({'ml': ['localhost:2222']}, 'ml')"))
    assert result.out == "ml 0 1 allred://localhost:2222/job:ml/task:0\n", result.text
    tf_config = json.dumps({"cluster": {"chief": ["localhost:2222"]}, "task": {"type": "chief", "index": 0}})
    result = python("-c", code.format("allred.Server.from_tf_config()"), env={"TF_CONFIG": tf_config})
    assert result.out == "worker 0 1 allred://localhost:2222/job:worker/task:0\n", result.text


VARIABLES = """
import numpy as np
import allred

cluster = allred.ClusterSpec({"ps": 2, "worker": 2})
server = allred.Server(cluster)
if allred.job_name() == "ps":
    server.join()
else:
    with allred.device(allred.replica_device_setter(cluster=cluster)):
        w = allred.variable(np.zeros(1000), name="weights")
        step = allred.variable(0, name="step")
        b = allred.variable(np.zeros(10), name="bias")
    with allred.device("/job:ps/task:SERVER"):
        late = allred.variable(0.0)
    model = [w, {"b": b, "late": late}]
    opt = allred.distributed(allred.optim.SGD(1.0), consistency="sync"MORE)
    opt.broadcast(model)
    opt.step(model, [np.ones(1000), {"b": np.ones(10), "late": 2.0}])
    print(w[0], b[0], float(late))
"""


def test_variables_live_where_allred_device_has_put_them():
    result = mpirun(4, "-c", VARIABLES.replace("SERVER", "1").replace("MORE", ""))
    assert (result.code, result.out) == (0, "-1.0 -1.0 -2.0\n" * 2), result.text
    for line in (
        "server 0: 2 tensors, 8.08 kB, 99.9%", "server 1: 1 tensor, 8 B, 0.1%", "weights: /job:ps/task:0/cpu:0",
        "bias: /job:ps/task:0/cpu:0", "1.late: /job:ps/task:1/cpu:0",
        "given a server, but not among the parameters of this optimizer, so they stay here: 'step'",
    ):  # fmt: skip
        assert f"allred: {line}\n" in result.err, result.text


@pytest.mark.parametrize(
    ("server", "more", "words"),
    [
        ("1", ", placement='bytes'", "'0' was made inside allred.device, and allred.distributed was given a placement"),
        ("{allred.task_index()}", "", "allred.device around variables, or a function given as placement, must say"),
    ],
)
def test_variables_whose_places_are_not_clear(server, more, words):
    program = VARIABLES.replace('"/job:ps/task:SERVER"', f'f"/job:ps/task:{server}"').replace("MORE", more)
    result = mpirun(4, "-c", program)
    assert result.code == 1, result.text
    assert words in result.err, result.text
