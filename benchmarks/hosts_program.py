"""The program that benchmarks/hosts.py runs on every rank. The chief prints one line of JSON.

hosts_program.py allreduce [SIZES]    sizes in bytes, with the wire's rate before and after
hosts_program.py collectives [SIZES]  reducescatter and allgather; a size is that of the larger array
hosts_program.py fsdp                 a step of FSDP over allred and over gloo
hosts_program.py step                 ResNet-50's opt.step, 1000 x 1 KiB, overlap with computation
hosts_program.py ps                   a step of mode ps with ResNet-50's parameters
"""

import contextlib
import json
import resource
import socket
import sys
import time

import numpy as np
from mpi4py import MPI

import allred
from allred.bench import verify
from allred.comm.functions import current

WIRE_BYTES = 2**24
STEPS = 4


def seconds(call, repeats, calls=1):
    """Return the median time of a call on the slowest rank. calls: that follow each other without a barrier."""
    times = []
    for _ in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX) / calls)
    return float(np.median(times))


def wire_rate():
    """Return the bytes per second that a TCP connection sends, in each direction at the same time, after its first
    4 MiB. Between the first ranks of the first two hosts."""
    names = comm.allgather(socket.gethostname())
    first, second = 0, next(rank for rank, name in enumerate(names) if name != names[0])
    rate = 0.0
    if rank in (first, second):
        if rank == first:
            with socket.create_server(("", 0)) as listener:
                comm.send((socket.gethostbyname(names[0]), listener.getsockname()[1]), second)
                one, _ = listener.accept()
        else:
            one = socket.create_connection(comm.recv(source=first))
        one.setblocking(False)
        out, back = memoryview(bytearray(WIRE_BYTES)), memoryview(bytearray(2**20))
        sent = received = 0
        start = start_bytes = 0
        while sent < WIRE_BYTES or received < WIRE_BYTES:
            with contextlib.suppress(BlockingIOError):
                sent += one.send(out[sent : sent + 2**18]) if sent < WIRE_BYTES else 0
            with contextlib.suppress(BlockingIOError):
                received += one.recv_into(back) if received < WIRE_BYTES else 0
            if not start and received >= 2**22:
                start, start_bytes = time.perf_counter(), received
            time.sleep(0.0002)
        rate = (received - start_bytes) / (time.perf_counter() - start)
        one.close()
    return float(comm.allreduce(rate, op=MPI.MAX))


def sent_bytes():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def alternating(calls_of, repeats, calls):
    """Return seconds, CPU seconds of all ranks, and bytes that this host sends, of a call of each function, by name.
    Batches of `calls` calls of the functions alternate."""
    found = {name: ([], [], []) for name in calls_of}
    for number in range(repeats + 1):
        for name, call in calls_of.items():
            comm.Barrier()
            cpu, sent = cpu_s(), sent_bytes()
            took_s = seconds(call, 1, calls)
            figures = took_s, comm.allreduce(cpu_s() - cpu, op=MPI.SUM) / calls, (sent_bytes() - sent) / calls
            for figure, all_figures in zip(figures, found[name], strict=True):
                if number:  # the first is a warm-up
                    all_figures.append(figure)
    return {name: [float(np.median(each)) for each in figures] for name, figures in found.items()}


