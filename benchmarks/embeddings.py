"""Embedding tables on a parameter server: a step with 65 536 random ids of 4 M rows, dim 64, row-wise Adagrad.

    ALLRED_MODE=ps mpirun -np 2 python benchmarks/embeddings.py [ROUNDS] [IDS]   # needs torch and a C compiler
    ALLRED_MODE=ps mpirun -np 2 python benchmarks/embeddings.py dense [ROUNDS]

A step: lookup, gradient, update. In turn, in the worker's process: a loop in C on one array; torch's
EmbeddingBag(sparse=True) with SparseAdam, and with Adagrad. `dense`: the table as one dense parameter of the server,
with plain Adagrad: push and pull of all rows. Prints medians in ms, and their ratios to allred's. Rows take 1 GB.
"""

import ctypes
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import allred

NUMBERS = [int(each) for each in sys.argv[1:] if each.isdigit()]
ROWS, DIM, LR = 4_000_000, 64, 0.05
ROUNDS, IDS = [*NUMBERS, *[20, 65_536][len(NUMBERS) :]]
LOOP = """
#include <math.h>
#include <stdint.h>
#include <string.h>
enum { DIM = %d };
__attribute__((target("avx2"))) void step(float *rows, float *sums, const float *gradients, float *out,
                                          const int64_t *ids, int64_t count) {
  for (int64_t i = 0; i < count; i++) memcpy(out + i * DIM, rows + ids[i] * DIM, DIM * sizeof *out);
  for (int64_t i = 0; i < count; i++) {
    float *row = rows + ids[i] * DIM, lanes[8] = {0}, sum = 0;
    const float *gradient = gradients + i * DIM;
    for (int j = 0; j < DIM; j += 8)
      for (int lane = 0; lane < 8; lane++) lanes[lane] += gradient[j + lane] * gradient[j + lane];
    for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
    sum = sums[ids[i]] += sum / DIM;
    const float root = sqrtf(sum) + 1e-10f;
    for (int j = 0; j < DIM; j++) row[j] -= gradient[j] / root * %gf;
  }
}
"""


def compiled_loop():
    directory = pathlib.Path(tempfile.mkdtemp())
    (directory / "loop.c").write_text(LOOP % (DIM, LR))
    library = directory / "loop.so"
    options = ["-O3", "-fno-math-errno", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, directory / "loop.c", "-o", library, "-lm"], check=True)
    return ctypes.CDLL(library).step


def plain_c(gradients):
    step = compiled_loop()
    rows, sums = np.full((ROWS, DIM), 0.01, np.float32), np.zeros(ROWS, np.float32)
    out = np.empty((IDS, DIM), np.float32)
    arrays = [ctypes.c_void_p(each.ctypes.data) for each in (rows, sums, gradients, out)]
    keep = rows, sums, out

    def run(ids):
        step(*arrays, ctypes.c_void_p(ids.ctypes.data), ctypes.c_int64(len(ids)))
        return keep

    return run


def of_torch(gradients, make):
    table = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    optimizer, gradient = make(table.parameters()), torch.from_numpy(gradients)
    offsets = torch.arange(IDS)

    def run(ids):
        optimizer.zero_grad()
        table(torch.from_numpy(ids), offsets).backward(gradient)
        optimizer.step()

    return run


def timed(call, *arguments):
    start = time.perf_counter()
    call(*arguments)
    return 1e3 * (time.perf_counter() - start)


def main(rounds):
    allred.init()
    table = allred.Embedding("rows", DIM, ROWS, optimizer=allred.optim.Adagrad(LR, row_wise=True))
    opt = allred.distributed(allred.optim.Adagrad(LR), tables=[table])
    params = {"w": np.zeros((ROWS if "dense" in sys.argv else 1, DIM), np.float32)}
    opt.broadcast(params)
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(IDS, DIM)).astype(np.float32)
    dense = {"w": np.full_like(params["w"], 0.5)}
    if "dense" in sys.argv:
        times = [timed(opt.step, params, dense) for _ in range(max(rounds // 10, 3))]
        print(f"dense push and pull of {params['w'].nbytes / 1e9:.2f} GB: {np.median(times):.0f} ms", flush=True)
        return
    everything = rng.permutation(ROWS)
    for start in range(0, ROWS, IDS):
        table.lookup(everything[start : start + IDS])
        opt.step(params, dense)

    def ours(ids):
        table.lookup(ids)
        table.gradient(gradients)
        opt.step(params, dense)

    calls = {
        "allred": ours, "plain C": plain_c(gradients),
        "torch SparseAdam": of_torch(gradients, lambda given: torch.optim.SparseAdam(given, LR)),
        "torch Adagrad": of_torch(gradients, lambda given: torch.optim.Adagrad(given, LR)),
    }  # fmt: skip
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, rng.integers(0, ROWS, IDS)))
    medians = {name: float(np.median(found[1:])) for name, found in times.items()}
    for name, median in medians.items():
        print(f"{name:18} {median:8.2f} ms  {median / medians['allred']:6.2f} of allred", flush=True)


if __name__ == "__main__":
    main(ROUNDS)
