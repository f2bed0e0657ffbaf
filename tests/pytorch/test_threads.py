"""init() limits the threads of torch to the cores of a rank. One job, about 8 s."""

import json
import os

import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = """
import json, os
import torch
import allred
import allred.torch

def threads():
    torch.ones(300, 300) @ torch.ones(300, 300)
    return [torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")]

cores, found = len(os.sched_getaffinity(0)), []
for number in (cores, cores + 1, 1):  # the first one could be a default, the others are chosen by the program
    torch.set_num_threads(number)
    allred.init()
    found.append(threads())
    allred.shutdown()
    found.append(threads())
os.environ["OMP_NUM_THREADS"] = "9"
torch.set_num_threads(cores)
allred.init(banner=False)
found.append(threads())
print(json.dumps(found) + "\\n", end="", flush=True)
"""


@pytest.mark.limit(150)
def test_threads_of_torch_are_the_cores_of_a_rank_unless_the_program_sets_them():
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("with one core there is nothing to limit")
    unset = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"])
    result = testing.mpirun(2, "-c", PROGRAM, env=unset, timeout_s=140)
    assert result.code == 0, result.text
    share = cores // 2
    chosen = [[cores + 1, str(share)], [cores + 1, None], [1, str(share)], [1, None]]
    expected = [[share, str(share)], [cores, None], *chosen, [cores, "9"]]
    assert [json.loads(line) for line in result.out.splitlines()] == [expected] * 2, result.text
    assert result.err.count("; let the program set at most ") == 1, result.text
