"""More cases of hooked_program.py: which gradients are reduced when, their memory, their names, and the state."""

import contextlib

import torch
from optimizer_case_runner import case_with_overlap
from torch import nn

import allred
from __main__ import RANK, SIZE, equal_on_all, raised
from allred.errors import InputError, MismatchError


def parameter(*shape):
    return nn.Parameter(torch.zeros(*shape or (2,)))


def sgd(*parameters, **options):
    return allred.distributed(torch.optim.SGD(parameters, lr=1.0), **options)


def backward_of(each, value):
    """A backward pass in which every element of the gradient is `value`."""
    (each * value).sum().backward()


def rank_mean(function):
    return sum(map(function, range(SIZE))) / SIZE


def steps(opt, each, count=3):
    """The ranks are in phase: `count` steps have the right result."""
    before = each.detach().clone()
    for _ in range(count):
        opt.zero_grad()
        backward_of(each, RANK + 1.0)
        opt.step()
    torch.testing.assert_close(each.detach(), before - count * rank_mean(lambda rank: rank + 1.0))
    equal_on_all(nn.ParameterList([each]))


# Ranks that do not reduce in the same way.


@case_with_overlap
def clipping_of_torch_and_gradients_on_some_ranks():
    """An error if the gradients are clipped on some ranks only; below the limit all is well."""
    for with_local_gradients in (False, True):
        each = parameter()
        opt = sgd(each)
        steps(opt, each)
        for limit, value in ((100.0, 2.0), (1.0, 40.0), (100.0, 2.0)):
            opt.zero_grad()
            before = each.detach().clone()
            if RANK == 0:
                backward_of(each, value)
            elif with_local_gradients:
                with opt.allred.no_sync():
                    backward_of(each, value)
            nn.utils.clip_grad_norm_([each], limit)
            if limit == 1:
                assert "clip_norm" in raised(InputError, opt.step)
                assert torch.equal(each, before)
            else:
                opt.step()
                count = SIZE if with_local_gradients else 1
                torch.testing.assert_close(each.detach(), before - value * count / SIZE)
        steps(opt, each)


@case_with_overlap
def clip_norm_and_gradients_on_some_ranks():
    each = parameter()
    opt = sgd(each, clip_norm=1.0)
    for step in range(3):
        opt.zero_grad()
        if (RANK + step) % SIZE == 0:
            backward_of(each, 40.0)
        opt.step()
    torch.testing.assert_close(each.detach().norm(), torch.tensor(3.0))
    equal_on_all(nn.ParameterList([each]))


@case_with_overlap
def no_sync_on_one_rank():
    """As often as the others call backward(), all is well. If the others call it more often, it is an error."""
    each = parameter()
    opt = sgd(each)
    steps(opt, each)
    for extra in (0, 1, 0):
        opt.zero_grad()
        before = each.detach().clone()
        with opt.allred.no_sync() if RANK == 0 else contextlib.nullcontext():
            backward_of(each, RANK + 1.0)

        def rest(extra=extra):
            for _ in range(extra):
                backward_of(each, 5.0)
            opt.step()

        if extra:
            assert "in the same order" in raised(MismatchError, rest)
            assert torch.equal(each, before)
        else:
            rest()
            torch.testing.assert_close(each.detach(), before - rank_mean(lambda rank: rank + 1.0))
        steps(opt, each)


@case_with_overlap
def no_sync_on_one_rank_after_the_reduction():
    each = parameter()
    opt = sgd(each)

    def two_steps():
        for _ in range(2):
            opt.zero_grad()
            backward_of(each, RANK + 1.0)
            if RANK == 0:
                with opt.allred.no_sync():
                    backward_of(each, 5.0)
            opt.step()

    for _ in range(2):
        message = raised(InputError, two_steps)
        assert "gradients of different steps: reduction 2 since the last update on rank 0" in message
        opt.allred.broadcast()
        steps(opt, each)


@case_with_overlap
def gradients_on_one_rank_after_a_pass_without_a_step():
    """The other ranks have no gradients any more when they call step()."""
    each = parameter()
    opt = sgd(each)
    for _ in range(3):
        opt.zero_grad()
        backward_of(each, 10.0)
        opt.zero_grad()
        if RANK == 0:
            backward_of(each, 1.0)
        opt.step()
    torch.testing.assert_close(each.detach(), torch.full((2,), -3.0 / SIZE))
    steps(opt, each)


@case_with_overlap
def parameters_unfrozen_after_a_pass_without_a_step():
    for limit in (None, 4.0):
        first, second = parameter(), parameter()
        second.requires_grad_(False)
        opt = sgd(first, second, clip_norm=limit)
        for _ in range(2):
            backward_of(first, 1.0)
            opt.zero_grad()
            first.requires_grad_(False)
            second.requires_grad_(True)
            backward_of(second, 2.0 * RANK)
            torch.testing.assert_close(second.grad, torch.full((2,), SIZE - 1.0))
            opt.step()
            opt.zero_grad()
            first.requires_grad_(True)
        torch.testing.assert_close(second.detach(), torch.full((2,), -2.0 * (SIZE - 1)))
        assert not first.any()
