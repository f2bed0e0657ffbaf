"""The rendezvous of tasks without mpirun: PMI-1, hellos, addresses, the secret."""

import base64
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import zlib

import pytest
from ports import reserved_ports

from allred.config import secret
from allred.errors import ConfigError
from allred.launch import rendezvous_client
from allred.launch.rendezvous_server import (
    Exchanges,
    Pmi,
    RendezvousState,
    decode_values,
    digest,
    mapping,
    members_of,
)
from allred.runtime import detached
from allred.runtime.timings import LINE_BYTES
from allred.wording import ranges_in_order

# ---- PMI-1


def test_what_one_has_put_all_get_after_the_barrier():
    pmi = Pmi(["a", "a", "b"])
    [(ranks, name)] = pmi.handle(1, "cmd=get_my_kvsname")
    assert ranks == [1]
    name = name.rpartition("=")[2]
    assert pmi.handle(0, f"cmd=put kvsname={name} key=k value=a=b+/") == [([0], "cmd=put_result rc=0 msg=success")]
    assert pmi.handle(0, "cmd=barrier_in") == pmi.handle(2, "cmd=barrier_in") == []
    assert pmi.handle(1, "cmd=barrier_in") == [(range(3), "cmd=barrier_out rc=0")]
    assert pmi.handle(2, f"cmd=get kvsname={name} key=k") == [([2], "cmd=get_result rc=0 value=a=b+/")]
    assert pmi.handle(2, f"cmd=get kvsname={name} key=x") == [([2], "cmd=get_result rc=1 msg=key_not_found")]
    where = "cmd=get_result rc=0 value=(vector,(0,1,2),(1,1,1))"
    assert pmi.handle(0, f"cmd=get kvsname={name} key=PMI_process_mapping") == [([0], where)]
    assert pmi.handle(0, "cmd=barrier_in") == [], "the next barrier begins anew"


def test_values_go_to_all_members_once_all_have_sent_theirs():
    pmi = Pmi(["a"] * 4)
    assert pmi.handle(2, "cmd=allgather key=k ranks=2,0,3 value=dHdv") == []
    assert pmi.handle(0, "cmd=allgather key=k ranks=2,0,3 value=emVybw==") == []
    assert pmi.handle(0, "cmd=missing key=k") == [([0], "cmd=missing key=k ranks=3")]
    [(ranks, line)] = pmi.handle(3, "cmd=allgather key=k ranks=2,0,3 value=")
    assert list(ranks) == [2, 0, 3]
    text, found = line.removeprefix("cmd=allgathered key=k left=0 values="), [b"two", b"zero", b""]
    assert decode_values(text, 3) == found
    for wrong in (text[:-4], text[4:], "", base64.b64encode(zlib.compress(b"x," * 2**21)).decode()):
        with pytest.raises(ValueError, match=r"."):
            decode_values(wrong, 3)
    assert pmi.handle(0, "cmd=missing key=k") == [([0], "cmd=missing key=k ranks=")], "complete, but not received yet"
    with pytest.raises(ValueError, match="rank 3 is not one of 0-2"):
        pmi.handle(3, "cmd=allgather key=l ranks=0-2 value=")
    assert pmi.handle(0, "cmd=missing key=l") == [([0], "cmd=missing key=l ranks=")], "nobody has begun it"


def test_large_values_are_sent_in_several_lines():
    exchanges, values = Exchanges(2), [base64.b64encode(os.urandom(600_000)) for _ in range(2)]
    words = [{"cmd": "allgather", "key": "k", "ranks": "0-1", "value": value.decode()} for value in values]
    assert exchanges.handle(0, words[0]) == []
    lines = [line for _, line in exchanges.handle(1, words[1])]
    assert [line.partition(" values=")[0] for line in lines][-2:] == [f"cmd=allgathered key=k left={n}" for n in (1, 0)]
    assert max(map(len, lines)) < LINE_BYTES
    text = "".join(line.partition(" values=")[2] for line in lines)
    assert decode_values(text, 2) == [base64.b64decode(value) for value in values]


