"""`allred run` without processes: hosts, commands, reports of ranks, decisions after a start."""

import argparse
import contextlib
import errno
import itertools
import json
import os
import threading
import time

import pytest

from allred.errors import AllredError, ConfigError
from allred.run import command, host_list, mpirun, restarts, runner
from allred.run.host_list import HostList
from allred.run.job import Reports
from allred.run.restarts import End, RestartPolicy
from allred.run.runner import delete_commits
from allred.runtime.channel import HandshakeError, connect
from allred.runtime.loop import Loop
from allred.watch import job_directory

SLURM = {"SLURM_JOB_NODELIST": "n[1-2],gpu3", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def write(path, text):
    path.write_text(text)
    return str(path)


def test_the_options_name_the_hosts_before_the_batch_system(tmp_path):
    file = write(tmp_path / "hosts", "a slots=3\n")
    assert host_list.find("b:2", "", SLURM).slots == {"b": 2}
    assert host_list.find("", file, SLURM).slots == {"a": 3}
    assert host_list.find("", "", {}) == HostList({})


def test_each_batch_system_names_its_hosts(tmp_path):
    assert host_list.of_batch_job(SLURM) == HostList({"n1": 4, "n2": 4, "gpu3": 2}, "SLURM_JOB_NODELIST")
    assert host_list.of_batch_job({"SLURM_JOB_NODELIST": "n7", "SLURM_JOB_CPUS_PER_NODE": "8"}).slots == {"n7": 8}
    nodes = write(tmp_path / "pbs", "n1\nn1\nn2\n")
    assert host_list.of_batch_job({"PBS_NODEFILE": nodes}).slots == {"n1": 2, "n2": 1}
    assert host_list.of_batch_job({"LSB_MCPU_HOSTS": "n1 4 n2 2"}).slots == {"n1": 4, "n2": 2}
    queues = write(tmp_path / "sge", "n1 2 all.q@n1 UNDEFINED\nn2 1 all.q@n2 <NULL>\n")
    assert host_list.of_batch_job({"PE_HOSTFILE": queues}).slots == {"n1": 2, "n2": 1}


def test_host_files_of_both_mpis_are_read():
    text = "# ours\nnode-1.site slots=4 max_slots=8\n\nnode2:2\nnode3 2\nnode4\nnode4 max_slots=9\n"
    assert host_list.parse_file(text) == {"node-1.site": 4, "node2": 2, "node3": 2, "node4": 2}


@pytest.mark.parametrize("line", ["node1 slots=many", "node1 slots=0", "node1,node2", "node1: x", "a b c"])
def test_a_wrong_line_of_a_host_file_is_named(line):
    with pytest.raises(ConfigError, match=r"--hostfile, line 2: .* is not a host and its slots"):
        host_list.parse_file(f"good\n{line}\n")


@pytest.mark.parametrize("text", ["a:0", "a:x", "a,,b", "a:1:2", "a b"])
def test_a_wrong_list_of_hosts_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a host name, or a name and a number of slots"):
        host_list.parse_list(text)


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"PBS_NODEFILE .*No such file"):
        host_list.of_batch_job({"PBS_NODEFILE": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="names no host"):
        host_list.find("", write(tmp_path / "empty", "# nothing\n"), {})


def test_this_machine_is_local_and_others_are_not():
    assert host_list.is_local("localhost")
    assert host_list.is_local(os.uname().nodename)
    assert host_list.is_local("127.0.0.1")
    assert not host_list.is_local("198.51.100.1")
    assert not host_list.is_local("no-such-host.invalid")


def test_the_commands_of_both_mpis():
    ranks = {"n1": 2, "n2": 1}
    mpich, open_mpi = mpirun.Launcher("/m/mpirun", "MPICH 5.0.2"), mpirun.Launcher("/o/mpirun", "Open MPI 5.0.11")
    words = mpirun.command(mpich, ranks, ["prog"], {"ALLRED_MODE": "ps"}, is_root=True)
    assert " ".join(words) == "/m/mpirun -hosts n1:2,n2:1 -bind-to none -np 3 prog"
    environ = {"ALLRED_MODE": "ps", "PMI_RANK": "0", "OMP_NUM_THREADS": "1", "HOME": "/root"}
    words = mpirun.command(open_mpi, ranks, ["prog"], environ, is_root=True)
    assert " ".join(words) == (
        "/o/mpirun --allow-run-as-root --host n1:2,n2:1 --map-by slot --bind-to none -x ALLRED_MODE -x OMP_NUM_THREADS "
        "-np 3 prog"
    )
    assert "--allow-run-as-root" not in mpirun.command(open_mpi, ranks, ["prog"], environ, is_root=False)


def test_all_variables_are_forwarded_to_other_hosts_if_asked_for():
    launch = mpirun.Launcher("/o/mpirun", "Open MPI 5.0.11")
    environ = {"HOROVOD_TIMELINE": "t", "PMI_RANK": "0", "TOKEN": "1", "PWD": "/", "BASH_FUNC_f%%": "() { :; }"}

    def names(ranks, forwards_all):
        words = mpirun.command(launch, ranks, ["prog"], environ, is_root=False, forwards_all=forwards_all)
        return [name for option, name in itertools.pairwise(words) if option == "-x"]

    assert names({"n1": 1}, True) == ["HOROVOD_TIMELINE", "TOKEN"]
    assert names({"localhost": 1}, True) == names({"n1": 1}, False) == ["HOROVOD_TIMELINE"]


def test_torchs_variables_name_the_first_host_and_keep_those_of_the_user():
    here = os.uname().nodename
    found = mpirun.torch_variables({here: 2, "localhost": 1}, {})
    assert (found["MASTER_ADDR"], found["WORLD_SIZE"]) == ("127.0.0.1", "3")
    assert 1024 < int(found["MASTER_PORT"]) < 32768
    given = {"MASTER_PORT": "1", "WORLD_SIZE": "7"}
    assert mpirun.torch_variables({"198.51.100.1": 1, "localhost": 1}, given) == {"MASTER_ADDR": "198.51.100.1"}
    assert mpirun.torch_variables({"localhost": 1, "198.51.100.1": 1}, given) != {"MASTER_ADDR": "localhost"}


def options(**given):
    defaults = {"np": 2, "hosts": "", "hostfile": "", "restarts": 0, "min_np": None, "max_np": None, "mode": None}
    defaults |= {"num_ps": None, "tag": False, "logs": "", "name": None, "is_module": False, "program": "train.py"}
    return argparse.Namespace(**defaults | {"arguments": [], "elastic": False, "spares": 0} | given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"np": None}, "how many ranks"),
        ({"hosts": "a:1,b:2", "np": 4}, "-np 4 needs 4 slots, but --hosts has 3: a:1, b:2"),
        ({"hosts": "a:4", "hostfile": "h"}, "name the hosts twice"),
        ({"min_np": 3}, "2 ranks are not within --min-np 3"),
        ({"max_np": 1, "min_np": 1}, "2 ranks are not within --min-np 1 and --max-np 1"),
        ({"num_ps": 2}, "--num-ps needs --mode ps"),
    ],
)
def test_options_that_do_not_fit_together_are_an_error(given, words, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "PBS", "LSB", "PE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=words):
        command.make_options(options(**given))


def test_a_working_directory_that_was_deleted_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ConfigError, match=r"the working directory cannot be used \(No such file"):
        command.make_options(options())


