"""`allred run --elastic`: deaths, and what the ranks that go on compute."""

import collections
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import recover_program
from harness import BIN, full, run
from hosts import hosts

import allred

HERE = pathlib.Path(__file__).parent


def elastic(directory, *words, kill=None, env=None, timeout_s=60, prefix=(), **changes):
    """Run the program. Returns the result, and what the processes have written at their end, by rank."""
    given = {
        "directory": str(directory), "rows": 96, "batch_size": 8, "epochs": 3, "elements": 16, "form": "dict",
        "pause_s": 0.002, "kill": kill, **changes,
    }  # fmt: skip
    own = {"ELASTIC_PROGRAM": json.dumps(given), "XDG_RUNTIME_DIR": str(directory), **(env or {})}
    command = [*prefix, BIN["mpich"] / "python", "-m", "allred", "run", "--name", "tested", "--elastic", *words]
    result = run([*command, HERE / "elastic_program.py"], timeout_s, own, cwd=directory)
    found = [json.loads(path.read_text()) for path in directory.glob("result-*")]
    check_ledger(directory, given, result)
    return result, sorted(found, key=lambda each: each["rank"])


def events(directory):
    """All events of the ledgers, with the process."""
    for path in directory.glob("ledger-*"):
        for line in path.read_text().splitlines():
            yield {**json.loads(line), "process": path.name}


def check_ledger(directory, given, result):
    """Each committed step has the samples of its batch exactly once, in the world in which it was committed.

    A process may have died after a step that the others could not complete. It is in no later world."""
    attempts, worlds = collections.defaultdict(list), collections.defaultdict(set)
    last = collections.defaultdict(int)
    for event in events(directory):
        last[event["process"]] = max(last[event["process"]], event.get("world", 0))
    for event in events(directory):
        if event["event"] == "attempt":
            attempts[event["step"], event["world"]] += event["ids"]
        elif event["event"] == "commit" and (last[event["process"]] > event["world"] or not worlds[event["step"]]):
            worlds[event["step"]].add(event["world"])
    for event in events(directory):
        if event["event"] == "commit" and event["world"] > max(worlds[event["step"]]):
            worlds[event["step"]] = {event["world"]}
    rows, size = given["rows"], given["batch_size"]
    for step, committed in sorted(worlds.items()):
        assert len(committed) == 1, (step, committed, result.text)
        epoch, index = divmod(step - 1, rows // size)
        expected = order(given, epoch)[index * size : (index + 1) * size]
        assert sorted(attempts[step, *committed]) == sorted(expected), (step, result.text)
    return len(worlds)


def order(given, epoch):
    """The samples of an epoch in their order."""
    if given.get("stream"):
        return list(allred.data.shuffled(range(given["rows"]), buffer=given["rows"]).of_epoch(epoch))
    return np.random.default_rng([0, epoch]).permutation(given["rows"])


def reference(given):
    """The first parameters after a serial training."""
    rows, size = given["rows"], given["batch_size"]
    targets = np.random.default_rng(7).standard_normal((rows, 8)).astype("f4")
    params, velocity = np.ones(9), np.zeros(9)
    for epoch in range(given["epochs"]):
        samples = order(given, epoch)
        for begin in range(0, rows, size):
            gradient = np.append(params[:8] - targets[samples[begin : begin + size]].mean(axis=0), params[8] * 0.01)
            velocity = 0.9 * velocity + gradient
            params = params - 0.05 * velocity
    return params


def trained(result, found, ranks, rows=96, batch_size=8, epochs=3, stream=False):
    """All processes have ended by themselves with success, with the result of a serial training."""
    assert result.code == 0, result.text
    assert result.left == [], result.text
    assert [each["rank"] for each in found] == list(range(ranks)), (found, result.text)
    assert {each["size"] for each in found} == {ranks}, result.text
    assert {each["step"] for each in found} == {rows // batch_size * epochs}, result.text
    assert len({each["digest"] for each in found}) == 1, (found, result.text)
    expected = reference({"rows": rows, "batch_size": batch_size, "epochs": epochs, "stream": stream})
    np.testing.assert_allclose(found[0]["head"], expected, rtol=1e-6, atol=1e-6)


def when_training(directory, processes, call):
    """Call `call` in a thread when so many processes have each committed 10 steps. Returns the thread."""

    def wait():
        until = time.monotonic() + 50
        while time.monotonic() < until:
            ledgers = [path.read_text() for path in directory.glob("ledger-*")]
            if sum(ledger.count('"commit"') >= 10 for ledger in ledgers) >= processes:
                return call()
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


DEATHS = {
    "SIGKILL": r"was killed by signal 9 \(SIGKILL\)",
    "segfault": r"was killed by signal 11 \(SIGSEGV\)",
    "raise": "ended with exit code 1: ValueError: wrong",
    "exit": r"ended with exit code 3: sys.exit\(3\)",
}


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (0, "SIGKILL"),
        *(pytest.param(rank, how, marks=full) for rank, how in [(0, "raise"), (2, "raise"), (2, "SIGKILL")]),
        *(pytest.param(rank, how, marks=full) for rank in (0, 2) for how in ("segfault", "exit")),
    ],
)
def test_the_others_go_on_without_a_dead_rank(how, rank, tmp_path):
    result, found = elastic(tmp_path, "-np", 3, kill={"rank": rank, "step": 7, "how": how})
    trained(result, found, 2)
    line = rf"allred run: rank {rank} on localhost \(pid \d+\) {DEATHS[how]}.*; 2 ranks go on, step 7 is \w+, \d+ ms"
    assert re.search(line, result.err), result.text
    assert ("ValueError: wrong" in result.err) == (how == "raise"), result.text


