"""Places in TensorFlow's words, blocks in blocks; and what of a function's call travels without a copy."""

import sys

import numpy as np
import pytest

import allred
from allred.client.call import pack, unpack
from allred.cluster import device
from allred.cluster.device import Place
from allred.compat import tf1
from allred.compat.tf1 import training_session
from allred.errors import InputError, NotInitializedError


def test_inner_blocks_inherit_missing_parts_from_outer_blocks():
    assert device.of_function() == Place()
    with allred.device("/job:worker/task:1/gpu:0"):
        with allred.device("/cpu:0"):
            assert str(device.of_function()) == "/job:worker/task:1/cpu:0"
        with allred.device("/job:ps"):  # of which the task of the other job says nothing
            assert device.of_variable(None) == Place("ps", None, "gpu:0")
        with allred.device(None):
            assert device.of_function() == Place()
        with pytest.raises(ZeroDivisionError), allred.device("/task:2"):
            raise ZeroDivisionError
        assert device.of_function() == Place("worker", 1, "gpu:0")
    assert device.of_function() == Place()


@pytest.mark.parametrize("text", ["worker:1", "/job:ps/task:x", "/task:1/job:ps", "/tpu:0", 3, "/job:worker/replica:1"])
def test_what_names_no_place(text):
    with pytest.raises(InputError, match="expected /job:NAME/task:NUMBER"), allred.device(text):
        pass


@pytest.fixture
def server():
    yield allred.Server.create_local_server()
    allred.shutdown()


def test_a_function_for_a_gpu_runs_on_its_task_under_soft_placement(server, capfd, monkeypatch):
    monkeypatch.setattr(training_session, "_warned", set())
    config = tf1.ConfigProto(allow_soft_placement=True, log_device_placement=True, gpu_options={})
    for session in (
        allred.connect(server.target, allow_soft_placement=True, log_device_placement=True),
        tf1.Session(server.target, config=config),
    ):
        with allred.device("/job:local/task:0/gpu:1"):
            assert session.run(max, 1, 2) == 2
    said = capfd.readouterr().err
    assert said.count("max: /job:local/task:0/cpu:0\n") == 2
    assert said.count("allred: ConfigProto: these arguments have no effect: gpu_options") == 1
    for session in (allred.connect(server.target), tf1.Session(server.target)):
        words = r"remove /gpu:1 from .* or .*allow_soft_placement=True"
        with pytest.raises(InputError, match=words), allred.device("/job:local/task:0/gpu:1"):
            session.run(max, 1, 2)
    with pytest.raises(InputError, match=r"expected a tf1\.ConfigProto"):
        tf1.Session(server.target, config={"allow_soft_placement": True})


def test_a_client_outside_the_cluster_gets_an_error_with_a_remedy():
    target = "allred://node1:2222/job:worker/task:0"
    words = r"this process is not a task of a cluster, .* job 'client' .*allred.Server\(cluster, 'client', 0\)"
    for given in (target, ""):
        with pytest.raises(NotInitializedError, match=words):
            allred.connect(given)
    allred.init(banner=False)
    try:
        with pytest.raises(NotInitializedError, match=words):  # and the function does not run here
            allred.connect(target)
        session = allred.connect()
        assert session.run(max, 1, 2) == 2
    finally:
        allred.shutdown()
    with pytest.raises(NotInitializedError, match=r"session.run: allred.shutdown\(\) has ended the session"):
        session.run(max, 1, 2)


def test_arrays_travel_from_where_they_lie():
    array = np.arange(1000.0)
    parts = pack(({"x": array}, 1), "it")
    assert len(parts) == 2
    assert len(parts[0]) < 1000
    assert np.shares_memory(array, np.frombuffer(parts[1], np.uint8))
    (back, _) = unpack([bytearray(part) for part in parts])
    assert back["x"].tolist() == array.tolist()
    assert back["x"].flags.writeable


def test_without_cloudpickle_functions_are_sent_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert unpack(pack(np.add, "it")) is np.add
    with pytest.raises(InputError, match=r"the function cannot be sent .*pip install cloudpickle"):
        pack(lambda: 1, "the function")
