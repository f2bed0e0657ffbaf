"""More cases of hooked_program.py: repeated and failed backward passes, clipping, sums, the life of an optimizer."""

import contextlib
import copy
import gc
import sys
import tempfile
import weakref

import numpy as np
import pytest
import torch
from optimizer_case_runner import case, case_with_overlap
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import allred
from __main__ import RANK, ROWS, SIZE, batch, close, equal_on_all, hooked, joined, loss_of, net, raised, train
from allred.errors import InputError


def overlaps():
    return sys.modules["__main__"].OVERLAPS


def sgd(parameter, **options):
    return allred.distributed(torch.optim.SGD([parameter], lr=1.0), **options)


def backward_of(parameter, value):
    """A backward pass in which every element of the gradient is `value`."""
    (parameter * value).sum().backward()


# Clipping.


@case_with_overlap
def clipping_of_gradients_that_torch_unscales():
    """In scaler.step(), or with fused=True in the update. In step 1 a gradient overflows on one rank."""
    for fused in (False, True):

        def make(parameters, fused=fused):
            return torch.optim.SGD(parameters, lr=1.0, fused=fused)

        model, opt, other, plain = hooked(net(), make, clip_norm=0.1, nonfinite="ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            opt.zero_grad()
            loss = scaler.scale(loss_of(model, batch(step)))
            (loss * float("inf") if step == 1 and RANK == 0 else loss).backward()
            scaler.step(opt)
            scaler.update()
            if step == 1:
                continue
            other.zero_grad()
            loss_of(other, joined(step)).backward()
            norm = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            plain.step()
            assert norm > 0.1
            assert abs(opt.allred.grad_norm - float(norm)) < 1e-5
        close(model, other, 1e-5)
        equal_on_all(model)


@case_with_overlap
def clipping_of_the_sum_of_two_backward_passes():
    model, opt, other, plain = hooked(net(), lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=0.1)
    for step in range(3):
        for optimizer, net_, get in ((opt, model, batch), (plain, other, joined)):
            optimizer.zero_grad()
            loss_of(net_, get(2 * step)).backward()
            loss_of(net_, get(2 * step + 1)).backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        opt.step()
        plain.step()
        assert abs(opt.allred.grad_norm - float(norm)) < 1e-5
    close(model, other)


# Sums over the ranks.


def total():
    return sum(range(1, SIZE + 1))


@case
def a_sum_of_a_parameter_of_two_optimizers():
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizers = [sgd(parameter, op=allred.Sum) for _ in range(2)]
    for set_to_none in (True, False, False):
        backward_of(parameter, RANK + 1.0)
        assert parameter.grad[0, 0] == total()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none)


@case_with_overlap
def steps_that_use_a_sum_again():
    parameter = nn.Parameter(torch.zeros(2, 2))
    opt = sgd(parameter, op=allred.Sum)
    for _ in range(3):
        opt.zero_grad()
        backward_of(parameter, RANK + 1.0)
        opt.step()
        opt.step()
    assert parameter[0, 0] == -6 * total()
    scaler = allred.GradScaler(init_scale=4.0)
    parameter = nn.Parameter(torch.zeros(2, 2))
    opt = sgd(parameter, scaler=scaler)
    backward_of(parameter, scaler.scale(RANK + 1.0))
    opt.step()
    opt.step()
    assert parameter[0, 0] == -2 * total() / SIZE


