"""Mode ps and what users get wrong: one clear error, before anything has moved, after which the worker can go on."""

import itertools

import pytest
from harness import mpirun

MODE = {"ALLRED_MODE": "ps"}
BEGIN = """
import numpy as np
import allred
allred.init(banner=False)
{make}
params = {{"w": np.ones(4), "b": np.ones(2)}}
ones = {{"w": np.ones(4), "b": np.ones(2)}}

def refuses(call, *given, **named):
    try:
        call(*given, **named)
    except allred.AllredError as error:
        return f"{{type(error).__name__}}: {{error}}"
    raise AssertionError("no error")
"""
SGD = "opt = allred.distributed(allred.optim.SGD(lr=0.5))"


def run(body, ranks=2, make=SGD, **env):
    """What the program's workers printed."""
    result = mpirun(ranks, "-c", BEGIN.format(make=make) + body, env=MODE | env, timeout_s=60)
    assert result.code == 0, result.text
    assert "Traceback" not in result.err, result.text
    return result.out


CASES = """
import sys
import numpy as np
import allred

def refuses(call, *given, **named):
    try:
        call(*given, **named)
    except allred.AllredError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")

for number, body in enumerate(sys.argv[1:]):
    server = allred.Server({"ps": 1, "worker": 1})
    if allred.job_name() == "ps":
        server.join()
    else:
        params, ones = {"w": np.ones(4), "b": np.ones(2)}, {"w": np.ones(4), "b": np.ones(2)}
        try:
            exec(body, {"np": np, "allred": allred, "params": params, "ones": ones, "refuses": refuses})
        except BaseException:
            print("failed:", body, file=sys.stderr)
            raise
        print("end of case", flush=True)
    allred.shutdown()
"""


def run_cases(bodies, **env):
    """What the worker printed in each case. All run in one job: the server returns from Server.join() after each."""
    env |= {"ALLRED_BANNER": "0", "ALLRED_WATCHER": "0"}
    result = mpirun(2, "-c", CASES, *bodies, env=env, timeout_s=60)
    assert result.code == 0, result.text
    assert "Traceback" not in result.err, result.text
    *said, rest = result.out.split("end of case\n")
    assert (len(said), rest) == (len(bodies), ""), result.text
    return said


# The worker's state is sound after each: a step does what it should.
GOES_ON = "\nopt.step(params, ones)\nassert params['w'].tolist() == [0.5] * 4 and params['b'].tolist() == [0.5] * 2"


WRONG_ARGUMENTS = [
    ("opt.pull({'w': np.ones(4)})", "InputError: opt.pull(): parameters differ from those that the servers have"),
    ("opt.pull({'w': np.ones(4), 'b': np.ones(3)})", "'b' float64 (3,) where they have 'b' float64 (2,)"),
    ("opt.pull({'w': np.ones(4), 'b': np.ones(2, 'f4')})", "'b' float32 (2,) where they have 'b' float64 (2,)"),
    ("opt.pull({'w': np.ones(4), 'c': np.ones(2)})", "'c' float64 (2,) where they have"),
    ("opt.pull({'w': np.ones(4), 'b': np.broadcast_to(1.0, 2)})", "opt.pull(): parameter 'b' is a read-only array"),
    ("opt.pull({'w': np.ones(4), 'b': [1.0, 1.0]})", "opt.pull(): parameter 'b.0' is float"),
    ("opt.broadcast({'w': np.ones(4)})", "opt.broadcast(): parameters differ from those that the servers have"),
    ("opt.broadcast(params, root=1)", "opt.broadcast(): root=1: in mode ps"),
    ("opt.step({'w': np.ones(5), 'b': params['b']}, {'w': np.ones(5), 'b': ones['b']})", "opt.step(): parameters"),
    ("opt.step({'w': np.ones(4, 'f4'), 'b': params['b']}, ones)", "'w' float32 (4,) where they have 'w' float64"),
    ("opt.step(params, {'w': np.ones(4)})", "opt.step(): params and grads differ in structure, in 'b'"),
    ("opt.step(params, {'w': np.ones(4), 'b': 1j * np.ones(2)})", "opt.step(): 'b': dtype complex128"),
    ("again.step(params, ones)", "again.step(): this program trains another optimizer"),
    ("again.broadcast(params)", "again.broadcast(): this program trains another optimizer"),
]  # fmt: skip


def test_wrong_arguments_are_told_before_anything_moves():
    again = "again = allred.distributed(allred.optim.SGD(lr=0.5), name='again')\n"
    bodies = []
    for call, _ in WRONG_ARGUMENTS:
        called, given = call.split("(", 1)
        bodies.append(f"{SGD}\nopt.broadcast(params)\n{again}print(refuses({called}, {given}){GOES_ON}")
    for (call, words), said in zip(WRONG_ARGUMENTS, run_cases(bodies), strict=True):
        assert words in said, call


TIED = "both = np.ones(4)\ntied = {'out': both, 'in': both, 'other': np.ones(4)}\n"
PARTS = "both = np.ones(6)\ntied = {'out': both[:4], 'in': both[2:], 'other': np.ones(4)}\n"


def test_tied_parameters_are_refused():
    """Each would lose the other's gradient: the pull writes both into the same memory."""
    calls = ["opt.broadcast, tied", "opt.step, tied, {key: ones['w'] for key in tied}"]
    cases = list(itertools.product([TIED, PARTS], calls))
    bodies = [f"{SGD}\n{tied}print(refuses({call})){GOES_ON}" for tied, call in cases]
    for case, said in zip(cases, run_cases(bodies), strict=True):
        assert "parameters 'in' and 'out' share memory" in said, case
        assert "with the sum of its gradients" in said, case