def allreduce(sizes):
    rows, before = [], wire_rate()
    for nbytes in sizes:
        array = np.ones(nbytes // 4, np.float32)
        repeats, calls = (20, 10) if nbytes <= 2**14 else (10, 4) if nbytes <= 2**20 else (5, 1)
        functions = {
            "raw": lambda: comm.Allreduce(MPI.IN_PLACE, array),  # noqa: B023
            "ours": lambda: allred.allreduce_(array, allred.Max),  # noqa: B023
        }
        rows.append({"bytes": nbytes, **alternating(functions, repeats, calls)})
    return {"wire": max(before, wire_rate()), "rows": rows}


def collectives(sizes):
    rows, before = [], wire_rate()
    world = current(None)
    for nbytes in sizes:
        whole = np.ones(nbytes // 4, np.float32)
        part = np.ones(whole.size // world.size, np.float32)
        repeats, calls = (10, 4) if nbytes <= 2**20 else (5, 1)
        functions = {
            "reducescatter": lambda: world.reducescatter(whole, allred.Max, out=part).wait(),  # noqa: B023
            "allgather": lambda: world.allgather(part, out=whole).wait(),  # noqa: B023
        }
        rows.append({"bytes": nbytes, **alternating(functions, repeats, calls)})
    return {"wire": max(before, wire_rate()), "rows": rows}


def fsdp():
    """A step of six Linear(2048), 25 M parameters, each sharded by fully_shard; SGD."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    before = wire_rate()
    dist.init_process_group("allred")
    groups = {"allred": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    inputs = torch.full((4, 2048), 0.1 * (rank + 1))
    losses = {}

    def step_over(name, group):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses[name] = loss.item()

        return step

    rows = alternating({name: step_over(name, group) for name, group in groups.items()}, 5, 1)
    assert abs(losses["allred"] / losses["gloo"] - 1) < 1e-4, losses
    dist.destroy_process_group()
    return {"wire": max(before, wire_rate()), **rows}


def step():
    before = wire_rate()
    params = [np.ones(shape, np.float32) for shape in verify.resnet50()]
    grads = [np.full_like(p, rank) for p in params]
    opt = allred.distributed(allred.optim.SGD(1e-9))
    opt.step(params, grads)
    found = {"step_bytes": sum(p.nbytes for p in params)}
    found["step"] = seconds(lambda: opt.step(params, grads), 3)
    small = [np.ones(256, np.float32) for _ in range(1000)]
    whole = np.ones(256_000, np.float32)
    tiny = allred.distributed(allred.optim.SGD(1e-9))
    tiny.step(small, small)
    functions = {
        "raw_1000": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "group_1000": lambda: allred.grouped_allreduce_(small, allred.Max),
        "step_1000": lambda: tiny.step(small, small),
    }
    found |= {name: figures[0] for name, figures in alternating(functions, 10, 1).items()}
    return found | {"hidden": overlap(), "wire": max(before, wire_rate())}


def overlap():
    return {name: hidden(piece) for name, piece in PIECES.items()}


MATRIX = np.ones((400, 400), np.float32)
PIECE_S = 0.005
PIECES = {  # work of some milliseconds
    "sleep": lambda: time.sleep(PIECE_S),
    "python": lambda: sum(range(300_000)),
    "matmul": lambda: [MATRIX @ MATRIX for _ in range(4)],
}


def hidden(piece):
    """Return the share of an allreduce of 16 MiB that is hidden behind work that takes about as long alone."""
    array = np.ones(2**22, np.float32)
    alone_s = seconds(lambda: allred.allreduce_async_(array, allred.Max).wait(), 3)
    count = comm.bcast(max(1, round(alone_s / seconds(piece, 10))))

    def work():
        for _ in range(count):
            piece()

    def both():
        pending = allred.allreduce_async_(array, allred.Max)
        work()
        pending.wait()

    work_s, both_s = seconds(work, 3), seconds(both, 3)
    return (alone_s + work_s - both_s) / min(alone_s, work_s)


def ps():
    before = wire_rate()
    params = [np.ones(shape, np.float32) for shape in verify.resnet50()]
    opt = allred.distributed(allred.optim.SGD(1e-9))
    opt.broadcast(params)
    grads = [np.ones_like(p) for p in params]
    opt.step(params, grads)
    allred.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        opt.step(params, grads)
    allred.barrier()
    took_s = (time.perf_counter() - start) / STEPS
    return {"wire": before, "step": took_s, "step_bytes": sum(p.nbytes for p in params), "workers": allred.size()}


allred.init(banner=False)
comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank()
what, *sizes = sys.argv[1:]
modes = {"allreduce": allreduce, "collectives": collectives}
alone = {"fsdp": fsdp, "step": step, "overlap": overlap, "ps": ps}
result = alone[what]() if what in alone else modes[what]([*map(int, sizes)])
if allred.is_chief():
    print(json.dumps(result), flush=True)