@case_with_overlap
def sums_of_gradients_that_were_set_to_zero():
    """Also if no step was made, such as by GradScaler; autograd.grad adds nothing to a gradient."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    opt = sgd(parameter, op=allred.Sum)
    for with_step in (False, True, False):
        backward_of(parameter, RANK + 1.0)
        torch.autograd.grad((parameter * 2).sum(), parameter)
        assert parameter.grad[0, 0] == total()
        if with_step:
            opt.step()
        opt.zero_grad(set_to_none=False)


@case_with_overlap
def gradients_added_to_a_sum():
    for text in ("op=allred.Sum", "scaler: "):
        for with_step in (False, True):
            parameter = nn.Parameter(torch.zeros(2, 2))
            opt = sgd(parameter, **({"op": allred.Sum} if "Sum" in text else {"scaler": allred.GradScaler()}))
            for _ in range(3):
                opt.zero_grad()
                backward_of(parameter, RANK + 1.0)
                if with_step:
                    opt.step()
            message = raised(InputError, lambda parameter=parameter: backward_of(parameter, RANK + 1.0))
            assert text in message
            assert "'0.0'" in message
            opt.zero_grad()
            backward_of(parameter, RANK + 1.0)
            del opt


@case
def sparse_gradients_added_to_a_sum():
    words = nn.Embedding(4, 2, sparse=True)
    opt = allred.distributed(torch.optim.SparseAdam(words.parameters()), op=allred.Sum)
    for _ in range(2):
        opt.zero_grad()
        words(torch.tensor([RANK])).sum().backward()
        opt.step()
    message = raised(InputError, lambda: words(torch.tensor([RANK])).sum().backward())
    assert "op=allred.Sum" in message


# Backward passes.


@case_with_overlap
def reentrant_checkpoints_that_share_a_module():
    """A backward pass calls the hooks of the module twice."""
    torch.manual_seed(0)
    model, opt, other, plain = hooked(nn.Linear(6, 6))

    def loss(model, data):
        x = data[0].clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(model(y)), x, use_reentrant=True)
        return functional.cross_entropy(x, data[1])

    for step in range(4):
        train(model, opt, batch(step), loss)
        train(other, plain, joined(step), loss)
    close(model, other)


@case_with_overlap
def a_gradient_that_changes_after_it_was_sent():
    """A checkpoint has a module that is used before, in one step only: outside or in another checkpoint."""
    for outside in (False, True):
        torch.manual_seed(0)
        a_gradient_that_changes(outside, *hooked(nn.Linear(6, 6)))


def a_gradient_that_changes(outside, model, opt, other, plain):
    def loss(model, data, times=1):
        x = data[0].clone().requires_grad_()
        if outside:
            x = torch.tanh(model(x))
            times -= 1
        for _ in range(times):
            x = checkpoint(lambda y: torch.tanh(model(y)), x, use_reentrant=True)
        return functional.cross_entropy(x, data[1])

    for step in range(5):
        if overlaps() and step == 3:
            opt.zero_grad()
            message = raised(InputError, lambda: loss(model, batch(3), 2).backward())
            assert "a module; call zero_grad() and repeat the backward pass" in message
        times = 2 if step == 3 else 1
        train(model, opt, batch(step), lambda m, d, times=times: loss(m, d, times))
        train(other, plain, joined(step), lambda m, d, times=times: loss(m, d, times))
    close(model, other)


class Failure(torch.autograd.Function):
    """The backward pass raises an exception."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("failure")


def fail(model, data):
    with contextlib.suppress(RuntimeError):
        functional.cross_entropy(model(Failure.apply(data[0].clone().requires_grad_())), data[1]).backward()
        raise AssertionError("no exception")


@case_with_overlap
def failed_backward_passes():
    model, opt, other, plain = hooked(net())
    fail(model, batch(9))  # the first pass of all
    for step in range(5):
        if step >= 3:
            fail(model, batch(9))
            fail(model, batch(10))
        train(model, opt, batch(step))
        train(other, plain, joined(step))
    close(model, other)
    for step in (5, 6) if overlaps() else ():
        if RANK == 0:
            fail(model, batch(9))
        else:
            with contextlib.suppress(InputError):
                loss_of(model, batch(9)).backward()
                raise AssertionError("no InputError")
        opt.allred.samples = None if step == 5 else 4  # of the next pass: not used by the failed one
        train(model, opt, batch(step))
        train(other, plain, joined(step))
        close(model, other)
    fail(model, batch(9))
    if overlaps():  # the other ranks expect an answer
        train(model, opt, batch(6))
    reference = weakref.ref(opt.allred)
    del opt
    if overlaps():  # the errors of rank 0 have tracebacks
        gc.collect()
    assert reference() is None


@case_with_overlap
def no_sync():
    """Gradients of two backward passes, of which one is local."""
    model, opt, other, plain = hooked(net())
    for step in range(4):
        for optimizer, net_, get in ((opt, model, batch), (plain, other, joined)):
            optimizer.zero_grad()
            with opt.allred.no_sync() if optimizer is opt else contextlib.nullcontext():
                loss_of(net_, get(2 * step)).backward()
            if step < 3:
                loss_of(net_, get(2 * step + 1)).backward()
            optimizer.step()  # the last one has local gradients only
        if RANK == 0:  # the other ranks do not take part
            with opt.allred.no_sync():
                loss_of(model, batch(99)).backward()
    close(model, other)
    with contextlib.suppress(ValueError), opt.allred.no_sync():
        raise ValueError
    train(model, opt, batch(9))
    train(other, plain, joined(9))
    close(model, other)