LEARNING_RATES = [
    ("'x'", "InputError: opt.step(): lr must be a finite number >= 0, but is 'x'"),
    ("-1.0", "lr must be a finite number >= 0, but is -1.0"),
    ("float('nan')", "lr must be a finite number >= 0, but is nan"),
    ("lambda step: 0.5", "opt.step(): lr was changed to a schedule, and the servers do not hear of it"),
]  # fmt: skip


def test_a_learning_rate_that_cannot_be_sent():
    bodies = [
        f"{SGD}\nopt.broadcast(params)\nopt.optimizer.lr = {lr}\nprint(refuses(opt.step, params, ones))\n"
        f"opt.optimizer.lr = 0.5{GOES_ON}"
        for lr, _ in LEARNING_RATES
    ]
    for (lr, words), said in zip(LEARNING_RATES, run_cases(bodies), strict=True):
        assert words in said, lr


def test_a_learning_rate_may_be_any_number():
    body = SGD + "\nopt.broadcast(params)\nopt.optimizer.lr = {}\nopt.step(params, ones)\nprint(params['w'])"
    bodies = [body.format(lr) for lr in ("0", "np.float32(0)", "np.array(0.0)")]
    assert run_cases(bodies) == ["[1. 1. 1. 1.]\n"] * 3


def test_a_users_own_optimizer_may_have_any_lr():
    make = """
class Own:
    lr = property(lambda self: 0.5)
    def step(self, params, grads):
        for key in params:
            params[key] -= self.lr * grads[key]
opt = allred.distributed(Own())
"""
    run(GOES_ON, make=make)


def test_hyper_parameters_are_the_same_on_all_ranks_and_servers():
    make = "opt = allred.distributed(allred.optim.SGD(lr=0.1, momentum=0.5 + 0.1 * (allred.rank() == 1)))"
    said = run("print(refuses(opt.broadcast, params))", 2, make)
    assert "MismatchError: mode ps is set differently: the server has SGD(momentum=0.6" in said
    assert "worker 0 has SGD(momentum=0.5" in said


def test_a_policy_may_be_given_in_a_word():
    make = "opt = allred.distributed(allred.optim.SGD(lr=0.5), consistency='{}')\n"
    body = make + "opt.broadcast(params)\nfrom allred import world\nprint(opt._options.policy(world.config()))"
    policies = {"sync": "Sync(", "bounded": "Bounded(staleness=7)", "async": "Async()"}
    wrong = "import allred.modes.options as o\nprint(refuses(o.StepOptions, 'opt', consistency='some'))"
    *found, said = run_cases([*(body.format(word) + GOES_ON for word in policies), wrong], ALLRED_STALENESS="7")
    for policy, described in zip(found, policies.values(), strict=True):
        assert policy.startswith(described)
    assert "consistency='some' must be allred.ps.Async()" in said


def test_no_samples_are_no_gradient():
    """momentum keeps what it has, too"""
    make = "opt = allred.distributed(allred.optim.SGD(lr=0.5, momentum=0.5))"
    body = "opt.broadcast(params)\nopt.step(params, ones, samples=0)\nassert params['w'].tolist() == [1.0] * 4\n"
    run(body + "opt.step(params, ones, samples=3)\nassert params['w'].tolist() == [0.5] * 4", make=make)


def test_a_nest_that_contains_itself():
    said = run("params['w'] = params\nprint(refuses(opt.broadcast, params))")
    assert "opt.broadcast(): a nest of parameters is too deep or contains itself; flatten it" in said


def test_two_threads_at_once():
    body = """
import threading, time
opt.broadcast(params)
found, stop = [], threading.Event()
def step():
    own, grads = ({k: np.ones(v.shape) for k, v in params.items()} for _ in range(2))
    while not stop.is_set():
        try:
            opt.step(own, grads)
        except allred.AllredError as error:
            found.append(str(error))
            stop.set()
import sys
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=step) for _ in range(2)]
[t.start() for t in threads]
stop.wait(20)
[t.join() for t in threads]
print(found)
opt.step(params, ones)
"""
    assert "two threads of this worker call the parameter servers at once" in run(body)


def test_an_optimizer_that_puts_new_arrays_into_the_nest():
    make = """
class Own:
    def step(self, params, grads):
        for key in params:
            params[key] = params[key] - 0.5 * grads[key]
opt = allred.distributed(Own())
"""
    run(GOES_ON, make=make)
    run("opt.broadcast(params)" + GOES_ON, 3, make, ALLRED_NUM_PS="2")


def test_an_optimizer_that_knows_its_nest():
    make = """
import collections
Layer = collections.namedtuple("Layer", "w b")
class Own:
    def step(self, params, grads):
        params.w[...] -= 0.5 * grads.w
        params.b[...] -= 0.5 * grads.b
opt = allred.distributed(Own())
"""
    run("layer, ones = Layer(**params), Layer(**ones)\n" + GOES_ON.replace("(params,", "(layer,"), make=make)


@pytest.mark.parametrize(("seed", "refused"), [("allred.rank()", 1), ("0", 0)])
def test_batches_of_different_arguments(seed, refused):
    """The worker that makes its first step later raises the error. Start positions may differ between workers."""
    body = f"""
opt.broadcast(params)
data = allred.data.batches(np.arange(8), batch_size=4, seed={seed}, epochs=2)
data.load_state_dict(data.state_dict() | {{"samples": 4 * allred.rank()}})
for x in data:
    try:
        opt.step(params, ones)
    except allred.MismatchError as error:
        print(error)
opt.finish()
"""
    said = run(body, ranks=3)
    words = "opt.step(): the ranks iterate over batches with different arguments: seed=0 on rank 0, seed=1 on rank 1."
    assert (said.count(words) > 0) == refused
    assert "start=" not in said