def test_members_as_text():
    for number in range(1, 6):
        for members in itertools.permutations(range(5), number):
            assert tuple(members_of(ranges_in_order(members), 5)) == members
    for wrong in ("", "5", "-1", "0-5", "2-1", "0,0", "0-2,2", "x", "0-99999999999999999999", "9" * 5000):
        with pytest.raises(ValueError, match=r"."):
            members_of(wrong, 5)


def test_two_worlds_have_two_names():
    names = {Pmi(["a"]).handle(0, "cmd=get_my_kvsname")[0][1] for _ in range(3)}
    assert len(names) == 3


def test_answers_of_one_line():
    pmi = Pmi(["a", "b"])
    assert pmi.handle(1, "cmd=get_universe_size") == [([1], "cmd=universe_size rc=0 size=2")]
    assert pmi.handle(0, "cmd=finalize") == [([0], "cmd=finalize_ack rc=0")]
    assert pmi.handle(0, "cmd=abort exitcode=7 message=abort") == []
    with pytest.raises(ValueError, match="spawn"):
        pmi.handle(0, "cmd=spawn")


def test_the_mapping_gives_the_nodes_back():
    for nodes in itertools.product("abc", repeat=5):
        check_mapping(nodes)
    many = [node for node in range(1000) for _ in range(16)]
    assert mapping(many) == "(vector,(0,1000,16))"
    assert rendezvous_client.mpi_problem({"a": ("MPICH", "")}, many) == ""
    assert "cannot read the hosts" in rendezvous_client.mpi_problem({"a": ("MPICH", "")}, [*range(9), 3, 1] * 60)


def check_mapping(nodes):
    numbers = [tuple(map(int, block.split(","))) for block in mapping(nodes)[len("(vector,(") : -2].split("),(")]
    expanded = [each for node, many, count in numbers for each in range(node, node + many) for _ in range(count)]
    names = dict(zip(expanded, nodes, strict=True))
    assert [names[node] for node in expanded] == list(nodes)
    assert len(names) == len(set(nodes))


# ---- who is there

ADDRESSES = {"/job:ps/task:0": "a:1", "/job:worker/task:0": "b:1", "/job:worker/task:1": "c:1"}
PS, W0, W1 = ADDRESSES


def hello(task, **more):
    return {"task": task, "addresses": ADDRESSES, "node": "n", "host": "h", "pid": 7, "user": 1, **more}


def complete():
    state = RendezvousState(ADDRESSES)
    assert [state.connect(hello(task, node=task)) for task in (W1, PS, W0)] == ["", "", ""]
    return state


def test_it_begins_when_all_are_there():
    state = RendezvousState(ADDRESSES)
    assert not state.connect(hello(W0))
    assert state.missing() == [f"{PS} (a:1)", f"{W1} (c:1)"]
    assert state.disconnect(W0) == ""
    assert len(state.missing()) == 3, "one that goes again is missed again"
    assert not state.all_connected
    assert complete().all_connected
    assert complete().nodes() == [PS, W0, W1], "in the order of ranks"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hello(PS, pid=8), f"{PS} (pid 8 on h) was started a second time; pid 7 on h is {PS} already"),
        (hello(W0, problem="no port"), f"{W0} (pid 7 on h) cannot start: no port"),
        (hello(W0, user=2), f"{W0} (pid 7 on h) is of user 2, but {PS} of user 1; on one machine they share memory"),
        (hello(W0, addresses={**ADDRESSES, W1: "d:1"}), f"there {W1} is d:1, here it is c:1"),
        (hello(W0, addresses={**ADDRESSES, "/job:x/task:0": "d:1"}), "there /job:x/task:0 is d:1, here it is nothing"),
        (hello(W0, addresses=None), f"there {PS} is nothing, here it is a:1"),
        (hello(W0, addresses=dict(reversed(ADDRESSES.items()))), "the order of the tasks differs"),
        (hello("/job:x/task:9"), "it has no /job:x/task:9"),
    ],
)
def test_refused_hellos(wrong, words):
    state = RendezvousState(ADDRESSES)
    assert not state.connect(hello(PS))
    assert words in state.connect(wrong)
    assert state.missing() == [f"{W0} (b:1)", f"{W1} (c:1)"], "the one that was there still is"


