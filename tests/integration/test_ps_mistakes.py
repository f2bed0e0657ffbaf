"""Mode ps and mistakes of its users: one clear error before anything has moved; then the worker can continue."""

from harness import mpirun
from ps_jobs import Case, run_cases

SGD = "opt = allred.distributed(allred.optim.SGD(lr=0.5))\n"

# A step does what it should.
GOES_ON = "\nopt.step(params, ones)\nassert params['w'].tolist() == [0.5] * 4 and params['b'].tolist() == [0.5] * 2"

# Classes are pickled for the servers by name, so they are part of the script, not of a case.
OPTIMIZERS = """
import collections

class AnyLr:
    lr = property(lambda self: 0.5)
    def step(self, params, grads):
        for key in params:
            params[key] -= self.lr * grads[key]

class NewArrays:
    def step(self, params, grads):
        for key in params:
            params[key] = params[key] - 0.5 * grads[key]

Layer = collections.namedtuple("Layer", "w b")

class KnowsItsNest:
    def step(self, params, grads):
        params.w[...] -= 0.5 * grads.w
        params.b[...] -= 0.5 * grads.b
"""

WRONG_ARGUMENTS = {
    "opt.pull({'w': np.ones(4)})": "InputError: opt.pull(): parameters differ from those that the servers have",
    "opt.pull({'w': np.ones(4), 'b': np.ones(3)})": "'b' float64 (3,) where they have 'b' float64 (2,)",
    "opt.pull({'w': np.ones(4), 'b': np.ones(2, 'f4')})": "'b' float32 (2,) where they have 'b' float64 (2,)",
    "opt.pull({'w': np.ones(4), 'c': np.ones(2)})": "'c' float64 (2,) where they have",
    "opt.pull({'w': np.ones(4), 'b': np.broadcast_to(1.0, 2)})": "opt.pull(): parameter 'b' is a read-only array",
    "opt.pull({'w': np.ones(4), 'b': [1.0, 1.0]})": "opt.pull(): parameter 'b.0' is float",
    "opt.broadcast({'w': np.ones(4)})": "opt.broadcast(): parameters differ from those that the servers have",
    "opt.broadcast(params, root=1)": "opt.broadcast(): root=1: in mode ps",
    "opt.step({'w': np.ones(5), 'b': params['b']}, {'w': np.ones(5), 'b': ones['b']})": "opt.step(): parameters",
    "opt.step({'w': np.ones(4, 'f4'), 'b': params['b']}, ones)": "'w' float32 (4,) where they have 'w' float64",
    "opt.step(params, {'w': np.ones(4)})": "opt.step(): params and grads differ in structure, in 'b'",
    "opt.step(params, {'w': np.ones(4), 'b': 1j * np.ones(2)})": "(2,) is complex128; pass its real part",
    "opt.step(params, {'w': np.array([1, np.inf, 1, 1]), 'b': ones['b']})":
        "NonFiniteError: opt.step(): the gradient of 'w' of worker 0 is not finite",
    "again.step(params, ones)": "again.step(): this program trains another optimizer",
    "again.broadcast(params)": "again.broadcast(): this program trains another optimizer",
}  # fmt: skip

TIED = "both = np.ones(4)\ntied = {'out': both, 'in': both, 'other': np.ones(4)}\n"
PARTS = "both = np.ones(6)\ntied = {'out': both[:4], 'in': both[2:], 'other': np.ones(4)}\n"
SHARED_MEMORY = ("parameters 'in' and 'out' share memory", "with the sum of its gradients")

LEARNING_RATES = {
    "'x'": "InputError: opt.step(): lr must be a finite number >= 0, but is 'x'",
    "-1.0": "lr must be a finite number >= 0, but is -1.0",
    "float('nan')": "lr must be a finite number >= 0, but is nan",
    "lambda step: 0.5": "opt.step(): lr was changed to a schedule, which is not sent to the servers",
}

GRADIENTS = ("gradient function", "mode ps", "step(params, grads)")

TWO_THREADS = """
opt.broadcast(params)
found, stop = [], threading.Event()
sets = [{k: np.ones(v.shape) for k, v in params.items()} for _ in range(2)]
for own in sets: opt.pull(own)
def step(own):
    grads = {k: np.ones(v.shape) for k, v in params.items()}
    while not stop.is_set():
        try:
            opt.step(own, grads)
        except allred.AllredError as error:
            found.append(str(error))
            stop.set()
interval = sys.getswitchinterval()
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=step, args=[own]) for own in sets]
[t.start() for t in threads]
stop.wait(20)
[t.join() for t in threads]
sys.setswitchinterval(interval)
say(found)
opt.step(params, ones)
"""


