"""Optimizers that keep the errors of compression: checkpoints, skipped steps, overlap, and what the options refuse."""

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred import Compression, native, optim, world
from allred.comm import functions
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.create import create
from allred.comm.select import TransportFacts
from allred.config import Config
from allred.errors import InputError

pytestmark = pytest.mark.mpi

SHAPE = (80, 300)


@pytest.fixture(scope="module")
def tcp():
    """A communicator in which each rank is a host of its own."""
    size = MPI.COMM_WORLD.Get_size()
    if size == 1:
        pytest.skip("one rank has no other host")
    facts = [TransportFacts(node, has_kernels=native.available) for node in range(size)]
    made, _ = create(MpiBootstrap(MPI.COMM_WORLD.Dup()), facts, Config(timeout_s=30.0, transport="tcp"))
    yield made
    made.barrier().wait()
    made.close()


@pytest.fixture
def between_hosts(tcp, monkeypatch):
    monkeypatch.setattr(world.current(), "communicator", tcp)


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return {"w": rng.normal(size=SHAPE).astype(np.float32), "b": rng.normal(size=300).astype(np.float32)}


def start(**options):
    params = {"w": np.zeros(SHAPE, np.float32), "b": np.zeros(300, np.float32)}
    return params, allred.distributed(optim.SGD(lr=0.5), compression=Compression.int4, **options)


def train(params, opt, steps, reduces=False, samples=None):
    for step in steps:
        grads = gradients(allred.rank(), step)
        if reduces:
            for name in ("b", "w"):
                opt.reduce(name, grads[name], samples)
        opt.step(params, grads, samples=samples)


def means(steps, size):
    return sum(sum(gradients(rank, step)["w"].astype(np.float64) for rank in range(size)) for step in steps) / size


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("samples", [None, "uneven"])
def test_errors_do_not_add_up(between_hosts, rank, size, reduces, samples):
    """Without error feedback the error of 40 steps of equal gradients is 40 times that of one."""
    errors = {}
    for keeps in (True, False):
        params, opt = start(error_feedback=keeps)
        for _ in range(40):
            train(params, opt, [1], reduces, None if samples is None else 1 + rank)
        weights = [1 + r if samples else 1 for r in range(size)]
        mean = sum(w * gradients(r, 1)["w"].astype(np.float64) for r, w in enumerate(weights)) / sum(weights)
        errors[keeps] = np.linalg.norm(params["w"] / -0.5 - 40 * mean) / np.linalg.norm(mean)
        assert len(set(allred.allgather_object(allred.digest(params)))) == 1
    assert errors[True] < 1 < 3 < errors[False]


def test_a_run_that_is_continued_from_a_checkpoint_gives_the_same_bits(between_hosts, tmp_path):
    whole, opt = start()
    train(whole, opt, range(6))
    assert opt.save(tmp_path, whole) is None or allred.rank() == 0
    train(whole, opt, range(6, 12))
    params, opt = start()
    assert opt.restore(tmp_path, params) == 6
    train(params, opt, range(6, 12))
    assert all(np.array_equal(whole[name], params[name]) for name in params)
    plain, opt = start()
    train(plain, opt, range(12))
    assert not np.array_equal(whole["w"], plain["w"])  # the checkpoint has dropped errors


def test_errors_of_a_skipped_step_are_dropped(between_hosts, size):
    """So the next step is a first step."""
    first, opt = start()
    train(first, opt, [5])
    params, opt = start(nonfinite="skip")
    train(params, opt, [1, 2])
    before = params["w"].copy()
    bad = gradients(allred.rank(), 3)
    bad["w"][3, 4] = np.nan
    opt.step(params, bad)
    assert (opt.skipped, np.array_equal(params["w"], before)) == (1, True)
    params["w"][...] = params["b"][...] = 0
    train(params, opt, [5])
    np.testing.assert_array_equal(params["w"], first["w"])


def test_a_scaler_that_changes_its_scale_and_a_broadcast_drop_residuals(between_hosts):
    first, opt = start()
    train(first, opt, [5])
    for case in ("scaler", "broadcast", "load_state_dict"):
        scaler = allred.GradScaler(init_scale=1.0, growth_interval=2, growth_factor=1.0 + 1e-9)
        params, opt = start(scaler=scaler if case == "scaler" else None)
        train(params, opt, [1, 2])
        params["w"][...] = params["b"][...] = 0
        if case == "broadcast":
            opt.broadcast(params)
        elif case == "load_state_dict":
            opt.load_state_dict(opt.state_dict())
        train(params, opt, [5])
        np.testing.assert_allclose(params["w"], first["w"], rtol=1e-6)


def test_a_function_of_gradients_keeps_residuals_too(between_hosts, size):
    step = allred.distributed.gradients(lambda: [gradients(allred.rank(), 1)["w"]], compression=Compression.int4)
    total = sum(step()[0].astype(np.float64) for _ in range(30))
    assert np.abs(total - 30 * means([1], size)).max() < 3


def test_summary_and_options(rank, size, between_hosts):
    params, opt = start()
    train(params, opt, range(3))
    assert "a step as int4, 0.1" in opt.summary()
    with pytest.raises(InputError, match="error_feedback='yes' must be True or False"):
        start(error_feedback="yes")
    with pytest.raises(InputError, match=r"error_feedback=True needs compression, such as allred\.Compression\.int8"):
        allred.distributed(optim.SGD(), error_feedback=True)
    if size > 1:
        odd, opt = start(error_feedback=rank > 0)
        with pytest.raises(allred.MismatchError, match="compression=int4 error_feedback=True"):
            train(odd, opt, [0])


def test_on_one_host_nothing_changes(rank, size):
    if functions.current().backend.encodes:
        pytest.skip("several hosts")
    params, opt = start()
    train(params, opt, range(3))
    plain, other = start()
    other = allred.distributed(optim.SGD(lr=0.5))
    train(plain, other, range(3))
    assert all(np.array_equal(params[name], plain[name]) for name in params)
    if size > 1:
        assert "as int4, which has an effect only between hosts" in opt.summary()


@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
def test_errors_of_a_step_that_is_not_finite_are_dropped(between_hosts, rank, nonfinite):
    """Also those of large finite numbers beside the NaN."""
    first, opt = start()
    train(first, opt, [5])
    params, opt = start(nonfinite=nonfinite)
    train(params, opt, [1, 2, 3, 4])
    bad = gradients(rank, 3)
    bad["w"][3, 4], bad["w"][70] = np.nan, 1e30
    try:
        opt.step(params, bad)
    except allred.NonFiniteError:
        assert nonfinite == "raise"
    params["w"][...] = params["b"][...] = 0
    train(params, opt, [5])
    np.testing.assert_array_equal(params["w"], first["w"])


def test_an_average_of_many_ranks_fits_float16(between_hosts, size):
    """It is divided before it is rounded."""
    x = np.full((200, 200), 40_000.0, np.float32)
    assert (functions.current().allreduce(x, allred.Average, "", Compression.fp16).wait() == x).all()
    assert np.isinf(functions.current().allreduce(x, allred.Sum, "", Compression.fp16).wait()).all()
