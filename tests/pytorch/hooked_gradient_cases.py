"""More cases of hooked_program.py: which gradients are reduced when, their memory, their names, and the state."""

import contextlib
import copy
import functools
import io
import pickle
import tempfile

import numpy as np
import pytest
import torch
from hooked_edge_cases import overlaps
from optimizer_case_runner import case, case_with_overlap, named
from torch import nn

import allred
import allred.torch as hvd
from __main__ import RANK, SIZE, equal_on_all, raised
from allred.errors import DriftError, InputError, MismatchError, NonFiniteError


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


# Steps that are alike, and one that differs.


def assign(make):
    def change(each):
        each.data = make(each.data)

    return change


@case_with_overlap
def memory_that_changes_after_equal_steps():
    for make in (torch.clone, lambda data: data[:2], lambda data: data[1:], torch.t, torch.Tensor.double):
        each, other = parameter(4, 4), parameter()
        opt = sgd(each, other)
        steps(opt, each, 6)
        for _ in range(2):
            assign(make)(each)
            steps(opt, each, 6)


@case_with_overlap
def gradients_that_differ_after_equal_steps():
    each = parameter(4, 4)
    opt = sgd(each)
    steps(opt, each, 6)
    opt.zero_grad()
    before = each.detach().clone()
    assert "not finite" in raised(NonFiniteError, lambda: backward_of(each, float("nan") if RANK == SIZE - 1 else 1.0))
    assert torch.equal(each, before)
    steps(opt, each, 6)
    before, values = each.detach().clone(), torch.arange(16.0).reshape(4, 4)
    each.grad = values.t() * (RANK + 1)  # of other strides, and not reduced by a backward pass
    opt.step()
    torch.testing.assert_close(each.detach(), before - values.t() * rank_mean(lambda rank: rank + 1.0))
    steps(opt, each, 6)
    before = each.detach().clone()
    for _ in range(6):
        opt.zero_grad()
        opt.allred.samples = RANK + 1
        backward_of(each, RANK + 1.0)
        opt.step()
    weighted = sum((rank + 1) ** 2 for rank in range(SIZE)) / sum(range(1, SIZE + 1))
    torch.testing.assert_close(each.detach(), before - 6 * weighted)
    steps(opt, each, 6)


@case
def drift_after_equal_steps():
    each = parameter(4, 4)
    opt = sgd(each)
    steps(opt, each, 6)
    each.data.add_(RANK)
    assert "differs" in raised(DriftError, lambda: steps(opt, each))


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
        assert "gradients of different steps: reduction number 2 (modulo 3) since the last update on rank 0" in message
        opt.allred.broadcast()
        steps(opt, each)


@case_with_overlap
def one_backward_pass_less_on_one_rank():
    """An error in the next reduction, however many the ranks have made since the last update."""
    each = parameter()
    opt = sgd(each)

    def two_steps(passes, broadcasts):
        for _ in range(passes):
            backward_of(each, 1.0)
        if broadcasts:
            opt.allred.broadcast()
        if RANK != 0:
            backward_of(each, 1.0)
        opt.step()
        backward_of(each, 1.0)
        opt.step()

    for passes in range(1, 10):
        for broadcasts in (False, True):
            message = raised(InputError, functools.partial(two_steps, passes, broadcasts))
            assert "gradients of different steps: reduction number 1 since the last update on rank 0" in message
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


# Names and memory.


