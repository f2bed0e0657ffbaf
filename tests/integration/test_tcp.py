"""Backend tcp in whole programs: collectives, steps and errors of ranks on several hosts."""

import os
import re
import threading
import time

import pytest
from harness import MPICH_BY_DEFAULT, ROOT, mpirun, python
from hosts import hosts
from test_shm import CHECK, MPIS, full

START = """
import os, sys
import numpy as np
import allred
from allred import optim
from allred.comm import functions
allred.init()
rank, size = allred.rank(), allred.size()
"""

STEPS = """
# A group of every kind of tensor at once, in more than one window.
shapes = [(3,), (700, 900), (5, 5), (600_000,), (), (1,)]
dtypes = ["f4", "f4", "f8", "f4", "f2", "f4"]
expected = sum(range(1, size + 1)) / size
for _ in range(2):
    group = [np.full(shape, rank + 1, dtype) for shape, dtype in zip(shapes, dtypes)]
    for mean in allred.grouped_allreduce(group):
        assert np.allclose(mean, expected), mean
# Sums that depend on the order are the same bits on all ranks.
noise = np.random.default_rng(rank).standard_normal(400_001).astype("f4")
for again in range(2):
    total = allred.allreduce(noise, allred.Sum)
    if not again: first = total
    assert total.tobytes() == first.tobytes() == allred.broadcast(total, root=size - 1).tobytes()
small = allred.allreduce(noise[:999], allred.Sum)
assert small.tobytes() == allred.broadcast(small, root=0).tobytes()
# Compression, uneven batches, overlapped operations.
half = allred.allreduce(np.full(3000, 1 + rank, "f4"), allred.Sum, compression=allred.Compression.fp16)
assert (half == sum(range(1, size + 1))).all()
works = [allred.allreduce_async(np.full(count, rank, "f4"), allred.Sum) for count in (10, 2_000_000, 10, 300_000)]
for work in works: assert (work.wait() == sum(range(size))).all()
params = [np.ones((300, 300), "f4"), np.ones(4, "f4")]
opt = allred.distributed(optim.SGD(1.0))
opt.step(params, [np.full(p.shape, rank, "f4") for p in params], samples=rank + 1)
mean = sum(r * (r + 1) for r in range(size)) / sum(range(1, size + 1))
assert np.allclose(params[0], 1 - mean) and np.allclose(params[1], 1 - mean)
before = params[0].copy()
bad = [np.ones_like(p) for p in params]
if rank == size - 1: bad[0][7, 3] = np.nan
try: opt.step(params, bad)
except allred.NonFiniteError as error: assert f"'0' on rank {size - 1}" in str(error), error
else: raise AssertionError("no error")
assert (params[0] == before).all()
try: allred.allreduce(np.ones(3 + (rank == 1)))
except allred.MismatchError: pass
else: raise AssertionError("no error")
# A process set, and ranks that have joined.
ends = allred.ProcessSet([0, size - 1])
if rank in (0, size - 1): assert (allred.allreduce(np.ones(100_000), allred.Sum, process_set=ends) == 2).all()
if rank: assert (allred.allreduce(np.ones(50_000), allred.Sum) == size - 1).all()
for _ in range(rank): opt.step(params, [np.ones_like(p) for p in params])
assert allred.join() >= 1
assert len(set(allred.allgather_object((params[0].tobytes(), opt.global_step)))) == 1
"""


def check(result):
    assert result.code == 0, result.text
    return result


@pytest.mark.parametrize("nodes", ["1,1", *(pytest.param(nodes, marks=full) for nodes in ("2,1", "2,2", "1,2,3"))])
@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_pretended_hosts(mpi, nodes):
    ranks = sum(map(int, nodes.split(",")))
    env = {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": nodes}
    result = check(mpirun(ranks, "-c", START + CHECK + STEPS, mpi=mpi, env=env))
    assert result.out.count("right by tcp\n") == ranks


@pytest.mark.parametrize("ranks", [[2, 1], pytest.param([1, 1, 1], marks=full), pytest.param([2, 2], marks=full)])
@pytest.mark.parametrize("mpi", MPIS)
def test_hosts_with_a_network_between_them(mpi, ranks, tmp_path):
    with hosts(len(ranks), tmp_path) as here:
        code = START.replace("import allred\n", 'os.environ["ALLRED_TRANSPORT"] = "tcp"\nimport allred\n', 1)
        result = check(here.run(mpi, ranks, "-c", code + CHECK + STEPS))
        assert result.out.count("right by tcp\n") == sum(ranks)


CUT = """
import time
steps, going = 0, True
while going:
    assert (allred.allreduce(np.full(30_000, steps, "f4"), allred.Sum) == steps * size).all()
    steps += 1
    if steps == 3 and rank == 0: open(sys.argv[1], "w").close()  # the test cuts the link now
    going = bool(allred.broadcast(np.array([not os.path.exists(sys.argv[1] + ".up")]), 0))
time.sleep(0.5)  # for the message of the watcher
allred.barrier()
"""


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=full)])
def test_a_link_that_is_cut_for_some_seconds_is_reported_and_the_job_continues(mpi, tmp_path):
    flag = tmp_path / "cut"

    def cut_for_a_while():
        while not flag.exists():
            time.sleep(0.05)
        here.set_link(1, "down")
        time.sleep(7.0)
        here.set_link(1, "up")
        (tmp_path / "cut.up").touch()

    with hosts(2, tmp_path) as here:
        code = START.replace("import allred\n", 'os.environ["ALLRED_TRANSPORT"] = "tcp"\nimport allred\n', 1)
        thread = threading.Thread(target=cut_for_a_while, daemon=True)
        thread.start()
        result = check(here.run(mpi, [1, 1], "-c", code + CUT, flag))
        thread.join()
        name = here.names[1]
    assert re.search(rf"host {name} \(rank 1\) has been unreachable for \d s: ", result.err), result.text
    assert f"host {name} (rank 1) answers again, after " in result.err, result.text


@full
def test_the_benchmark_of_hosts_in_a_small_case():
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    result = check(python(ROOT / "benchmarks/hosts.py", "--smoke"))
    assert re.search(r"^\| 4 MiB \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", result.out, re.MULTILINE), result.text


def test_each_host_may_name_its_own_interface(tmp_path):
    with hosts(2, tmp_path, networks=2) as here:
        code = START.replace("import allred\n", 'os.environ["ALLRED_TRANSPORT"] = "tcp"\nimport allred\n', 1)
        own = 'import socket\nfirst = socket.gethostname()[-1] == "0"\n'
        own += 'os.environ["ALLRED_NETWORK"] = "eth1" if first else "10.99.1.0/24"\n'
        check(here.run("mpich", [1, 1], "-c", code.replace("import numpy", own + "import numpy", 1) + CHECK))


def test_an_interface_that_no_host_has_is_one_clear_error():
    env = {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1", "ALLRED_NETWORK": "nosuch0"}
    result = mpirun(2, "-c", START, env=env)
    assert result.code != 0
    words = f"rank 0 on {os.uname().nodename}: ALLRED_NETWORK='nosuch0' fits no interface of {os.uname().nodename}"
    assert words in result.text, result.text
    assert "; set ALLRED_NETWORK to the interface between the hosts, or ALLRED_TRANSPORT=mpi" in result.text
