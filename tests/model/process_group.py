"""Scenarios of torch.distributed: calls on a group of backend allred, compared with closed forms and with backend gloo.

Values are small integers, so that results are exact in each dtype and in any order. A call is made on all ranks or on a
subgroup, at once or with async_op=True beside others. One rank may make a wrong call: an error on all ranks, which
changes nothing, and the next call works.
"""

import dataclasses
import functools
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import torch
import torch.distributed as dist

from allred.errors import AllredError

torch.set_num_threads(1)

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "uint8",
    "int8",
    "bool",
    "complex64",
    "complex128",
]
SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0), (2, 2, 3, 2), (1, 7, 1), (3000,)]
LAYOUTS = ["C", "C", "strided", "transposed", "offset", "channels_last"]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced", "coalescing_manager"]
DATA_MOVEMENT = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
]
OTHERS = ["send_recv", "barrier", "all_gather_object", "broadcast_object", "gather_object", "scatter_object"]
SYNC_ONLY = ["coalescing_manager", *OTHERS]  # not with async_op=True
GAP = 77  # the elements of memory between those of a tensor


@dataclasses.dataclass(frozen=True, repr=False)
class Call(array_nests.Plan):
    kind: str
    members: tuple[int, ...]
    seed: int
    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    op: str = "SUM"
    layouts: tuple[str, str] = ("C", "C")  # of inputs and outputs
    expanded: bool = False  # inputs
    root: int = 0  # of members
    is_async: bool = False
    splits: bool = False  # uneven, of all_to_all_single
    wrong: int = -1  # the rank with another shape or dtype


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    size: int
    bursts: tuple[tuple[Call, ...], ...]  # calls that are in flight together


def scenario(rng: random.Random, size: int) -> Scenario:
    bursts = []
    for _ in range(rng.randint(2, 8)):
        calls = [_call(rng, size) for _ in range(rng.choice([1, 1, 2, 3]))]
        if len(calls) > 1:
            calls = [dataclasses.replace(call, is_async=call.kind not in SYNC_ONLY, wrong=-1) for call in calls]
        bursts.append(tuple(calls))
    return Scenario(size, tuple(bursts))


def _call(rng: random.Random, size: int) -> Call:
    members = tuple(range(size))
    if rng.random() < 0.3:
        members = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    kind, dtype = rng.choice(REDUCTIONS + DATA_MOVEMENT + OTHERS), rng.choice(DTYPES)
    ops = ["SUM", "PRODUCT", "MIN", "MAX"]
    ops += {"f": ["AVG"], "b": ["AVG"], "i": ["BAND", "BOR", "BXOR"], "u": ["BAND", "BXOR"]}.get(dtype[0], [])
    ops = ["SUM", "AVG"] if "complex" in dtype else ["SUM", "PRODUCT", "MIN", "MAX"] if dtype == "bool" else ops
    layouts = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
    if kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        layouts = "C", "C"
    wrong = (
        rng.choice(members) if len(members) > 1 and kind in ("all_reduce", "broadcast") and rng.random() < 0.1 else -1
    )
    return Call(
        kind=kind,
        members=members,
        seed=rng.randrange(2**16),
        shape=rng.choice(SHAPES),
        dtype=dtype,
        op=rng.choice(ops),
        layouts=layouts,
        expanded=rng.random() < 0.1 and kind in ("all_gather", "gather", "scatter", "all_to_all"),
        root=rng.randrange(len(members)),
        is_async=kind not in SYNC_ONLY and rng.random() < 0.4,
        splits=rng.random() < 0.5,
        wrong=wrong,
    )


# ---- Tensors


