"""Ranks that fail while batches are fetched ahead: the job ends as any other, and leaves no process."""

import pytest
from harness import MPICH_BY_DEFAULT, mpirun, remove_mapped

PROGRAM = """
import pathlib, re
import numpy as np
from mpi4py import MPI
import allred

class Numbers:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if FAIL == "dataset" and index == 40:
            raise OSError("sample forty")
        return float(index)

FAIL = {fail!r}

if __name__ == "__main__":
    allred.init(banner=False)
    mapped = re.findall(r" (/dev/shm/\\S+)$", pathlib.Path("/proc/self/maps").read_text(), re.MULTILINE)
    pathlib.Path(__file__).with_name(f"shm-{{allred.rank()}}.txt").write_text("\\n".join({{*mapped}}))
    opt, params = allred.distributed(allred.optim.SGD(lr=0.1)), [np.zeros(1)]
    data = allred.data.batches(Numbers(), batch_size=6, seed=None)
    for step, x in enumerate(allred.data.prefetch(data, workers={workers})):
        if FAIL == "loop" and step == 5 and allred.rank() == 1:
            raise OSError("step five")
        opt.step(params, [np.array([x.mean()])])
"""


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("fail", "words"), [("loop", "OSError: step five"), ("dataset", "OSError: sample forty")])
def test_a_rank_that_fails_ends_the_job(mpi, workers, fail, words, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(fail=fail, workers=workers))
    result = mpirun(2, script, mpi=mpi, timeout_s=50)
    remove_mapped(tmp_path)
    assert result.code == 1, result.text
    assert result.left == [], result.text
    assert words in result.err, result.text
    assert "allred: rank 1 on " in result.err or fail == "dataset", result.text