def test_a_plan_takes_all_slots_and_sets_the_mode():
    made = command.make_options(options(np=None, hosts="a:2,b:1", mode="ps", num_ps=1))
    assert (made.target, made.settings["ALLRED_MODE"], made.settings["ALLRED_NUM_PS"]) == (3, "ps", "1")
    assert command.make_options(options(np=None, hosts="a:2,b:1", max_np=2)).target == 2


# Reports.


def reports(size=2, **more):
    found = Reports(size)
    for rank in range(size):
        found.handle({"event": "joined", "rank": rank, "host": f"n{rank}"})
    return found


def test_success_is_a_report_of_every_rank():
    found = reports()
    found.handle({"event": "left", "rank": 0})
    assert not found.is_success
    assert found.missing == "rank 1 ended without a report"
    found.handle({"event": "left", "rank": 1})
    assert found.is_success


def test_ranks_without_a_watcher_are_no_missing_report():
    """init() warns of them, and training continues: the watcher of a node could not accept one."""
    found = Reports(2)
    found.handle({"event": "joined", "rank": 0, "host": "n0"})
    assert not found.watched_have_left
    found.handle({"event": "left", "rank": 0})
    assert found.watched_have_left
    assert not found.is_success, "the exit code of mpirun decides"


def test_a_failure_has_the_exception_and_the_step_of_the_session():
    found = reports()
    found.handle({"event": "session", "rank": 1, "step": 10, "is_open": True})
    assert found.sessions == {1: 10}
    found.handle({"event": "session", "rank": 1, "step": 14, "is_open": False})
    found.handle({"event": "failed", "rank": 1, "words": "ValueError: x", "code": 1})
    found.handle({"event": "verdict", "rank": 1, "code": 1, "text": "rank 1 failed\nTraceback"})
    assert (found.exception, found.step, found.restored, found.text) == ("ValueError: x", 14, 10, "rank 1 failed")
    assert found.sessions == {}
    assert not found.is_success


