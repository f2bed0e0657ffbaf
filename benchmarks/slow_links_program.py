"""The program that benchmarks/slow_links.py runs on every rank. The chief prints lines of JSON.

slow_links_program.py speed               one allreduce of 16 MiB by each encoding, interleaved
slow_links_program.py steps MIB           seconds of a step with 50 ms of computation, of each way of this mode
slow_links_program.py train TASK SEED     losses of each way of this mode; TASK: digits or text
"""

import itertools
import json
import pathlib
import sys
import sysconfig
import time

import numpy as np

import allred
from allred import Compression, optim
from allred.comm.functions import current

COMPUTING_S = 0.05
STEPS = 512
EVALUATIONS = [*range(0, 64, 8), *range(64, STEPS + 1, 64)]  # steps before them, in mode sync
SYNC = {
    "sync": {}, "fp16": {"compression": Compression.fp16}, "int8": {"compression": Compression.int8},
    "int8, no error feedback": {"compression": Compression.int8, "error_feedback": False},
    "int4": {"compression": Compression.int4},
    "int4, no error feedback": {"compression": Compression.int4, "error_feedback": False},
    "PowerSGD rank 1": {"rank": 1}, "PowerSGD rank 4": {"rank": 4},
}  # fmt: skip
LOCAL = {
    **{f"local, every {every}": {"every": every} for every in (8, 32, 128)},
    **{f"streaming, every {every}": {"every": every, "fragments": 4, "delay": every // 8} for every in (8, 32, 128)},
    "local, every 32, int8": {"every": 32, "compression": Compression.int8},
    "average, every 32": {"every": 32, "outer": optim.SGD(1.0)},
}


# ---- PowerSGD (T. Vogels et al., NeurIPS 2019), as a program would do it: the comparison for int4


class PowerSGD:
    """Averages gradients: matrices by their approximation of a rank, with error feedback and warm start."""

    def __init__(self, rank):
        self._rank, self._factors, self._errors = rank, {}, {}

    def average(self, grads):
        matrices = {name: grad.reshape(len(grad), -1) for name, grad in grads.items() if grad.ndim > 1}
        rng = np.random.default_rng(0)
        for name, matrix in matrices.items():
            if name not in self._factors:
                self._factors[name] = rng.normal(size=(matrix.shape[1], self._rank)).astype(np.float32)
                self._errors[name] = np.zeros_like(matrix)
            matrix += self._errors[name]
        left = [matrix @ self._factors[name] for name, matrix in matrices.items()]
        others = [grad for grad in grads.values() if grad.ndim < 2]
        allred.grouped_allreduce_([*left, *others])
        left = [np.linalg.qr(each)[0] for each in left]
        right = [matrix.T @ each for matrix, each in zip(matrices.values(), left, strict=True)]
        allred.grouped_allreduce_(right)
        for (name, matrix), p, q in zip(matrices.items(), left, right, strict=True):
            self._factors[name] = q
            approximation = p @ q.T
            self._errors[name] = matrix - approximation
            grads[name][...] = approximation.reshape(grads[name].shape)


class Trainer:
    """One way to train. step: updates parameters by the gradients of this rank."""

    def __init__(self, options, params, optimizer):
        options = dict(options)
        self._power = PowerSGD(options.pop("rank")) if "rank" in options else None
        self._optimizer = optimizer if self._power else allred.distributed(optimizer, **options)
        if not self._power:
            self._optimizer.broadcast(params)

    def step(self, params, grads):
        if self._power:
            self._power.average(grads)
        self._optimizer.step(params, grads)

    def end(self):
        if not self._power:
            self._optimizer.round()


# ---- speed


def sent_bytes():
    return int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def speed():
    encodings = {
        "float32": (Compression.none, False), "fp16": (Compression.fp16, False), "int8": (Compression.int8, False),
        "int8 + EF": (Compression.int8, True), "int4 + EF": (Compression.int4, True),
    }  # fmt: skip
    x = np.random.default_rng(allred.rank()).normal(size=(4096, 1024)).astype(np.float32)
    residuals, y, comm = {name: np.zeros(x.size, np.float32) for name in encodings}, x.copy(), current()
    rows = {name: [] for name in encodings}
    for number in range(8):
        for name, (compression, keeps) in encodings.items():
            y[...] = x
            allred.barrier()
            sent, cpu, start = sent_bytes(), time.process_time(), time.perf_counter()
            comm.grouped_allreduce_blocking(
                [y], True, allred.Average, "", compression, residual=residuals[name] if keeps else None
            )
            row = time.perf_counter() - start, time.process_time() - cpu, sent_bytes() - sent
            everyone = np.array(allred.allgather_object(row))
            if number:
                rows[name].append((everyone[:, 0].max(), everyone[:, 1].sum(), everyone[:, 2].mean()))
    return {name: np.median(found, axis=0).tolist() for name, found in rows.items()}


def steps(mib):
    """Return seconds of a step of each way."""
    columns = int(mib * 2**20 / 4 / 8 / 400)
    found = {}
    for name, options in ways().items():
        params = {str(i): np.zeros((400, columns), np.float32) for i in range(8)}
        trainer, every = Trainer(options, params, optim.SGD(0.0)), options.get("every", 1)
        rng = np.random.default_rng(allred.rank())
        grads = {key: rng.normal(size=value.shape).astype(np.float32) for key, value in params.items()}
        count = max(8, 2 * every if every < 100 else every)
        for number in range(-1 if every == 1 else 0, count):
            if number == 0:
                allred.barrier()
                start = time.perf_counter()
            time.sleep(COMPUTING_S)
            trainer.step(params, {key: value.copy() for key, value in grads.items()})
        allred.barrier()
        found[name] = (time.perf_counter() - start) / count
    return found


# ---- training


def digits_task():
    """Return parameters, a function of (params, rows) to (loss, gradients), and rows for training and evaluation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(x))
    rng = np.random.default_rng(1)
    sizes = [64, 128, 64, 10]
    params = {f"w{i}": (rng.normal(size=(a, b)) / a**0.5).astype(np.float32) for i, (a, b) in enumerate(pairs(sizes))}
    params |= {f"b{i}": np.zeros(b, np.float32) for i, b in enumerate(sizes[1:])}

    def loss(params, rows, needs_gradients=True):
        values = [x[rows]]
        for i in range(3):
            z = values[-1] @ params[f"w{i}"] + params[f"b{i}"]
            values.append(np.maximum(z, 0) if i < 2 else z)
        z = values[-1] - values[-1].max(1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(1, keepdims=True))
        mean = -float(logs[np.arange(len(rows)), y[rows]].mean())
        if not needs_gradients:
            return mean, None
        grads, delta = {}, np.exp(logs)
        delta[np.arange(len(rows)), y[rows]] -= 1
        delta /= len(rows)
        for i in reversed(range(3)):
            grads[f"w{i}"], grads[f"b{i}"] = values[i].T @ delta, delta.sum(0)
            delta = (delta @ params[f"w{i}"].T) * (values[i] > 0)
        return mean, grads

    return params, loss, order[:1400], order[1400:], 16, 3e-3


def pairs(sizes):
    return list(itertools.pairwise(sizes))


def text_task():
    """The next character of Python's standard library from the 32 before, by a torch model of 1.2 M parameters."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
    text = "".join(file.read_text(errors="ignore") for file in files)[:4_000_000]
    codes = torch.from_numpy(np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64))
    model = nn.Sequential(
        nn.Embedding(128, 32), nn.Flatten(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(),
        nn.Linear(512, 128),
    )  # fmt: skip
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    window = torch.arange(33)

    def loss(params, rows, needs_gradients=True):
        found = codes[torch.from_numpy(rows)[:, None] + window]
        with torch.set_grad_enabled(needs_gradients):
            value = functional.cross_entropy(model(found[:, :32]), found[:, 32])
        if not needs_gradients:
            return float(value), None
        model.zero_grad()
        value.backward()
        return float(value), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}

    places = np.random.default_rng(0).permutation(len(codes) - 33)
    return params, loss, places[4096:], places[:4096], 64, 1e-3


def train(task, seed):
    """Return {way: [(steps, loss), ...]}: the loss of the parameters of all ranks on data that is not trained on."""
    params, loss, training, held_out, batch, lr = {"digits": digits_task, "text": text_task}[task]()
    first = {name: value.copy() for name, value in params.items()}
    curves = {}
    for name, options in ways().items():
        for key, value in params.items():
            value[...] = first[key]
        rng = np.random.default_rng([seed, allred.rank()])
        trainer, curve, every = Trainer(options, params, optim.AdamW(lr)), [], options.get("every", 1)
        for step in range(STEPS + 1):
            if step in EVALUATIONS and (every == 1 or (step % every == 0 and step % 128 == 0)):
                trainer.end()
                curve.append((step, loss(params, held_out, False)[0]))
            if step < STEPS:
                rows = rng.choice(training, batch)
                trainer.step(params, loss(params, rows)[1])
        curves[name] = curve
    return curves


def ways():
    return LOCAL if allred.world.config().mode == "local" else SYNC


def main():
    allred.init(banner=False, check_steps=0)
    what, *words = sys.argv[1:]
    if what == "speed":
        found = speed()
    elif what == "steps":
        found = steps(float(words[0]))
    else:
        found = train(words[0], int(words[1]))
    if allred.rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
