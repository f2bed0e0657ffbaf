"""The arena from init() to the end of the process."""

from harness import mpirun

CODE = """
import numpy as np, allred
from allred import arena
from allred.native import arena_usage
assert arena.memory() is None
early = allred.empty(10)
allred.init(banner=False)
array = allred.empty(1000)
array[:] = allred.rank()
live = arena_usage()[1]
assert live > 0
arena.learn([80_000])
served = np.zeros(10_000)
assert arena_usage()[1] > live
allred.shutdown()
assert array.sum() == 1000 * int(array[0])
late, live = (allred.empty(1000), np.zeros(10_000)), arena_usage()[1]
del served
assert arena_usage()[1] < live
allred.init(banner=False)
again = allred.empty(1000)
assert allred.allreduce(array, allred.Sum).sum() == 1000
cycle = [array]
cycle.append(cycle)
print("end\\n", end="", flush=True)
"""


def test_arrays_live_longer_than_the_ranks_and_the_interpreter():
    result = mpirun(2, "-c", CODE, timeout_s=40)
    assert (result.code, result.out.split()) == (0, ["end", "end"]), result.text
    assert "Traceback" not in result.err, result.text


def test_no_arena():
    code = "import allred; from allred import arena; allred.init(); allred.empty(5); print(arena.memory())"
    result = mpirun(2, "-c", code, env={"ALLRED_ARENA": "0"}, timeout_s=40)
    assert (result.code, result.out.split()) == (0, ["None", "None"]), result.text
