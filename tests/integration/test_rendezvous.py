"""Clusters without mpirun: tasks started one by one meet, train, hear of each other's end, and end each by itself."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import time

import pytest
from harness import LATE_S
from hosts import hosts
from rendezvous import cluster, tasks, text

WORKER = "opt = train({steps}); opt.finish(); allred.barrier(); opt.pull(params); print('w', params['w'][0])"


def await_line(future, words, jobs):
    """Until a task that listens is there: its process answers at the first address."""
    host, _, port = jobs["ps"][0].rpartition(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not future.done():
        try:
            with socket.create_connection((host, int(port)), 5) as connection:
                assert words in connection.recv(200)
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(future.result().text if future.done() else "it does not listen")


def await_file(path, words, future):
    """Until a task has written that."""
    deadline = time.monotonic() + 60
    while not (path.exists() and words in path.read_text()):
        if future.done() or time.monotonic() > deadline:
            pytest.fail(future.result().text)
        time.sleep(0.1)


def test_tasks_come_in_any_order_and_say_for_whom_they_wait(tmp_path):
    jobs = cluster()
    said = tmp_path / "said"
    also_there = f"say, said = rendezvous_client.log.rank_warning, open({str(said)!r}, 'a', buffering=1)\n"
    also_there += "rendezvous_client.log.rank_warning = lambda text: (say(text), print(text, file=said))"
    body = WORKER.format(steps=5) + "\nprint([name for name in os.environ if name.startswith('PMI')])"
    with tasks(jobs) as t:
        last = t.start("worker", 1, body, before=also_there)
        await_file(said, "Connection refused", last)
        gave_up = t.start("ps", 0, start_timeout_s=1).result()
        first = t.start("ps", 0, "server.join(); print('joined')")
        await_line(first, b'"allred": ', jobs)
        time.sleep(1)
        found = {("worker", 0): t.start("worker", 0, body), ("ps", 0): first, ("worker", 1): last}
        found = {task: future.result() for task, future in found.items()}
    address = dict(zip(("ps 0", "worker 0", "worker 1"), (*jobs["ps"], *jobs["worker"]), strict=True))
    assert gave_up.code == 1, gave_up.text
    worker_0 = f"/job:worker/task:0 ({address['worker 0']})"
    assert re.search(
        rf"CollectiveTimeout: /job:ps/task:0 has waited for \d+ s .* for {re.escape(worker_0)}", gave_up.err
    )
    assert [result.code for result in found.values()] == [0, 0, 0], text(found)
    assert not any(result.left for result in found.values()), text(found)
    assert "joined" in found["ps", 0].out
    for worker in (0, 1):
        out = found["worker", worker].out
        assert f"in allred://{address[f'worker {worker}']}/job:worker/task:{worker}\n" in out, text(found)
        assert "w -10.0\n[]\n" in out, text(found)
    waits = re.findall("(/job:\\S+) waits for (.*); .* s have passed", found["worker", 1].err + found["ps", 0].err)
    assert ("/job:worker/task:1", f"/job:ps/task:0 ({address['ps 0']}): Connection refused") in waits, text(found)
    assert {("/job:worker/task:1", worker_0), ("/job:ps/task:0", worker_0)} <= set(waits), text(found)


def test_a_worker_that_is_killed_is_named_to_all_at_once_but_not_to_one_that_has_ended_well():
    with tasks(cluster(1, 3)) as t:
        kill = "train(90, 0.05, lambda n: os.kill(os.getpid(), 9) if n == 60 else None)"
        go_on = "try: train(10_000, 0.05)\nfinally: print('finally')"
        found = t.all(
            {("ps", 0): "server.join()", ("worker", 0): go_on, ("worker", 1): kill, ("worker", 2): "train(1)"}
        )
    assert [result.code for result in found.values()] == [137, 137, -9, 0], text(found)
    for task in (("ps", 0), ("worker", 0)):
        named = r"^allred: rank \d on \S+ ends: rank 2 \(worker 1\) on \S+ was killed by signal 9 \(SIGKILL\)"
        assert re.search(named, found[task].err, flags=re.MULTILINE), text(found)
    assert "finally" in found["worker", 0].out
    assert not any(result.left for result in found.values()), text(found)


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        ("raise OSError('disk full')", 1),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.full),
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", 130, marks=pytest.mark.full),
    ],
)
def test_a_task_that_fails_ends_all_with_its_exit_code(fails, code):
    with tasks(cluster(1, 1)) as t:
        fail = f"def fail(n):\n    if n == 3: {fails}\ntrain(50, 0.05, fail)"
        found = t.all({("ps", 0): "server.join()", ("worker", 0): fail})
    assert [result.code for result in found.values()] == [code] * 2, text(found)
    assert "rank 1 (worker 0) on " in found["ps", 0].err, text(found)
    assert "disk full" in found["ps", 0].err or code != 1, text(found)
    assert found["worker", 0].err.count("Traceback") == (code != 3), text(found)
    assert not any(result.left for result in found.values()), text(found)


def test_a_task_that_dies_while_tasks_start_is_named_to_the_other():
    with tasks(cluster(1, 1)) as t:
        kill = "import allred.server\nallred.server.enter = lambda *_, **__: os.kill(os.getpid(), 9)"
        started = {("ps", 0): t.start("ps", 0), ("worker", 0): t.start("worker", 0, before=kill)}
        found = {task: future.result() for task, future in started.items()}
    assert [result.code for result in found.values()] == [1, -9], text(found)
    words = r"/job:worker/task:0 \(pid \d+ on .+\) has ended while the tasks started"
    assert re.search(words, found["ps", 0].err), text(found)
    assert "in allred://" not in found["ps", 0].out


NO_MPI = "import sys; sys.modules['mpi4py'] = None"
SYNC = """
rank, size = allred.rank(), allred.size()
pair = allred.ProcessSet([0, 2])
if pair.included():
    assert allred.allgather(np.array([rank]), process_set=pair).tolist() == [0, 2]
