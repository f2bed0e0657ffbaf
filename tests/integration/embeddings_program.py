"""Cases of embedding tables in mode ps: `embeddings_program.py SERVERS CASES` under mpirun; see ps_program.py."""

import json
import os
import pathlib
import shutil
import sys

import numpy as np
from ps_program import ARGUMENTS, OPTIONS, main

import allred
from allred import checkpoint, embeddings, optim
from allred.embeddings.row_store import RowStore
from allred.errors import AllredError, NonFiniteError

DIM, ROWS, IDS = 6, 60, 40
OPTIMIZERS = {
    "row-wise": lambda: optim.Adagrad(0.1, row_wise=True),
    "adam": lambda: optim.Adam(optim.exponential_decay(0.05, 3, 0.5)),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9),
}


def make(name="users", optimizer="row-wise", **options):
    options = {"init": embeddings.Uniform(-1.0, 1.0), **options}
    return allred.Embedding(name, DIM, optimizer=OPTIMIZERS[optimizer](), **options)


def distribute(*tables, **options):
    given = OPTIONS.get("consistency")
    policy = {} if given is None else {"consistency": getattr(allred.ps, given[0])(**given[1])}
    opt = allred.distributed(optim.SGD(0.5), tables=tables, **policy, **options)
    params = {"w": np.zeros(3, np.float32)}
    opt.broadcast(params)
    return opt, params


def ids_of(worker, number, table=0):
    ids = np.random.default_rng((worker, number, table)).integers(0, ROWS, IDS)
    return ids[:0] if (number + worker) % 5 == 4 else ids


def gradients_of(worker, number, table=0):
    count = len(ids_of(worker, number, table))
    return np.random.default_rng((number, worker, table, 1)).normal(size=(count, DIM)).astype(np.float32)


def trained(steps, optimizer, dtype="float32"):
    """Train two tables, and compare each lookup with tables on one process that get the mean of all workers. Return the
    largest difference."""
    tables = [make("users", optimizer, dtype=dtype), make("items", "momentum", rows=ROWS, dtype=dtype)]
    opt, params = distribute(*tables)
    worker, workers = allred.rank(), allred.size()
    whole, worst = [RowStore(table.form) for table in tables], 0.0
    for number in range(steps):
        for index, (table, store) in enumerate(zip(tables, whole, strict=True)):
            ids = ids_of(worker, number, index)
            expected = store.lookup(ids.astype(np.uint64), False).astype(np.float32)
            worst = max(worst, np.abs(table.lookup(ids) - expected).max(initial=0))
            table.gradient(gradients_of(worker, number, index))
        opt.step(params, {"w": np.ones(3, np.float32)})
        for index, store in enumerate(whole):
            for other in range(workers):
                distinct, places = np.unique(ids_of(other, number, index), return_inverse=True)
                sums = np.zeros((len(distinct), DIM), np.float32)
                np.add.at(sums, places, gradients_of(other, number, index))
                store.lookup(distinct.astype(np.uint64), True)
                store.add(distinct.astype(np.uint64), sums)
            store.apply_mean(workers)
    allred.barrier()
    for table, store in zip(tables, whole, strict=True):
        rows = table.export()
        assert rows["ids"].tolist() == store.columns()["ids"].tolist()
        assert table.size() == store.rows
        worst = max(worst, np.abs(rows["vectors"].astype(np.float64) - store.columns()["vectors"]).max())
    assert (params["w"] == -0.5 * steps).all()
    return float(worst)


def training():
    return trained(10, ARGUMENTS["optimizer"], ARGUMENTS["dtype"])


def no_gradient_is_lost():
    """SGD without momentum: the rows are minus the sum of all gradients, in any order of the workers."""
    table = allred.Embedding("sums", DIM, init=0.0, optimizer=optim.SGD(1.0))
    opt, params = distribute(table)
    worker, workers, steps = allred.rank(), allred.size(), 12
    for number in range(steps):
        table.lookup(ids_of(worker, number))
        table.gradient(np.round(gradients_of(worker, number) * 8) / 8)
        opt.step(params, {"w": np.ones(3, np.float32)})
    opt.finish()
    allred.barrier()
    expected = np.zeros((ROWS, DIM))
    for other in range(workers):
        for number in range(steps):
            np.add.at(expected, ids_of(other, number), -np.round(gradients_of(other, number) * 8) / 8)
    rows = table.export()
    found = np.zeros((ROWS, DIM))
    found[rows["ids"]] = rows["vectors"]
    share = 1.0 / workers if OPTIONS.get("consistency", [""])[0] == "Sync" else 1.0
    return float(np.abs(found - expected * share).max())