@pytest.mark.parametrize("form", ["nested", *(pytest.param(form, marks=full) for form in ("bare", "list"))])
def test_parameters_of_all_forms_go_to_a_spare(form, tmp_path):
    how = {"rank": 1, "step": 5, "how": "SIGKILL"}
    result, found = elastic(tmp_path, "-np", 3, "--spares", 1, kill=how, form=form, elements=40)
    trained(result, found, 3)
    assert "3 ranks go on, 1 of them new" in result.err, result.text


@pytest.mark.parametrize("where", [pytest.param("before", marks=full), "after"])
@pytest.mark.parametrize("step", [7, *(pytest.param(step, marks=full) for step in (1, 35, 36))])
def test_a_session_goes_on(step, where, tmp_path):
    """The rank dies before a step, or between a step and its end."""
    how = {"rank": 0, "step": step, "how": "SIGKILL", "where": where}
    result, found = elastic(tmp_path, "-np", 3, "--spares", 1, kill=how, session=str(tmp_path / "ckpt"))
    trained(result, found, 3)
    assert {each["calls"] for each in found} == {36}, (found, result.text)
    assert len({each["total"] for each in found}) == 1, (found, result.text)
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("step-*"))[-1] == "step-00000036"


def test_a_session_ends_at_max_steps(tmp_path):
    how = {"rank": 1, "step": 10, "how": "SIGKILL"}
    result, found = elastic(tmp_path, "-np", 3, kill=how, session=str(tmp_path / "ckpt"), max_steps=10)
    assert result.code == 0, result.text
    assert {each["step"] for each in found} == {10}, result.text