def test_a_death_is_sent_to_the_tasks_that_start():
    state = complete()
    assert [state.begins(task) for task in ADDRESSES] == [[], [], []]
    state.started(PS)
    words = state.disconnect(W1)
    assert state.wait_for(W1) == [W0]
    assert words == f"{W1} (pid 7 on h) has ended while the tasks started; this task ends, too"
    state.started(W0)  # it had all of the other
    assert state.wait_for(W1) == []
    assert state.begins(PS) == [words], "once more, without the other"


def test_a_task_that_starts_does_not_wait_for_one_that_has_started_and_ended():
    state = complete()
    for task in ADDRESSES:
        state.begins(task)
    state.started(W1)
    state.disconnect(W1)
    assert state.wait_for(W1) == []


def test_finished_tasks_are_released_if_another_task_failed():
    state = complete()
    for task in ADDRESSES:
        state.begins(task)
        state.started(task)
    state.finished(W0)
    state.disconnect(W1)
    assert state.wait_for(W1) == []
    assert state.blocked_in_finalize() == [], "one still works"
    state.finished(PS)
    assert state.blocked_in_finalize() == [PS, W0]
    assert state.blocked_in_finalize() == [], "once"


def test_finished_tasks_get_no_message_if_all_finish():
    state = complete()
    for task in ADDRESSES:
        state.finished(task)
    assert state.blocked_in_finalize() == []
    state.disconnect(PS)
    assert state.blocked_in_finalize() == []


# ---- addresses


def test_places_and_the_secret():
    near = {"a": "localhost:1", "b": "127.0.0.1:2"}
    rendezvous_client.check_addresses(near, rendezvous_client.look_up(near), "")
    far = {"a": "10.0.0.1:1", "b": "10.0.0.2:1"}
    rendezvous_client.check_addresses(far, rendezvous_client.look_up(far), "s")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:1 of a can be reached from other machines: set ALLRED_SECRET"):
        rendezvous_client.check_addresses(far, rendezvous_client.look_up(far), "")
    mixed = {"a": "localhost:1", "b": "10.0.0.2:1"}
    with pytest.raises(ConfigError, match=r"loopback \(127\.0\.0\.1\), which b at 10\.0\.0\.2:1 cannot reach"):
        rendezvous_client.check_addresses(mixed, rendezvous_client.look_up(mixed), "s")
    twice = {"a": "localhost:1", "b": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"localhost:1 of a and 127\.0\.0\.1:1 of b are the same address"):
        rendezvous_client.check_addresses(twice, rendezvous_client.look_up(twice), "")


def test_one_query_for_each_host(monkeypatch):
    queries, real = [], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: queries.append(host) or real(host, *more))
    addresses = {f"t{n}": f"{'[::1]' if n % 2 else 'localhost'}:{n}" for n in range(1, 100)}
    found = rendezvous_client.look_up(addresses)
    assert queries == ["::1", "localhost"]
    assert found["t1"] == [("::1", 1, 0, 0)] * len(found["t1"])
    assert found["t2"][0] == ("127.0.0.1", 2)


def test_unknown_hosts():
    with pytest.raises(ConfigError, match=r"unknown host on .*: nowhere\.invalid of b "):
        rendezvous_client.look_up({"a": "localhost:1", "b": "nowhere.invalid:1"})


def test_an_address_of_another_machine():
    address = {"a": "192.0.2.1:2222"}  # of no machine, by RFC 5737
    with pytest.raises(ConfigError, match=r"a cannot listen at 192\.0\.2\.1:2222 .*; start a on the machine that"):
        rendezvous_client.listen("a", "192.0.2.1:2222", rendezvous_client.look_up(address)["a"])


# ---- the secret


