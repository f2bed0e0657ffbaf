"""DistributedDataParallel on backend allred, compared with gloo."""

import contextlib
import math
import sys
import tempfile

import group_case_runner
import pytest
import torch
import torch.distributed as dist
from group_case_runner import assert_same
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import allred

STEPS = 3


class Net(torch.nn.Module):
    """Layers of different sizes; `skip` leaves one unused in some steps, `reenter` recomputes one in the backward."""

    def __init__(self, reenter=None):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = torch.nn.Linear(6, 30), torch.nn.Linear(30, 30), torch.nn.Linear(30, 4)
        self.norm, self.reenter = torch.nn.BatchNorm1d(30), reenter

    def forward(self, x, skip=False):
        x = torch.tanh(self.norm(self.first(x)))
        if not skip:
            x = checkpoint(self.middle, x, use_reentrant=self.reenter) if self.reenter is not None else self.middle(x)
        return self.last(x)


def batches(rank, count=STEPS):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(count)]


def check_against_gloo(size, train):
    """Compare the parameters after train(group) of this backend and of gloo."""
    found = train(None)
    assert_same(found, train(gloo()), size)


GLOO = []


def gloo():
    if not GLOO:
        GLOO.append(dist.new_group(backend="gloo"))
    return GLOO[0]


def train(rank, group, net=None, hook=None, skips=(), syncs=None, bucket_cap_mb=0.002, **options):
    """A few steps of SGD. Return the parameters, buffers and last gradients."""
    model = DistributedDataParallel(net or Net(), process_group=group, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        hook(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, x in enumerate(batches(rank)):
        wait = syncs is None or syncs[step]
        with contextlib.nullcontext() if wait else model.no_sync():
            model(x, **({"skip": True} if step in skips else {})).square().mean().backward()
        if wait:
            optimizer.step()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
    return [*(p.detach() for p in model.parameters()), *model.buffers(), *gradients]


def plain(rank, size):
    check_against_gloo(size, lambda group: train(rank, group))


def session(rank, size):
    """A distributed optimizer of a DDP leaves the averaging to it, and counts the steps of a session."""

    def in_session(wrap):
        net = Net()
        model = DistributedDataParallel(net)
        optimizer, sent = wrap(torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)), []
        model.register_comm_hook(None, lambda _, bucket: sent.append(1) or default_hooks.allreduce_hook(None, bucket))
        with contextlib.ExitStack() as stack:
            loop = batches(rank)
            if wrap is allred.distributed:
                session = stack.enter_context(allred.Session(log_steps=None, hooks=None))
                session.track(params=model, optimizer=optimizer)
                loop = session.steps(loop)
            for x in loop:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                gradients = [p.grad.clone() for p in net.parameters()]
                optimizer.step()
        assert len(sent) == STEPS  # of one bucket
        assert wrap is not allred.distributed or (session.step, optimizer.allred.global_step) == (STEPS, STEPS)
        return [*(p.detach() for p in net.parameters()), *net.buffers(), *gradients]

    expected = in_session(lambda optimizer: optimizer)
    for got, want in zip(in_session(allred.distributed), expected, strict=True):
        assert torch.equal(got, want), (got, want)
    model = DistributedDataParallel(Net())
    wrong = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2, op=allred.Sum)
    with pytest.raises(allred.InputError, match=r"op, accumulate of allred.distributed has no effect on"):
        wrong.allred.broadcast(model)
    other = torch.nn.Parameter(torch.ones(1))
    wrong = allred.distributed(torch.optim.SGD([*model.parameters(), other], lr=0.1))
    with pytest.raises(allred.InputError, match="is not a parameter of this DistributedDataParallel"):
        wrong.allred.broadcast(model)