def mistakes():
    """Return {name: (body, words that it prints)}."""
    again = "again = allred.distributed(allred.optim.SGD(lr=0.5), name='again')\n"
    made = {}
    for call, words in WRONG_ARGUMENTS.items():
        called, given = call.split("(", 1)
        made[call] = f"{SGD}opt.broadcast(params)\n{again}say(refuses({called}, {given}){GOES_ON}", [words]
    for tied in (TIED, PARTS):
        for call in ("opt.broadcast, tied", "opt.step, tied, {key: ones['w'] for key in tied}"):
            made[tied + call] = f"{SGD}{tied}say(refuses({call})){GOES_ON}", SHARED_MEMORY
    for undo in ("opt.pull(params)", "opt.broadcast(params); params['w'] -= 1; opt.broadcast(params)"):
        made[f"a change, {undo}"] = (
            f"{SGD}opt.broadcast(params)\nopt.step(params, {{key: 0 * ones[key] for key in ones}})\n"
            "params['w'] += 1\nsay(refuses(opt.step, params, ones))\n"
            f"assert params['w'].tolist() == [2.0] * 4\n{undo}{GOES_ON}",
            ["opt.step(): the program has changed parameter 'b' or one of 1 more since the last pull"],
        )
    for lr, words in LEARNING_RATES.items():
        body = (
            f"{SGD}opt.broadcast(params)\nopt.optimizer.lr = {lr}\nsay(refuses(opt.step, params, ones))\n"
            f"opt.optimizer.lr = 0.5{GOES_ON}"
        )
        made[f"lr = {lr}"] = body, [words]
    for name, body, words in (
        ("a nest that contains itself", SGD + "params['w'] = params\nsay(refuses(opt.broadcast, params))",
         ["opt.broadcast(): a nest of parameters is too deep or contains itself; flatten it"]),
        ("two threads at once", SGD + TWO_THREADS,
         ["two threads of this worker call the parameter servers at once"]),
        ("a policy that does not exist",
         "import allred.modes.options as o\nsay(refuses(o.StepOptions, 'opt', consistency='some'))",
         ["consistency='some' must be allred.ps.Async()"]),
        ("a sum", "opt = allred.distributed(allred.optim.SGD(lr=0.1), op=allred.Sum)\nsay(refuses(opt.statistics))",
         ["opt: op=allred.Sum is available in mode sync only; parameter servers apply"]),
        ("a decorated gradient function",
         "def call():\n    @allred.distributed.gradients\n    def g(): return []\n    g()\nsay(refuses(call))",
         GRADIENTS),
        ("a gradient function",
         "say(refuses(lambda: allred.distributed.gradients(lambda: [np.ones(3)], op=allred.Sum)()))", GRADIENTS),
    ):  # fmt: skip
        made[name] = body, words
    return made


def test_each_mistake_is_one_error_before_anything_moves_and_the_worker_can_continue(tmp_path):
    table = mistakes()
    _, said = run_cases(tmp_path, {name: Case(body) for name, (body, _) in table.items()}, watcher=0)
    for name, (_, expected) in table.items():
        for words in expected:
            assert words in said[name][0], (name, words, said[name])


POLICIES = {"sync": "Sync(", "bounded": "Bounded(staleness=7)", "async": "Async()"}


def test_what_a_worker_may_give(tmp_path):
    """A learning rate of any type of number, a policy in a word, no samples, optimizers of its own."""
    rates = ("0", "np.float32(0)", "np.array(0.0)")
    step_at = SGD + "opt.broadcast(params)\nopt.optimizer.lr = {}\nopt.step(params, ones)\nsay(params['w'])"
    cases = {rate: Case(step_at.format(rate)) for rate in rates}
    for word in POLICIES:
        make = f"opt = allred.distributed(allred.optim.SGD(lr=0.5), consistency='{word}')\nopt.broadcast(params)\n"
        tell = "from allred import world\nsay(opt._options.policy(world.config()))"
        cases[word] = Case(make + tell + GOES_ON)
    momentum = "opt = allred.distributed(allred.optim.SGD(lr=0.5, momentum=0.5))\nopt.broadcast(params)\n"
    cases["no samples"] = Case(  # no gradient: momentum keeps its value too
        f"{momentum}opt.step(params, ones, samples=0)\nassert params['w'].tolist() == [1.0] * 4\n"
        "opt.step(params, ones, samples=3)\nassert params['w'].tolist() == [0.5] * 4"
    )
    cases["skip"] = Case(
        "opt = allred.distributed(allred.optim.SGD(lr=0.5), nonfinite='skip')\nopt.broadcast(params)\n"
        f"opt.step(params, {{'w': np.full(4, np.nan), 'b': ones['b']}})\nsay(opt.skipped){GOES_ON}"
    )
    cases["any lr"] = Case("opt = allred.distributed(AnyLr())" + GOES_ON)
    cases["new arrays"] = Case("opt = allred.distributed(NewArrays())" + GOES_ON)
    layers = "layer, ones = Layer(**params), Layer(**ones)\nopt = allred.distributed(KnowsItsNest())"
    cases["knows its nest"] = Case(layers + GOES_ON.replace("(params,", "(layer,"))
    _, said = run_cases(tmp_path, cases, before=OPTIMIZERS, watcher=0, staleness=7)
    for rate in rates:
        assert said[rate] == {0: "[1. 1. 1. 1.]\n"}, rate
    for word, described in POLICIES.items():
        assert said[word][0].startswith(described), said
    assert said["skip"] == {0: "1\n"}


