"""Cases of mode ps for tests: `ps_program.py SERVERS CASES` under mpirun. Worker 0 prints a line of JSON for each case.

CASES: JSON, a list of [name of a function, its arguments, options]; options: {"consistency": [class, arguments],
"use_locking": bool}, each may be missing. The servers return from Server.join() after each case, and the next case
starts with a new allred.Server.
"""

import json
import pathlib
import sys
import time

import numpy as np
from mpi4py.MPI import COMM_WORLD

import allred

ARGUMENTS, OPTIONS = {}, {}  # of the current case


class Own:
    """A user's own optimizer: goes through the nest as it is given, and needs whole tensors."""

    def __init__(self, lr):
        self.lr, self.velocity = lr, {}

    def step(self, params, grads):
        for name in params:
            for i, (p, g) in enumerate(zip(params[name], grads[name], strict=True)):
                if g is not None:
                    v = self.velocity.setdefault((name, p.shape), np.zeros_like(p))
                    v *= 0.9
                    v += g / (1 + abs(g).max(initial=0))
                    p -= self.lr * v * (1 + i)

    def state_dict(self):
        return {key: v.copy() for key, v in self.velocity.items()}

    def load_state_dict(self, state):
        self.velocity = {key: v.copy() for key, v in state.items()}


class Normed(allred.optim.Optimizer):
    """One that needs whole tensors: steps of unit length. Its slots differ in shape from the parameter."""

    def slots(self, param):
        return {"mean": np.zeros_like(param, dtype=np.result_type(param, np.float32)), "count": np.zeros((1, 1))}

    def update(self, param, grad, slots, lr, step):
        slots["mean"] += 0.5 * (grad - slots["mean"])
        slots["count"] += 1
        size = np.sqrt((slots["mean"].astype(np.float64) ** 2).sum()) + 1e-9
        param -= (lr / size / slots["count"][0, 0] * slots["mean"]).astype(param.dtype)


def optimizer(name):
    known = {
        "sgd": lambda: allred.optim.SGD(lr=0.125),
        "momentum": lambda: allred.optim.SGD(lr=allred.optim.step_decay(0.1, (2, 4), 0.5), momentum=0.9),
        "adam": lambda: allred.optim.AdamW(lr=0.01),
        "adagrad": lambda: allred.optim.Adagrad(lr=0.1),
        "normed": lambda: Normed(lr=0.01),
        "own": lambda: Own(lr=0.1),
        "count": lambda: allred.optim.SGD(lr=1.0),
    }
    return known[name]()


def distributed(optimizer):
    options = dict(OPTIONS)
    if "consistency" in options:
        policy, arguments = options["consistency"]
        options["consistency"] = getattr(allred.ps, policy)(**arguments)
    return allred.distributed(optimizer, **options)


def parameters(rng, halves=True):
    """Of several dtypes, layouts and sizes; the largest takes several cells."""
    few = rng.normal(size=(300, 7)).astype(np.float32)
    return {
        "a": [rng.normal(size=(700, 400)).astype(np.float32), few.T, np.array(rng.normal())],
        "b": [rng.normal(size=5).astype(np.float16 if halves else np.float32), np.zeros((0, 3), np.float32)],
        "c": [rng.normal(size=(90, 1000))],
    }


def gradients(params, rng, step):
    """One for each parameter; the tiny ones are left out now and then."""
    made = {k: [rng.normal(size=p.shape).astype(p.dtype) for p in v] for k, v in params.items()}
    if step % 3 == 1:
        made["b"][0] = None
    if step % 4 == 2:
        made["a"][1] = None
    return made


def hashes(values):
    return allred.digest([v for part in values.values() for v in part])


def serial():
    """One worker must give what the optimizer alone gives, bit for bit."""
    name = ARGUMENTS["optimizer"]
    params = parameters(np.random.default_rng(0), halves=name != "own")
    opt = distributed(optimizer(name))
    alone, alone_opt = parameters(np.random.default_rng(0), halves=name != "own"), optimizer(name)
    opt.broadcast(params)
    for step in range(6):
        if step == 3:  # keeps the state, which is at the servers
            opt.broadcast(params)
        grads = gradients(params, np.random.default_rng(step), step)
        alone_opt.step(alone, grads)
        opt.step(params, grads)
    state, alone_state = opt.state_dict(), alone_opt.state_dict()
    same_state = allred.digest(_plain(state)) == allred.digest(_plain(alone_state))
    return {
        "same": hashes(params) == hashes(alone),
        "same_state": same_state,
        "moved": bool(abs(params["a"][0]).max() > 0),
    }


def spare():
    """More servers than tensors: some have nothing to do but to count."""
    name = ARGUMENTS["optimizer"]
    params, alone = ({"a": [np.ones(3)], "b": [np.ones((2, 2), np.float32)]} for _ in range(2))
    opt, alone_opt = distributed(optimizer(name)), optimizer(name)
    opt.broadcast(params)
    for step in range(6):
        grads = {"a": [None if step % 3 == 1 else np.full(3, step - 2.0)], "b": [np.full((2, 2), 1.0, np.float32)]}
        opt.step(params, grads)
        alone_opt.step(alone, grads)
    updates = [server.updates for server in opt.statistics().servers]
    opt.save(ARGUMENTS["directory"], params) if name != "own" else None
    return {"same": hashes(params) == hashes(alone), "updates": updates}