@case
def no_sync_and_sums():
    parameter = nn.Parameter(torch.zeros(2, 2))
    opt = sgd(parameter, op=allred.Sum)
    with opt.allred.no_sync():
        backward_of(parameter, RANK + 1.0)
    backward_of(parameter, RANK + 1.0)
    assert parameter.grad[0, 0] == 2 * total()
    with opt.allred.no_sync():
        backward_of(parameter, 1.0)
    assert "no_sync" in raised(InputError, opt.step)


# The step.


class SharpnessAware(torch.optim.SGD):
    """As SAM (Foret et al., 2021): a step calls its closure twice, at the parameters and near them."""

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.1 / norm) for p in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


@case_with_overlap
def an_optimizer_that_calls_its_closure():
    for options in ({}, {"clip_norm": 1e6}):
        model, opt, other, plain = hooked(net(), lambda p: SharpnessAware(p, lr=0.1), **options)
        for step in range(4):
            losses = []
            for optimizer, net_, get in ((opt, model, batch), (plain, other, joined)):

                def closure(optimizer=optimizer, net_=net_, get=get, step=step):
                    optimizer.zero_grad()
                    loss = loss_of(net_, get(step))
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure).detach()))
            assert abs(losses[0] - losses[1]) < 1e-5
        close(model, other)


@case
def a_compiled_step():
    torch.manual_seed(0)
    model, opt, other, plain = hooked(nn.Linear(6, 3))

    @torch.compile(backend="eager")
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()

    for number in range(3):
        step(*batch(number))
        train(other, plain, joined(number))
    close(model, other)
    assert opt.allred.global_step == 3


# The life of parameters and optimizers.


@case_with_overlap
def parameters_with_another_layout():
    """`parameter.data = ...`: first with other strides at the same address, then with another shape."""
    torch.manual_seed(RANK)
    parameter = nn.Parameter(torch.randn(3, 3))
    opt = sgd(parameter)
    opt.allred.broadcast()
    before = parameter.detach().clone()
    parameter.data = parameter.data.t() if RANK == 0 else torch.zeros(3, 3)
    opt.allred.broadcast()
    assert torch.equal(parameter, before.t())
    for rows in (3, 3, 2, 2):
        parameter.data = parameter.data[:rows]
        opt.zero_grad()
        backward_of(parameter, RANK + 1.0)
        opt.step()
    assert np.allclose(parameter.detach(), before.t()[:2] - 4 * total() / SIZE, atol=1e-5)


@case_with_overlap
def a_replaced_optimizer():
    """The garbage collector runs on one rank only."""
    model = net()
    gc.disable()
    try:
        opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
        for step in range(3):
            train(model, opt, batch(step))
        schedule.step()
        del schedule
        opt = allred.distributed(torch.optim.Adam(model.parameters(), lr=0.1))
        if RANK:
            gc.collect()
        train(model, opt, batch(3))
        assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1] * 6
    finally:
        gc.enable()
    equal_on_all(model)
    step = opt.step
    del opt
    assert "keep a reference" in raised(InputError, step)


@case_with_overlap
def detached_optimizers():
    """The optimizer is kept by another object."""
    model, other = net(), net()
    kept = opt = torch.optim.SGD(model.parameters(), lr=0.1)
    allred.distributed(opt, op=allred.Sum)
    train(model, opt, batch(0))
    opt.allred.detach()
    assert not hasattr(kept, "allred")
    assert "step" not in vars(kept)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    if RANK == 0:
        train(model, opt, batch(1))
    model.load_state_dict(other.state_dict())
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    again = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    allred.distributed(kept).allred.detach()
    for step in range(1, 4):
        train(model, again, batch(step))
        train(other, plain, joined(step))
    close(model, other)


@case
def options_that_a_checkpoint_cannot_hold():
    model = net()
    opt = allred.distributed(torch.optim.SGD([{"params": model.parameters(), "kind": torch.float32}], lr=0.1))
    train(model, opt, batch())
    if RANK == 0:
        with (
            tempfile.TemporaryDirectory() as directory,
            pytest.raises(InputError, match=r"SGD: option 'kind' of parameter group 0 is torch\.float32"),
        ):
            opt.allred.save(directory)


@case
def buffers_that_are_not_persistent():
    model = net()
    model.register_buffer("scale", torch.full((ROWS,), float(RANK)), persistent=False)
    opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
    opt.allred.broadcast(model)
    assert model.scale.sum() == 0
