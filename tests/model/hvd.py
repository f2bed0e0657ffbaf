"""Scenarios of Horovod's interface: collectives, started alone or several at once, between the actions of a training
(hvd_training.py), in a world that one of several functions has made.

Values are small integers, so that results are exact in each dtype and in any order; process_group.py makes them, and
tensors with a layout. One rank may make a wrong call: an error on all ranks, which changes nothing, and the next call
works.
"""

import dataclasses
import itertools
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import hvd_training
import process_group
import torch
import torch.distributed as dist

import allred
import allred.compat.horovod

import horovod.torch as hvd  # isort: skip  (allred.compat.horovod makes it)

CREATES_WORLDS = True
DOORS = ["hvd", "hvd", "sets", "allred", "allred, hvd", "torch", "comm"]
FLOATS = ["float32", "float32", "float64", "float16", "bfloat16"]
REDUCED = [*FLOATS, "int64", "int32", "int16", "uint8", "int8", "bool"]
MOVED = [*REDUCED, "complex64", "complex128", "uint16", "float8_e5m2"]
MOVES = ["allgather", "broadcast", "alltoall"]
COLLECTIVES = ["allreduce", "allreduce", "reducescatter", *MOVES]
OTHERS = ["barrier", "broadcast_object", "allgather_object", "sparse", "parameters", "join"]
GLOBAL = ["allgather_object", "parameters", "join"]  # have no argument process_set
FORMS = {"allreduce": ["", "_", "async", "async_"], "broadcast": ["", "_", "async", "async_"]}
GROUPED = ["allreduce", "allgather", "reducescatter"]
NAMES = [None, None, "x", "a.b", "é ", "'\"", "{0}%s", "n" * 300]
WRONG = {
    "allreduce": ["shape", "dtype", "sparse", "op", "name", "kind", "order", "overlap"],
    "reducescatter": ["shape", "dtype", "sparse", "op", "name"],
    "allgather": ["shape", "dtype", "sparse", "name"],
    "broadcast": ["shape", "dtype", "sparse", "root", "name"],
    "alltoall": ["shape", "dtype", "sparse", "splits"],
    "allgather_object": ["pickle", "name"],
    "broadcast_object": ["pickle", "name"],
    "parameters": ["shape", "dtype", "sparse"],
}
OF_ONE_RANK = ["sparse", "splits", "overlap", "pickle"]  # errors also without other ranks