def leave():
    """Sync with workers that end at different steps: each step is the mean of those that still live."""
    params = {"a": np.zeros((300, 200)), "b": np.zeros(70000), "c": np.zeros(3, np.float32)}
    opt, expected = distributed(optimizer("count")), 0.0
    opt.broadcast(params)
    last = [ARGUMENTS["first"] + 2 * worker for worker in range(allred.size())]
    for step in range(last[allred.rank()]):
        living = [worker for worker, end in enumerate(last) if step < end]
        opt.step(params, {name: np.full_like(p, 2.0 ** allred.rank() * (step + 1)) for name, p in params.items()})
        expected -= sum(2.0**worker * (step + 1) for worker in living) / len(living)
        worst = max(abs(p - expected).max() for p in params.values())
        assert worst <= 1e-5 * abs(expected), (step, expected, {name: set(p.ravel()) for name, p in params.items()})
    opt.finish()
    allred.barrier()
    return {"updates": [server.updates for server in opt.statistics().servers]}


def _plain(state):
    return {str(key): value for key, value in state.items()}


def mean():
    """Sync, n workers: the serial optimizer on the mean gradient."""
    name, steps = ARGUMENTS.get("optimizer", "sgd"), 3
    params = parameters(np.random.default_rng(0), halves=False)
    alone = parameters(np.random.default_rng(0), halves=False)
    opt, alone_opt = distributed(optimizer(name)), optimizer(name)
    opt.broadcast(params)
    for step in range(steps):
        each = [gradients(params, np.random.default_rng((step, w)), 0) for w in range(allred.size())]
        average = {k: [sum(e[k][i] for e in each) / len(each) for i in range(len(v))] for k, v in params.items()}
        alone_opt.step(alone, average)
        opt.step(params, each[allred.rank()])
    worst = max(float(abs(a - b).max()) for k in params for a, b in zip(params[k], alone[k], strict=True) if a.size)
    everywhere = allred.allgather_object(hashes(params))
    return {"worst": worst, "equal": len(set(everywhere)) == 1, "text": str(opt.statistics())}