@pytest.mark.limit(150)
@pytest.mark.parametrize("what", ["kill", pytest.param("cut", marks=full)])
def test_a_host_is_lost(what, tmp_path):
    """All its processes are killed; or its link is cut, and its ranks end before the others go on."""
    with hosts(3, tmp_path) as here:

        def lose():
            if what == "cut":
                return here.set_link(2, "down")
            for pid in here.processes(2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        names = ",".join(f"{name}:2" for name in here.names[1:])
        more = {"env": {"HYDRA_LAUNCHER_EXEC": str(tmp_path / "agent")}, "prefix": here.inside(0), "timeout_s": 100}
        thread = when_training(tmp_path, 4, lose)
        result, found = elastic(tmp_path, "--hosts", names, "-np", 4, epochs=10, pause_s=0.02, **more)
        thread.join()
        here.wait_for_end()
    trained(result, found, 2, epochs=10)
    assert re.search(r"rank 2 on .* and rank 3 on .*; 2 ranks go on", result.err), result.text


@full
def test_the_host_file_changes(tmp_path):
    """A host leaves, and another one comes. The processes on the third go on."""
    file = tmp_path / "hosts"
    with hosts(4, tmp_path) as here:
        _, first, second, third = here.names
        file.write_text(f"{first} slots=2\n{second} slots=1\n")

        def change():
            new = tmp_path / "hosts.new"
            new.write_text(f"{second} slots=1\n{third} slots=2\n")
            new.rename(file)

        thread = when_training(tmp_path, 3, change)
        more = {"env": {"HYDRA_LAUNCHER_EXEC": str(tmp_path / "agent")}, "prefix": here.inside(0)}
        words = ["--hostfile", file, "--min-np", 1]
        result, found = elastic(tmp_path, *words, epochs=15, pause_s=0.02, **more)
        thread.join()
        here.wait_for_end()
    assert f"{file} has changed: 3 ranks" in result.err, result.text
    trained(result, found, 3, epochs=15)
    assert len(list(tmp_path.glob("ledger-*"))) == 5


@full
def test_all_hosts_of_the_host_file_are_replaced(tmp_path):
    """The old ranks leave when new ones are there to receive the state."""
    file = tmp_path / "hosts"
    with hosts(3, tmp_path) as here:
        _, first, second = here.names
        file.write_text(f"{first} slots=2\n")

        def change():
            (tmp_path / "new").write_text(f"{second} slots=3\n")
            (tmp_path / "new").rename(file)

        thread = when_training(tmp_path, 2, change)
        more = {"env": {"HYDRA_LAUNCHER_EXEC": str(tmp_path / "agent")}, "prefix": here.inside(0)}
        words = ["-np", 2, "--hostfile", file, "--max-np", 3]
        result, found = elastic(tmp_path, *words, epochs=80, pause_s=0.005, **more)
        thread.join()
        here.wait_for_end()
    trained(result, found, 3, epochs=80)


def test_an_agent_that_does_not_connect(tmp_path):
    (tmp_path / "agent").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "agent").chmod(0o755)
    env = {"HYDRA_LAUNCHER_EXEC": str(tmp_path / "agent"), "ALLRED_START_TIMEOUT_S": "2"}
    result, _ = elastic(tmp_path, "--hosts", "localhost,192.0.2.1", "-np", 2, env=env)
    assert result.code == 1, result.text
    assert "was not started: the agent of its host has not connected for " in result.err, result.text


def test_a_stopped_rank_is_killed(tmp_path):
    how = {"rank": 1, "step": 9, "how": "SIGSTOP"}
    result, found = elastic(tmp_path, "-np", 3, kill=how, env={"ALLRED_TIMEOUT_S": "2"})
    trained(result, found, 2)
    assert "rank 1 is killed, because it does not take part" in result.err, result.text


@full  # by default in test_after_shutdown_a_rank_may_fail_and_the_others_end_later
def test_spares_end_with_the_training(tmp_path):
    result, found = elastic(tmp_path, "-np", 2, "--spares", 2)
    trained(result, found, 2)
    assert result.err.count("\n") == 1, result.text


@pytest.mark.parametrize("has_session", [pytest.param(False, marks=full), True])
def test_a_job_is_resized(has_session, tmp_path):
    """`allred resize` while the job trains: one more process, then two fewer. Those that leave end with success."""
    words = ["-m", "allred", "resize", "tested"]
    answers = []

    def resize(size):
        answers.append(run([BIN["mpich"] / "python", *words, size], env={"XDG_RUNTIME_DIR": str(tmp_path)}))

    def resize_twice():
        resize(3)
        when_training(tmp_path, 3, lambda: resize(1)).join()

    thread = when_training(tmp_path, 2, resize_twice)
    session = str(tmp_path / "ckpt") if has_session else None
    result, found = elastic(tmp_path, "-np", 2, epochs=20, pause_s=0.02, session=session)
    thread.join()
    assert [answer.out for answer in answers] == [
        "tested: 3 ranks instead of 2; the processes go on\n", "tested: 1 rank instead of 3; the processes go on\n",
    ], (answers, result.text)  # fmt: skip
    assert result.code == 0, result.text
    trained(result, [each for each in found if each["step"] == 240], 1, epochs=20)
    assert "Traceback" not in result.err, result.text
    assert "3 ranks go on, 1 of them new" in result.err, result.text
    assert "1 rank goes on" in result.err, result.text


