"""Towers with torch: tensors for gradients, and examples/mnist_towers.py, whose losses do not depend on how batches are
split: one tower, two of one rank, two ranks."""

import gzip
import json
import pathlib
import re
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits

import allred
from allred import testing
from allred.errors import InputError

torch = pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("mnist_towers_program.py")
STEPS = 300


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_tensors(count, parallel):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(4, 2, generator=generator, requires_grad=True)
    x, y = torch.randn(10, 4, generator=generator), np.arange(10.0, dtype=np.float32)

    def loss_and_grads(params, x, y):
        assert params is w
        loss = ((x @ w).sum(axis=1) - torch.from_numpy(y)).square().mean()
        return loss, {"w": torch.autograd.grad(loss, w)[0], "unused": None}

    expected, whole = loss_and_grads(w, x, y)
    loss, grads = allred.Towers(count, loss_and_grads, parallel)(w, x, y)
    assert type(loss) is float
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert type(grads["w"]) is np.ndarray
    np.testing.assert_allclose(grads["w"], whole["w"].numpy(), rtol=1e-5)
    assert grads["unused"] is None


@pytest.mark.parametrize(
    "grad", [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta"), torch.ones(2).to_sparse()]
)
def test_tensors_that_numpy_cannot_see(grad):
    with pytest.raises(InputError, match="the gradient 'w' of tower 0: "):
        allred.Towers(2, lambda params, x: (0, {"w": grad}))(None, np.arange(2))


# ---- the example


def trained(ranks, *arguments, dtype="float32"):
    """The losses by step, and what was printed, whose last line is checked."""
    result = testing.mpirun(ranks, PROGRAM, dtype, *arguments, timeout_s=100)
    assert result.code == 0, result.text
    assert re.search(r"^test accuracy: [01]\.\d{3}, with averaged parameters: [01]\.\d{3}$", result.out, re.MULTILINE)
    found = json.loads(re.search(r"^losses (.*)$", result.out, re.MULTILINE)[1])
    return {int(step): loss for step, loss in found.items()}, result.out + result.err


@pytest.fixture(scope="module")
def one_tower():
    return trained(1)


@pytest.fixture(scope="module")
def exact():
    """One tower, in float64."""
    return trained(1, dtype="float64")


def largest_difference(losses, expected, last=STEPS):
    return max(abs(loss - expected[step]) for step, loss in losses.items() if step <= last)


@pytest.mark.limit(150)
def test_it_learns_and_says_so(one_tower):
    losses, text = one_tower
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[1] > 2.3
    assert np.mean([losses[step] for step in range(STEPS - 22, STEPS + 1)]) < 0.1
    for step in range(40, STEPS + 1, 20):
        line = re.search(rf"^step {step}, loss = (\S+) \(\d+\.\d examples/sec; 0\.\d+ sec/batch\)$", text, re.MULTILINE)
        assert float(line[1]) == pytest.approx(losses[step], abs=0.005)
    last, averaged = re.search(r"^test accuracy: (\S+), with averaged parameters: (\S+)$", text, re.MULTILINE).groups()
    assert float(last) > 0.97
    assert float(averaged) > 0.97


@pytest.mark.limit(250)
@pytest.mark.parametrize(("ranks", "towers"), [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)])
def test_the_same_losses_however_batches_are_split(exact, ranks, towers):
    losses, _ = trained(ranks, "--towers", towers, dtype="float64")
    assert len(losses) == STEPS
    assert largest_difference(losses, exact[0]) < 1e-10


@pytest.mark.limit(250)
@pytest.mark.parametrize(("ranks", "towers"), [(1, 2), (2, 2)])
def test_in_float32_but_for_rounding(one_tower, ranks, towers):
    losses, _ = trained(ranks, "--towers", towers)
    assert largest_difference(losses, one_tower[0], last=50) < 1e-5
    assert largest_difference(losses, one_tower[0]) < 0.05  # where it decides which pixel is the largest: another path


@pytest.mark.limit(250)
def test_it_goes_on_with_others(exact, tmp_path):
    first, _ = trained(2, "--checkpoint_dir", tmp_path, "--max_steps", 130, dtype="float64")
    later, text = trained(1, "--checkpoint_dir", tmp_path, "--towers", 2, dtype="float64")
    assert "resumes from step 130" in text
    assert [*first, *later] == list(range(1, STEPS + 1))
    assert largest_difference(first | later, exact[0]) < 1e-10
    last_lines = [re.search(r"^test accuracy.*$", words, re.MULTILINE)[0] for words in (text, exact[1])]
    assert last_lines[0] == last_lines[1]  # the averages went on, too


def idx(array):
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.mark.limit(150)
def test_mnists_files(tmp_path):
    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((3, 3))).astype(np.uint8)  # 24 x 24
    labels = digits.target.astype(np.uint8)
    for name, of in (("train", slice(1400)), ("t10k", slice(1400, None))):
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(np.pad(images[of], ((0, 0), (2, 2), (2, 2)))))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(gzip.decompress(idx(labels[of])))
    losses, _ = trained(1, "--towers", 2, "--max_steps", 100, "--data_dir", tmp_path)
    assert losses[100] < 1 < 2 < losses[1]
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    result = testing.mpirun(1, PROGRAM, "float32", "--data_dir", tmp_path)
    assert result.code == 1
    assert "has not all of train-images*, train-labels*, t10k-images*, t10k-labels*" in result.err