def test_unreachable_hosts_are_known_by_name():
    found = reports(3)
    found.handle({"event": "unreachable", "rank": 1, "ranks": [1, 2], "how": ""})
    assert found.lost_hosts == {"n1", "n2"}


# Decisions.


def test_restarts_are_counted():
    policy = RestartPolicy(2)
    assert [policy.decide(End(137, "killed")).delay_s is None for _ in range(3)] == [False, False, True]


def test_the_delay_doubles_without_progress_and_begins_anew_after_it():
    policy = RestartPolicy(100)
    delays = [policy.decide(End(137, restored=step)).delay_s for step in (None, 4, 4, 4, 8, 8)]
    assert delays == [0.5, 0.5, 1.0, 2.0, 0.5, 1.0]
    longest = [RestartPolicy(30)] * 20
    assert [policy.decide(End(137)).delay_s for policy in longest][-1] == restarts.LONGEST_RESTART_DELAY_S


def test_the_same_exception_at_the_same_step_ends_the_job():
    policy, failure = RestartPolicy(9), End(1, "x", "ValueError: x", step=7)
    assert policy.decide(failure).delay_s is not None
    assert policy.decide(End(1, "x", "ValueError: x", step=8)).delay_s is not None
    assert policy.decide(End(1, "x", "ValueError: x", step=8)).reason == "the same exception occurred twice at step 8"


def test_a_rank_that_is_killed_twice_at_the_same_step_is_no_exception():
    policy = RestartPolicy(9)
    assert [policy.decide(End(137, step=7)).delay_s is None for _ in range(3)] == [False] * 3


def test_a_program_that_ends_twice_before_init_is_not_started_again():
    policy = RestartPolicy(9)
    assert policy.decide(End(1, joined=False)).delay_s is not None
    assert policy.decide(End(1, joined=False)).reason == "the program ended twice before allred.init()"


# Files.


def test_the_directory_of_jobs_belongs_to_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert job_directory.directory().stat().st_mode & 0o777 == 0o700
    job_directory.directory().chmod(0o755)
    with pytest.raises(AllredError, match="must be a directory of this user with mode 0700"):
        job_directory.directory()


def test_a_job_is_chosen_by_its_name_or_because_it_is_the_only_one():
    assert job_directory.choose("", {"a": 1}, "job") == job_directory.choose("a", {"a": 1, "b": 2}, "job") == 1
    with pytest.raises(AllredError, match=r"which job\?; running here: a, b"):
        job_directory.choose("", {"a": 1, "b": 2}, "job")


