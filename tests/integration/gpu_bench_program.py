"""Runs bench for each command in a JSON list, with a stand-in for the GPU (tests/parallel/standin_gpu.py)."""

import json
import pathlib
import sys

import numpy as np

sys.path += [str(pathlib.Path(__file__).parents[1] / "parallel"), str(pathlib.Path(__file__).parents[2] / "benchmarks")]

import bench  # adds the baseline nccl
import raw_nccl
import standin_gpu

from allred.bench import allreduce, verify

standin_gpu.install(setattr)
raw_nccl.adopt = standin_gpu.adopt
allreduce.empty_on_gpu = lambda shape, dtype: standin_gpu.on_gpu(np.zeros(shape, dtype))
raw_nccl._ENQUEUE_SAMPLES = 3
verify.SETS["small"] = lambda: [(256,)] * 10
standin_gpu.attach(standin_gpu.Device)
for words in json.loads(sys.argv[1]):
    if code := bench.command.main(words):
        sys.exit(code)
