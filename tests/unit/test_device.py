"""Places in TensorFlow's words, blocks in blocks; and what of a function's call travels without a copy."""

import sys

import numpy as np
import pytest

import allred
from allred.client.message import pack, unpack
from allred.cluster import device
from allred.cluster.device import Place
from allred.errors import InputError


def test_inner_blocks_leave_to_outer_ones_what_they_do_not_say():
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


def test_arrays_travel_from_where_they_lie():
    array = np.arange(1000.0)
    parts = pack(({"x": array}, 1), "it")
    assert len(parts) == 2
    assert len(parts[0]) < 1000
    assert np.shares_memory(array, np.frombuffer(parts[1], np.uint8))
    (back, _) = unpack([bytearray(part) for part in parts])
    assert back["x"].tolist() == array.tolist()
    assert back["x"].flags.writeable


def test_without_cloudpickle_functions_go_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert unpack(pack(np.add, "it")) is np.add
    with pytest.raises(InputError, match=r"the function cannot be sent .*pip install 'allred\[client\]'"):
        pack(lambda: 1, "the function")
