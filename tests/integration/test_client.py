"""A client has the tasks run its functions: under mpirun, by hand, and what happens when one of them fails or dies."""

import re

import pytest
from harness import mpirun, python
from ports import reserved_ports
from rendezvous import tasks, text

PROGRAM = """
import traceback
import numpy as np
import allred

server = allred.Server({"client": 1, "worker": 2, "ps": PS} if PS else {"client": 1, "worker": 2})

def where(x):
    return x * 2, allred.job_name(), allred.task_index()

def together(x):
    return float(allred.allreduce(np.full(3, x), op=allred.Sum)[0])

def fails(x):
    raise KeyError(f"bad {x}")

def main():
    session = allred.connect(server.target, log_device_placement=True)
    print(session.run(where, 1))
    with allred.device("/job:worker/task:1"):
        big = np.arange(5_000_000.0)
        doubled, *rest = session.run(where, x=big)
        print((doubled == 2 * big).all(), doubled.flags.writeable, rest)
        empty, fortran = session.run(lambda a, b: (a, b), np.zeros((0, 3)), np.asfortranarray(np.eye(2)))
        print(empty.shape, fortran.tolist())
        try:
            session.run(fails, 7)
        except KeyError:
            print(traceback.format_exc())
        with allred.connect() as own:  # whose end does not raise again what was dealt with
            try:
                own.run(fails, 8)
            except KeyError:
                pass
        try:
            session.run(lambda: (x for x in "ab"))
        except allred.InputError as error:
            print(error)
    calls = []
    for x in (1.0, 2.0):
        for task in range(2):  # both have answers that wait for this client when it asks for the last one
            with allred.device(f"/job:worker/task:{task}"):
                calls += [session.start(np.zeros, 1_000_000), session.start(together, x)]
    print([call.wait() for call in reversed(calls)][::2], all(call.done() for call in calls))
    for task, call in (
        *((f"/job:{job}", lambda: session.run(where, 1)) for job in ["ps/task:0"] * PS + ["worker/task:2"]),
        *((None, call) for call in (allred.barrier, server.join, lambda: allred.connect("grpc://localhost:1"))),
    ):
        try:
            with allred.device(task):
                call()
        except allred.InputError as error:
            print("refused:", error)
    with allred.device("/job:worker"):
        session.start(fails, 8)
        session.run(np.add, 1, 2)  # by then the failure has come, too

if allred.job_name() == "client":
    main()
else:
    print(server.join(), "joined")
"""


@pytest.mark.parametrize(
    ("mpi", "servers"),
    [
        ("mpich", 1),
        pytest.param("mpich", 0, marks=pytest.mark.full),
        pytest.param("openmpi", 0, marks=pytest.mark.full),
    ],
)
def test_functions_run_where_the_client_says(mpi, servers):
    result = mpirun(3 + servers, "-c", PROGRAM.replace("PS", str(servers)), mpi=mpi)
    assert result.code == 0, result.text
    out = [line for line in result.out.splitlines() if line != "None joined"]
    assert len(result.out.splitlines()) == len(out) + 2 + servers, result.text
    assert out[:3] == ["(2, 'client', 0)", "True True ['worker', 1]", "(0, 3) [[1.0, 0.0], [0.0, 1.0]]"], result.text
    assert "KeyError: 'bad 7'\non /job:worker/task:1:\nTraceback" in result.out, result.text
    # The file of a function that is sent by value: "<dynamic-code>" since cloudpickle 3.1.3.
    file = 'File "<(string|dynamic-code)>"'
    assert re.search(rf"{file}, line \d+, in fails\n", result.out.partition("on /job")[2]), result.text
    assert "the result of <lambda> on /job:worker/task:1 cannot be sent (TypeError: " in result.out, result.text
    assert "[4.0, 4.0, 2.0, 2.0] True" in out, result.text
    refused = [line.removeprefix("refused: ") for line in out if line.startswith("refused: ")]
    no_task = "session.run: there is no /job:worker/task:2; functions run on /job:worker/task:0, /job:worker/task:1"
    no_functions = "session.run: /job:ps/task:0 is a parameter server, which runs no functions"
    expected = ("barrier was called by a client", "this is a client", "server.target")
    for said, words in zip(refused, (*[no_functions] * servers, no_task, *expected), strict=True):
        assert words in said, result.text
    placed = [line for line in result.err.splitlines() if line.endswith("/cpu:0")]
    assert placed[:2] == ["where: /job:client/task:0/cpu:0", "where: /job:worker/task:1/cpu:0"], result.text
    assert (
        "session.run(fails) on /job:worker/task:0 failed, and its error was not retrieved:\nallred: KeyError"
        in result.err
    )


