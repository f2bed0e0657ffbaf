"""Runs bench for each command in a JSON list, with a stand-in for the GPU (tests/parallel/standin_gpu.py)."""

import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))

import standin_gpu

from allred import startup
from allred.bench import command, gpu, verify
from allred.comm.create import add_device

standin_gpu.install(setattr)
gpu.adopt = standin_gpu.adopt
gpu.allocate = lambda shapes, dtype: [standin_gpu.on_gpu(np.zeros(shape, dtype)) for shape in shapes]
gpu._ENQUEUE_SAMPLES = 3
verify.SETS["small"] = lambda: [(256,)] * 10
startup.select_devices = lambda *_: (True, "")
startup.add_devices = lambda communicator, *_: add_device(communicator, standin_gpu.Device(), staged=False)
for words in json.loads(sys.argv[1]):
    if code := command.main(words):
        sys.exit(code)