def large():
    """Several cells in both directions, and rows that are larger than the memory between worker and server."""
    table = allred.Embedding("large", 200, init=embeddings.Normal(0.0, 0.1), optimizer=optim.SGD(1.0))
    opt, params = distribute(table)
    ids = np.random.default_rng(allred.rank()).permutation(9000)[:8000]
    before = table.lookup(np.repeat(ids, 2))
    table.gradient(np.ones_like(before))
    opt.step(params, {"w": np.ones(3, np.float32)})
    allred.barrier()
    after = table.lookup(ids, train=False)
    moved = before[::2] - after
    return [float(moved.min()), float(moved.max()), bool(np.array_equal(before[::2], before[1::2]))]


def errors():
    """Return the texts of errors, after each of which the table can be used."""
    table, texts = make(rows=ROWS), []
    opt = allred.distributed(optim.SGD(0.5), tables=[table])
    params, grads = {"w": np.zeros(3, np.float32)}, {"w": np.ones(3, np.float32)}

    def catch(call):
        try:
            call()
        except AllredError as error:
            texts.append(f"{type(error).__name__}: {error}")

    catch(lambda: table.lookup([1]))
    opt.broadcast(params)
    catch(lambda: table.lookup([ROWS]))
    catch(lambda: table.lookup([0.5]))
    before = table.lookup([1, 2, 3])
    gradient = np.ones((3, DIM), np.float32)
    gradient[2, 1] = np.inf
    table.gradient(gradient)
    catch(lambda: opt.step(params, grads))
    assert np.array_equal(table.lookup([1, 2, 3], train=False), before)
    assert not params["w"].any()
    table.lookup([1, 2, 3])
    table.gradient(np.ones((3, DIM), np.float32))
    opt.step(params, grads)
    allred.barrier()
    assert (table.lookup([1, 2, 3], train=False) < before).all()
    return texts


def skips():
    table = make()
    opt, params = distribute(table, nonfinite="skip")
    before = table.lookup([7])
    table.gradient(np.full((1, DIM), np.nan))
    opt.step(params, {"w": np.ones(3, np.float32)})
    table.lookup([7])
    table.gradient(np.full((1, DIM), np.nan))
    opt.step(params, {"w": np.full(3, np.nan, np.float32)})  # one step, although both are not finite
    return [opt.skipped, bool(np.array_equal(table.lookup([7], train=False), before)), float(params["w"][0])]


def different():
    """Workers whose tables differ."""
    distribute(make(seed=allred.rank()))


def learning_rate():
    """A learning rate that worker 0 assigns reaches the servers with its next step."""
    table = allred.Embedding("rate", DIM, init=0.0, optimizer=optim.SGD(1.0))
    opt, params = distribute(table)
    found = []
    for lr in (1.0, 1.0, 0.25):
        table.optimizer.lr = lr
        table.lookup([1])
        table.gradient(np.ones((1, DIM), np.float32))
        opt.step(params, {"w": np.ones(3, np.float32)})
        found.append(float(table.lookup([1], train=False)[0, 0]))
    return found


def assigned():
    table = make()
    distribute(table)
    ids, values = np.arange(-20, 20), np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float32)
    if allred.rank() == 0:
        table.assign(ids, values)
    allred.barrier()
    return bool(np.array_equal(table.lookup(ids, train=False), values))


def failed_steps():
    """Steps that raise, or are skipped, lose their gradients, and no learning rate."""
    table = allred.Embedding("failed", DIM, init=0.0, optimizer=optim.SGD(1.0))
    opt, params = distribute(table, nonfinite=ARGUMENTS["nonfinite"])
    for gradient, of_params, lr in ((1000.0, np.nan, 2.0), (1.0, 1.0, 2.0)):
        table.optimizer.lr = lr
        table.lookup([1])
        table.gradient(np.full((1, DIM), gradient, np.float32))
        try:
            opt.step(params, {"w": np.full(3, of_params, np.float32)})
        except NonFiniteError:
            assert ARGUMENTS["nonfinite"] == "raise"
    return float(table.lookup([1], train=False)[0, 0])


def refusals():
    texts = []

    def catch(call):
        try:
            call()
        except AllredError as error:
            texts.append(f"{type(error).__name__}: {error}")

    catch(lambda: distribute(make("a"), every=2))
    unpicklable = allred.Embedding("b", DIM, optimizer=optim.SGD(lambda step: 0.1))
    opt = allred.distributed(optim.SGD(0.5), tables=[unpicklable], name="unpicklable")
    catch(lambda: opt.broadcast({"w": np.zeros(3, np.float32)}))
    return texts


def schedule():
    """A schedule that the program assigns later is refused."""
    table = make("rates")
    opt, params = distribute(table)
    table.optimizer.lr = optim.constant(0.1)
    try:
        opt.step(params, {"w": np.ones(3, np.float32)})
    except AllredError as error:
        return str(error)
    return ""


