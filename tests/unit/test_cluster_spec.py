"""ClusterSpec: TensorFlow's names, ways to write it, and what is refused. Roles of ranks in its words."""

import json

import pytest
import worlds

import allred
from allred import numbering
from allred.cluster import topology
from allred.cluster.spec import tf_config
from allred.errors import ConfigError, InputError

LISTS = {"worker": ["b:1", "c:1"], "ps": ["a:1"]}


def test_methods_of_a_cluster_of_lists():
    cluster = allred.ClusterSpec(LISTS)
    assert cluster.as_dict() == LISTS
    assert cluster.jobs == ["worker", "ps"]
    assert cluster.num_tasks("worker") == 2
    assert cluster.task_indices("worker") == [0, 1]
    assert cluster.task_address("worker", 1) == "c:1"
    assert cluster.job_tasks("worker") == ["b:1", "c:1"]


def test_servers_come_first_in_the_world():
    cluster = allred.ClusterSpec(LISTS)
    assert list(cluster.addresses()) == ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]


def test_clients_come_last_in_the_world():
    cluster = allred.ClusterSpec({"client": 1, "worker": 2, "ps": 1})
    names = ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:client/task:0"]
    assert list(cluster.addresses()) == names
    seen = []
    for rank in range(4):
        here = numbering.number([0] * 4, rank, servers=1, clients=1)
        with worlds.installed(here):
            seen.append((topology.role(), here.rank, here.size, here.local_rank, here.local_size, topology.is_chief()))
    assert seen == [
        ("parameter server 0", 2, 2, 0, 1, False),
        ("worker 0", 0, 2, 0, 2, True),
        ("worker 1", 1, 2, 1, 2, False),
        ("client 0", 3, 2, 0, 1, False),
    ]


def test_a_dict_by_index_may_leave_some_out():
    cluster = allred.ClusterSpec({"worker": {2: "c:1", 0: "a:1"}})
    assert cluster.task_indices("worker") == [0, 2]
    assert cluster.num_tasks("worker") == 2
    assert cluster.job_tasks("worker") == ["a:1", None, "c:1"]
    assert cluster.as_dict() == {"worker": {0: "a:1", 2: "c:1"}}
    assert allred.ClusterSpec({"worker": {0: "a:1"}}) == allred.ClusterSpec({"worker": ["a:1"]})


def test_counts_have_no_addresses():
    cluster = allred.ClusterSpec({"ps": 1, "worker": 3})
    assert cluster.job_tasks("worker") == [None] * 3
    assert cluster.task_address("worker", 2) == ""
    assert cluster.as_dict() == {"ps": 1, "worker": 3}


def test_equality_is_of_jobs_and_their_tasks():
    cluster = allred.ClusterSpec(LISTS)
    assert cluster == allred.ClusterSpec(cluster) == allred.ClusterSpec(cluster.as_dict())
    assert hash(cluster) == hash(allred.ClusterSpec(LISTS))
    assert cluster == allred.ClusterSpec(dict(reversed(LISTS.items())))
    assert cluster != allred.ClusterSpec({**LISTS, "worker": ["c:1", "b:1"]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "a dict from jobs to their tasks"),
        (["a:1"], "a dict from jobs to their tasks"),
        ({"ps": []}, "job 'ps' needs at least one task"),
        ({"ps": 0}, "job 'ps' needs at least one task"),
        ({"ps": True}, "job 'ps' takes addresses"),
        ({"ps": "a:1"}, "job 'ps' takes addresses"),
        ({"ps": {-1: "a:1"}}, "numbered from 0"),
        ({"ps": ["a"]}, "job 'ps' is not host:port: 'a'"),
        ({"ps": ["a:http"]}, "is not host:port"),
        ({"ps": ["a:0"]}, "is not host:port"),
        ({"ps": ["a:65536"]}, "is not host:port"),
        ({"ps": [None]}, "is not host:port: None"),
        ({"p s": ["a:1"]}, "a job's name is a word"),
        ({"ps": ["a:1"], "worker": ["b:1", "a:1"]}, "/job:ps/task:0 and /job:worker/task:1 have the same address, a:1"),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(InputError) as error:
        allred.ClusterSpec(given)
    assert words in str(error.value)


def test_asking_for_what_is_not_there():
    cluster = allred.ClusterSpec(LISTS)
    with pytest.raises(InputError, match="no job 'chief'; it has 'worker', 'ps'"):
        cluster.num_tasks("chief")
    with pytest.raises(InputError, match="job 'worker' has no task 2; it has 0, 1"):
        cluster.task_address("worker", 2)


def test_from_world_before_init_uses_the_launchers_size(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert allred.ClusterSpec.from_world(num_ps=0).as_dict() == {"worker": 1}
    monkeypatch.setenv("PMI_SIZE", "5")
    assert allred.ClusterSpec.from_world(num_ps=2).as_dict() == {"ps": 2, "worker": 3}
    with pytest.raises(InputError, match="of 5 processes no worker is left"):
        allred.ClusterSpec.from_world(num_ps=5)


def config(job, index, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def test_tf_config():
    given = config("worker", 1, **LISTS)
    assert allred.ClusterSpec.from_tf_config(given) == allred.ClusterSpec(LISTS)
    assert tf_config(given)[1:] == ("worker", 1)


@pytest.mark.parametrize("chief", ["chief", "master"])
@pytest.mark.parametrize(
    ("job", "index", "ours"), [("chief", 0, ("worker", 0)), ("worker", 1, ("worker", 2)), ("ps", 0, ("ps", 0))]
)
def test_the_chief_of_tf_config_is_worker_0(chief, job, index, ours):
    jobs = {chief: ["x:1"], **LISTS}
    cluster, *task = tf_config(config(chief if job == "chief" else job, index, **jobs))
    assert cluster.job_tasks("worker") == ["x:1", "b:1", "c:1"]
    assert tuple(task) == ours


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"cluster": {"ps": ["a:1"]}}', '{"cluster": 1, "task": 2}'])
def test_a_tf_config_that_cannot_be_used(text):
    with pytest.raises(ConfigError, match="it should look like"):
        allred.ClusterSpec.from_tf_config({} if text is None else {"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, ("ps", 0, False)), (1, ("ps", 1, False)), (2, ("worker", 0, True)), (4, ("worker", 2, False))],
)
def test_the_role_of_a_rank(rank, expected):
    with worlds.installed(numbering.number([0] * 5, rank, servers=2)):
        assert (allred.job_name(), allred.task_index(), allred.is_chief()) == expected