opt, w = allred.distributed(allred.optim.SGD(lr=1.0)), np.full(3, float(rank))
opt.broadcast(w)
opt.step(w, np.full(3, float(rank)))
assert w.tolist() == [-1.0] * 3, w
allred.shutdown()
allred.init()  # the same tasks join again
server.target
assert allred.allreduce(np.ones(2), allred.Sum).tolist() == [size, size]
assert "mpi4py.MPI" not in sys.modules
print("trained")
"""


def test_tasks_of_mode_sync_need_no_mpi_and_may_have_different_ones():
    """And mode ps says which task has the wrong one."""
    jobs = cluster(0, 3)
    with tasks(jobs) as t:
        options = {"mpi": "openmpi"}, {}, {"before": NO_MPI}
        started = {("worker", each): t.start("worker", each, SYNC, **more) for each, more in enumerate(options)}
        found = {task: future.result() for task, future in started.items()}
    assert [result.code for result in found.values()] == [0, 0, 0], text(found)
    assert all("trained" in result.out for result in found.values()), text(found)
    with tasks(cluster(0, 2)) as t:
        again = "allred.shutdown()\nif index: time.sleep(2)\nallred.init()\nallred.shutdown()\n"
        again += "if index: os._exit(3)\nallred.init()"
        found = t.all({("worker", 0): again, ("worker", 1): again}, stall_warning_s=1)
    words = "AllredError: /job:worker/task:1 (pid "
    assert found["worker", 0].code == 1, text(found)
    assert words in found["worker", 0].err, text(found)
    assert "allred: rank 0 has waited for 1 s for /job:worker/task:1; for 1800 s at most" in found["worker", 0].err
    with tasks(cluster(0, 2)) as t:
        found = t.all({("worker", 0): "", ("worker", 1): ""}, pretend_nodes="9")
    for result in found.values():
        assert result.err.count("allred: ConfigError: pretend_nodes='9' must be") == 1, text(found)
    with tasks(cluster(1, 1)) as t:
        started = {("ps", 0): t.start("ps", 0), ("worker", 0): t.start("worker", 0, mpi="openmpi")}
        found = {task: future.result() for task, future in started.items()}
    words = (
        "clients, backend mpi and transport mpi, without mpirun, need MPICH; /job:worker/task:0: this Python has Open"
    )
    assert all(result.code == 1 and words in result.err for result in found.values()), text(found)


def listener(port):
    """The process that listens at this port of loopback. For a moment the task that has started it holds the socket
    too."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    [inode] = [row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        found = set()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"socket:[{inode}]" in map(os.readlink, (process / "fd").iterdir()):
                    found.add(int(process.name))
        if len(found) == 1:
            return found.pop()
    raise LookupError(port, found)