LAST_IS_NAN = """
large = {{k: np.ones(400_000, np.float32) for k in "abc"}}
grads = {{k: np.ones(400_000, np.float32) for k in "abc"}}
grads["c"][-1] = np.nan
opt = allred.distributed(allred.optim.SGD(lr=0.5, momentum=0.5), consistency={policy!r})
opt.broadcast(large)
say(refuses(opt.step, large, grads))
opt.pull(large)
say(opt.statistics().servers[-1].gradients, sum(float(abs(p - 1).max()) for p in large.values()))
if me == 0:
    grads["c"][-1] = 1
    opt.step(large, grads)
    assert all((p == 0.5).all() for p in large.values()), large
"""


def test_a_nan_in_the_last_tensor_applies_no_part_of_the_gradient(tmp_path):
    """The tensors have several cells each, on one server with two workers or on two servers with one."""
    cases = {
        f"{policy}, {servers}": Case(LAST_IS_NAN.format(policy=policy), servers)
        for servers, policy in ((1, "async"), (2, "async"), (2, "sync"))
    }
    _, said = run_cases(tmp_path, cases, ranks=3, watcher=0)
    for name, found in said.items():
        assert "the gradient of 'c' of worker 0 is not finite" in found[0], (name, found)
        assert found[0].endswith("0 0.0\n"), (name, found)


def test_an_optimizer_of_a_server_that_differs_is_an_error():
    make = "opt = allred.distributed(allred.optim.SGD(lr=0.1, momentum=0.5 + 0.1 * (allred.rank() == 1)))"
    code = f"import numpy as np\nimport allred\nallred.init(banner=False)\n{make}\nopt.broadcast({{'w': np.ones(4)}})"
    result = mpirun(2, "-c", code, env={"ALLRED_MODE": "ps"}, timeout_s=60)
    assert result.code == 1, result.text
    assert "MismatchError: mode ps is set differently: the server has SGD(momentum=0.6" in result.err, result.text
    assert "worker 0 has SGD(momentum=0.5" in result.err, result.text


# Worker 1 differs from worker 0. The case, and the error of worker 1.
OTHER = "opt = allred.distributed([allred.optim.SGD, allred.optim.Adam][me](lr=1.0))"
DIFFERENCES = {
    OTHER: "MismatchError: mode ps is set differently: worker 1 has Adam",
    "opt = allred.distributed(allred.optim.SGD(lr=1.0), use_locking=me != 1)":
        "MismatchError: mode ps is set differently: worker 1 has SGD",
    "opt = allred.distributed(allred.optim.SGD(lr=1.0), consistency=allred.ps.Bounded(1 + me))":
        "Bounded(staleness=2), use_locking=True, worker 0 has SGD",
    SGD + "params['w'] = params['w'][me:]; ones['w'] = ones['w'][me:]": "MismatchError: parameters differ",
    SGD + "params['w'] += me": "DriftError: opt.step(): worker 1 starts from other parameters",
    "opt = allred.distributed(allred.optim.SGD(lr=1.0), placement=lambda t: me)":
        "MismatchError: worker 1 places the parameters differently from worker 0",
}  # fmt: skip

BATCHES = """
opt.broadcast(params)
data = allred.data.batches(np.arange(8), batch_size=4, seed={}, epochs=2)
data.load_state_dict(data.state_dict() | {{"samples": 4 * me}})
for x in data:
    try:
        opt.step(params, ones)
    except allred.MismatchError as error:
        say(error)
opt.finish()
"""


def test_workers_that_differ_are_told_what_differs(tmp_path):
    """In their options, parameters, initial values or batches. The worker that makes its first step later raises the
    error about batches, whose start positions may differ."""
    step = "\nsay(refuses(opt.step, params, ones)) if me == 1 else opt.step(params, ones)"
    cases = {change: Case(change + step, servers=2) for change in DIFFERENCES}
    for seed in ("me", "0"):
        cases[seed] = Case(SGD + BATCHES.format(seed), servers=2)
    _, said = run_cases(tmp_path, cases, 4, watcher=0)
    for change, words in DIFFERENCES.items():
        assert words in said[change][1], (change, said[change])
    [told] = said["me"].values()
    words = "opt.step(): the ranks iterate over batches with different arguments: seed=0 on rank 0, seed=1 on rank 1."
    assert words in told
    assert "start=" not in told
    assert not said["0"]