@pytest.mark.parametrize(("words", "text"), [
    (["--mode", "ps"], "--elastic is for modes sync and local"),
    pytest.param(["--min-np", 3], "2 ranks are not within --min-np 3", marks=full),
    pytest.param(["--max-np", 1], "2 ranks are not within --max-np 1", marks=full),
])  # fmt: skip
def test_options_that_do_not_fit_are_an_error(words, text, tmp_path):
    result = run([BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "-np", 2, *words, "train.py"])
    assert result.code == 2 and text in result.err, result.text  # noqa: PT018  (one result)


@pytest.mark.parametrize(("env", "text"), [
    ({"ALLRED_BACKEND": "mpi"}, "backend mpi"),
    pytest.param({"ALLRED_TIMELINE": "times"}, "ALLRED_TIMELINE", marks=full),
])  # fmt: skip
def test_settings_that_are_refused_are_an_error(env, text, tmp_path):
    result, found = elastic(tmp_path, "-np", 2, env=env)
    assert result.code == 1, result.text
    assert not found
    assert f"ConfigError: {text} cannot be used with `allred run --elastic`" in result.err, result.text


def test_lines_are_marked_and_written_to_files(tmp_path):
    how = {"rank": 1, "step": 3, "how": "raise"}
    result, found = elastic(tmp_path, "--tag", "--logs", "logs", "-np", 2, kill=how)
    trained(result, found, 1)
    assert "[1] ValueError: wrong" in result.err, result.text
    assert "ValueError: wrong" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize("who", ["run", pytest.param("agent", marks=full)])
def test_all_processes_end_with(who, tmp_path):
    words = [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "-np", 2, HERE / "elastic_program.py"]
    given = {
        "directory": str(tmp_path),
        "rows": 96,
        "batch_size": 8,
        "epochs": 9999,
        "elements": 16,
        "form": "dict",
        "pause_s": 0.01,
    }
    killed = {"run": "$run", "agent": "$(cat /proc/$run/task/$run/children)"}[who]
    wait = "while ! grep -qs commit ledger-*; do sleep 0.05; done"
    script = f'"$@" & run=$!; {wait}; kill -9 {killed}; wait $run'
    own = {"ELASTIC_PROGRAM": json.dumps(given), "XDG_RUNTIME_DIR": str(tmp_path)}
    result = run(["sh", "-c", script, "sh", *words], 60, own, cwd=tmp_path)
    assert result.left == [], result.text
    assert result.code == {"run": 137, "agent": 1}[who], result.text


EVALUATION = """
import os, signal, sys, time
import numpy as np, allred
allred.init(banner=False)
params, opt = {"w": np.zeros(4)}, allred.distributed(allred.optim.SGD(lr=0.1))
opt.broadcast(params)
raised, seen, is_first = 0, 0, allred.rank() == 1
for step, x in enumerate(allred.data.batches(np.ones((40, 4)), batch_size=4)):
    opt.step(params, {"w": x.mean(axis=0) if len(x) else np.zeros(4)})
    try:
        for number, y in enumerate(allred.data.batches(np.ones((16, 4)), batch_size=4)):
            if step == 3 and number == 1 and is_first:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5 * (step == 3))
            seen += len(y)
    except allred.RanksChanged as error:
        assert "rank 1 on localhost" in str(error) and error.rank == 1, error
        raised += 1
assert opt.global_step == 10, opt.global_step
print("raised", raised, "on", allred.rank(), "of", allred.size())
"""


def test_a_loop_without_steps_raises_that_the_ranks_change(tmp_path):
    (tmp_path / "train.py").write_text(EVALUATION)
    own = {"XDG_RUNTIME_DIR": str(tmp_path)}
    result = run(
        [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "-np", 3, "train.py"], 60, own, cwd=tmp_path
    )
    assert result.code == 0, result.text
    assert sorted(result.out.splitlines()) == ["raised 1 on 0 of 2", "raised 1 on 1 of 2"], result.text