def together():
    """What comes out of full-batch steps at lr / n; the test compares modes."""
    n, rng = allred.size(), np.random.default_rng(5)
    x, y = rng.normal(size=(60, 8)), rng.normal(size=60)
    params = {"w": np.zeros(8)}
    opt = distributed(allred.optim.SGD(lr=0.05 / (n if ARGUMENTS["divide"] else 1)))
    opt.broadcast(params)
    mine = slice(allred.rank() * 60 // n, (allred.rank() + 1) * 60 // n)
    for _ in range(ARGUMENTS["steps"]):
        opt.step(params, {"w": 2 * x[mine].T @ (x[mine] @ params["w"] - y[mine]) / len(y[mine])})
    return {"w": params["w"].tolist()}


def schedule():
    """An order of steps by a logical clock: at each tick one worker makes its step."""
    rng = np.random.default_rng(ARGUMENTS["seed"])
    params = {"w": np.ones((100, 70), np.float32)}
    opt = distributed(optimizer("adam"))
    opt.broadcast(params)
    for tick, who in enumerate(rng.integers(0, allred.size(), size=40)):
        if allred.rank() == who:
            opt.step(params, {"w": np.random.default_rng((tick, who)).normal(size=(100, 70)) * params["w"]})
        allred.barrier()
    return {"hash": allred.allgather_object(allred.digest(params)), "staleness": dict(opt.statistics().staleness)}


def sums():
    """Random delays; every gradient must have been applied exactly once. Whole numbers: exact in any order."""
    steps, rng = ARGUMENTS["steps"], np.random.default_rng((ARGUMENTS["seed"], allred.rank()))
    params = {"a": np.zeros((300, 200)), "b": [np.zeros(1), np.zeros(70000)]}
    opt = distributed(optimizer("count"))
    opt.broadcast(params)
    total = 0
    for _ in range(steps):
        number = int(rng.integers(1, 100))
        before = opt.dropped
        opt.step(params, {"a": np.full((300, 200), number), "b": [np.full(1, number), np.full(70000, number)]})
        total += number if opt.dropped == before else 0
        spread = max(float(np.ptp(v)) for v in (params["a"], params["b"][1]))
        assert spread == 0 or not ARGUMENTS.get("consistent", True), "a pull mixed two versions"
        time.sleep(rng.random() * 0.002)
    opt.finish()
    totals = allred.allgather_object((total, opt.dropped))
    opt.pull(params)
    stats = opt.statistics()
    return {
        "expected": -float(sum(t for t, _ in totals)), "a": sorted(set(params["a"].ravel().tolist())),
        "b": sorted({*params["b"][0].tolist(), *params["b"][1].tolist()}), "dropped": [d for _, d in totals],
        "told": [stats.dropped[w] for w in range(allred.size())], "stalest": max(stats.staleness),
        "gradients": [s.gradients for s in stats.servers], "updates": [s.updates for s in stats.servers],
        "unused": [s.unused for s in stats.servers], "text": str(stats),
    }  # fmt: skip


def await_file(name):
    """Wait until a worker has made this file in the directory of the case."""
    file, until = pathlib.Path(ARGUMENTS["directory"], name), time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until, f"there is no {file}"
        time.sleep(0.005)


def late():
    """The last worker makes its only step when worker 0 has made 20."""
    params, is_late = {"w": np.zeros(1000)}, allred.rank() == allred.size() - 1
    opt = distributed(optimizer("count"))
    opt.broadcast(params)
    if is_late:
        await_file("ahead")
    for _ in range(1 if is_late else 20):
        opt.step(params, {"w": np.ones(1000)})
    if allred.rank() == 0:
        pathlib.Path(ARGUMENTS["directory"], "ahead").touch()
    opt.finish()
    return {"dropped": allred.allgather_object(opt.dropped), "text": str(opt.statistics())}


def slow():
    """The last worker makes 5 slow steps, and the others make steps until then."""
    params, steps, is_slow = {"w": np.zeros(1000)}, 0, allred.rank() == allred.size() - 1
    over = pathlib.Path(ARGUMENTS["directory"], "over")
    opt = distributed(optimizer("count"))
    opt.broadcast(params)
    while steps < 5 if is_slow else not over.exists():
        time.sleep(0.1 * is_slow)
        opt.step(params, {"w": np.ones(1000)})
        steps += 1
    if is_slow:
        over.touch()
    opt.finish()
    return {"steps": allred.allgather_object(steps)}


def large():
    """All workers push large gradients, of many cells, at the same time."""
    params = {"w": np.zeros(ARGUMENTS["elements"], np.float32)}
    opt = distributed(optimizer("count"))
    opt.broadcast(params)
    for _ in range(ARGUMENTS["steps"]):
        opt.step(params, {"w": np.ones_like(params["w"])})
    opt.finish()
    allred.barrier()
    opt.pull(params)
    return {"w": np.unique(params["w"]).tolist()}


def start():
    """Count the bytes of a broadcast, and of a second one after three steps of worker 1."""
    params = {name: np.full(1000, 1.0 + allred.rank()) for name in "ab"}
    ones = {name: np.ones(1000) for name in "ab"}
    opt = distributed(optimizer("count"))
    opt.broadcast(params)
    servers = opt.statistics().servers
    allred.barrier()
    for _ in range(3 * (allred.rank() == 1)):
        opt.step(params, ones)
    allred.barrier()
    opt.broadcast(params)
    equal = len(set(allred.allgather_object(allred.digest(params)))) == 1
    if allred.rank() == 0:
        opt.step(params, ones)
    return {
        "up": sum(server.bytes_in for server in servers), "down": sum(server.bytes_out for server in servers),
        "pulls": [server.pulls for server in servers], "equal": equal, "staleness": dict(opt.statistics().staleness),
        "values": [*np.unique(params["a"]), *np.unique(params["b"])],
    }  # fmt: skip


def clips():
    """Clipping, gradient scaling and compression: each worker's own, or without effect."""
    scaler = allred.GradScaler(init_scale=1024.0, growth_interval=2)
    settings = {"clip_norm": 1.0, "scaler": scaler, "compression": allred.Compression.bf16}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), **settings)
    params, scales = {"w": np.zeros(2), "b": np.zeros(1, np.float16)}, []
    opt.broadcast(params)
    grads = {"w": scaler.scale(np.array([6.0, 0.0])), "b": np.array([8192.0], np.float16)}  # 8, scaled
    before = {name: grad.copy() for name, grad in grads.items()}
    opt.step(params, grads)
    norm = opt.grad_norm
    assert all((grads[name] == before[name]).all() for name in grads)
    first = [round(float(p[0]), 3) for p in params.values()]
    for number in (np.inf, 0.0, 0.0):
        opt.step(params, {"w": np.array([number, 0.0]), "b": np.zeros(1, np.float16)})
        scales.append(scaler.get_scale())
    second = [round(float(p[0]), 3) for p in params.values()]
    return {"norm": norm, "params": [first, second], "skipped": opt.skipped, "scales": scales}


def main(servers, cases):
    ranks = COMM_WORLD.size
    for name, arguments, options in cases:
        server = allred.Server({"ps": servers, "worker": ranks - servers})
        for current, given in ((ARGUMENTS, arguments), (OPTIONS, options)):
            current.clear()
            current.update(given)
        if allred.job_name() == "ps":
            server.join()
        else:
            result = globals()[name]()
            if allred.rank() == 0:
                print(json.dumps(result), flush=True)
        allred.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