def test_the_process_at_which_they_meet_is_killed(tmp_path):
    """Before all are there, and once they train, when nobody needs it."""
    jobs, trains = cluster(1, 1), tmp_path / "trains"
    port = int(jobs["ps"][0].rpartition(":")[2])
    stays = f"train(3)\nopen('{trains}', 'w').close()\nwhile os.path.exists('{trains}'): time.sleep(0.1)"
    with tasks(jobs) as t:
        lost = t.start("ps", 0)
        await_line(lost, b'"allred": ', jobs)
        os.kill(listener(port), signal.SIGKILL)
        lost = lost.result()
        worker, first = t.start("worker", 0, stays), t.start("ps", 0, "server.join()")
        await_file(trains, "", worker)
        os.kill(listener(port), signal.SIGKILL)
        trains.unlink()
        found = {("worker", 0): worker.result(), ("ps", 0): first.result()}
    assert "AllredError: /job:ps/task:0: the rendezvous process that it started at " in lost.err, lost.text
    assert lost.code == 1
    assert [result.code for result in found.values()] == [0, 0], text(found)
    assert not any(result.left for result in found.values()), text(found)


SPECIAL = ("differs", "host", "twice")  # tests/unit/test_rendezvous.py has these refusals too


def test_a_task_that_cannot_take_part_and_the_tasks_that_wait_are_told_why(request):
    """And then the right one comes."""
    full = request.config.getoption("--full")
    jobs = cluster()
    other = {**jobs, "worker": [jobs["worker"][0], "localhost:9"]}
    unknown = {**jobs, "worker": [jobs["worker"][0], "nowhere.invalid:9"]}
    with tasks(jobs) as t:
        body = "train(3)\nprint('trained')"
        started = {("ps", 0): t.start("ps", 0, "server.join()", secret="s"), ("worker", 0): None}
        await_line(started["ps", 0], b'"allred": ', jobs)
        started["worker", 0] = t.start("worker", 0, body, secret="s")
        time.sleep(2)
        taken = socket.create_server(("127.0.0.1", int(jobs["worker"][1].rpartition(":")[2])))
        with taken:
            wrong = {
                "unset": ("worker", 1, {"before": LISTEN_NOT}),
                "differs": ("worker", 1, {"before": LISTEN_NOT, "secret": "t"}),
                "spec": ("worker", 1, {"before": LISTEN_NOT, "jobs": other, "secret": "s"}),
                "host": ("worker", 1, {"jobs": unknown, "secret": "s"}),
                "twice": ("ps", 0, {"before": LISTEN_NOT + START_NOT, "secret": "s"}),
                "port": ("worker", 1, {"secret": "s"}),
            }
            wrong = {
                name: t.start(job, index, **options)
                for name, (job, index, options) in wrong.items()
                if full or name not in SPECIAL
            }
            wrong = {name: future.result() for name, future in wrong.items()}
        started["worker", 1] = t.start("worker", 1, body, secret="s")
        found = {task: future.result() for task, future in started.items()}
    assert all(result.code == 1 for result in wrong.values()), {name: result.text for name, result in wrong.items()}
    assert [result.code for result in found.values()] == [0, 0, 0], text(found)
    expected = {
        "unset": (
            "refuses this process: this task has no ALLRED_SECRET, but /job:ps/task:0 has an ALLRED_SECRET; set the",
            "a task at 127.0.0.1 was refused: it has no ALLRED_SECRET, but /job:ps/task:0 has",
        ),
        "differs": ("has a different ALLRED_SECRET than /job:ps/task:0; set the same ALLRED_SECRET for all tasks",) * 2,
        "spec": (f"there /job:worker/task:1 is localhost:9, here it is {jobs['worker'][1]}",) * 2,
        "host": ("nowhere.invalid of /job:worker/task:1 (",) * 2,
        "twice": ("is /job:ps/task:0 already. Give each task its own task_index",) * 2,
        "port": (f"cannot listen at {jobs['worker'][1]} (127.0.0.1): Address already in use",) * 2,
    }
    for name, result in wrong.items():
        theirs, ours = expected[name]
        assert theirs in result.err.rstrip().rpartition("\n")[2], result.text
        assert ours in found["ps", 0].err, text(found)


LISTEN_NOT = "from allred.launch import rendezvous_client\nrendezvous_client.listen = lambda *_: None\n"
START_NOT = "rendezvous_client._start = lambda *_: None\n"


@pytest.mark.parametrize("closed", [pytest.param("<&-", marks=pytest.mark.full), "<&- >&- 2>&-"])
def test_tasks_without_standard_files(closed):
    """As `ssh host "program <&- &"` starts them."""
    inside = ("sh", "-c", f'exec "$@" {closed}', "sh")
    with tasks(cluster(1, 1)) as t:
        found = t.all({("ps", 0): "server.join()", ("worker", 0): "train(3)"}, inside=inside, start_timeout_s=20)
    assert [result.code for result in found.values()] == [0, 0], text(found)