@pytest.mark.parametrize("spares", [pytest.param(0, marks=full), 1])
@pytest.mark.parametrize("killed", [(0, 0), pytest.param((1, 9), marks=full)])
def test_a_loop_of_the_program_calls_recover(killed, spares, tmp_path):
    given = {"directory": str(tmp_path), "kill": killed, "size": 2 + spares}
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "RECOVER_PROGRAM": json.dumps(given)}
    words = ["-m", "allred", "run", "--elastic", "-np", 3, *["--spares", 1] * spares, HERE / "recover_program.py"]
    result = run([BIN["mpich"] / "python", *words], 60, own, cwd=tmp_path)
    assert result.code == 0, result.text
    found = sorted((json.loads(path.read_text()) for path in tmp_path.glob("result-*")), key=lambda each: each["rank"])
    assert [(each["rank"], each["size"]) for each in found] == [(rank, 2 + spares) for rank in range(2 + spares)]
    assert sum(each["recovered"] > 0 for each in found) == 2, (found, result.text)
    for each in found:
        assert each["w"] == found[0]["w"], result.text
        np.testing.assert_allclose(each["w"], recover_program.serial(each["steps"]), rtol=1e-12)


@full
def test_one_rank_may_end_much_later(tmp_path):
    """The others have ended for longer than the time limit. A spare does not take their place."""
    code = "import time, allred\nallred.init(banner=False)\nopt = allred.distributed(allred.optim.SGD(lr=0.1))\n"
    code += "import numpy as np\nw = np.zeros(3)\nopt.broadcast(w)\nopt.step(w, np.ones(3))\n"
    code += "time.sleep(6.0 * (allred.rank() == 1))\nprint('end', allred.size(), flush=True)\n"
    (tmp_path / "train.py").write_text(code)
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "ALLRED_TIMEOUT_S": "1"}
    words = ["-m", "allred", "run", "--elastic", "-np", 3, "--spares", 1, "train.py"]
    result = run([BIN["mpich"] / "python", *words], 60, own, cwd=tmp_path)
    assert (result.code, result.out) == (0, "end 3\n" * 3), result.text
    assert result.err.count("\n") == 1, result.text