def nan_and_drift(rank, size):
    """Gradients that DDP has averaged are checked as others, and the parameters are compared."""
    for problem in ("nan", "skip", "drift", "save"):
        net = torch.nn.Linear(3, 2)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        optimizer = allred.distributed(optimizer, nonfinite="skip" if problem == "skip" else None)
        if problem == "save" and rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                optimizer.allred.save(directory, model)  # changes nothing
        optimizer.allred.broadcast(model)
        optimizer.param_groups[0]["lr"] += rank * (problem == "drift")
        before = net.weight.detach().clone()
        model(torch.full((2, 3), math.nan if problem in ("nan", "skip") and rank else 1.0)).sum().backward()
        if problem == "nan":
            with pytest.raises(allred.NonFiniteError, match="averaged gradients are not finite: 'weight'"):
                optimizer.step()
        elif problem == "drift":
            with pytest.raises(allred.DriftError, match=r"the optimizer's 0\.lr is 0\.1 on rank 0"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(before, net.weight) == (problem != "save")
        assert optimizer.allred.skipped == (problem == "skip")


def bucket_views(rank, size):
    check_against_gloo(size, lambda group: train(rank, group, gradient_as_bucket_view=True))


def no_sync(rank, size):
    check_against_gloo(size, lambda group: train(rank, group, syncs=[False, False, True]))


def unused_parameters(rank, size):
    check_against_gloo(size, lambda group: train(rank, group, skips=(1,), find_unused_parameters=True))
    check_against_gloo(size, lambda group: train(rank, group, skips=(1,) if rank else (), find_unused_parameters=True))


def static_graph(rank, size):
    check_against_gloo(size, lambda group: train(rank, group, static_graph=True))
    check_against_gloo(size, lambda group: train(rank, group, Net(reenter=True), static_graph=True))


def checkpointing(rank, size):
    for reenter in (True, False):
        check_against_gloo(size, lambda group, reenter=reenter: train(rank, group, Net(reenter)))


def comm_hooks(rank, size):
    def with_state(hook):
        return lambda model, group: model.register_comm_hook(group or dist.group.WORLD, hook)

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        if hook is default_hooks.allreduce_hook or size == 2:  # gloo rounds the sum of 16-bit floats after each rank
            check_against_gloo(size, lambda group, hook=hook: train(rank, group, hook=with_state(hook)))

    def power(model, group):
        state = powerSGD_hook.PowerSGDState(
            group or dist.group.WORLD, start_powerSGD_iter=2, matrix_approximation_rank=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    check_against_gloo(
        3, lambda group: train(rank, group, hook=power, bucket_cap_mb=1)
    )  # gloo hangs with several buckets
    train(rank, None, hook=power)
    builtin = dist.BuiltinCommHookType
    for kind in (builtin.ALLREDUCE, *([builtin.FP16_COMPRESS] if size == 2 else [])):
        check_against_gloo(
            size,
            lambda group, kind=kind: train(rank, group, hook=lambda model, _: model._register_builtin_comm_hook(kind)),
        )


def own_hook(rank, size):
    """A hook that chains futures, and hooks that wait for a future in the backward, in Python and in C++."""

    def chained(group, bucket):
        tensor = bucket.buffer()
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / size).then(lambda f: f.value())

    def waiting(group, bucket):
        tensor = (
            dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
            .wait()
        )
        future = torch.futures.Future()
        future.set_result(tensor / size)
        return future

    def waiting_in_torch(group, bucket):
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        torch.futures.wait_all([future])
        return future.then(lambda f: f.value()[0] / size)

    expected = train(rank, gloo())
    for hook in (chained, waiting, waiting_in_torch):
        assert_same(
            train(rank, None, hook=lambda model, group, hook=hook: model.register_comm_hook(group, hook)), expected, 3
        )


def uneven_inputs(rank, size):
    def run(group, skip=False, divide_by_initial_world_size=True, **options):
        model = DistributedDataParallel(Net(), process_group=group, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for x in batches(rank, 2 + rank):
                model(x, skip).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    check_against_gloo(size, run)
    check_against_gloo(size, lambda group: run(group, divide_by_initial_world_size=False))
    check_against_gloo(size, lambda group: run(group, rank == 1, find_unused_parameters=True))


def zero_redundancy(rank, size):
    def run(group, overlap=False):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group or dist.group.WORLD, lr=0.1, momentum=0.9
        )
        with Join([model, optimizer]):
            for x in batches(rank, 2 + rank):
                model(x).square().mean().backward()
                optimizer.step()
                model.zero_grad()
        optimizer.consolidate_state_dict(0)
        if rank == 0:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        return [p.detach() for p in model.parameters()]

    check_against_gloo(size, run)


def mixed_precision_and_clipping(rank, size):
    def run(group):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        for x in batches(rank):
            with torch.autocast("cpu", torch.bfloat16, enabled=size == 2):  # it would amplify other roundings
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    check_against_gloo(size, run)


def errors_in_backward(rank, size):
    """Ranks with different models fail at once, with the same error."""
    from allred.errors import MismatchError

    tensor = torch.ones(3, requires_grad=True)

    def hook(gradient):
        work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
        work.get_future()
        return gradient

    tensor.register_hook(hook)
    try:
        tensor.sum().backward()
    except MismatchError as error:
        assert "float32 (2,) on rank 0" in str(error)  # noqa: PT017
    else:
        raise AssertionError("no error")


CASES = [
    plain,
    session,
    nan_and_drift,
    bucket_views,
    no_sync,
    unused_parameters,
    static_graph,
    checkpointing,
    comm_hooks,
    own_hook,
    uneven_inputs,
    zero_redundancy,
    mixed_precision_and_clipping,
    errors_in_backward,
]

if __name__ == "__main__":
    group_case_runner.run(CASES, sys.argv[1:])
