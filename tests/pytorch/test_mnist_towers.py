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
STEPS = 100  # of a training that is compared; the one that learns makes 300


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
    with pytest.raises(InputError, match="the gradient of 'w' of tower 0: "):
        allred.Towers(2, lambda params, x: (0, {"w": grad}))(None, np.arange(2))


# ---- the example. Two jobs make all trainings: on two ranks, then on one, which continues one of the first job.

SPLITS = [(1, 2), (2, 1), (2, 2), (1, 3), pytest.param(3, 1, marks=pytest.mark.full)]


def job(ranks, **trainings):
    """Run trainings in one job. Return for each the losses by step, what was printed, the averages and the error."""
    given = {name: (dtype, list(map(str, arguments))) for name, (dtype, *arguments) in trainings.items()}
    result = testing.mpirun(ranks, PROGRAM, json.dumps(given), timeout_s=200)
    assert result.code == 0, result.text
    found, rest = {}, result.out
    for name in trainings:
        text, rest = rest.split(f"training {name}: ")
        line, _, rest = rest.partition("\n")
        losses, averages, error = json.loads(line)
        found[name] = {int(step): loss for step, loss in losses.items()}, text, averages, error
    return found, result.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainings by name: the dtype, and "RANKSxTOWERS" or what is special."""
    steps, checkpoints = ("--max_steps", STEPS), tmp_path_factory.mktemp("checkpoints")
    files, incomplete = write_files(tmp_path_factory.mktemp("mnist")), tmp_path_factory.mktemp("incomplete")
    two, _ = job(
        2,
        **{f"float64 2x{towers}": ("float64", "--towers", towers, *steps) for towers in (1, 2)},
        **{"float32 2x2": ("float32", "--towers", 2, *steps)},
        first=("float64", "--checkpoint_dir", checkpoints, "--max_steps", 60),
    )
    one, log = job(
        1,
        **{"float32 1x1": ("float32",)},
        **{"float32 1x2": ("float32", "--towers", 2, *steps)},
        **{f"float64 1x{towers}": ("float64", "--towers", towers, *steps) for towers in (1, 2, 3)},
        later=("float64", "--checkpoint_dir", checkpoints, "--towers", 2, *steps),
        files=("float32", "--towers", 2, *steps, "--data_dir", files),
        incomplete=("float32", "--data_dir", incomplete),
    )
    return {**two, **one, "log": log}


def largest_difference(losses, expected, last=STEPS):
    return max(abs(loss - expected[step]) for step, loss in losses.items() if step <= last)


def accuracies(text):
    line = r"^test accuracy: ([01]\.\d{3}), with averaged parameters: ([01]\.\d{3})$"
    return re.search(line, text, re.MULTILINE).groups()


@pytest.mark.full
@pytest.mark.limit(450)
def test_accuracy_and_output(trained):
    losses, text, *_ = trained["float32 1x1"]
    assert list(losses) == list(range(1, 301))
    assert losses[1] > 2.3
    assert np.mean([losses[step] for step in range(300 - 22, 301)]) < 0.1
    for step in range(40, 301, 20):
        line = rf"^step {step}, loss = (\S+) \(\d+\.\d examples/sec; 0\.\d+ sec/batch\)$"
        found = re.search(line, text + trained["log"], re.MULTILINE)
        assert float(found[1]) == pytest.approx(losses[step], abs=0.005)
    assert all(float(accuracy) > 0.97 for accuracy in accuracies(text))


@pytest.mark.full
@pytest.mark.limit(450)
@pytest.mark.parametrize(("ranks", "towers"), SPLITS)
def test_the_same_losses_however_batches_are_split(trained, ranks, towers):
    name = f"float64 {ranks}x{towers}"
    if ranks == 3:
        trained = trained | job(3, **{name: ("float64", "--max_steps", STEPS)})[0]
    losses, text, *_ = trained[name]
    assert list(losses) == list(range(1, STEPS + 1))
    assert largest_difference(losses, trained["float64 1x1"][0]) < 1e-10
    assert accuracies(text) == accuracies(trained["float64 1x1"][1])


@pytest.mark.full
@pytest.mark.limit(450)
@pytest.mark.parametrize("split", ["1x2", "2x2"])
def test_float32_losses_within_rounding(trained, split):
    losses, expected = trained[f"float32 {split}"][0], trained["float32 1x1"][0]
    assert largest_difference(losses, expected, last=50) < 1e-5
    assert largest_difference(losses, expected) < 0.05  # rounding may decide which pixel is the largest


@pytest.mark.full
@pytest.mark.limit(450)
def test_resume_with_other_ranks_and_towers(trained):
    first, later, whole = trained["first"], trained["later"], trained["float64 1x1"]
    assert "resumes from step 60" in later[1] + trained["log"]
    assert [*first[0], *later[0]] == list(range(1, STEPS + 1))
    assert largest_difference(first[0] | later[0], whole[0]) < 1e-10
    assert accuracies(later[1]) == accuracies(whole[1])
    np.testing.assert_allclose(later[2], whole[2], rtol=1e-9)


def idx(array):
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def write_files(directory):
    """Write scikit-learn's digits as MNIST's four files."""
    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((3, 3))).astype(np.uint8)  # 24 x 24
    labels = digits.target.astype(np.uint8)
    for name, of in (("train", slice(1400)), ("t10k", slice(1400, None))):
        (directory / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(np.pad(images[of], ((0, 0), (2, 2), (2, 2)))))
        (directory / f"{name}-labels-idx1-ubyte").write_bytes(gzip.decompress(idx(labels[of])))
    return directory


@pytest.mark.full
@pytest.mark.limit(450)
def test_mnist_idx_files(trained):
    losses = trained["files"][0]
    assert losses[STEPS] < 1 < 2 < losses[1]
    assert "has not all of train-images*, train-labels*, t10k-images*, t10k-labels*" in trained["incomplete"][3]
