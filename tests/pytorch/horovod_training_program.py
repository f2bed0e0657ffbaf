"""Training in the style of Horovod's PyTorch examples with allred.torch; test_horovod.py runs it on 2 and 3 ranks.

Each rank also trains a copy of the model in one process, on the batches of all ranks, and compares the parameters.
"""

import contextlib
import copy
import dataclasses
import gc
import warnings

import pytest
import torch
from optimizer_case_runner import case, named
from torch import nn
from torch.nn import functional

import allred
import allred.torch as hvd
from allred import world

ROWS = 6


def batch(step=0, rank=None, shape=(10,)):
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(ROWS, *shape, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


def joined(step=0, shape=(10,)):
    parts = [batch(step, rank, shape) for rank in range(hvd.size())]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


class Negative:
    """A compressor of the program."""

    @staticmethod
    def compress(tensor):
        return -tensor, -1

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


REDUCTIONS = [{}, {"gradient_predivide_factor": 4.0}, {"compression": Negative}]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_of(model, data):
    return functional.cross_entropy(model(data[0]), data[1])


def wrapped(model, make=sgd, **options):
    """The model, its DistributedOptimizer, and a copy of the model with its own optimizer."""
    other, optimizer = copy.deepcopy(model), make(model.parameters())
    options.setdefault("named_parameters", model.named_parameters())
    assert hvd.DistributedOptimizer(optimizer, **options) is optimizer
    return model, optimizer, other, make(other.parameters())


def train(model, optimizer, data):
    optimizer.zero_grad()
    loss = loss_of(model, data)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def equal(model, other, tolerance=1e-6):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            one, two, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def convolutions():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def residual():
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), ResidualBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def closure_of(module, optimizer, data):
    """A closure for `optimizer.step`."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(module, data)
        loss.backward()
        return loss

    return closure


@case
def mnist_style():
    """pytorch_mnist.py: parameters and state from rank 0, a scaled learning rate, the mean of a metric."""
    torch.manual_seed(hvd.rank())
    model, other = nn.Sequential(convolutions(), nn.LogSoftmax(1)), nn.Sequential(convolutions(), nn.LogSoftmax(1))
    if hvd.rank():
        for parameter in model.parameters():
            parameter.data.normal_()

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.01 * hvd.size(), momentum=0.5)

    optimizer, plain = make(model.parameters()), make(other.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    for step in range(4):
        x, y = batch(step, shape=(1, 8, 8))
        optimizer.zero_grad()
        loss = functional.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        metric = hvd.allreduce(loss.detach(), name="avg_loss").item()
        plain.zero_grad()
        x, y = joined(step, shape=(1, 8, 8))
        whole = functional.nll_loss(other(x), y)
        whole.backward()
        plain.step()
        assert abs(metric - whole.item()) < 1e-5
    equal(model, other)


@case
def synthetic_benchmark_style():
    """pytorch_synthetic_benchmark.py: --fp16-allreduce, and --use-adasum, which is refused."""
    model, optimizer, other, plain = wrapped(residual(), compression=hvd.Compression.fp16)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(3):
        train(model, optimizer, batch(step, shape=(3, 8, 8)))
        train(other, plain, joined(step, shape=(3, 8, 8)))
    equal(model, other, 1e-3)
    with pytest.raises(NotImplementedError, match="Adasum is not available"):
        hvd.DistributedOptimizer(sgd(net().parameters()), op=hvd.Adasum)


@case
def gradient_accumulation():
    """pytorch_imagenet_resnet50.py with --batches-per-allreduce: sub-batches, one reduction, a schedule per batch."""
    model, optimizer, other, plain = wrapped(residual(), backward_passes_per_step=3)
    schedule, twin = (torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in (optimizer, plain))
    for step in range(3):
        x, y = batch(step, shape=(3, 8, 8))
        optimizer.zero_grad()
        for part in range(0, ROWS, 2):
            loss = functional.cross_entropy(model(x[part : part + 2]), y[part : part + 2])
            (loss / 3).backward()
        optimizer.step()
        train(other, plain, joined(step, shape=(3, 8, 8)))
        schedule.step()
        twin.step()
    equal(model, other)
    optimizer.set_backward_passes_per_step(1)
    train(model, optimizer, batch(9, shape=(3, 8, 8)))
    train(other, plain, joined(9, shape=(3, 8, 8)))
    equal(model, other)


@case
def a_lightning_like_loop():
    """The framework owns the loop: closures that make the backward pass, and several wrapped optimizers."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = net(), nn.Linear(3, 3)

        def training_step(self, data):
            return functional.cross_entropy(self.head(self.body(data[0])), data[1])

        def configure_optimizers(self):
            return [sgd(self.body.parameters()), torch.optim.Adam(self.head.parameters(), lr=0.01)]

    torch.manual_seed(0)
    model = Module()
    other = copy.deepcopy(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizers, plain = model.configure_optimizers(), other.configure_optimizers()
    for each in optimizers:
        hvd.broadcast_optimizer_state(each, root_rank=0)
        own = [(names[id(parameter)], parameter) for group in each.param_groups for parameter in group["params"]]
        hvd.DistributedOptimizer(each, named_parameters=own)
    for step in range(3):
        for module, both, data in ((model, optimizers, batch(step)), (other, plain, joined(step))):
            module.training_step(data).backward()
            for each in both:
                each.step()
            for each in both:
                each.zero_grad()
    equal(model, other)
    model, optimizer, other, twin = wrapped(net())
    for step in range(2):
        for module, each, data in ((model, optimizer, batch(step)), (other, twin, joined(step))):
            each.step(closure_of(module, each, data))
    equal(model, other)


@case
def lbfgs():
    """The closure is called repeatedly in one step; its loss is the mean over the ranks."""
    model, optimizer, other, plain = wrapped(net(), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    for step in range(2):
        for module, each, data in ((model, optimizer, batch(step)), (other, plain, joined(step))):
            each.step(closure_of(module, each, data))
    equal(model, other, 1e-4)


@case
def gradient_clipping():
    """synchronize, clip, and step in skip_synchronize."""
    model, optimizer, other, plain = wrapped(net())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss_of(other, joined(step)).backward()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1))
        plain.step()
    equal(model, other)