def test_another_program_at_the_first_address():
    jobs = cluster(1, 1)
    port = int(jobs["ps"][0].rpartition(":")[2])
    with tasks(jobs) as t, socket.create_server(("127.0.0.1", port)) as ours:
        found = {("ps", 0): t.start("ps", 0), ("worker", 0): t.start("worker", 0)}
        with ours.accept()[0] as connection:
            connection.sendall(b"220 mail.example.org ESMTP\r\n")
            found = {task: future.result() for task, future in found.items()}
    assert [result.code for result in found.values()] == [1, 1], text(found)
    assert (
        "Address already in use; /job:ps/task:0 runs here already, an earlier job ends still, or another"
        in found["ps", 0].err
    )
    assert f"the process at /job:ps/task:0 ({jobs['ps'][0]}) is not an allred process" in found["worker", 0].err


def test_join_with_an_optimizer_that_cannot_be_described():
    local = "def f():\n    class Mine(allred.optim.SGD): pass\n    return Mine\nallred.optim.SGD = f()\n"
    with tasks(cluster(1, 1)) as t:
        found = t.all({("ps", 0): "server.join()", ("worker", 0): f"{local}\ntrain(1)"})
    assert [result.code for result in found.values()] == [1, 1], text(found)
    for result in found.values():
        assert "parameter server 0 is in Server.join(), which serves with the optimizer of worker 0" in result.err
        assert "Mine cannot be pickled" in result.err, text(found)


def test_between_hosts_at_the_addresses_of_the_spec_alone(tmp_path):
    with hosts(2, tmp_path) as here:
        check_between(here)


def check_between(here):
    names = here.names
    jobs = {"ps": [f"{names[0]}:2222"], "worker": [f"{names[0]}:2223", f"{names[1]}:2222"]}
    jobs["client"] = [f"{names[1]}:2223"]
    tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "secret": "between us"}
    look = "import socket\nprint('at loopback:', socket.socket().connect_ex(('127.0.0.1', 2222)) == 0)"
    with tasks(jobs) as t:
        refused = t.start("ps", 0, inside=("ip", "netns", "exec", names[0])).result()
        places = {("ps", 0): names[0], ("worker", 0): names[0], ("worker", 1): names[1], ("client", 0): names[1]}
        join = "server.join()"
        bodies = {"ps": join, "worker": f"{look}\n{WORKER.format(steps=4)}\n{join}", "client": ASK}
        started = {
            task: t.start(*task, bodies[task[0]], inside=("ip", "netns", "exec", name), **tcp)
            for task, name in places.items()
        }
        found = {task: future.result() for task, future in started.items()}
    assert "can be reached from other machines: set ALLRED_SECRET" in refused.err, refused.text
    assert [result.code for result in found.values()] == [0, 0, 0, 0], text(found)
    for worker in (0, 1):
        assert "w -8.0" in found["worker", worker].out, text(found)
        assert "at loopback: False" in found["worker", worker].out, text(found)
    assert "task 0: 1000000.0 True\ntask 1: 1000000.0 False\n" in found["client", 0].out, text(found)


MESSAGES = """
from allred import world
comm, found = world.current().communicator, np.zeros(500_000)
after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
sent = comm.send(np.full(500_000, float(comm.rank)), after)
assert comm.recv(found).wait() == before
assert (found == before).all()
sent.wait()
print("received", "mpi4py.MPI" in sys.modules, flush=True)
comm.barrier().wait()
if comm.rank == 1:
    os.kill(os.getpid(), 9)
comm.recv(found, 1).wait()
"""


def test_messages_between_hosts_without_mpi_and_the_death_of_their_sender(tmp_path):
    with hosts(2, tmp_path) as here:
        places = [(0, 2222), (1, 2222), (1, 2223)]
        jobs = {"worker": [f"{here.names[number]}:{port}" for number, port in places]}
        with tasks(jobs) as t:
            started = {
                ("worker", task): t.start("worker", task, MESSAGES, inside=here.inside(number), secret="between us")
                for task, (number, _) in enumerate(places)
            }
            found = {task: future.result() for task, future in started.items()}
    assert all("received False\n" in result.out for result in found.values()), text(found)
    for task in (0, 2):
        assert re.search(r"rank 1 on ar\w+n1 was killed by signal 9", found["worker", task].err), text(found)


ASK = """
def network(): return os.readlink("/proc/self/ns/net")
session, here = allred.connect(server.target), network()
for task in (0, 1):
    with allred.device(f"/job:worker/task:{task}"):
        print(f"task {task}:", session.run(np.sum, np.ones(1_000_000)), session.run(network) != here)
"""