def test_the_secret_from_the_variable_or_a_file(tmp_path):
    assert secret({}) == ""
    assert secret({"ALLRED_SECRET": "s"}) == "s"
    file = tmp_path / "secret"
    given = {"ALLRED_SECRET_FILE": str(file)}
    with pytest.raises(ConfigError, match="cannot be read"):
        secret(given)
    file.write_text("t\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="is accessible to other users; chmod 600 it"):
        secret(given)
    file.chmod(0o600)
    assert secret(given) == "t"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        secret(given)


STRANGE = [
    b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"[" * 60_000 + b"\n", b"x" * 2**17, b'{"proof": "\\ud800"}\n',
    b'{"nonce": "\\ud800", "proof": {}}\n', b'{"nonce": 1e999}\n{"rank": 0}\n',
]  # fmt: skip


@contextlib.contextmanager
def meeting_place():
    """The address of a process at which tasks meet, and the first one of them."""
    with subprocess.Popen(["sleep", "60"]) as first, socket.create_server(("127.0.0.1", 0)) as server:
        address, listener = server.getsockname(), server.fileno()
        settings = {"addresses": ADDRESSES, "secret": "s", "listener": listener, "pid": first.pid}
        assert detached.start("allred.launch.rendezvous_server", settings, files=[listener]) == {"problem": ""}
        server.close()
        try:
            yield address
        finally:
            first.kill()


def test_strangers_do_not_end_the_meeting():
    with meeting_place() as address:
        for sent in (*STRANGE, b""):
            with socket.create_connection(address, 10) as stranger:
                stranger.settimeout(10)
                assert b'"allred": ' in stranger.recv(200), "it is still there"
                stranger.sendall(sent)


def next_message(lines):
    return lines.receive_one(time.monotonic() + 60)


def test_a_task_with_other_addresses_sends_them_and_is_refused():
    theirs = {**ADDRESSES, W1: "d:1"}
    connector = rendezvous_client.Connector(theirs, W0, "s")
    words = {"task": W0, "digest": digest(theirs), "node": "n", "host": "h", "pid": 7, "user": 1}
    waiting = rendezvous_client._Waiting(W0, 60.0, PS)
    with meeting_place() as address:
        assert rendezvous_client._wait(connector, [address], words, waiting) is None, "it has to connect again"
        with pytest.raises(ConfigError, match=f"another cluster than {PS}: there {W1} is d:1, here it is c:1"):
            rendezvous_client._wait(connector, [address], words, waiting)


def test_a_task_restarted_while_its_job_runs_waits_for_its_end():
    with meeting_place() as address, contextlib.ExitStack() as stack:

        def come(task):
            found = rendezvous_client.Connector(ADDRESSES, task, "s").connect([address], **hello(task))
            return stack.enter_context(contextlib.closing(found.connection)), found

        tasks = {task: come(task) for task in ADDRESSES}
        for _, lines in tasks.values():
            while not any("go" in message for message in lines.receive()):
                pass
        assert "was started a second time" in next_message(come(W1)[1])["refused"]
        tasks[W1][0].close()
        late, lines = come(W1)
        assert next_message(lines) == {"missing": [f"the end of the job at {PS} (a:1), in which pid 7 on h was {W1}"]}
        for task in (PS, W0):
            tasks[task][0].close()
        assert late.recv(1) == b"", "and now the next one can be met"


FORKS = """
import os, socket, sys, time
from allred.launch.rendezvous_bootstrap import RendezvousConnection
from allred.launch.rendezvous_client import Joined
exchanges = socket.socketpair()[0].detach()
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
connection = RendezvousConnection(Joined(0, 2, exchanges, int(sys.argv[1]), listener), 1.0)
del listener
child = os.fork()
if child == 0:
    os.closerange(0, 3)
    time.sleep(60)
os._exit(0) if child == 0 else print(child)
"""


def test_a_fork_that_lives_on_does_not_hide_a_task_s_end():
    ours, theirs = socket.socketpair()
    [port] = reserved_ports(1)
    command = [sys.executable, "-c", FORKS, str(theirs.fileno()), str(port)]
    with ours, theirs:
        task = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=30, check=True
        )
        theirs.close()
        ours.settimeout(20)
        try:
            assert ours.recv(1) == b""
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            os.kill(int(task.stdout), signal.SIGKILL)
