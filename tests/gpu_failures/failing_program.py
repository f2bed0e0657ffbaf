"""A rank that is killed or stopped while the others are in NCCL: the test's own program (test_gpu_failures.py)."""

import os
import signal
import sys

import cupy

import allred

allred.init(backend="nccl", timeout_s=15)
x = cupy.ones(2**20, cupy.float32)
for step in range(1000):
    work = allred.allreduce_async_(x, allred.Average)
    if step == 5 and allred.rank() == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    work.synchronize()