class Wide:
    """A compressor of the program."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


COMPRESSIONS: dict[str, Any] = {"": hvd.Compression.none, "fp16": hvd.Compression.fp16, "own": Wide}


@dataclasses.dataclass(frozen=True, repr=False)
class Call(array_nests.Plan):
    kind: str
    members: tuple[int, ...]
    seed: int
    tensors: tuple[tuple[tuple[int, ...], str, str], ...] = ()  # shape, dtype, layout
    is_list: bool = False
    form: str = ""  # the end of the name of the function, without "_"
    op: str = "Sum"
    before: float = 1.0
    after: float = 1.0
    compression: str = ""
    name: str | None = None
    root: int = 0
    splits: str = ""  # "list", or the dtype of a tensor
    uneven: bool = False  # allgather
    gradient: bool = False
    wrong: str = ""
    odd: int = 0  # the rank of the wrong call

    @property
    def is_async(self) -> bool:
        return self.form.startswith("async")

    @property
    def in_place(self) -> bool:
        return self.form.endswith("_")


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    size: int
    door: str
    sets: tuple[tuple[int, ...], ...]
    training: Any
    bursts: tuple[tuple[Call, ...], ...]  # calls that are in flight together
    across: tuple[bool, ...]  # whether they are in flight during an action of the training


def scenario(rng: random.Random, size: int) -> Scenario:
    everyone = tuple(range(size))
    sets = {tuple(sorted(rng.sample(range(size), rng.randint(1, size)))) for _ in range(rng.randint(0, 2))}
    training = hvd_training.scenario(rng, size) if rng.random() < 0.6 else None
    sets |= {training.members} if training else set()
    chosen = tuple(sorted(sets - {everyone}))
    bursts = []
    for _ in range(rng.randint(1, 6)):
        calls = [_call(rng, rng.choice([everyone, everyone, *chosen]), size) for _ in range(rng.choice([1, 1, 2, 4]))]
        if len(calls) > 1:
            calls = [_started(call, number) for number, call in enumerate(calls) if call.kind in COLLECTIVES]
        bursts.append(tuple(calls))
    across = tuple(all(call.is_async and not call.wrong for call in burst) for burst in bursts)
    return Scenario(size, rng.choice(DOORS), chosen, training, tuple(bursts), across)


def _started(call: Call, number: int) -> Call:
    """As a call among several in flight, whose names differ."""
    name = call.name and f"{call.name}{number}"
    form = call.form if call.is_async else f"async{call.form}"
    return dataclasses.replace(call, form=form, name=name, compression="", gradient=False, wrong="")


def _call(rng: random.Random, members: tuple[int, ...], size: int) -> Call:
    kind = rng.choice(COLLECTIVES * 3 + OTHERS)
    members = tuple(range(size)) if kind in GLOBAL else members
    is_list = kind in GROUPED and rng.random() < 0.3
    form = rng.choice(FORMS.get(kind, ["", "async"])) if kind in COLLECTIVES else ""
    op = rng.choice(["Sum", "Average", *(["Min", "Max", "Product"] if kind == "allreduce" else [])])
    count = rng.choice([0, 1, 2, 3, 40]) if is_list else rng.randint(1, 4) if kind == "parameters" else 1
    dtypes = MOVED if kind in (*MOVES, "parameters") else FLOATS if kind in ("sparse", "join") else REDUCED
    tensors = []
    for _ in range(count):
        shape, dtype = rng.choice(process_group.SHAPES[: 5 if count == 40 else None]), rng.choice(dtypes)
        shape = (4, 3) if (kind == "reducescatter" and not shape) else shape
        dtype = "int32" if dtype == "bool" and op in ("Sum", "Average") and kind not in MOVES else dtype
        tensors.append((shape, dtype, rng.choice(process_group.LAYOUTS)))
    scales = kind in ("allreduce", "reducescatter") and rng.random() < 0.3
    wrong = rng.choice(WRONG[kind]) if kind in WRONG and rng.random() < 0.15 and count else ""
    wrong = wrong if len(members) > 1 or wrong in OF_ONE_RANK else ""
    wrong = "" if wrong == "kind" and is_list else wrong  # of several operations, such as grouped_allgather
    wrong = "" if wrong == "overlap" and 0 in tensors[0][0] else wrong
    scales = scales and wrong != "overlap"  # scaled tensors are copies
    return Call(
        kind=kind,
        members=members,
        seed=rng.randrange(2**16),
        tensors=tuple(tensors),
        is_list=is_list,
        form="_" if wrong == "overlap" else form,
        op=op,
        before=rng.choice([1.0, 0.5, 2.0]) if scales else 1.0,
        after=rng.choice([1.0, 0.5, 2.0]) if scales and op != "Product" else 1.0,
        compression=rng.choice(["", "", *COMPRESSIONS]) if kind not in MOVES and not form and not wrong else "",
        name=rng.choice(NAMES),
        root=rng.choice(members),
        splits=rng.choice(["", "list", "int32", "int64"]),
        uneven=rng.random() < 0.5,
        gradient=kind in COLLECTIVES and not form and all(dtype in FLOATS[:3] for _, dtype, _ in tensors) and not wrong,
        wrong=wrong,
        odd=rng.choice(members),
    )


# ---- Values and expected results


def value(call: Call, rank: int, number: int, part: int = 0) -> torch.Tensor:
    """Tensor `number` of a rank. part: 0 for the input, 1 for the gradient of the result."""
    shape, dtype, _ = call.tensors[number]
    if call.kind == "allgather" and shape and call.uneven:
        shape = ((call.seed + rank) % 4, *shape[1:])
    if call.kind == "alltoall":
        shape = (sum(sent(call, rank)), *shape[1:])
    return _numbers(call, rank, number, shape, dtype, part)


def _numbers(call: Call, rank: int, number: int, shape: Any, dtype: str, part: int) -> torch.Tensor:
    plan = process_group.Call("", (), call.seed + 1000 * number, dtype=dtype)
    return process_group.values(plan, rank, part, tuple(shape))


def sent(call: Call, source: int) -> list[int]:
    """The number of rows that a rank sends to each member."""
    return [(2 * source + target + call.seed) % 3 if call.splits else call.seed % 3 for target in call.members]


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else (tensor.double() * factor).to(tensor.dtype)


def reduced(call: Call, parts: list[torch.Tensor], size: int = 0) -> torch.Tensor:
    """The reduction of tensors by a call. size: what Average divides by; 0: the number of parts."""
    op = {"Average": "SUM"}.get(call.op, call.op.upper())
    total = process_group.reduced(process_group.Call("", (), 0, op=op), [scaled(part, call.before) for part in parts])
    if call.op == "Average":
        mean = total.double() * call.after / (size or len(parts))
        return (mean if total.is_floating_point() else mean.trunc()).to(total.dtype)
    return scaled(total, call.after)


def expected(call: Call, rank: int, number: int) -> torch.Tensor:
    me, parts = call.members.index(rank), [value(call, member, number) for member in call.members]
    if call.kind == "allreduce":
        return reduced(call, parts)
    if call.kind == "reducescatter":
        return reduced(call, parts).tensor_split(len(parts))[me]
    if call.kind == "broadcast":
        return parts[call.members.index(call.root)]
    if call.kind == "allgather":
        return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
    rows = [part.split(sent(call, member)) for part, member in zip(parts, call.members, strict=True)]
    return torch.cat([each[me] for each in rows])


def expected_gradient(call: Call, rank: int, number: int) -> torch.Tensor:
    """The gradient of the input, if that of the result of each rank is `weights`."""
    me, count, mine = call.members.index(rank), len(call.members), value(call, rank, number)
    every = [weights(call, member, number) for member in call.members]
    mean = dataclasses.replace(call, op="Average", before=1.0, after=1.0)
    if call.kind == "allreduce":
        return reduced(call, every)
    if call.kind == "broadcast":
        return reduced(mean, every) if rank == call.root else torch.zeros_like(mine)
    if call.kind == "allgather":
        lengths = [value(call, member, number).shape[:1].numel() for member in call.members]
        return reduced(mean, every).split(lengths)[me].reshape(mine.shape)
    if call.kind == "reducescatter":
        return torch.cat(every) * (call.before * call.after * (count if call.op == "Sum" else 1))
    back = [every[i].split([sent(call, s)[i] for s in call.members])[me] for i in range(count)]
    return torch.cat(back)


def weights(call: Call, rank: int, number: int) -> torch.Tensor:
    return _numbers(call, rank, number, expected(call, rank, number).shape, call.tensors[number][1], 1)


def differs(got: Any, want: torch.Tensor, exact: bool) -> bool:
    if not isinstance(got, torch.Tensor) or got.dtype != want.dtype or got.shape != want.shape:
        return True
    return _bytes(got) != _bytes(want) if exact else not torch.allclose(got.double(), want.double(), 1e-2, 1e-2)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# ---- Calls


class Run:
    """A call on this rank."""

    def __init__(self, call: Call, rank: int, sets: dict[tuple[int, ...], Any]) -> None:
        self.call, self.rank = call, rank
        self.options = {} if call.kind in GLOBAL else {"process_set": sets[call.members]}
        self.inputs = [value(call, rank, number) for number in range(len(call.tensors))]
        layouts = [layout for _, _, layout in call.tensors]
        self.made = [process_group.Tensor(*pair) for pair in zip(self.inputs, layouts, strict=True)]
        self.given = [made.view.requires_grad_() if call.gradient else made.view for made in self.made]
        self.is_odd = bool(call.wrong) and call.odd == rank
        self.handle: Any = None
        self.results: Any = None
        self.received: Any = None

    def start(self) -> None:
        call = self.call
        if call.kind not in COLLECTIVES:
            self.results = getattr(self, call.kind)()
            return
        name = "other" if self.is_odd and call.wrong == "name" else call.name
        options: dict[str, Any] = {**self.options, "name": name}
        kind, given = call.kind, self._given()
        if kind in ("allreduce", "reducescatter"):
            op = ("Average" if call.op == "Sum" else "Sum") if self.is_odd and call.wrong == "op" else call.op
            options |= {"op": getattr(hvd, op), "prescale_factor": call.before, "postscale_factor": call.after}
            options |= {"compression": COMPRESSIONS[call.compression]} if not call.form else {}
        if kind == "broadcast":
            wrong_root = next(
                rank for rank in (*call.members, call.root) if rank != call.root or len(call.members) == 1
            )
            options["root_rank"] = wrong_root if self.is_odd and call.wrong == "root" else call.root
        if kind == "alltoall" and (call.splits or call.wrong == "splits"):
            rows = sent(call, self.rank)
            rows = [rows[0] + 1, *rows[1:]] if self.is_odd and call.wrong == "splits" else rows
            options["splits"] = torch.tensor(rows, dtype=getattr(torch, call.splits)) if "int" in call.splits else rows
        if self.is_odd and call.wrong == "kind":
            kind, options = "allgather", {**self.options, "name": name}
            given = given if isinstance(given, list) or given.ndim else given.reshape(1)
        grouped = "grouped_" * call.is_list
        form = "_async_" if call.form == "async_" else "_async" if call.is_async else call.form
        form = form.rstrip("_") if kind == "allgather" else form
        self.handle = getattr(hvd, f"{grouped}{kind}{form}")(given, **options)

    def _given(self) -> Any:
        """The argument, on the odd rank the wrong one."""
        wrong, given = self.call.wrong if self.is_odd else "", list(self.given)
        if wrong == "shape":
            given[0] = torch.zeros((*given[0].shape, 2) if given[0].ndim else (2, 2), dtype=given[0].dtype)
        elif wrong == "dtype":
            given[0] = given[0].to(torch.float32 if given[0].dtype != torch.float32 else torch.float64)
        elif wrong == "sparse":
            given[0] = given[0].to(torch.float32).reshape(-1).to_sparse()
        elif self.call.wrong == "overlap":
            given = [given[0], given[0].detach()] if self.is_odd else [given[0], given[0].clone()]
        return given if self.call.is_list or self.call.wrong == "overlap" else given[0]

    def wait(self) -> str:
        """Return the difference from the expected results."""
        if self.call.kind not in COLLECTIVES:
            return self.results or ""
        call, found = self.call, self.handle
        if call.is_async:
            if call.seed % 3 == 0:
                hvd.poll(found)
            found = hvd.synchronize(found)
        if call.kind == "alltoall" and (call.splits or call.is_async):
            found, received = found
            want = torch.tensor([sent(call, member)[call.members.index(self.rank)] for member in call.members])
            dtype = torch.int32 if "int" not in call.splits else getattr(torch, call.splits)
            if differs(received, want.to(dtype), True):
                return f"received splits {received}, expected {want}"
        self.results = list(found) if call.is_list else [found]
        exact = call.op != "Average" or call.kind in MOVES
        for number, got in enumerate(self.results):
            want = expected(call, self.rank, number)
            if differs(got, want, (exact and not got.dtype.is_floating_point) or call.kind in MOVES):
                return f"tensor {number} is {got}, expected {want}"
            if call.in_place and got is not self.given[number]:
                return f"result {number} is another tensor"
            if not call.in_place and differs(self.given[number], self.inputs[number], True):
                return f"input {number} has changed"
        if not all(made.gaps_are_unchanged() for made in self.made):
            return "elements beside those of a tensor have changed"
        return self.gradients() if call.gradient and self.results else ""

    def gradients(self) -> str:
        call = self.call
        pairs = [(result * weights(call, self.rank, i)).sum() for i, result in enumerate(self.results)]
        sum(each.double() for each in pairs).backward()
        for number, given in enumerate(self.given):
            want = expected_gradient(call, self.rank, number)
            if differs(given.grad, want, False):
                return f"the gradient of tensor {number} is {given.grad}, expected {want}"
        return ""

    # The other calls. They return the difference.

    def barrier(self) -> str:
        hvd.barrier(**self.options)
        return ""

    def object(self, rank: int) -> Any:
        if self.is_odd and self.call.wrong == "pickle":
            return (number for number in range(2))
        return {"rank": rank, "list": [self.call.seed] * (rank + 1), "none": None}

    def broadcast_object(self) -> str:
        root = self.call.odd if self.call.wrong == "pickle" else self.call.root
        name = "other" if self.is_odd and self.call.wrong == "name" else self.call.name
        found = hvd.broadcast_object(self.object(self.rank), root, name, **self.options)
        return "" if found == self.object(root) else f"{found}"

    def allgather_object(self) -> str:
        name = "other" if self.is_odd and self.call.wrong == "name" else self.call.name
        found = hvd.allgather_object(self.object(self.rank), name)
        return "" if found == [self.object(rank) for rank in self.call.members] else f"{found}"

    def sparse(self) -> str:
        def of(rank: int) -> torch.Tensor:
            return value(self.call, rank, 0) * (
                torch.arange(value(self.call, rank, 0).numel()) % 3 == rank % 3
            ).reshape(value(self.call, rank, 0).shape)

        if not self.inputs[0].ndim:
            return ""
        handle = hvd.sparse_allreduce_async(
            of(self.rank).to_sparse(1 + self.call.seed % self.inputs[0].ndim),
            name=self.call.name or "sparse", op=getattr(hvd, self.call.op), **self.options,
        )  # fmt: skip
        found, want = handle(), reduced(self.call, [of(member) for member in self.call.members])
        wrong = not found.is_sparse or differs(found.to_dense(), want, False)
        return f"{found}, expected {want}" if wrong else ""

    def parameters(self) -> str:
        tensors = list(enumerate(self.given))
        if self.is_odd and self.call.wrong:
            tensors[0] = 0, self._given()
        random.Random(self.call.seed + self.rank).shuffle(tensors)
        given: Any = {f"p{number}": tensor for number, tensor in tensors}
        if self.call.seed % 3:
            pairs = sorted(given.items())
            given = pairs if self.call.seed % 3 == 1 else [tensor for _, tensor in pairs]
        hvd.broadcast_parameters(given, self.call.root)
        for number, got in enumerate(self.given):
            if differs(got, want := value(self.call, self.call.root, number), True):
                return f"parameter {number} is {got}, expected {want}"
        return ""

    def join(self) -> str:
        """Each rank makes another number of allreduces."""
        steps = [(self.call.seed >> 2 * rank) % 3 for rank in self.call.members]
        call = dataclasses.replace(self.call, kind="allreduce")
        for step in range(steps[self.rank]):
            active = [value(call, rank, 0) for rank in call.members if steps[rank] > step]
            found = hvd.allreduce(self.given[0], op=getattr(hvd, call.op), name=call.name)
            if differs(found, want := reduced(call, active, len(steps)), False):
                return f"{found} in step {step}, expected {want}"
        last = hvd.join()
        if set(hvd.allgather_object(last)) != {last} or steps[last] != max(steps):
            return f"rank {last} joined last, with {steps} steps"
        return ""


# ---- The ranks


def _worlds(plan: Scenario) -> dict[tuple[int, ...], Any]:
    """Make the world; return its process sets by their ranks."""
    sets: dict[tuple[int, ...], Any] = {members: hvd.ProcessSet(list(members)) for members in plan.sets}
    if plan.door.startswith("allred"):
        allred.init()
    elif plan.door == "torch":
        dist.init_process_group("allred")
    elif plan.door == "comm":
        from mpi4py import MPI

        hvd.init(MPI.COMM_WORLD)
    if "hvd" in plan.door:
        hvd.init()
    if plan.door == "sets":
        hvd.init(process_sets=list(sets.values()))
    else:
        for members in plan.sets:
            sets[members] = hvd.add_process_set(sets[members] if len(members) % 2 else list(members))
    return {**sets, tuple(range(plan.size)): hvd.global_process_set}


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str | None]]:
    sets = _worlds(plan)
    training = iter(()) if plan.training is None else hvd_training.check(plan.training, directory, sets)
    for number, burst in itertools.zip_longest(range(len(plan.bursts)), plan.bursts):
        runs = [Run(call, hvd.rank(), sets) for call in burst if hvd.rank() in call.members]
        if burst and burst[0].wrong:
            yield _wrong(runs)
            yield from itertools.islice(training, 2)
            continue
        for run in runs:
            run.start()
        if plan.across[number]:
            yield from itertools.islice(training, 2)
        problems = [f"{run.call}: {problem}" for run in reversed(runs) if (problem := run.wait())]
        yield f"burst {number}: {problems[0]}" if problems else "", None
        if not plan.across[number]:
            yield from itertools.islice(training, 2)
    yield from training
    if plan.door == "torch":
        dist.destroy_process_group()
    hvd.shutdown()


def _wrong(runs: list[Run]) -> tuple[str, str | None]:
    """A call that one rank makes wrongly: the same error on all, and nothing changes."""
    if not runs:
        return "", None
    (run,) = runs
    call = run.call
    try:
        if call.wrong == "order":
            _other_order(run)
        else:
            run.start()
            run.wait()
    except hvd.HorovodInternalError as error:
        same = call.kind == "parameters" or not any(map(differs, run.given, run.inputs, itertools.repeat(True)))
        return "" if same else f"{call}: a call that raised an error has changed its tensor", str(error)
    return f"{call}: no error", ""


def _other_order(run: Run) -> None:
    names, error = ["b", "a"] if run.is_odd else ["a", "b"], None
    handles = [hvd.allreduce_async(run.given[0].clone(), name=name, op=hvd.Max, **run.options) for name in names]
    for handle in handles:
        try:
            hvd.synchronize(handle)
            raise AssertionError("no error")
        except hvd.HorovodInternalError as found:
            error = error or found
    assert error is not None
    raise error
