"""Several workers push gradients to several parameter servers and pull the parameters (policy async, SGD): allred, and
a loop in raw MPI (mpi4py and numpy) without checks, as processes of their own, in turn.

    python benchmarks/ps_workers.py [ROUNDS] [SERVERS] [WORKERS]    # default 5 2 4; needs mpirun

Prints the gradients per second of all workers, the median over the rounds, and allred's over the loop's. Raw MPI: the
arrays of `resnet50` are one flat array, in chunks of 1 MiB, of which each server has a contiguous half. A worker sends
all chunks and receives all parameters at once. A server holds one receive of each worker: it updates its chunk with
numpy when the gradient has arrived and sends it back.
"""

import os
import statistics
import subprocess
import sys
import time

import numpy as np

from allred.bench.verify import PS_SETS

SETS, SECONDS, LR, CHUNK = ("tiny", "resnet50"), 3.0, 0.01, 2**18
PUSH, PULL, END = 1, 2, 3


def allreds(name):
    import allred

    allred.init(mode="ps", banner=False)
    params = [np.zeros(shape, np.float32) for shape in PS_SETS[name]()]
    gradients = [np.ones_like(each) for each in params]
    opt = allred.distributed(allred.optim.SGD(LR), consistency=allred.ps.Async())
    opt.broadcast(params)
    for _ in range(3):
        opt.step(params, gradients)
    allred.barrier()
    steps, end = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        opt.step(params, gradients)
        steps += 1
    total = int(allred.allreduce(np.array([steps]), op=allred.Sum)[0])
    if allred.rank() == 0:
        print("gradients/s", total / SECONDS)


def raw(name, servers):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    elements = sum(int(np.prod(shape)) for shape in PS_SETS[name]())
    each = -(-elements // servers)
    halves = [range(at, min(at + each, elements)) for at in range(0, elements, each)]
    chunks = [[slice(at, min(at + CHUNK, half.stop)) for at in half[::CHUNK]] for half in halves]
    params = np.zeros(elements, np.float32)
    if comm.rank < servers:
        serve(comm, params, chunks[comm.rank], range(servers, comm.size))
        return
    gradients = np.ones_like(params)

    def step():
        for server, own in enumerate(chunks):
            requests.extend(comm.Irecv(params[part], server, PULL) for part in own)
            requests.extend(comm.Isend(gradients[part], server, PUSH) for part in own)
        MPI.Request.Waitall(requests)
        requests.clear()

    requests, workers = [], comm.Split(1, comm.rank)
    for _ in range(3):
        step()
    workers.Barrier()
    steps, end = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        step()
        steps += 1
    total = workers.allreduce(steps)
    for server in range(servers):
        comm.Send(np.empty(0, np.float32), server, END)
    if workers.rank == 0:
        print("gradients/s", total / SECONDS)


def serve(comm, params, chunks, workers):
    from mpi4py import MPI

    comm.Split(MPI.UNDEFINED, 0)
    buffers = [np.empty(CHUNK, np.float32) for _ in workers]
    receive = lambda i: comm.Irecv(buffers[i], workers[i], MPI.ANY_TAG)  # noqa: E731
    receives, nexts, status = [receive(i) for i in range(len(workers))], [0] * len(workers), MPI.Status()
    sends = [MPI.REQUEST_NULL] * len(workers)
    while any(each != MPI.REQUEST_NULL for each in receives):
        i = MPI.Request.Waitany(receives, status)
        if status.Get_tag() == END:
            continue
        part = chunks[nexts[i]]
        gradient, param = buffers[i][: part.stop - part.start], params[part]
        np.multiply(gradient, LR, out=gradient)
        np.subtract(param, gradient, out=param)
        sends[i].Wait()
        sends[i] = comm.Isend(param, workers[i], PULL)
        nexts[i] = (nexts[i] + 1) % len(chunks)
        receives[i] = receive(i)
    MPI.Request.Waitall(sends)


def measure(kind, name, servers, workers):
    command = ["mpirun", "-np", str(servers + workers), sys.executable, __file__, kind, name, str(servers)]
    env = {**os.environ, "ALLRED_NUM_PS": str(servers), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split("gradients/s")[1].split()[0])


def main(rounds=5, servers=2, workers=4):
    for name in SETS:
        found = {"allred": [], "raw": []}
        for _ in range(rounds):
            for kind, speeds in found.items():
                speeds.append(measure(kind, name, servers, workers))
        ratios = [a / b for a, b in zip(found["allred"], found["raw"], strict=True)]
        speeds = ", ".join(f"{kind} {statistics.median(each):.1f}" for kind, each in found.items())
        print(
            f"{name}: gradients/s of {workers} workers, {servers} servers: {speeds}; "
            f"{statistics.median(ratios):.2f} times as many ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["allred"]:
        allreds(sys.argv[2])
    elif sys.argv[1:2] == ["raw"]:
        raw(sys.argv[2], int(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:]))