def partial_checkpoints():
    """Checkpoints with the rows that were used since the one before. Return the rows in each, the checkpoints that are
    left of all but the newest, and whether it gives the rows back."""
    table = make("users", "adam", full_every=3, expire_after=4)
    opt, params = distribute(table)
    rows, directory = [], ARGUMENTS["directory"]
    for number in range(8):
        ids = ids_of(0, number)[:10]
        table.lookup(ids)
        table.gradient(gradients_of(0, number)[:10])
        opt.step(params, {"w": np.ones(3, np.float32)})
        if number == 5:
            table.assign([1000], np.ones((1, DIM)))
        saved = checkpoint.read_manifest(opt.save(directory, params)).meta["tables"]["users"]
        rows.append(sum(part["entries"][0]["shape"][0] for part in saved["parts"]))
        assert (saved["base"] == "") == (number % 3 == 0), number
    expected = table.export()
    checkpoint.prune(directory, 1)
    left = sorted(os.listdir(directory))
    table.lookup(np.arange(500))
    opt.step(params, {"w": np.ones(3, np.float32)})
    assert opt.restore(directory, params) == 8
    found = table.export()
    equal, bases = all(np.array_equal(found[name], expected[name]) for name in expected), []
    for root in (directory, directory, f"{directory}/other", directory):
        opt.step(params, {"w": np.ones(3, np.float32)})
        path = opt.save(root, params)
        bases.append(checkpoint.read_manifest(path).meta["tables"]["users"]["base"])
    for file in pathlib.Path(directory, "step-00000009").glob("rows-*"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    return rows, left, equal, bases, checkpoint.verify(f"{directory}/step-00000010")


def two_directories():
    """A checkpoint in a directory that has one of another training, with the name of this training's last one."""
    table = make("users", full_every=3)
    opt, params = distribute(table)
    root = ARGUMENTS["directory"]
    for number in range(3):
        table.lookup(ids_of(0, number)[:10])
        opt.step(params, {"w": np.ones(3, np.float32)})
        if number == 1:
            opt.save(os.path.join(root, "own"), params)
            os.makedirs(os.path.join(root, "other"))
            copied = os.path.join(root, "other", "step-00000002")
            shutil.copytree(os.path.join(root, "own", "step-00000002"), copied)
    saved = checkpoint.read_manifest(opt.save(os.path.join(root, "other"), params)).meta["tables"]["users"]
    return saved["base"]


def failed_checkpoint():
    """A checkpoint cannot be written, in a directory that has another one of this step."""
    from allred.ps import worker_client

    table = make("users", full_every=9)
    opt, params = distribute(table)
    root, other = (os.path.join(ARGUMENTS["directory"], name) for name in ("root", "other"))
    bases = []
    for directory in (root, other, root):
        table.lookup(ids_of(0, len(bases))[:10])
        opt.step(params, {"w": np.ones(3, np.float32)})
        bases.append(checkpoint.read_manifest(opt.save(directory, params)).meta["tables"]["users"]["base"])
        if directory == other:
            shutil.copytree(os.path.join(other, "step-00000002"), os.path.join(root, "step-00000002"))
            commit, worker_client.checkpoint.commit = worker_client.checkpoint.commit, None
            try:
                opt.save(root, params)
            except TypeError:  # None is not callable
                bases.append("failed")
            worker_client.checkpoint.commit = commit
    return bases


def prefetches():
    """Vectors that were prefetched lack one step. The memory for vectors is smaller than those of the second call."""
    table = allred.Embedding("rows", ARGUMENTS["dim"], optimizer=optim.SGD(1.0))
    opt, params = distribute(table)
    ids, moved = np.random.default_rng(0).permutation(10**6)[: ARGUMENTS["count"]], []
    before = table.lookup(ids)
    for _ in range(3):
        table.gradient(np.ones_like(before))
        table.prefetch(ids)
        assert table.size() == len(ids)  # another request between
        opt.step(params, {"w": np.ones(3, np.float32)})
        stale = table.lookup(ids)
        assert np.array_equal(stale, before)
        fresh = table.lookup(ids, train=False)
        moved.append(float((stale - fresh).min()))
        before = fresh
    table.prefetch(ids)  # the worker leaves without it
    return moved


def prefetches_and_waits():
    """Worker 1 has begun a lookup and waits for worker 0, which makes a step."""
    table = allred.Embedding("rows", DIM, init=0.0, optimizer=optim.SGD(1.0))
    opt, params = distribute(table)
    if allred.rank() == 1:
        table.prefetch(np.arange(100))
    allred.barrier()
    if allred.rank() == 0:
        table.lookup([1])
        table.gradient(np.ones((1, DIM)))
        opt.step(params, {"w": np.ones(3, np.float32)})
    allred.barrier()
    found = table.lookup(np.arange(100), train=False)
    return float(found[1, 0])


if __name__ == "__main__":
    import ps_program

    ps_program.__dict__.update({name: value for name, value in globals().items() if name[0] != "_"})
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