def test_hosts_without_an_answer_are_found_with_the_agent_of_mpirun(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = 198.51.100.1 ]\n')
    agent.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(agent)}
    assert host_list.unreachable(["localhost", "198.51.100.1", "198.51.100.2"], environ) == {"198.51.100.2"}
    assert host_list.unreachable(["198.51.100.2"], {"PBS_NODEFILE": "x"}) == set()


@pytest.mark.parametrize("other", [{"process": 4194305}, {"started": "0"}, {}])  # no such process; another one; neither
def test_entries_of_killed_processes_are_removed(tmp_path, monkeypatch, other):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = job_directory.write_entry("mine", job_directory.JOB, {"port": 1})
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    assert list(job_directory.entries(job_directory.JOB)) == ([] if other else ["mine"])
    assert job_directory.entries(job_directory.RUN) == {}
    assert path.exists() == (not other)


def test_a_request_that_is_not_one_ends_no_job(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.closing(Loop()) as loop:
        requests = runner.ResizeRequests(loop, "mine", lambda request: f"{int(request['np'])} ranks")
        with pytest.raises(AllredError, match="a job with the name 'mine' runs here already"):
            runner.ResizeRequests(loop, "mine", str)
        entry, replies = job_directory.entries(job_directory.RUN)["mine"], []

        def ask(secret, message):
            try:
                with contextlib.closing(connect(("127.0.0.1", entry["port"]), runner.RESIZE_PURPOSE, secret)) as peer:
                    peer.send(message)
                    replies.append(peer.receive_one(time.monotonic() + 60))
            except (HandshakeError, ConnectionError) as error:
                replies.append(str(error))

        given = [("guess", {"np": 4}), (entry["secret"], {"np": "x"}), (entry["secret"], {"np": 4})]
        for number, each in enumerate(given, 1):
            thread = threading.Thread(target=ask, args=each)
            thread.start()
            while len(replies) < number:
                loop.turn(0.05)
            thread.join()
        requests.close()
    assert replies[0].startswith("refuses this process: ")
    assert replies[1:] == ["the peer has closed the connection", {"text": "4 ranks", "code": 0}]
    assert job_directory.entries(job_directory.RUN) == {}


def test_a_job_runs_without_its_file_unless_its_name_is_the_cause(tmp_path, monkeypatch, capfd):
    """And a file that could not be written is removed."""

    def fill(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.closing(Loop()) as loop:
        with pytest.raises(AllredError, match=r"too long: .*; choose another --name"):
            runner.ResizeRequests(loop, "x" * 300, str)
        monkeypatch.setattr("allred.watch.job_directory.json.dump", fill)
        runner.ResizeRequests(loop, "mine", str).close()
    assert "warning: `allred resize` cannot find this job: No space left on device" in capfd.readouterr().err
    assert list(job_directory.directory().iterdir()) == []


def test_only_commits_are_deleted(tmp_path):
    for name in ("run-1.pt", "run-2.tmp", "notes.txt"):
        (tmp_path / "job.commits").mkdir(exist_ok=True)
        (tmp_path / "job.commits" / name).touch()
    delete_commits(str(tmp_path / "job.commits"))
    assert [path.name for path in (tmp_path / "job.commits").iterdir()] == ["notes.txt"]
    (tmp_path / "job.commits" / "notes.txt").unlink()
    delete_commits(str(tmp_path / "job.commits"))
    assert not (tmp_path / "job.commits").exists()


@pytest.mark.parametrize(("text", "least"), [("0", 1), ("-1", 0), ("²", 0), ("", 0), ("1.5", 0), ("1" * 10, 0)])
def test_wrong_numbers_are_refused(text, least):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number from {least} to"):
        command._number(text, least)


def test_no_restarts_and_no_spares_can_be_asked_for():
    assert command.main(["--elastic", "--restarts", "0", "--spares", "0", "-np", "2", "--dry-run", "train.py"]) == 0
