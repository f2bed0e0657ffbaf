"""Mode ps with torch optimizers, and sessions in both modes: 3 ranks, ps_cases_program.py [CASE...] DIRECTORY.

Servers are in Server.join(), so one job can have several cases: each starts a cluster and shuts it down.
"""

import copy
import pathlib
import sys
import warnings

import numpy as np
import torch
from optimizer_case_runner import named, run_case
from torch import nn
from torch.nn import functional

import allred
from allred.errors import InputError
from allred.session import Hook

torch.set_num_threads(1)
warnings.simplefilter("error")
ROOT, RANKS, STEPS = pathlib.Path(sys.argv.pop()), 3, 9
CASES = []  # servers, function; no servers: mode sync


def case(servers):
    return lambda function: CASES.append((servers, function)) or function


class Net(nn.Module):
    """With a buffer, extra state, and a layer that no optimizer trains."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 30), nn.Tanh(), nn.Linear(30, 3))
        self.fixed = nn.Linear(20, 20)
        self.register_buffer("passes", torch.zeros(()))
        self.made_with = seed
        self.to(dtype)

    def get_extra_state(self):
        return {"seed": self.made_with}

    def set_extra_state(self, state):
        self.made_with = state["seed"]

    def forward(self, x):
        self.passes += 1
        return self.layers(self.fixed(x))


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x, (x[:, :3]).argmax(dim=1)


def train(model, optimizer, data, schedule=None):
    optimizer.zero_grad()
    x, y = data
    loss = functional.cross_entropy(model(x.to(model.fixed.weight.dtype)).float(), y)
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    return float(loss.detach())


def same(model, other, tolerance=0.0):
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def check_bits(make, dtype=torch.float32, schedule=None, prepare=lambda model, opt: None, at_step=None, **options):
    """One worker and the servers are bit-identical to one process. prepare: called after allred.distributed."""
    model = Net(dtype=dtype)
    other = copy.deepcopy(model)
    opt, plain = allred.distributed(make(model), **options), make(other)
    schedules = [schedule and schedule(opt), schedule and schedule(plain)]
    for each in ((model, opt), (other, plain)):
        prepare(*each)
    opt.allred.broadcast(model)
    for step in range(STEPS):
        for each in ((model, opt), (other, plain)):
            if at_step and step == at_step[0]:
                at_step[1](*each)
        assert train(model, opt, batch(step), schedules[0]) == train(other, plain, batch(step), schedules[1])
    same(model, other)
    state, expected = opt.allred.state_dict(), plain.state_dict()
    assert (state["global_step"], len(state["slots"])) == (STEPS, len(expected["state"]))
    names = [name for name, _ in opt.allred.optimizer.named_parameters()]
    for number, slots in expected["state"].items():
        for key, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.dtype != torch.bfloat16:
                np.testing.assert_array_equal(state["slots"][names[number]][key], value.numpy(), strict=True)
    return model, opt


def sgd(model):
    return torch.optim.SGD(named(model.layers), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(model):
    return torch.optim.Adam(model.layers.parameters(), lr=0.01)


def raised(function, kind=InputError):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@case(2)
def momentum_is_bit_identical_to_one_process():
    check_bits(sgd)


@case(2)
def adam_is_bit_identical_to_one_process():
    check_bits(adam)


@case(2)
def bfloat16_is_bit_identical_to_one_process():
    check_bits(sgd, torch.bfloat16)


@case(2)
def float64_is_bit_identical_to_one_process():
    check_bits(adam, torch.float64)


@case(2)
def float16_is_bit_identical_to_one_process():
    check_bits(sgd, torch.float16)


def in_place(weight):
    with torch.no_grad():
        weight[0, 0] += 1


def of_data(weight):
    weight.data.mul_(0.5)


def other_data(weight):
    weight.data = weight.data + 1


def a_row_of_data(weight):
    weight.data[-1] = 7.0


def one_element_of_data(weight):
    weight.data[3, 1, 2, 0] += 7.0


@case(2)
def changes_of_parameters_by_the_program():
    """They would be lost at the next pull: an error, unless they are undone, or dropped by pull, or before broadcast.
    Of a single element through `.data` after some steps. Weights with the memory format channels_last too."""
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Flatten(), nn.Linear(40, 3))
    other = copy.deepcopy(model)
    model.to(memory_format=torch.channels_last)
    x, y = torch.randn(4, 3, 3, 3), torch.arange(4) % 3
    opt, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other))
    allred.distributed(opt)

    def step(both=True):
        for net, optimizer in ((model, opt), (other, plain)) if both else ((model, opt),):
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    opt.allred.broadcast()
    step()
    for change in (in_place, of_data, other_data, a_row_of_data):
        for tensor in (model[0].weight, model[2].weight):
            change(tensor)
            for _ in range(2):
                assert "opt.step(): the program has changed parameter" in raised(lambda: step(both=False))
            opt.allred.pull()
            step()
            same(model, other, 1e-5)
    kept = model[0].weight.data.clone()  # an evaluation with other values
    for values in (kept + 1, kept):
        model[0].weight.data.copy_(values)
    step()
    model[0].weight.data = model[0].weight.data.clone()
    step()
    same(model, other, 1e-5)

    def steps():
        for _ in range(40):
            one_element_of_data(model[0].weight)
            step(both=False)

    assert "the program has changed parameter" in raised(steps)
    in_place(other[2].weight)
    model.load_state_dict(other.state_dict())
    opt.allred.broadcast()
    step()
    same(model, other, 1e-5)


@case(2)
def grad_scaler_of_torch_with_a_fused_optimizer():
    """GradScaler leaves unscaling and the skipped update to a fused optimizer, which runs on the servers here."""
    model = Net()
    other = copy.deepcopy(model)
    opt = allred.distributed(torch.optim.SGD(model.layers.parameters(), lr=0.1, fused=True), nonfinite="ignore")
    opt.allred.broadcast(model)
    for net, optimizer in ((model, opt), (other, torch.optim.SGD(other.layers.parameters(), lr=0.1, fused=True))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = functional.cross_entropy(net(x), y) * (torch.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    same(model, other)


@case(2)
def optimizers_that_are_not_available():
    """Regression: an error of torch on the servers."""
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        text = raised(lambda kind=kind: allred.distributed(kind(Net().layers.parameters())))
        assert text == f"opt: torch.optim.{kind.__name__} is not available in mode ps; use mode sync"
    check_bits(sgd)


@case(2)
def schedules_that_change_momentum():
    """OneCycleLR changes betas, and adds entries to the groups, after the servers made their copies."""
    check_bits(adam, schedule=lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, STEPS))


@case(2)
def groups_added_before_the_first_step():
    """Server.join(): the optimizer is sent with the first request, with all its groups."""

    def add(model, opt):
        opt.add_param_group({"params": list(model.layers[4].parameters()), "lr": 0.02, "betas": (0.8, 0.9)})

    model, opt = check_bits(lambda m: torch.optim.AdamW(m.layers[:3].parameters(), lr=0.01), prepare=add)
    text = raised(lambda: opt.add_param_group({"params": list(model.fixed.parameters())}))
    assert "add_param_group" in text
    assert len(opt.param_groups) == 2
    train(model, opt, batch(99))


@case(2)
def requires_grad_set_after_the_first_steps():
    def freeze(model, opt):
        model.layers[0].requires_grad_(False)

    def thaw(model, opt):
        model.layers[0].requires_grad_(True)

    check_bits(sgd, prepare=freeze, at_step=(4, thaw))


@case(2)
def complex_parameters():
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    opt = allred.distributed(torch.optim.SGD([weight], lr=1.0))
    (weight * (2 + 1j)).real.sum().backward()
    opt.step()
    np.testing.assert_allclose(weight.detach().numpy(), np.full(3, -1 + 1j), rtol=1e-6)


@case(2)
def sparse_gradients_become_dense():
    words = nn.Embedding(12, 6, sparse=True)
    before = words.weight.detach().clone()
    opt = allred.distributed(torch.optim.SGD(words.parameters(), lr=1.0))
    words(torch.tensor([3, 3, 5])).sum().backward()
    opt.step()
    before[3] -= 2
    before[5] -= 1
    torch.testing.assert_close(words.weight.detach(), before)


def check_workers(consistency, updates):
    model = Net(seed=allred.rank())
    opt = allred.distributed(adam(model), consistency=consistency)
    opt.allred.broadcast(model)
    losses = [train(model, opt, batch(step, allred.rank())) for step in range(STEPS)]
    opt.allred.finish()
    allred.barrier()
    opt.allred.pull(model)
    assert "parameters differ from those that the servers have" in raised(lambda: opt.allred.pull([np.zeros(3)]))
    assert losses[-1] < losses[0]
    assert opt.allred.statistics().updates == updates
    digests = allred.allgather_object(allred.digest([p.detach().numpy() for p in model.layers.parameters()]))
    assert len(set(digests)) == 1


@case(1)
def two_workers_with_policy_sync():
    check_workers("sync", STEPS)


@case(1)
def two_workers_with_policy_async():
    check_workers("async", 2 * STEPS)


@case(1)
def two_workers_with_policy_bounded():
    check_workers("bounded", 2 * STEPS)


# A training of three parts, in modes ps, sync and ps, as one process makes it. Each part has new objects.


def whole(steps):
    model, opt = (made := Net()), adam(made)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for step in range(steps):
        train(model, opt, batch(step), schedule)
    return model, opt


def part(first, last, seed):
    """Train with a session from one step to another, and compare with one process."""
    model = Net(seed)
    opt = allred.distributed(adam(model))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    with allred.Session(ROOT / "session", save_steps=100, max_steps=last, log_steps=None) as session:
        restored = session.track(params=model, optimizer=opt, schedule=schedule)
        assert restored == (first or None)
        while not session.should_stop():
            x, y = batch(session.step)
            mine = slice(allred.rank(), None, allred.size())
            opt.allred.samples = len(y[mine])
            loss = train(model, opt, (x[mine], y[mine]), schedule)
            session.log(loss=loss)
    expected, plain = whole(last)
    same(model, expected, 1e-4)
    assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert opt.allred.global_step == last
    return model, opt


@case(2)
def a_session_in_mode_ps():
    model, opt = part(0, 3, seed=0)
    opt.allred.save(ROOT / "from ps", model)


@case(0)
def a_session_in_mode_sync_continues_it():
    part(3, 6, seed=5 + allred.rank())


@case(2)
def a_session_in_mode_ps_continues_that():
    part(6, 9, seed=5)


class Steps(Hook):
    def __init__(self):
        self.seen = []

    def after_step(self, session, values):
        self.seen.append((session.step, values["number"]))


@case(2)
def a_session_in_mode_ps_with_accumulated_batches():
    model = Net()
    other = copy.deepcopy(model)
    opt, plain = allred.distributed(adam(model), accumulate=2), adam(other)
    hook = Steps()
    with allred.Session(max_steps=3, hooks=[hook], log_steps=None) as session:
        session.track(params=model, optimizer=opt)
        for number in session.steps(range(100)):
            for net, optimizer in ((model, opt), (other, plain)):
                x, y = batch(number)
                (functional.cross_entropy(net(x), y) / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            session.log(number=number)
    assert hook.seen == [(1, 0.5), (2, 2.5), (3, 4.5)]
    same(model, other)


def restored(directory):
    """Restore the checkpoint of 3 steps in a new model, and train 3 steps more."""
    model = Net(seed=7 + allred.rank())
    opt = allred.distributed(adam(model))
    assert opt.allred.restore(ROOT / directory, model) == 3
    same(model, whole(3)[0], 1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5, last_epoch=2)
    for step in range(3, 6):
        train(model, opt, batch(step), schedule)
    same(model, whole(6)[0], 1e-4)
    return model, opt


@case(0)
def a_checkpoint_of_mode_ps_in_mode_sync():
    restored("from ps")
    model = Net()
    opt = allred.distributed(adam(model))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for step in range(3):
        train(model, opt, batch(step), schedule)
    opt.allred.save(ROOT / "from sync", model)
    allred.barrier()


@case(2)
def a_checkpoint_of_mode_sync_in_mode_ps():
    restored("from sync")


def check_equal_starts(directory):
    """Also buffers, and the layer that is not trained; after a session and after restore."""
    model = Net(seed=allred.rank())
    model.passes.fill_(allred.rank())
    opt = allred.distributed(adam(model))
    with allred.Session(ROOT / directory, log_steps=None) as session:
        session.track(params=model, optimizer=opt)
    same(model, Net(seed=0))
    if allred.world_size() > allred.size():
        return  # servers take one optimizer
    model = Net(seed=allred.rank())
    opt = allred.distributed(adam(model))
    assert opt.allred.restore(ROOT / directory, model) is None
    same(model, Net(seed=0))


@case(0)
def without_a_checkpoint_all_ranks_start_equal():
    check_equal_starts("none")


@case(1)
def without_a_checkpoint_all_workers_start_equal():
    check_equal_starts("none ps")


@case(1)
def rounds_of_two_workers():
    """With `every`, policy sync and outer SGD(1) the parameters are the mean of what the workers would have alone."""
    rank, policy = allred.rank(), allred.ps.Sync()
    model = Net(seed=rank)
    opt = allred.distributed(sgd(model), every=3, outer=allred.optim.SGD(1.0), consistency=policy)
    opt.allred.broadcast(model)
    alone = [copy.deepcopy(model) for _ in range(allred.size())]
    optimizers = [sgd(each) for each in alone]
    for step in range(STEPS):
        train(model, opt, batch(step, rank))
        for number, (each, plain) in enumerate(zip(alone, optimizers, strict=True)):
            train(each, plain, batch(step, number))
        if step % 3 == 2:
            with torch.no_grad():
                for each in zip(*(one.layers.parameters() for one in alone), strict=True):
                    mean = sum(each) / len(each)
                    for parameter in each:
                        parameter.copy_(mean)
    for one, two in zip(model.parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    opt.allred.save(ROOT / "rounds", model)
    saved = copy.deepcopy(model)
    train(model, opt, batch(0, rank))
    assert opt.allred.restore(ROOT / "rounds", model) == STEPS
    same(model.layers, saved.layers)


def main():
    for servers, function in CASES:
        if sys.argv[1:] and function.__name__ not in sys.argv[1:]:
            continue
        jobs = {"ps": servers} if servers else {}
        server = allred.Server({**jobs, "worker": RANKS - servers})
        if allred.job_name() == "ps":
            server.join()
        else:
            run_case(function.__name__, function)
        allred.shutdown()


if __name__ == "__main__":
    main()