def jobs(workers=2, servers=0):
    """Addresses of so many workers and servers, and of a client."""
    client, *found = [f"localhost:{port}" for port in reserved_ports(1 + workers + servers)]
    with_servers = {"ps": found[workers:]} if servers else {}
    return {"worker": found[:workers], "client": [client], **with_servers}


CLIENT = """
session = allred.connect(server.target)
def dies(signal): os.kill(os.getpid(), signal)
try:
    with allred.device("/job:worker/task:1"):
        session.run(DIES)
except allred.AllredError as error:
    print(type(error).__name__, error)
    WHAT
"""


def test_a_task_that_is_killed_in_a_function_is_named_to_the_client():
    client = CLIENT.replace("WHAT", "raise").replace("DIES", "dies, 9")
    with tasks(jobs()) as t:
        join = "server.join()"
        found = t.all({("worker", 0): join, ("worker", 1): join, ("client", 0): client})
    assert [result.code for result in found.values()] == [137, -9, 137], text(found)
    check_named(found, 1, "dies", "was killed by signal 9")


def check_named(found, worker, name, words):
    named = rf"RemoteRankError rank {worker} \(worker {worker}; it runs {name} for /job:client/task:0\) on \S+ {words}"
    assert re.search(named, found["client", 0].out), text(found)
    assert not any(result.left for result in found.values()), text(found)


def test_with_go_on_the_client_hears_of_it_and_goes_on_with_the_others():
    go_on = "with allred.device('/job:worker/task:0'): print(session.run(lambda: allred.task_index()))"
    with tasks(jobs(servers=1)) as t:
        bodies = dict.fromkeys([("ps", 0), ("worker", 0), ("worker", 1)], "server.join()\nprint('joined')")
        found = t.all(
            {**bodies, ("client", 0): CLIENT.replace("WHAT", go_on).replace("DIES", "dies, 9")}, worker_failure="go_on"
        )
    assert [result.code for result in found.values()] == [0, 0, -9, 0], text(found)
    said = found["client", 0].out
    assert "AllredError session.run(dies) on /job:worker/task:1: rank 2, /job:worker/task:1, was killed by" in said
    assert said.endswith("\n0\n"), text(found)
    assert "joined" in found["worker", 0].out, text(found)


@pytest.mark.full  # test_rendezvous.py: a worker that fails
def test_a_client_that_fails_ends_the_task_which_hears_of_it():
    with tasks(jobs(workers=1)) as t:
        found = t.all({("worker", 0): "server.join()", ("client", 0): "raise OSError('no data')"})
    assert [result.code for result in found.values()] == [1, 1], text(found)
    assert "rank 1 (client 0) on " in found["worker", 0].err, text(found)
    assert "OSError: no data" in found["worker", 0].err, text(found)


WITHOUT_CLOUDPICKLE = """
def mine(): pass
session = allred.connect(server.target)
with allred.device("/job:worker"):
    print(session.run(np.add, 1, 2))
    for function in (mine, lambda: 1):
        try: session.run(function)
        except allred.InputError as error: print(error)
    try: session.run(sys.exit, 3)
    except allred.AllredError as error:
        print(type(error).__name__, error)
        raise
"""


def test_without_cloudpickle_a_function_has_to_be_importable_there_and_one_that_exits_is_named():
    none = "sys.modules['cloudpickle'] = None\n"
    with tasks(jobs(workers=1)) as t:
        found = t.all({("worker", 0): "server.join()", ("client", 0): WITHOUT_CLOUDPICKLE}, before=none)
    assert [result.code for result in found.values()] == [3, 3], text(found)
    said = found["client", 0].out
    assert "\n3\n/job:worker/task:0 cannot load mine (AttributeError: " in said, text(found)
    assert "session.run(<lambda>) on /job:worker/task:0: the function, or an argument, cannot be sent (" in said
    assert said.count("pip install cloudpickle") == 2, text(found)
    check_named(found, 0, "exit", r"failed with exit code 3: sys.exit\(3\)")


def test_alone():
    code = """
import allred
server = allred.Server.create_local_server()
with allred.connect(server.target) as session:
    print(session.run(max, 1, 2), session.start(max, 3, 4).wait())
    with allred.device("/job:worker/task:0"):
        session.run(max, 1, 2)
"""
    result = python("-c", code)
    assert result.out == "2 4\n", result.text
    words = "InputError: session.run: /job:local/task:0 cannot run a function on /job:worker/task:0; only a task of job"
    assert words in result.err, result.text
