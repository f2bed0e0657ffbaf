"""Ranks that are blocked inside a call of NCCL, which never returns. The GPU is a stand-in (standin_gpu.py)."""

import ctypes
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))

import standin_gpu

import allred

standin_gpu.install(setattr)
standin_gpu.attach(standin_gpu.Device)


def blocked(*_):
    """Lock a mutex twice: C that no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


standin_gpu.Nccl.allReduce = blocked
allred.init(timeout_s=1)
allred.allreduce(standin_gpu.on_gpu(np.ones(3, np.float32)), name="w")