@case
def a_rank_without_a_backward_pass_synchronizes():
    """In skip_synchronize too: it reduces zeros where the other ranks have gradients."""
    for in_context in (False, True):
        model, optimizer, other, plain = wrapped(net())
        last = hvd.size() > 1 and hvd.rank() == hvd.size() - 1
        if not last:
            loss_of(model, batch()).backward()
        with optimizer.skip_synchronize() if in_context else contextlib.nullcontext():
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        ranks = range(max(1, hvd.size() - 1))
        (sum(loss_of(other, batch(0, rank)) for rank in ranks) / hvd.size()).backward()
        plain.step()
        equal(model, other)


@case
def the_check_of_synchronize_and_a_pass_that_is_discarded():
    """Unlike in Horovod, zero_grad() between backward() and step() is no error."""
    model, optimizer, other, plain = wrapped(net())
    loss_of(model, batch(2)).backward()
    optimizer.zero_grad()
    loss_of(model, batch()).backward()
    loss_of(other, joined(0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    plain.step()
    equal(model, other)
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batch(1)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.zero_grad()


@case
def steps_that_skip_the_reduction():
    """skip_synchronize without synchronize, before the last backward pass of a step: the gradients of this rank."""
    model, optimizer, other, plain = wrapped(net(), backward_passes_per_step=2)
    loss_of(model, batch()).backward()
    with optimizer.skip_synchronize():
        optimizer.step()
    train(other, plain, batch())
    equal(model, other)


@case
def grad_scaler():
    """torch.amp.GradScaler: infinite gradients of one rank skip the step on all, without an error."""
    model, optimizer, *_ = wrapped(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = copy.deepcopy(model.state_dict())
    for step in range(2):
        factor = float("inf") if (step, hvd.rank()) == (0, 0) else 1.0
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch()) * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert unchanged == (step == 0)
    assert not all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert scaler.get_scale() == 8.0
    for tensor in model.state_dict().values():
        assert all(torch.equal(tensor, each) for each in hvd.allgather(tensor[None]))


@case
def sums():
    model, optimizer, other, plain = wrapped(net(), op=hvd.Sum)
    for step in range(3):
        train(model, optimizer, batch(step))
        plain.zero_grad()
        (loss_of(other, joined(step)) * hvd.size()).backward()
        plain.step()
    equal(model, other)


@case
def reductions_and_compressors_of_the_program():
    """What the hooked optimizer cannot do takes another way, with the same result."""

    for options in REDUCTIONS:
        model, optimizer, other, plain = wrapped(net(), **options)
        for step in range(3):
            train(model, optimizer, batch(step))
            train(other, plain, joined(step))
        equal(model, other)
    model, optimizer, *_ = wrapped(net(), op=hvd.Max, backward_passes_per_step=2)
    loss_of(model, batch()).backward()
    loss_of(model, batch(1)).backward()
    grads = []
    for rank in range(hvd.size()):
        model2 = net()
        loss_of(model2, batch(0, rank)).backward()
        loss_of(model2, batch(1, rank)).backward()
        grads.append([parameter.grad for parameter in model2.parameters()])
    for found, *each in zip(model.parameters(), *grads, strict=True):
        torch.testing.assert_close(found.grad, torch.stack(each).amax(0))
    loss_of(model, batch(2)).backward()  # the first of two: not reduced
    with pytest.raises(hvd.HorovodInternalError, match="backward_passes_per_step"):
        loss_of(model, batch(2)).backward()
    optimizer.zero_grad()  # the error has ended the step
    model, optimizer, *_ = wrapped(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), op=hvd.Min)
    with pytest.raises(hvd.HorovodInternalError, match="'0' is complex"):
        model[0].abs().sum().backward()
    factor = 2.0 + hvd.rank()
    model, optimizer, *_ = wrapped(net(), gradient_predivide_factor=factor)
    with pytest.raises(hvd.HorovodInternalError, match=r"gradient_predivide_factor=2\.0"):
        train(model, optimizer, batch())


@case
def gradients_that_are_missing():
    """On some ranks they count as zeros; if all ranks lack one it is zeros after synchronize, as in Horovod."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.unused = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(2, 2)

    torch.manual_seed(3)
    model, optimizer, other, plain = wrapped(Branches())
    x, y = batch()
    functional.cross_entropy((model.left if hvd.rank() else model.right)(x), y).backward()
    optimizer.step()
    assert not model.unused.weight.grad.any()
    total = 0.0
    for rank in range(hvd.size()):
        x, y = batch(0, rank)
        total = total + functional.cross_entropy((other.left if rank else other.right)(x), y) / hvd.size()
    total.backward()
    for parameter in other.unused.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    equal(model, other)


@case
def sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.words(x))

    def words(step, ranks):
        generators = [torch.Generator().manual_seed(50 * step + rank) for rank in ranks]
        rows = [torch.randint(0, 20, (ROWS, 4), generator=each) for each in generators]
        return torch.cat(rows), torch.cat([rows[i][:, 0] % 3 for i in range(len(rows))])

    for dense in (False, True):
        torch.manual_seed(4)
        model, optimizer, other, plain = wrapped(Words(), lambda p: torch.optim.SGD(p, lr=0.5), sparse_as_dense=dense)
        for step in range(3):
            train(model, optimizer, words(step, [hvd.rank()]))
            assert model.words.weight.grad.is_sparse
            train(other, plain, words(step, range(hvd.size())))
        for net_, each, share in ((model, optimizer, 1.0), (other, plain, 1.0 / hvd.size())):  # on rank 0 only
            each.zero_grad()
            if each is plain or hvd.rank() == 0:
                (loss_of(net_, words(9, [0])) * share).backward()
            each.step()
        equal(model, other)


@case
def sparse_gradients_that_ranks_lack():
    """With momentum, which stays sparse: torch cannot add a dense gradient to it."""
    for dense in (False, True):
        torch.manual_seed(4)
        words = nn.Embedding(4, 2, sparse=True)
        model, optimizer, other, plain = wrapped(
            words, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5), sparse_as_dense=dense
        )
        for ranks in (range(hvd.size()), [0], []):  # those with a gradient
            optimizer.zero_grad()
            plain.zero_grad()
            if hvd.rank() in ranks:
                model(torch.tensor([0, hvd.rank()])).sum().backward()
            (
                sum((other(torch.tensor([0, rank])).sum() for rank in ranks), 0 * other.weight.sum()) / hvd.size()
            ).backward()
            optimizer.step()
            plain.step()
            equal(model, other)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        model(torch.tensor([1])).sum().backward()
        other(torch.tensor([1])).sum().backward()
        optimizer.step()
        plain.step()
        equal(model, other)


@case
def state_that_is_broadcast_in_the_middle_of_a_step():
    """It ends the step, or not, on all ranks, also on the root."""
    calls = (lambda o: hvd.broadcast_optimizer_state(o, root_rank=0)), (lambda o: o.allred.broadcast(root=0))
    for number, broadcast in enumerate(calls):
        model, optimizer, other, plain = wrapped(net(), backward_passes_per_step=2)
        for _ in range(3):
            loss_of(model, batch()).backward()
        broadcast(optimizer)
        assert hvd.allgather_object(optimizer.allred.accumulates) == [bool(number)] * hvd.size()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        for step in range(2):
            loss_of(model, batch(step)).backward()
            loss_of(other, joined(step)).backward()
        optimizer.step()
        plain.step()
        equal(model, other)
    optimizer.zero_grad()


@case
def a_process_set_of_one_optimizer():
    """Ranks outside of the set train alone."""
    some = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.add_process_set([0])
    model, optimizer, other, plain = wrapped(net(), process_set=some)
    for step in range(3):
        train(model, optimizer, batch(step))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            pass
        members = some.ranks if some.included() else [hvd.rank()]
        parts = [batch(step, rank) for rank in members]
        train(other, plain, tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        optimizer.zero_grad()
    equal(model, other)
    hvd.remove_process_set(some)


@case
def uneven_data_and_join():
    """Rank r makes 2 + r steps. Averages count the ranks that have joined; all get the parameters of the last one."""
    size = hvd.size()
    for options in REDUCTIONS:
        model, optimizer, other, plain = wrapped(net(), **options)
        for step in range(2 + hvd.rank()):
            train(model, optimizer, batch(step))
        last = hvd.join()
        assert last == size - 1
        for step in range(2 + last):
            plain.zero_grad()
            ranks = [rank for rank in range(size) if step < 2 + rank]
            (sum(loss_of(other, batch(step, rank)) for rank in ranks) / size).backward()
            plain.step()
        equal(model, other)


@case
def the_state_of_optimizers():
    """broadcast_optimizer_state of every kind of torch: the state and the options of the root."""
    kinds = [
        lambda p: torch.optim.Adam(p, lr=0.1 * (1 + hvd.rank()), betas=(0.5 + 0.1 * hvd.rank(), 0.9), amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1 * (1 + hvd.rank()), momentum=0.9),
        lambda p: torch.optim.Rprop(p, lr=0.01 * (1 + hvd.rank())),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
    ]
    for make in kinds:
        model = net(hvd.rank())
        optimizer = make(model.parameters())
        for step in range(1 + hvd.rank()):  # other states on other ranks
            train(model, optimizer, batch(step))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=model)
        state = hvd.broadcast_object(optimizer.state_dict(), root_rank=1)
        own = optimizer.state_dict()
        assert own["param_groups"] == state["param_groups"]
        assert own["state"].keys() == state["state"].keys()
        for number, slots in own["state"].items():
            for name, found in slots.items():
                expected = state["state"][number][name]
                assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
        train(model, hvd.DistributedOptimizer(optimizer), batch(5))
    new = torch.optim.Adam(net().parameters(), lr=0.1 * (1 + hvd.rank()))
    hvd.broadcast_optimizer_state(new, root_rank=0)  # no state yet
    assert (new.param_groups[0]["lr"], len(new.state)) == (0.1, 0)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net().parameters()), root_rank=0)


@case
def a_learning_rate_that_is_a_tensor():
    """The program changes it after the broadcast."""
    weight, rate = nn.Parameter(torch.zeros(2)), torch.tensor(0.5 * (hvd.rank() + 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=rate))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
    rate.fill_(0.25)
    weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), -0.25))


@case
def parameters_to_broadcast():
    model = nn.Sequential(net(hvd.rank()), nn.BatchNorm1d(3))
    model[1].num_batches_tracked += hvd.rank()
    expected = nn.Sequential(net(1), nn.BatchNorm1d(3)).state_dict()
    forms = (
        model.state_dict, lambda: list(model.named_parameters()), lambda: list(model.parameters()),
    )  # fmt: skip
    for form in forms:
        model[0].load_state_dict(net(hvd.rank()).state_dict())
        hvd.broadcast_parameters(form(), root_rank=1)
        for name, tensor in model[0].state_dict().items():
            assert torch.equal(tensor, expected[f"0.{name}"])
    assert model[1].num_batches_tracked.item() == 1
    with pytest.raises(ValueError, match="expected a dict or a list"):
        hvd.broadcast_parameters(model.parameters(), root_rank=0)


@case
def arguments_of_the_optimizer():
    model = net()
    pairs = list(model.named_parameters())
    refused = [
        ({"named_parameters": [*pairs, pairs[0]]}, r"0\.weight"),
        ({"named_parameters": pairs[1:]}, "1 parameters of the optimizer have no name"),
        ({"named_parameters": model.parameters()}, "pairs"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
        ({"op": "mean"}, "op='mean' is not a reduction"),
        ({"compression": 16}, "compression=16: expected"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0 must be"),
        ({"num_groups": -1}, "groups=-1"),
        ({"groups": 0}, "groups=0"),
        ({"groups": [[pairs[0][1]], [pairs[0][1]]]}, "in two groups"),
        ({"groups": [["weight"]]}, "expected lists of tensors"),
    ]
    for options, match in refused:
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    for make in (lambda model: 2, lambda model: [list(model[0].parameters())]):
        twin = net()
        twin, optimizer, other, plain = wrapped(twin, groups=make(twin))
        train(twin, optimizer, batch())
        train(other, plain, joined())
        equal(twin, other)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=2)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    with pytest.raises(ValueError, match=r"DistributedOptimizer\(int\): expected an optimizer"):
        hvd.DistributedOptimizer(3)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="distributed already"):
        allred.distributed(optimizer)


@case
def the_state_is_that_of_torch():
    """Checkpoints can be loaded without allred, and schedules made before wrapping go on."""
    model, other = net(), net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            train(model, optimizer, batch(step))
            schedule.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.keys() == {"state", "param_groups"}
    plain = sgd(other.parameters())
    assert saved["param_groups"][0].keys() == plain.state_dict()["param_groups"][0].keys() | {"initial_lr"}
    other.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(saved))  # which takes the tensors as they are
    optimizer.load_state_dict(saved)
    train(model, optimizer, batch(2))
    train(other, plain, joined(2))
    equal(model, other)


@case
def names_in_errors():
    for options in (*REDUCTIONS, {"op": hvd.Max}):
        model, optimizer, *_ = wrapped(net(), **options)
        if hvd.rank():
            model[0].weight.data.add_(1)
        with pytest.raises(hvd.HorovodInternalError, match=r"parameter '0\.weight' differs on") as caught:
            train(model, optimizer, batch())
        assert isinstance(caught.value, allred.MismatchError)
    for options in REDUCTIONS:  # the averages are changed on the ranks that have them before step()
        model, optimizer, *_ = wrapped(net(), **options)
        if hvd.rank() == 0:
            loss_of(model, batch()).backward()
            model[0].weight.grad.mul_(2)
        with pytest.raises(hvd.HorovodInternalError, match=r"the reduced gradients of '0\.weight' differ"):
            optimizer.step()


@case
def synchronized_batch_normalization():
    """As nn.BatchNorm on the batches of all ranks: outputs, gradients and running statistics; evaluation is local."""
    for make, shape in ((nn.BatchNorm1d, (4,)), (nn.BatchNorm2d, (4, 3, 3))):
        for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
            layer, other = hvd.SyncBatchNorm(4, **options), make(4, **options)
            for step in range(2):
                parts = [batch(step, rank, shape)[0] * (rank + 1) + 100 for rank in range(hvd.size())]
                whole = torch.cat(parts).requires_grad_()
                own = parts[hvd.rank()].clone().requires_grad_()
                weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
                found, expected = layer(own), other(whole)
                rows = slice(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1))
                torch.testing.assert_close(found, expected[rows], rtol=1e-4, atol=1e-4)
                (found * weights[rows]).sum().backward()
                (expected * weights).sum().backward()
                torch.testing.assert_close(own.grad, whole.grad[rows], rtol=1e-3, atol=1e-4)
            if layer.affine:
                total = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
                torch.testing.assert_close(total, other.weight.grad, rtol=1e-3, atol=1e-3)
            if layer.track_running_stats:
                torch.testing.assert_close(layer.running_mean, other.running_mean)
                torch.testing.assert_close(layer.running_var, other.running_var, rtol=1e-3, atol=1e-3)
                assert layer.num_batches_tracked == 2
                layer.eval(), other.eval()
                if hvd.rank() == 0:
                    torch.testing.assert_close(layer(parts[0]), other(parts[0]), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="expected an input of shape"):
        hvd.SyncBatchNorm(4)(torch.ones(4))
    layer = hvd.SyncBatchNorm(4)
    layer(torch.ones(int(hvd.rank() == 0), 4))  # one value per channel on all ranks
    torch.testing.assert_close(layer.running_var, torch.full((4,), 0.9))


@case
def gradients_are_sent_during_the_backward_pass():
    """With ALLRED_OVERLAP=always, between the allreduces of SyncBatchNorm."""
    before = world.current().config
    world.current().config = dataclasses.replace(before, overlap="always")
    gc.collect()  # an optimizer overlaps if it is the only one
    try:
        torch.manual_seed(6)
        layers = [nn.Linear(10, 8), hvd.SyncBatchNorm(8), nn.Linear(8, 8), hvd.SyncBatchNorm(8), nn.Linear(8, 3)]
        model, optimizer, *_ = wrapped(nn.Sequential(*layers))
        plain = [nn.BatchNorm1d(8) if isinstance(each, hvd.SyncBatchNorm) else copy.deepcopy(each) for each in layers]
        other = nn.Sequential(*plain)
        twin = sgd(other.parameters())
        for step in range(6):
            train(model, optimizer, batch(step))
            train(other, twin, joined(step))
        equal(model, other, 1e-4)
        overlap = optimizer.allred.session_support._overlap
        assert overlap is not None
        assert overlap.has_order
    finally:
        world.current().config = before


@case
def two_losses_of_two_optimizers():
    """A generator and a discriminator, whose parameters require a gradient in turn."""
    torch.manual_seed(5)
    parts = [nn.Linear(10, 6), nn.Linear(6, 3)]
    twins = copy.deepcopy(parts)
    optimizers = [hvd.DistributedOptimizer(sgd(each.parameters())) for each in parts]
    plain = [sgd(each.parameters()) for each in twins]
    for step in range(4):
        for own, both, data in ((parts, optimizers, batch(step)), (twins, plain, joined(step))):
            for number, part in enumerate(own):
                part.requires_grad_(number == step % 2)
            for each in both:
                each.zero_grad()
            functional.cross_entropy(own[1](own[0](data[0])), data[1]).backward()
            both[step % 2].step()
    for one, two in zip(parts, twins, strict=True):
        equal(one, two)


@case
def parameters_with_names_of_torch():
    """Names that the optimizer has already, and parameters added later."""
    model, late = net(), nn.Linear(3, 3)
    other, later = copy.deepcopy(model), copy.deepcopy(late)
    optimizer, plain = sgd(named(model)), sgd(other.parameters())
    hvd.DistributedOptimizer(optimizer)
    train(model, optimizer, batch())
    train(other, plain, joined())
    optimizer.add_param_group({"params": named(late)})
    plain.add_param_group({"params": list(later.parameters())})
    train(nn.Sequential(model, late), optimizer, batch(1))
    train(nn.Sequential(other, later), plain, joined(1))
    equal(model, other)
    equal(late, later)