@case
def parameters_of_two_models_with_equal_names():
    """Also a name that is like a number given by allred."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(3)]
    for model in models:
        nn.init.zeros_(model.weight)
    names = ["weight", "weight", "weight#2"]
    opt = torch.optim.SGD([(name, m.weight) for name, m in zip(names, models, strict=True)], lr=1.0, momentum=0.5)
    allred.distributed(opt)
    for step in range(2):
        opt.zero_grad()
        backward_of(sum(number * model.weight for number, model in enumerate(models, 1)), 2.0 * RANK)
        opt.step()
        for number, model in enumerate(models, 1):
            expected = -number * (SIZE - 1.0) * [1, 2.5][step]
            torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), expected))
    state = opt.allred.state_dict()
    assert list(state["slots"]) == ["weight", "weight#2", "weight#2#2"]
    opt.add_param_group({"params": [("weight", parameter())]})
    opt.zero_grad()
    with torch.no_grad():
        models[1].weight.add_(RANK)
    assert overlaps() or "'weight#2'" in raised(DriftError, lambda: backward_of(models[1].weight, 1.0))


def dense_layouts():
    yield torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    yield torch.zeros(3, 2).t()
    yield torch.zeros(2, 3, 4).permute(2, 0, 1)


@case_with_overlap
def missing_gradients_and_copies_have_the_layout_of_their_parameters():
    """Fused updates, and norms of torch, use parameters and gradients in the order of their memory."""
    for like in dense_layouts():
        values = torch.arange(like.numel(), dtype=torch.float32).reshape(like.shape)
        for kind, options in (("missing", {}), ("scaler", {"scaler": allred.GradScaler(init_scale=8.0)})):
            for dtype in (torch.float32, torch.bfloat16):
                each = nn.Parameter(torch.empty_like(like, dtype=dtype).zero_())
                fused = dtype is torch.float32  # the fused update of bfloat16 is wrong in torch 2.13 on CPUs
                opt = allred.distributed(torch.optim.SGD([each], lr=1.0, fused=fused), **options)
                for _ in range(3):
                    opt.zero_grad()
                    if RANK == 0 or kind == "scaler":
                        loss = (each * values).sum()
                        options.get("scaler", allred.GradScaler(1.0)).scale(loss).backward()
                    opt.step()
                    assert each.grad.stride() == each.stride()
                expected = -3 * (values if kind == "scaler" else values / SIZE)
                torch.testing.assert_close(each.detach().float(), expected, rtol=0.02, atol=0)
                norms = allred.allgather_object(float(nn.utils.get_total_norm([each.grad])))
                assert len(set(norms)) == 1


# Closures.


@case
def a_closure_with_local_passes():
    """`step` reduces after each call of a closure whose passes are in no_sync(), or which one rank leaves out."""
    for lacks in (False, True):
        ours, plain = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
        opt = allred.distributed(torch.optim.LBFGS([ours], lr=0.5, max_iter=4))

        def closure(weight, ranks, local=contextlib.nullcontext, lacks=lacks):
            losses = [(weight - rank - 1).square().sum() * (not lacks or rank > 0) for rank in ranks]
            weight.grad = None
            if not lacks or ranks != [0]:
                with local():
                    (sum(losses) / len(losses)).backward()
            return sum(losses) / len(losses)

        opt.step(functools.partial(closure, ours, [RANK], opt.allred.no_sync))
        torch.optim.LBFGS([plain], lr=0.5, max_iter=4).step(functools.partial(closure, plain, list(range(SIZE))))
        torch.testing.assert_close(ours, plain)


@case
def losses_of_closures_are_weighted_by_samples():
    """Shares of allred.data, one of them without rows, or `samples`. The loss of a rank without rows is NaN."""
    x = np.random.default_rng(0).normal(size=(2 * SIZE - 1, 3))
    for size in (2 * SIZE - 1, SIZE, None):
        for search in (None, "strong_wolfe"):
            weights = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
            ours, plain = (torch.optim.LBFGS([w], lr=0.5, max_iter=4, line_search_fn=search) for w in weights)
            allred.distributed(ours)
            if size is None:
                parts = [x[: rank + 1] for rank in range(SIZE)]
                pairs = [(parts[RANK], np.concatenate(parts))]
            else:
                shares = [allred.data.batches(x, batch_size=size, **one) for one in ({}, {"rank": 0, "size": 1})]
                pairs = zip(*shares, strict=True)
            for mine, whole in pairs:

                def closure(optimizer, weight, rows, size=size, ours=ours):
                    def run():
                        if size is None and optimizer is ours:
                            optimizer.allred.samples = len(rows)
                        optimizer.zero_grad()
                        loss = (torch.from_numpy(rows) @ weight - 1).square().mean()
                        loss.backward()
                        return loss

                    return run

                one = ours.step(closure(ours, weights[0], mine))
                two = plain.step(closure(plain, weights[1], whole))
                torch.testing.assert_close(one.detach(), two.detach())
                torch.testing.assert_close(*weights)


# State.


@case
def broadcast_keeps_the_tensors_of_the_program():
    """A learning rate and betas that are tensors, a group and a slot; the program changes the rate afterwards."""
    each, other = parameter(), parameter(3)
    rate, beta = torch.tensor(0.1 * (RANK + 1), dtype=torch.float64), torch.tensor(0.5)
    first = {"params": [each], "lr": rate, "betas": (beta, torch.tensor(0.9)), "extra": torch.full((2,), RANK + 1.0)}
    opt = torch.optim.Adam([first, {"params": [other]}], capturable=False, foreach=False)
    allred.distributed(opt)
    for parameters in ([each], [each, other]):
        for part in parameters:
            part.grad = torch.full_like(part, 1.0 + RANK)
        with opt.allred.no_sync():
            type(opt).step(opt)
        group, slot = opt.param_groups[0], opt.state[each]["exp_avg"]
        opt.allred.broadcast()
        assert opt.param_groups[0] is group
        assert group["lr"] is rate
        assert group["betas"][0] is beta
        assert group["extra"].tolist() == [1.0, 1.0]
        assert rate == torch.tensor(0.1, dtype=torch.float64)
        assert opt.state[each]["exp_avg"] is slot
        assert len(set(allred.allgather_object(str(slot.tolist())))) == 1
    rate.fill_(0.25)
    opt.zero_grad()
    backward_of(each, RANK + 1.0)
    before = each.detach().clone()
    opt.step()
    assert not torch.equal(each.detach(), before)
    equal_on_all(nn.ParameterList([each]))
    assert opt.param_groups[0]["lr"] == 0.25


@case
def broadcast_and_restored_state_has_the_layout_of_its_parameter():
    """Fused updates use it in the order of its memory. hvd.broadcast_optimizer_state loads it in the same way."""
    for like in dense_layouts():
        values = torch.arange(1.0, like.numel() + 1).reshape(like.shape)
        for way in ("broadcast", "restore", "hvd"):
            ours, plain = (nn.Parameter(torch.empty_like(like).zero_()) for _ in range(2))
            optimizer, other = (torch.optim.Adam([each], lr=0.1, fused=True) for each in (ours, plain))
            for number, (each, weight) in enumerate(((optimizer, ours), (other, plain))):
                if number or RANK == 0:
                    (weight * values).sum().backward()
                    each.step()
            allred.distributed(optimizer)
            with tempfile.TemporaryDirectory() as directory:
                directory = allred.broadcast_object(directory, 0)
                if way == "restore":
                    optimizer.allred.save(directory)
                    optimizer.state.clear()
                    optimizer.allred.restore(directory)
                else:
                    if way == "hvd":
                        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
                    optimizer.allred.broadcast()
                allred.barrier()
            assert optimizer.state[ours]["exp_avg"].stride() == ours.stride()
            for each, weight in ((optimizer, ours), (other, plain)):
                each.zero_grad()
                (weight * values.flip(0)).sum().backward()
                each.step()
            torch.testing.assert_close(ours, plain)


@case
def a_refused_restore_changes_nothing():
    """A checkpoint of an optimizer with another number of groups."""
    each = parameter()
    saved = sgd(each)
    steps(saved, each, 1)
    with tempfile.TemporaryDirectory() as directory:
        directory = allred.broadcast_object(directory, 0)
        saved.allred.save(directory)
        saved.allred.detach()
        with torch.no_grad():
            each.fill_(7.0)
        opt = torch.optim.SGD([{"params": [each]}, {"params": [], "lr": 0.5}], lr=0.25)
        allred.distributed(opt)
        assert "parameter groups" in raised(InputError, lambda: opt.allred.restore(directory))
        allred.barrier()
    assert each.tolist() == [7, 7]
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.5]


@case
def copies_of_the_optimizer_are_refused():
    """A copy would have no hooks: each rank would train alone. After detach() it is an optimizer of torch."""
    each = parameter()
    opt = sgd(each)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .*optimizer\.state_dict\(\)"):
            copied(opt)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy({"model": nn.ParameterList([each]), "optimizer": opt})
    copy.deepcopy(opt.state_dict())
    opt.allred.detach()
    assert isinstance(copy.deepcopy(opt), torch.optim.SGD)


@case
def buffers_of_all_dtypes_are_broadcast():
    """Also lazy conjugates and negations of torch, which are not always that on all ranks."""
    model = nn.Linear(2, 1)
    model.register_buffer("float8", torch.full((3,), RANK + 1.0).to(torch.float8_e4m3fn))
    model.register_buffer("uint16", torch.full((3,), RANK + 1, dtype=torch.uint16))
    model.register_buffer("complex", torch.full((3,), RANK + 1j))
    model.register_buffer("conjugate", torch.full((3,), RANK + 1j).conj())
    model.register_buffer("negative", torch.full((3,), RANK + 2j).conj().imag)
    opt = allred.distributed(torch.optim.SGD(named(model), lr=0.1))
    opt.allred.broadcast(model)
    assert model.float8.float().tolist() == model.uint16.tolist() == [1, 1, 1]
    assert model.complex.tolist() == [1j, 1j, 1j]
    assert model.conjugate.tolist() == [-1j, -1j, -1j]
    assert model.negative.tolist() == [-2, -2, -2]
    if RANK == 0:
        model.conjugate = model.conjugate.resolve_conj()
    assert "'module.conjugate, conjugate'" in raised(MismatchError, lambda: opt.allred.broadcast(model))


# Sparse gradients, and skipped steps.


@case
def sparse_gradients_on_some_ranks():
    """With and without rows; with momentum, which is sparse too; set to zero afterwards."""
    for rows in ([], [1], [0, 2, 2]):
        for make in (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5), lambda p: torch.optim.Adagrad(p, lr=1.0)):
            words = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
            for each in words:
                nn.init.ones_(each.weight)
            ours, plain = (make(each.parameters()) for each in words)
            allred.distributed(ours)
            for step in range(3):
                for optimizer, each in zip((ours, plain), words, strict=True):
                    if optimizer is plain or (RANK + step) % SIZE == 0:
                        (
                            each(torch.tensor(rows, dtype=torch.long)).sum() * (1 if optimizer is ours else 1 / SIZE)
                        ).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
            torch.testing.assert_close(*(each.weight for each in words))
            equal_on_all(words[0])


@case_with_overlap
def one_skipped_step_of_two_passes():
    for options in ({"nonfinite": "skip"}, {"scaler": allred.GradScaler(init_scale=1024.0)}):
        each = parameter()
        opt = sgd(each, **options)
        for step in range(4):
            opt.zero_grad()
            for part in range(2 if step == 1 else 1):
                value = float("nan") if (step, part, RANK) == (1, 0, 0) else 1.0
                backward_of(each, options["scaler"].scale(value) if "scaler" in options else value)
            opt.step()
        assert opt.allred.skipped == 1
        assert each.tolist() == [-3.0, -3.0]
        assert "scaler" not in options or options["scaler"].get_scale() == 512


# What the ranks have agreed on, after an error.


@case_with_overlap
def parameters_frozen_with_gradients():
    """torch updates a frozen parameter that has a gradient, so it is reduced; on some ranks only it is an error."""
    for everyone in (True, False):
        first, second = parameter(), parameter()
        opt = sgd(first, second)

        def step(opt=opt, second=second):
            backward_of(second, 1.0)
            opt.step()

        if everyone or RANK == 0:
            with opt.allred.no_sync():
                backward_of(first, 2.0 * RANK)
        first.requires_grad_(False)
        if everyone:
            step()
            assert first.tolist() == [1.0 - SIZE] * 2
        else:
            assert "tensor 0" in raised(MismatchError, step)
            assert not first.any()
        opt.zero_grad()
        steps(opt, second)


@case_with_overlap
def a_parameter_that_one_rank_has_frozen():
    """Training goes on after the error, with other numbers of samples."""
    for count in (1, 2):
        parameters = [parameter() for _ in range(count)]
        opt = sgd(*parameters)
        for samples in (None, 4):
            opt.zero_grad()
            parameters[0].requires_grad_(RANK != SIZE - 1)

            def step(samples=samples, opt=opt, parameters=parameters):
                opt.allred.samples = samples
                if trained := [each for each in parameters if each.requires_grad]:
                    backward_of(sum(trained), 1.0)
                opt.step()

            raised(MismatchError, step)
            parameters[0].requires_grad_(True)
            opt.zero_grad()
            steps(opt, parameters[0])


@case_with_overlap
def gradients_added_to_a_sum_on_one_rank():
    first, second = parameter(), parameter()
    opt = sgd(first, second, op=allred.Sum)
    steps_of_sums = 2
    for _ in range(steps_of_sums):
        opt.zero_grad()
        backward_of(first, 1.0)
        opt.step()
    loss = first + second if RANK == 0 else second
    assert "op=allred.Sum" in raised(InputError, lambda: backward_of(loss, 1.0))
    opt.zero_grad()
    backward_of(first, 1.0)
    opt.step()
    assert first.tolist() == [-SIZE * (steps_of_sums + 1.0)] * 2


@case
def sparse_gradients_after_a_broadcast_and_a_step_without_them():
    words, other = nn.Embedding(4, 2, sparse=True), parameter()
    nn.init.zeros_(words.weight)
    opt = sgd(words.weight, other)
    for uses in (True, False, True):
        opt.zero_grad()
        if uses:
            words(torch.tensor([1])).sum().backward()
        else:
            opt.allred.broadcast()
            backward_of(other, 1.0)
        opt.step()
    assert words.weight[1].tolist() == [-2.0, -2.0]


@case
def sparse_gradients_that_the_program_scales():
    """A sparse gradient is no longer coalesced then. It is clipped, and a sum is not reduced again."""
    for options in ({"clip_norm": 1.0}, {"op": allred.Sum}):
        words = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(words.weight)
        opt = sgd(words.weight, **options)
        words(torch.tensor([1, 1, 2])).sum().backward()
        words.weight.grad.mul_(8.0)
        assert not words.weight.grad.is_coalesced()
        opt.step()
        if "clip_norm" in options:
            assert abs(float(words.weight.detach().norm()) - 1.0) < 1e-6
        else:
            opt.step()
            assert words.weight[2].tolist() == [-16.0 * SIZE] * 2


@case
def sparse_gradients_that_torch_adds_to():
    """After a reduction with no row, or one row of one rank only."""
    for first in ([], [1]):
        words, other = nn.Embedding(4, 2, sparse=True), parameter()
        nn.init.zeros_(words.weight)
        opt = sgd(words.weight, other)
        for rows in ([2], first if RANK == 0 else [], [0, 1, 3]):
            if rows != [0, 1, 3]:
                opt.zero_grad(set_to_none=False)
            loss = other.sum()
            if rows:
                loss = loss + words(torch.tensor(rows)).sum()
            loss.backward()
            opt.step()
        assert words.weight[:, 0].tolist() == [-1.0, -1.0 - 2 * len(first) / SIZE, -1.0, -1.0]