@pytest.mark.parametrize("stream", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("prefetch", [pytest.param(None, marks=full), {}, pytest.param({"workers": 2}, marks=full)])
def test_batches_that_are_fetched_ahead_are_fetched_again(prefetch, stream, tmp_path):
    how = {"rank": 1, "step": 17, "how": "SIGKILL"}
    result, found = elastic(tmp_path, "-np", 3, "--spares", 1, kill=how, prefetch=prefetch, stream=stream)
    trained(result, found, 3, stream=stream)


def is_alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@full
@pytest.mark.limit(200)
@pytest.mark.parametrize("has_session", [False, True])
def test_random_kills(has_session, tmp_path):
    """Single and double kills at random times, also while a world is formed. Resources of a process stay constant."""
    rng, done = random.Random(1), []

    def training():
        for path in tmp_path.glob("ledger-*"):
            pid = int(path.name.partition("-")[2])
            if is_alive(pid) and path.read_text().count('"commit"') > 2:
                yield pid

    def kill():
        time.sleep(2)
        for number in rng.sample([1] * 12 + [2] * 4, 16):
            time.sleep(rng.uniform(0.3, 1.0))
            pids = [*training()]
            if len(pids) > number:
                done.append(number)
                for pid in rng.sample(pids, number):
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(rng.choice([0, 0.005, 0.02, 0.05]))

    killer = threading.Thread(target=kill)
    killer.start()
    session = str(tmp_path / "ckpt") if has_session else None
    more = {"epochs": 800, "pause_s": 0.002, "elements": 5000, "session": session, "save_steps": 3, "timeout_s": 180}
    result, found = elastic(tmp_path, "-np", 4, "--spares", 1, "--restarts", 99, **more)
    killer.join()
    trained(result, found, 4, epochs=800)
    assert len(done) > 10 and 2 in done, (done, result.text)  # noqa: PT018  (one result)
    assert len({(each["descriptors"], each["mappings"]) for each in found}) == 1, found
    assert all("100 % reduced in place" in each["summary"] for each in found), found


def script(directory, code, *words, env=None, command=("train.py",)):
    """Run `allred run --elastic` with a program of this code."""
    (directory / "train.py").write_text("import os, signal, sys, time\nimport numpy as np\nimport allred\n" + code)
    own = {"XDG_RUNTIME_DIR": str(directory), **(env or {})}
    result = run(
        [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", *words, *command], 60, own, cwd=directory
    )
    assert result.left == [], result.text
    return result


START = """
allred.init(banner=False)
w, opt = np.zeros(3), allred.distributed(allred.optim.SGD(lr=0.1))
opt.broadcast(w)
"""


def test_a_rank_that_a_script_has_started(tmp_path):
    """The script goes on after it, and its exit code is that of the rank, here 4."""
    (tmp_path / "start.sh").write_text(f'{BIN["mpich"]}/python train.py\necho "after $?"\nexit 4\n')
    code = START + "opt.step(w, np.ones(3))\nprint('end', flush=True)\n"
    result = script(tmp_path, code, "-np", 2, command=["sh", "start.sh"])
    assert result.code == 4, result.text
    assert sorted(result.out.splitlines()) == ["after 0", "after 0", "end", "end"], result.text


def test_a_host_without_an_agent_ends_the_job(tmp_path):
    (tmp_path / "agent").write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    (tmp_path / "agent").chmod(0o755)
    words = ["-np", 2, "--hosts", "localhost:1,192.0.2.7:1"]
    result = script(tmp_path, START, *words, env={"HYDRA_LAUNCHER_EXEC": str(tmp_path / "agent")})
    assert result.code != 0, result.text
    assert "was not started: the agent of its host has ended with exit code 255" in result.err, result.text


def test_a_replacement_keeps_the_job_above_its_minimum(tmp_path):
    how = {"rank": 1, "step": 9, "how": "SIGKILL"}
    result, found = elastic(tmp_path, "-np", 2, "--min-np", 2, "--restarts", 2, kill=how, epochs=40)
    trained(result, found, 2, epochs=40)
    assert "2 ranks go on, 1 of them new, step 9 is" in result.err, result.text


def test_two_loops_at_once_have_the_same_ranks(tmp_path):
    code = (
        START
        + """
ids = [np.arange(64), np.arange(64) + 100]
seen, is_first = [], allred.rank() == 1
loops = [allred.data.batches(each, batch_size=8, seed=0) for each in ids]
for step, (a, b) in enumerate(zip(*loops)):
    assert (a + 100 == b).all(), (a, b)
    if step == 3 and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    opt.step(w, np.ones(3), samples=len(a))
    if not opt.interrupted:
        seen += b.tolist()
print(sorted(seen[-8:]), flush=True)
"""
    )
    result = script(tmp_path, code, "-np", 3)
    assert result.code == 0, result.text
    shares = [eval(line) for line in result.out.splitlines()]
    assert len(shares) == 2, result.text
    last = (np.random.default_rng([0, 0]).permutation(64)[-4:] + 100).tolist()
    assert set(last) <= {number for share in shares for number in share}, result.text


WRONG = {
    "allred.data.stream(iter(range(9)), batch_size=3).__iter__().__next__()": "can be iterated over only once",
    "allred.SharedCounter('x').add(1)": "would return to 0 with each change",
    "allred.join()": "join() cannot be used with `allred run --elastic`",
    "opt.step(w, w); allred.distributed(allred.optim.SGD(lr=1.0)).step(w, w)": "recovers one optimizer",
    "allred.distributed(allred.optim.SGD(lr=1.0), accumulate=2).step(w, w)": "recovers one optimizer",
}


def test_what_cannot_be_recovered_is_an_error(tmp_path):
    """All in one job."""
    code = f"""
for code in {list(WRONG)}:
    try:
        exec(code)
    except allred.AllredError as error:
        print(f"{{code}} >> {{error}}\\n", end="", flush=True)
"""
    result = script(tmp_path, START + code, "-np", 2)
    assert result.code == 0, result.text
    for code, text in WRONG.items():
        lines = [line for line in result.out.splitlines() if line.startswith(f"{code} >> ")]
        assert [text in line for line in lines] == [True, True], result.text


def test_a_second_broadcast_is_completed_by_the_others(tmp_path):
    """Rank 1 dies before a broadcast of new parameters, in which the others wait."""
    code = (
        START
        + """
w = {str(n): np.full(400_000, 1.0 + allred.rank()) for n in range(8)}
opt.broadcast(w)
opt.step(w, w)
for each in w.values():
    each[:] = 10.0 + allred.rank()
if allred.rank() == 1:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    time.sleep(5)
opt.broadcast(w)
print({float(each[0]) for each in w.values()}, {float(each[-1]) for each in w.values()}, flush=True)
"""
    )
    result = script(tmp_path, code, "-np", 3)
    assert result.code == 0, result.text
    assert result.out.splitlines() == ["{10.0} {10.0}"] * 2, result.text


def test_after_shutdown_a_rank_may_fail_and_the_others_end_later(tmp_path):
    code = START + "opt.step(w, np.ones(3))\nrank = allred.rank()\nallred.shutdown()\n"
    code += "if rank == 1:\n    sys.exit(3)\ntime.sleep(4)\nprint('end', flush=True)\n"
    result = script(tmp_path, code, "-np", 3, "--spares", 1, env={"ALLRED_TIMEOUT_S": "1"})
    assert (result.code, result.out) == (0, "end\nend\n"), result.text


def test_gradients_that_are_reduced_early(tmp_path):
    """opt.reduce() does not raise that the ranks change; the step is lost as a whole."""
    code = (
        START.replace("np.zeros(3)", '{"a": np.zeros(5000), "b": np.zeros(7000)}')
        + """
lost = 0
for step, x in enumerate(allred.data.batches(np.arange(80.0), batch_size=8)):
    grads = {name: np.full(each.shape, x.mean() if len(x) else 0.0) for name, each in w.items()}
    if step == 4 and allred.world.current().generation == 1 and allred.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name, grad in reversed(grads.items()):
        opt.reduce(name, grad)
        time.sleep(0.02)
    opt.step(w, grads)
    lost += opt.interrupted
print(opt.global_step, lost, round(float(w["a"][0]), 9), round(float(w["b"][-1]), 9), flush=True)
"""
    )
    result = script(tmp_path, code, "-np", 3)
    assert result.code == 0, result.text
    assert result.out.splitlines() == ["10 1 -39.5 -39.5"] * 2, result.text


@full
def test_a_rank_that_has_failed_and_does_not_end_is_killed(tmp_path):
    code = (
        START + "import threading\nif allred.rank() == 1:\n    threading.Thread(target=time.sleep, args=[60]).start()\n"
    )
    code += "    raise ValueError('wrong')\nfor x in allred.data.batches(np.arange(30.0), batch_size=3):\n"
    code += "    opt.step(w, np.ones(3))\nprint('end', opt.global_step, flush=True)\n"
    result = script(tmp_path, code, "-np", 2)
    assert (result.code, result.out) == (0, "end 10\n"), result.text
    assert "failed with exit code 1, and was killed 3 s later: ValueError: wrong; 1 rank goes on" in result.err, (
        result.text
    )


@pytest.mark.parametrize("name", [pytest.param("INT", marks=full), "TERM", "USR1"])
def test_a_signal_ends_a_session(name, tmp_path):
    """SIGUSR1 is sent before a rank handles it."""
    code = (
        "open('started', 'w').close()\ntime.sleep(0.5)\n"
        + START
        + """
data = allred.data.batches(np.arange(6000.0), batch_size=3)
with allred.Session("ckpt", log_steps=None) as session:
    session.track(params=w, optimizer=opt, data=data)
    open(f"ready-{allred.rank()}", "w").close()
    for x in session.steps(data):
        opt.step(w, np.ones(3))
        time.sleep(0.01)
print("end", session.asked, flush=True)
"""
    )
    (tmp_path / "train.py").write_text("import time\nimport numpy as np\nimport allred\n" + code)
    flag = "started" if name == "USR1" else "ready-1"
    shell = f'"$@" & run=$!; while ! [ -e {flag} ]; do sleep 0.02; done; kill -{name} $run; wait $run'
    words = [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "-np", 2, "train.py"]
    result = run(["sh", "-c", shell, "sh", *words], 60, {"XDG_RUNTIME_DIR": str(tmp_path)}, cwd=tmp_path)
    assert (result.code, result.out) == (0, f"end SIG{name}\n" * 2), result.text
    assert len(list((tmp_path / "ckpt").glob("step-*"))) == 1, result.text


def test_the_message_names_the_rank_that_failed_first(tmp_path):
    code = START + "if allred.rank() == 1:\n    raise ValueError('wrong')\nopt.step(w, np.ones(3))\n"
    result = script(tmp_path, code, "-np", 2, "--min-np", 2)
    assert result.code == 1, result.text
    line = "allred run: rank 1 on localhost ended with exit code 1: ValueError: wrong; 1 rank left, but the job needs 2"
    assert line in result.err, result.text