def values(call: Call, rank: int, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    shape = call.shape if shape is None else shape
    generator = torch.Generator().manual_seed(call.seed * 100 + rank * 10 + part)
    low = 0 if call.dtype in ("uint8", "bool") else -2
    made = torch.randint(low, 2 if call.dtype == "bool" else 4, shape, generator=generator)
    dtype = getattr(torch, call.dtype)
    if dtype.is_complex:
        made = torch.complex(made.double(), torch.randint(-2, 4, shape, generator=generator).double())
    if call.expanded and shape and shape[0]:
        made = made[:1].expand(shape).clone()
    return made.to(dtype)


class Tensor:
    """A tensor with a layout, and the memory that it is a part of."""

    def __init__(self, value: torch.Tensor, layout: str, expanded: bool = False) -> None:
        gap = torch.ones((), dtype=value.dtype) if value.dtype is torch.bool else torch.full((), GAP).to(value.dtype)
        self.base, self.view = value.clone(), value
        if expanded and value.ndim and value.shape[0] > 1:
            self.base = value[:1].clone()
            self.view = self.base.expand(value.shape)
        elif layout == "strided" and value.ndim:
            self.base = gap.expand(*value.shape[:-1], 2 * value.shape[-1]).clone()
            self.view = self.base[..., ::2]
        elif layout == "offset":
            self.base = gap.expand(value.numel() + 3).clone()
            self.view = self.base[3:].view(value.shape)
        elif layout == "transposed":
            axes = tuple(reversed(range(value.ndim)))
            self.base = value.permute(axes).clone(memory_format=torch.contiguous_format)
            self.view = self.base.permute(axes)
        elif layout == "channels_last" and value.ndim == 4:
            self.base = self.view = value.clone(memory_format=torch.channels_last)
        else:
            self.view = self.base
        if 0 not in self.view.stride():
            self.view.copy_(value)
        self.layout, self.gap = "C" if expanded else layout, gap

    def gaps_are_unchanged(self) -> bool:
        """Return whether the elements between those of the view are unchanged."""
        if self.layout == "strided" and self.view.ndim and self.view.numel() * 2 == self.base.numel():
            return bool((self.base[..., 1::2] == self.gap).all())
        return self.layout != "offset" or bool((self.base[:3] == self.gap).all())


# ---- The expected results


def reduced(call: Call, parts: list[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(parts)
        return stacked.any(0) if call.op in ("SUM", "MAX") else stacked.all(0)
    functions = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = functools.reduce(functions[call.op], [part.clone() for part in parts])
    return (total / len(parts)).to(dtype) if call.op == "AVG" else total


def splits_of(call: Call, source: int, target: int) -> int:
    """The number of rows that one rank sends to another."""
    return (source * 2 + target + call.seed) % 3 if call.splits else 2


# ---- Calls


class Run:
    """A call on this rank. wants: pairs of a tensor and its expected value."""

    def __init__(self, call: Call, rank: int, group: Any, parts: bool = False) -> None:
        self.call, self.me, self.n = call, call.members.index(rank), len(call.members)
        self.group, self.work, self.wants = group, None, []
        self.tensors: list[Tensor] = []
        self.root = call.members[call.root]
        self.op = getattr(dist.ReduceOp, call.op)

    def tensor(self, value: torch.Tensor, is_output: bool = False) -> torch.Tensor:
        made = Tensor(value, self.call.layouts[is_output], self.call.expanded and not is_output)
        self.tensors.append(made)
        return made.view

    def input(self, value: torch.Tensor) -> torch.Tensor:
        made = self.tensor(value)
        self.wants.append((made, value.clone()))
        return made

    def output(self, want: torch.Tensor) -> torch.Tensor:
        made = self.tensor(torch.ones_like(want), is_output=True)
        self.wants.append((made, want))
        return made

    def changed(self, value: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        made = self.tensor(value, is_output=True)
        self.wants.append((made, want))
        return made

    def of(self, rank: int, part: int = 0) -> torch.Tensor:
        return values(self.call, rank, part)

    def start(self) -> None:
        self.work = getattr(self, self.call.kind)(group=self.group)

    def wait(self) -> str:
        if self.call.is_async:
            self.work.wait()
        for number, (got, want) in enumerate(self.wants):
            if not self.is_same(got, want):
                return f"{self.call}: tensor {number} is {_text(got)}, expected {_text(want)}"
        if not all(tensor.gaps_are_unchanged() for tensor in self.tensors):
            return f"{self.call}: elements beside those of a tensor have changed"
        return ""

    def is_same(self, got: Any, want: Any) -> bool:
        if not isinstance(got, torch.Tensor):
            return bool(got == want)
        exact = self.call.op != "AVG" or not (want.is_floating_point() or want.is_complex())
        return torch.equal(got, want) if exact else torch.allclose(got, want, 1e-2, 1e-2)

    def options(self) -> dict[str, Any]:
        return {"async_op": self.call.is_async}

    def all_reduce(self, group: Any) -> Any:
        want = reduced(self.call, [self.of(rank) for rank in range(self.n)])
        return dist.all_reduce(self.changed(self.of(self.me), want), self.op, group, **self.options())

    def reduce(self, group: Any) -> Any:
        mine, total = self.of(self.me), reduced(self.call, [self.of(rank) for rank in range(self.n)])
        made = self.changed(mine, total if self.me == self.call.root else mine)
        if self.me != self.call.root:
            self.wants.pop()  # torch leaves open what the others have
        return dist.reduce(made, self.root, self.op, group, **self.options())

    def reduce_scatter(self, group: Any) -> Any:
        want = reduced(self.call, [self.of(rank, self.me) for rank in range(self.n)])
        parts = [self.input(self.of(self.me, part)) for part in range(self.n)]
        return dist.reduce_scatter(self.output(want), parts, self.op, group, **self.options())

    def reduce_scatter_tensor(self, group: Any) -> Any:
        shape = self.call.shape or (2,)
        mine = [values(self.call, self.me, part, shape) for part in range(self.n)]
        want = reduced(self.call, [values(self.call, rank, self.me, shape) for rank in range(self.n)])
        return dist.reduce_scatter_tensor(
            self.output(want), self.input(torch.cat(mine)), self.op, group, **self.options()
        )

    def coalesced(self, group: Any) -> Any:
        wants = [reduced(self.call, [self.of(rank, part) for rank in range(self.n)]) for part in range(2)]
        made = [self.changed(self.of(self.me, part), wants[part]) for part in range(2)]
        return dist.all_reduce_coalesced(made, self.op, group, **self.options())

    def coalescing_manager(self, group: Any) -> None:
        with dist._coalescing_manager(group):
            for part in range(2):
                want = reduced(self.call, [self.of(rank, part) for rank in range(self.n)])
                dist.all_reduce(self.changed(self.of(self.me, part), want), self.op, group)

    def broadcast(self, group: Any) -> Any:
        made = self.changed(self.of(self.me), self.of(self.call.root))
        return dist.broadcast(made, self.root, group, **self.options())

    def all_gather(self, group: Any) -> Any:
        found = [self.output(self.of(rank)) for rank in range(self.n)]
        return dist.all_gather(found, self.input(self.of(self.me)), group, **self.options())

    def all_gather_into_tensor(self, group: Any) -> Any:
        shape = self.call.shape or (1,)
        parts = [values(self.call, rank, 0, shape) for rank in range(self.n)]
        found = self.output(torch.stack(parts) if self.call.splits else torch.cat(parts))
        return dist.all_gather_into_tensor(found, self.input(parts[self.me]), group, **self.options())

    def all_to_all(self, group: Any) -> Any:
        found = [self.output(self.of(rank, self.me)) for rank in range(self.n)]
        parts = [self.input(self.of(self.me, part)) for part in range(self.n)]
        return dist.all_to_all(found, parts, group, **self.options())

    def all_to_all_single(self, group: Any) -> Any:
        def rows(source: int, target: int) -> torch.Tensor:
            return values(self.call, source, target, (splits_of(self.call, source, target), 3))

        found = self.output(torch.cat([rows(rank, self.me) for rank in range(self.n)]))
        given = self.input(torch.cat([rows(self.me, rank) for rank in range(self.n)]))
        ranks = range(self.n)
        outgoing, incoming = None, None
        if self.call.splits:
            outgoing = [splits_of(self.call, self.me, rank) for rank in ranks]
            incoming = [splits_of(self.call, rank, self.me) for rank in ranks]
        return dist.all_to_all_single(found, given, incoming, outgoing, group, **self.options())

    def gather(self, group: Any) -> Any:
        is_root = self.me == self.call.root
        found = [self.output(self.of(rank)) for rank in range(self.n)] if is_root else None
        return dist.gather(self.input(self.of(self.me)), found, self.root, group, **self.options())

    def scatter(self, group: Any) -> Any:
        root = self.call.root
        parts = [self.input(self.of(root, part)) for part in range(self.n)] if self.me == root else None
        return dist.scatter(self.output(self.of(root, self.me)), parts, self.root, group, **self.options())

    def send_recv(self, group: Any) -> None:
        """Each rank sends to the next one."""
        if self.n == 1:
            return
        members, after, before = self.call.members, (self.me + 1) % self.n, (self.me - 1) % self.n
        sent, found = self.input(self.of(self.me)), self.output(self.of(before))
        if self.call.splits:
            both = [
                dist.P2POp(dist.isend, sent, members[after], group),
                dist.P2POp(dist.irecv, found, members[before], group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
        else:
            work = dist.isend(sent, members[after], group, tag=self.call.seed % 100)
            dist.recv(found, members[before], group, tag=self.call.seed % 100)
            work.wait()

    def barrier(self, group: Any) -> None:
        dist.barrier(group)

    def object(self, rank: int) -> Any:
        return {"rank": rank, "list": [self.call.seed] * (rank + 1), "tensor": self.of(rank).tolist()}

    def all_gather_object(self, group: Any) -> None:
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, self.object(self.me), group)
        self.wants.append((found, [self.object(rank) for rank in range(self.n)]))

    def broadcast_object(self, group: Any) -> None:
        found = [self.object(self.me), 5 if self.me == self.call.root else None]
        dist.broadcast_object_list(found, self.root, group)
        self.wants.append((found, [self.object(self.call.root), 5]))

    def gather_object(self, group: Any) -> None:
        found: Any = [None] * self.n if self.me == self.call.root else None
        dist.gather_object(self.object(self.me), found, self.root, group)
        if found is not None:
            self.wants.append((found, [self.object(rank) for rank in range(self.n)]))

    def scatter_object(self, group: Any) -> None:
        found: list[Any] = [None]
        given = [self.object(rank) for rank in range(self.n)] if self.me == self.call.root else None
        dist.scatter_object_list(found, given, self.root, group)
        self.wants.append((found, [self.object(self.me)]))


def _text(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)[:300]


# ---- The ranks


@functools.cache
def groups(members: tuple[int, ...]) -> tuple[Any, Any]:
    """Return groups of backend allred and gloo. Collective on all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("allred")
    return dist.new_group(list(members)), dist.new_group(list(members), backend="gloo")


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str | None]]:
    for call in (call for burst in plan.bursts for call in burst):
        groups(call.members)
    rank = dist.get_rank()
    for number, burst in enumerate(plan.bursts):
        problem, text = "", ""
        if burst[0].wrong >= 0:
            problem, text = _wrong(burst[0], rank)
        else:
            runs = [Run(call, rank, groups(call.members)[0]) for call in burst if rank in call.members]
            for run in runs:
                run.start()
            for run in reversed(runs):
                problem = problem or run.wait()
            problem = problem or next(filter(None, (_with_gloo(call, rank) for call in burst)), "")
        yield problem and f"burst {number}: {problem}", text or None


def _wrong(call: Call, rank: int) -> tuple[str, str]:
    """A call with another shape or dtype on one rank: the same error on all, and nothing changes."""
    if rank not in call.members:
        return "", ""
    shape, dtype = (*call.shape, 2), "float64" if call.dtype != "float64" else "float32"
    odd = dataclasses.replace(call, **({"shape": shape} if call.splits else {"dtype": dtype}))
    call, odd = (dataclasses.replace(each, op="SUM") for each in (call, odd))
    run = Run(odd if rank == call.wrong else call, rank, groups(call.members)[0])
    mine = run.of(run.me)
    try:
        run.start()
        if call.is_async:
            run.work.wait()
    except AllredError as error:
        same = torch.equal(run.wants[0][0], mine)
        return "" if same else f"{call}: a call that raised an error has changed its tensor", f"{error}"
    return f"{call}: no error", ""


def _with_gloo(call: Call, rank: int) -> str:
    """The closed form, on gloo, where it has the call: else the model is wrong."""
    not_in_gloo = ("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "coalesced", "coalescing_manager")
    if rank not in call.members or call.kind in not_in_gloo or call.op == "AVG":
        return ""
    if call.dtype not in ("float32", "float64", "int64", "uint8"):
        return ""
    if call.kind == "all_gather_into_tensor" and call.splits:
        return ""
    if call.layouts != ("C", "C") or call.expanded or 0 in call.shape or call.kind in OTHERS:
        return ""
    run = Run(call, rank, groups(call.members)[1])
    run.start()
    found = run.wait()
    return found and f"gloo: {found}"
