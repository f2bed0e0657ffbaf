"""Cases of hooked torch optimizers in mode sync; test_hooked.py runs it on 2 and 3 ranks.

Expected values come from one process: each rank also trains a copy of the model on the batches of all ranks.
"""

import copy
import dataclasses
import tempfile
import warnings

import numpy as np
import torch
from optimizer_case_runner import OVERLAP_CASES, case, case_with_overlap, named, run_cases
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import allred
from allred import world
from allred.errors import DriftError, InputError, MismatchError, NonFiniteError

torch.set_num_threads(1)
allred.init(banner=False)
RANK, SIZE = allred.rank(), allred.size()
ROWS = 4
OVERLAPS = False  # if True, parameters are not compared, so that every step but the first overlaps


def batch(step=0, rank=RANK, features=6, rows=ROWS):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, features, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def joined(step=0, **options):
    parts = [batch(step, rank, **options) for rank in range(SIZE)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def loss_of(model, data):
    return functional.cross_entropy(model(data[0]), data[1])


def hooked(model, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options):
    """The model, its hooked optimizer, and a copy of the model with its own optimizer, to train in one process."""
    other = copy.deepcopy(model)
    optimizer = make(named(model))
    assert allred.distributed(optimizer, **options) is optimizer
    return model, optimizer, other, make(named(other))


def name_of(number, name):
    """The name of a parameter in errors."""
    return name if isinstance(named(nn.Linear(1, 1))[0], tuple) else f"0.{number}"


def close(model, other, tolerance=1e-6):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(one.detach(), two.detach(), rtol=tolerance, atol=tolerance, err_msg=name)


def equal_on_all(model):
    digests = allred.allgather_object(allred.digest([p.detach().numpy() for p in model.parameters()]))
    assert len(set(digests)) == 1, digests


def train(model, optimizer, data, loss=loss_of):
    optimizer.zero_grad()
    loss(model, data).backward()
    optimizer.step()


def check_training(make, steps=6, **options):
    model, opt, other, plain = hooked(net(), make, **options)
    for step in range(steps):
        train(model, opt, batch(step))
        train(other, plain, joined(step))
    close(model, other)
    equal_on_all(model)
    return opt


@case_with_overlap
def sgd_as_one_process():
    opt = check_training(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
    assert opt.allred.global_step == 6
    assert "6 steps" in opt.allred.summary()


@case
def adamw_as_one_process():
    check_training(lambda p: torch.optim.AdamW(p, lr=0.01))


@case
def the_class_returns_the_same_object():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    assert allred.DistributedOptimizer(optimizer, accumulate=2) is optimizer
    for again in (allred.distributed, allred.DistributedOptimizer):
        assert "distributed already" in raised(TypeError, lambda again=again: again(optimizer))


@case_with_overlap
def backward_returns_averages():
    """Also for gradients that share memory with others, such as the views of a hook."""
    model, opt, other, _ = hooked(net())
    for step in range(3):
        opt.zero_grad()
        other.zero_grad()
        loss_of(model, batch(step)).backward()
        loss_of(other, joined(step)).backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            np.testing.assert_allclose(one.grad, two.grad, rtol=1e-5, atol=1e-7)


@case
def a_restored_state_has_no_gradients_of_an_incomplete_step():
    """Also where the program calls `load_state_dict` of torch."""
    directory = allred.broadcast_object(tempfile.mkdtemp())
    for how in ("restore", "load_state_dict", "of torch"):
        model, opt, other, plain = hooked(net(), accumulate=3)
        opt.allred.save(directory, model)
        allred.barrier()
        state, of_torch = opt.allred.state_dict(), opt.state_dict()
        opt.allred.samples = 5
        (1000 * loss_of(model, batch(7))).backward()
        loss_of(model, batch(8)).backward()
        if how == "restore":
            assert opt.allred.restore(directory, model) == 0
        elif how == "load_state_dict":
            opt.allred.load_state_dict(state)
        else:
            opt.load_state_dict(of_torch)
        assert not opt.allred.accumulates
        for optimizer, net_, get in ((opt, model, batch), (plain, other, joined)):
            for micro in range(3):
                (loss_of(net_, get(micro)) / 3).backward()
            optimizer.step()
        close(model, other)


@case
def sums():
    model, opt, other, plain = hooked(net(), lambda p: torch.optim.SGD(p, lr=0.01), op=allred.Sum)
    for step in range(3):
        train(model, opt, batch(step))
        train(other, plain, joined(step), lambda m, d: SIZE * loss_of(m, d))
    close(model, other)
    opt.zero_grad()
    loss_of(model, batch(7)).backward()
    message = raised(InputError, lambda: loss_of(model, batch(8)).backward())
    assert "op=allred.Sum" in message


def raised(kind, function):
    """The message of an error, which must be the same on all ranks."""
    text = ""
    try:
        function()
    except kind as error:
        text = str(error)
    everyone = allred.allgather_object(text)
    assert text, f"no {kind.__name__}"
    assert len(set(everyone)) == 1, everyone
    return text


class Checkpointed(nn.Module):
    """Reentrant checkpointing: backward passes inside of a backward pass."""

    def __init__(self, whole):
        super().__init__()
        torch.manual_seed(5)
        self.whole = whole
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.requires_grad_()
        if self.whole:
            return checkpoint(lambda x: self.last(self.middle(self.first(x))), x, use_reentrant=True)
        x = checkpoint(lambda x: torch.tanh(self.middle(x)), self.first(x), use_reentrant=True)
        x = checkpoint(lambda x: torch.tanh(x), x, use_reentrant=True)
        return self.last(x)


@case_with_overlap
def reentrant_checkpoints():
    for whole in (False, True):
        model, opt, other, plain = hooked(Checkpointed(whole))
        for step in range(3):
            train(model, opt, batch(step))
            train(other, plain, joined(step))
        close(model, other)


@case_with_overlap
def parameter_groups_added_later():
    torch.manual_seed(6)
    parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
    other = copy.deepcopy(parts)
    opt, plain = (torch.optim.SGD(m[1].parameters(), lr=0.1) for m in (parts, other))
    allred.distributed(opt)

    def loss(model, data):
        return functional.cross_entropy(model[1](torch.tanh(model[0](data[0]))), data[1])

    train(parts, opt, batch(0), loss)
    train(other, plain, joined(0), loss)
    opt.add_param_group({"params": list(parts[0].parameters()), "lr": 0.05})
    plain.add_param_group({"params": list(other[0].parameters()), "lr": 0.05})
    parts.zero_grad()
    other.zero_grad()
    for step in range(1, 5):
        train(parts, opt, batch(step), loss)
        train(other, plain, joined(step), loss)
    close(parts, other)


@case_with_overlap
def requires_grad_set_later():
    model, opt, other, plain = hooked(net())
    for each in (model, other):
        each[0].requires_grad_(False)
    for step in range(4):
        if step == 2:
            for each in (model, other):
                each[0].requires_grad_(True)
        train(model, opt, batch(step))
        train(other, plain, joined(step))
    close(model, other)


@case
def double_backward():
    """A penalty of the gradient by torch.autograd.grad, and backward(create_graph=True)."""

    def loss(model, data):
        x = data[0].clone().requires_grad_()
        value = functional.cross_entropy(model(x), data[1])
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + (slope * len(x)).square().mean()

    def smooth(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    model, opt, other, plain = hooked(smooth())
    for step in range(3):
        train(model, opt, batch(step), loss)
        train(other, plain, joined(step), loss)
    close(model, other)
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, batch(9)).backward(create_graph=True)
    assert next(model.parameters()).grad.requires_grad
    opt.zero_grad()


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(7)
        self.words, self.out = nn.Embedding(12, 6, sparse=sparse), nn.Linear(6, 3)

    def forward(self, numbers):
        return self.out(self.words(numbers).mean(dim=1))


def words(step, rank):
    generator = torch.Generator().manual_seed(50 * step + rank)
    return torch.randint(0, 12, (ROWS, 3), generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


@case
def sparse_gradients():
    for make in (
        lambda m: torch.optim.SGD(named(m), lr=0.5),
        lambda m: torch.optim.SparseAdam([m.words.weight], lr=0.1),
    ):
        model, other = Words(True), Words(True)
        opt, plain = allred.distributed(make(model)), make(other)
        for step in range(4):
            model.zero_grad()
            other.zero_grad()
            loss_of(model, words(step, RANK)).backward()
            parts = [words(step, rank) for rank in range(SIZE)]
            loss_of(other, tuple(torch.cat(each) for each in zip(*parts, strict=True))).backward()
            assert model.words.weight.grad.is_sparse
            opt.step()
            plain.step()
        np.testing.assert_allclose(model.words.weight.detach(), other.words.weight.detach(), rtol=1e-5, atol=1e-6)
        equal_on_all(model.words)


@case_with_overlap
def sparse_gradients_that_a_rank_lacks_or_clips():
    model = Words(True)
    opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.5), clip_norm=0.01)
    for step in range(3):
        opt.zero_grad()
        if RANK == 0 or step == 0:
            loss_of(model, words(step, RANK)).backward()
        else:
            model.out(torch.ones(1, 6)).sum().backward()
    opt.step()
    total = sum(p.grad.coalesce()._values().square().sum() if p.grad.is_sparse else p.grad.square().sum()
                for p in model.parameters())  # fmt: skip
    assert abs(total.sqrt() - 0.01) < 1e-6
    assert opt.allred.grad_norm > 0.01
    equal_on_all(model)


@case_with_overlap
def nonfinite_gradients_raise_or_skip():
    def nan_loss(model, data):
        loss = loss_of(model, data)
        return loss * float("nan") if RANK == SIZE - 1 else loss

    model, opt, *_ = hooked(net())
    text = raised(NonFiniteError, lambda: nan_loss(model, batch()).backward())
    assert f"rank {SIZE - 1}" in text
    assert name_of(0, "0.weight") in text
    model, opt, other, plain = hooked(net(), nonfinite="skip")
    for step in range(4):
        if step == 2:
            train(model, opt, batch(step), nan_loss)
        else:
            train(model, opt, batch(step))
            train(other, plain, joined(step))
    assert opt.allred.skipped == 1
    assert opt.allred.global_step == 3
    close(model, other)


@case
def different_initial_parameters_are_an_error_unless_broadcast():
    model = net(seed=RANK)
    opt = allred.distributed(torch.optim.SGD(named(model), lr=0.1))
    if not OVERLAPS:
        text = raised(DriftError, lambda: train(model, opt, batch()))
        assert name_of(1, "0.bias") in text or name_of(0, "0.weight") in text
    model = nn.Sequential(*net(seed=RANK), nn.BatchNorm1d(3))
    model[-1].running_mean.fill_(RANK)
    opt = allred.distributed(torch.optim.Adam(named(model), lr=0.1 * (RANK + 1)))
    opt.allred.broadcast(model)
    assert opt.param_groups[0]["lr"] == 0.1
    assert model[-1].running_mean.sum() == 0
    train(model, opt, batch())
    equal_on_all(model)


@case
def drift_of_an_optimizer_state_is_found():
    if OVERLAPS:
        return
    model, opt, *_ = hooked(net())
    train(model, opt, batch(0))
    if RANK == 0:
        opt.state[next(iter(model.parameters()))]["momentum_buffer"].add_(1)
    assert "momentum_buffer" in raised(DriftError, lambda: train(model, opt, batch(1)))
    model, opt, *_ = hooked(net())
    opt.param_groups[0]["lr"] = 0.1 * (1 + RANK)
    assert "lr" in raised(DriftError, lambda: train(model, opt, batch(1)))


@case
def different_models_are_an_error():
    torch.manual_seed(0)
    model = nn.Linear(6, 3 + RANK)
    opt = allred.distributed(torch.optim.SGD(named(model), lr=0.1))
    text = raised(MismatchError, lambda: model(batch()[0]).sum().backward())
    assert f"'{name_of(0, 'bias')}' float32 (3," in text
    del opt


@case_with_overlap
def clip_norm():
    model, opt, other, plain = hooked(net(), lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=0.1)
    for step in range(3):
        train(model, opt, batch(step))
        other.zero_grad()
        loss_of(other, joined(step)).backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        plain.step()
        assert abs(opt.allred.grad_norm - float(norm)) < 1e-5
    close(model, other)


@case
def clipping_of_torch_sees_averages():
    model, opt, other, plain = hooked(net(), lambda p: torch.optim.SGD(p, lr=1.0))
    for step in range(3):
        for net_, optimizer, get in ((model, opt, batch), (other, plain, joined)):
            optimizer.zero_grad()
            loss_of(net_, get(step)).backward()
            nn.utils.clip_grad_norm_(net_.parameters(), 0.1)
            optimizer.step()
    close(model, other)


@case
def lbfgs():
    for search in (None, "strong_wolfe"):

        def make(parameters, search=search):
            plain = [each[-1] if isinstance(each, tuple) else each for each in parameters]
            return torch.optim.LBFGS(plain, lr=0.5, max_iter=5, line_search_fn=search)

        model, opt, other, plain = hooked(nn.Sequential(net()[0], nn.Tanh(), nn.Linear(8, 3)).double(), make)

        def closure(net_, optimizer, data):
            def run():
                optimizer.zero_grad()
                loss = functional.cross_entropy(net_(data[0].double()), data[1])
                loss.backward()
                return loss

            return run

        for step in range(3):
            one = opt.step(closure(model, opt, batch(step)))
            two = plain.step(closure(other, plain, joined(step)))
            assert abs(float(one.detach()) - float(two.detach())) < 1e-9
        close(model, other, 1e-8)


@case
def lbfgs_after_a_skipped_closure():
    """The last closure of a step is skipped; the next step calls its closures and updates the parameters."""
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, max_eval=2)
    allred.distributed(opt, nonfinite="skip")
    calls = []

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = loss_of(model, batch()) * (float("nan") if len(calls) == 2 and RANK == 0 else 1)
        loss.backward()
        return loss

    opt.step(closure)
    assert (len(calls), opt.allred.skipped) == (2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    assert float(opt.step(closure)) > 0
    assert len(calls) == 4
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(before[0], next(model.parameters()))


@case
def compression():
    model, opt, other, plain = hooked(net(), lambda p: torch.optim.SGD(p, lr=0.1), compression=allred.Compression.bf16)
    for step in range(3):
        train(model, opt, batch(step))
        train(other, plain, joined(step))
    close(model, other, 0.02)
    equal_on_all(model)


@case_with_overlap
def bfloat16_models():
    model, opt, other, plain = hooked(net().bfloat16(), lambda p: torch.optim.SGD(p, lr=0.1))
    for step in range(3):
        x, y = batch(step)
        train(model, opt, (x.bfloat16(), y), lambda m, d: functional.cross_entropy(m(d[0]).float(), d[1]))
        x, y = joined(step)
        train(other, plain, (x.bfloat16(), y), lambda m, d: functional.cross_entropy(m(d[0]).float(), d[1]))
    assert next(model.parameters()).dtype is torch.bfloat16
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(one.detach().float(), two.detach().float(), atol=0.03)
    equal_on_all(model.float())


@case
def batches_of_allred_weight_the_ranks():
    x, y = (each.numpy() for each in joined(0, rows=5))
    model, opt, other, plain = hooked(net())
    data = allred.data.batches(x, y, batch_size=2 * SIZE + 1, epochs=2)
    for xs, ys in data:
        train(model, opt, (torch.from_numpy(xs), torch.from_numpy(ys)))
    for xs, ys in allred.data.batches(x, y, batch_size=2 * SIZE + 1, epochs=2, rank=0, size=1):
        train(other, plain, (torch.from_numpy(xs), torch.from_numpy(ys)))
    close(model, other)


@case
def accumulated_batches_of_allred_weight_the_ranks():
    size = 2 * SIZE + 1
    x, y = (np.concatenate([each.numpy()] * size)[: 4 * size] for each in joined(0, rows=4))
    model, opt, other, plain = hooked(net(), accumulate=2)
    ours = allred.data.batches(x, y, batch_size=size)
    whole = allred.data.batches(x, y, batch_size=size, rank=0, size=1)
    for net_, optimizer, data in ((model, opt, ours), (other, plain, whole)):
        for number, (xs, ys) in enumerate(data):
            (loss_of(net_, (torch.from_numpy(xs), torch.from_numpy(ys))) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    close(model, other)


@case_with_overlap
def ranks_with_unequal_numbers_of_batches():
    """allred.Join: a rank at the end of its batches takes part without gradients, and then gets the parameters. Rank 0
    has no batch in epoch 0."""
    model, opt, other, plain = hooked(net())
    opt.allred.broadcast(model)
    for epoch, counts in enumerate(([0, 2, 3], [3, 1, 2])):
        with allred.Join():
            for step in range(counts[RANK]):
                train(model, opt, batch(10 * epoch + step))
        for step in range(max(counts[:SIZE])):
            parts = [batch(10 * epoch + step, rank) for rank in range(SIZE) if step < counts[rank]]
            train(other, plain, tuple(torch.cat(each) for each in zip(*parts, strict=True)))
    for step in range(20, 23):
        train(model, opt, batch(step))
        train(other, plain, joined(step))
    close(model, other)
    assert opt.allred.global_step == max([0, 2, 3][:SIZE]) + 3 + 3


@case_with_overlap
def two_optimizers_in_one_backward_pass():
    """As for adversarial networks; the ranks use them in different orders."""
    one, opt_one, other_one, plain_one = hooked(net(0))
    two, opt_two, other_two, plain_two = hooked(net(1))
    for step in range(3):
        for m, n, optimizers, get in (
            (one, two, (opt_one, opt_two), batch),
            (other_one, other_two, (plain_one, plain_two), joined),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(m, get(step)), loss_of(n, get(step))]
            sum(losses if RANK % 2 else losses[::-1]).backward()
            for optimizer in optimizers:
                optimizer.step()
    close(one, other_one)
    close(two, other_two)


@case
def an_optimizer_without_gradients_on_some_ranks():
    """Rank 0 leaves out a whole model; it takes part in its step."""
    one, opt_one, *_ = hooked(net(0))
    two, opt_two, other, plain = hooked(net(1), lambda p: torch.optim.SGD(p, lr=0.1))
    for step in range(3):
        opt_one.zero_grad()
        opt_two.zero_grad()
        loss = loss_of(one, batch(step))
        if RANK:
            loss = loss + loss_of(two, batch(step))
        loss.backward()
        opt_two.step()
        opt_one.step()
        plain.zero_grad()
        (sum(loss_of(other, batch(step, rank)) for rank in range(1, SIZE)) / SIZE).backward()
        plain.step()
    close(two, other)


@case
def schedulers():
    for first in (True, False):  # the scheduler is made before or after the hooks
        model, other = net(), net()
        opt, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
        if not first:
            allred.distributed(opt)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.1) for each in (opt, plain)]
        if first:
            allred.distributed(opt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(5):
                train(model, opt, batch(step))
                train(other, plain, joined(step))
                for schedule in schedules:
                    schedule.step()
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.01
        close(model, other)


@case
def state_of_the_optimizer():
    """opt.allred.state_dict() is restored bit-identically."""
    model, opt, *_ = hooked(net(), lambda p: torch.optim.Adam(p, lr=0.01))
    for step in range(2):
        train(model, opt, batch(step))
    state, weights = opt.allred.state_dict(), copy.deepcopy(model.state_dict())
    train(model, opt, batch(2))
    again, second, *_ = hooked(net(1), lambda p: torch.optim.Adam(p, lr=0.5))
    again.load_state_dict(weights)
    second.allred.load_state_dict(state)
    train(again, second, batch(2))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert second.allred.global_step == 3


@case
def freed_optimizers_leave_no_hooks_that_reduce():
    import gc

    model, opt, *_ = hooked(net())
    train(model, opt, batch(0))
    del opt
    gc.collect()
    if RANK == 0:
        loss_of(model, batch(1)).backward()  # the other ranks do not take part


@case_with_overlap
def the_order_of_gradients_is_agreed_on_with_overlap():
    model, opt, *_ = hooked(net())
    for step in range(3):
        train(model, opt, batch(step))
    overlap = opt.allred.session_support._overlap
    assert (overlap is not None and overlap.has_order) == OVERLAPS


if __name__ == "__main__":
    import hooked_edge_cases  # noqa: F401  (more cases; it imports from this file)
    import hooked_gradient_cases  # noqa: F401

    run_cases("no_overlap ")
    world.current().config = dataclasses.replace(world.config(), overlap="always", check_steps=0)
    OVERLAPS = True
    run_cases("overlap ", OVERLAP_CASES)
