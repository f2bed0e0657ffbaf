"""Plan of a fuzz job: a pure function of its seed, which every rank and the driver evaluate.

A job has a world (ranks, MPI, backend, nodes), a list of operations, and in some jobs one fault: an action of one rank
before one of the operations or instead of it.
"""

import dataclasses
import math
import random

Shape = tuple[int, ...]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}  # else 1
COMPRESSIONS = ("none", "fp16", "bf16")

NODES = {
    2: ("none", "none", "1,1"),
    3: ("none", "2,1", "1,2", "1,1,1"),
    4: ("none", "2,2", "3,1", "1,3", "1,2,1"),
}
SMALL = (0, 1, 2, 3, 7, 16, 61, 127, 1009)
EDGES = (2**17, 2**18, 2**20)  # bytes: a chunk of shared memory, two chunks, a chunk of MPI
STEPS_AT_MOST = 30

REDUCING = ("allreduce", "grouped_allreduce", "reducescatter")
KINDS = {  # weights of the kinds of operations
    "allreduce": 6,
    "grouped_allreduce": 4,
    "broadcast": 3,
    "allgather": 3,
    "reducescatter": 3,
    "alltoall": 3,
    "barrier": 1,
    "allgather_object": 1,
    "broadcast_object": 1,
    "step": 4,
}

# Weights of the faults of one rank. All ranks can catch the error of a `wrong` call and continue.
FAULTS = {
    **{"none": 45, "wrong": 25},
    **{"raise": 4, "sys.exit": 4, "SystemExit": 4, "interrupt": 3, "_exit": 4, "kill": 7, "stop": 4},
}
CHANGES = {  # changes of a wrong call; "next", for all kinds, calls the next operation instead
    "allreduce": ("shape", "dtype", "op", "name", "compression", "unusable"),
    "grouped_allreduce": ("shape", "dtype", "op", "name", "compression", "unusable"),
    "broadcast": ("shape", "dtype", "root", "name", "unusable"),
    "allgather": ("shape", "dtype", "name", "unusable"),
    "reducescatter": ("shape", "dtype", "op", "name", "unusable"),
    "alltoall": ("shape", "dtype", "name", "unusable"),
    "allgather_object": ("name", "unusable"),
    "broadcast_object": ("root", "name", "unusable"),
    "step": ("shape", "dtype", "op", "name", "compression", "unusable"),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One collective operation that all ranks call. shapes, dtypes: of its arrays. Other fields apply to some kinds."""

    kind: str
    shapes: tuple[Shape, ...] = ()
    dtypes: tuple[str, ...] = ()
    op: str = ""
    root: int = 0
    name: str = ""
    rows: tuple[tuple[int, ...], ...] = ()  # allgather: rows of each rank; alltoall: rows from each rank to each rank
    specials: bool = False  # NaN and infinities among the floats
    delays: tuple[float, ...] = ()  # delay of each rank in seconds
    bucket_bytes: int = 2**20
    compression: str = "none"
    unusable: bool = False  # one argument is invalid

    def __str__(self) -> str:
        what = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True))
        wire = "" if self.compression == "none" else f" as {self.compression}"
        how = f"({self.op}{wire})" if self.op else f"(root={self.root})" if self.kind.startswith("broadcast") else ""
        return f"{self.kind}{how} '{self.name}' {what}{f' rows {self.rows}' if self.rows else ''}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault of one rank at one operation. code: of exits. change, caught: of wrong calls."""

    kind: str = "none"
    rank: int = -1
    operation: int = -1
    code: int = 0
    change: str = ""
    caught: bool = True
    midway_s: float = 0.0  # kill and stop: delay after the start of the operation

    def __str__(self) -> str:
        if self.kind == "none":
            return "no fault"
        detail = f" ({self.change}{'' if self.caught else ', not caught'})" if self.change else ""
        return f"fault {self.kind}{detail} on rank {self.rank} at operation {self.operation}"


@dataclasses.dataclass(frozen=True)
class Job:
    """Job: world, operations and fault."""

    seed: int
    ranks: int
    mpi: str
    backend: str
    nodes: str
    operations: tuple[Operation, ...]
    fault: Fault

    @property
    def recorded(self) -> bool:
        """Whether the job writes a timeline."""
        return self.seed % 3 == 0

    @property
    def rank_order(self) -> bool:
        """Whether sums are computed in rank order: on one node, in shared memory."""
        return self.backend == "auto" and self.nodes == "none"

    def __str__(self) -> str:
        where = f"{self.ranks} ranks, {self.mpi}, backend {self.backend}, nodes {self.nodes}"
        timeline = ", a timeline" * self.recorded
        return f"seed {self.seed}: {where}{timeline}, {len(self.operations)} operations, {self.fault}"


def job_of(seed: int) -> Job:
    """Job of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 3, 3, 4))
    mpi, backend = rng.choice(("mpich", "mpich", "openmpi")), rng.choice(("auto", "auto", "auto", "mpi"))
    nodes = rng.choice(NODES[ranks]) if backend == "auto" else "none"
    operations = tuple(_operation(rng, ranks) for _ in range(rng.randint(2, STEPS_AT_MOST)))
    return _compressed(Job(seed, ranks, mpi, backend, nodes, operations, _fault(rng, ranks, operations)))


def _compressed(job: Job) -> Job:
    """Add compression to some operations and faults. A separate generator keeps the other properties of each seed."""
    rng = random.Random(f"{job.seed} compression")
    operations, fault = list(job.operations), job.fault
    for index, operation in enumerate(operations):
        if "compression" in CHANGES.get(operation.kind, ()):
            operations[index] = dataclasses.replace(operation, compression=rng.choice(("none", *COMPRESSIONS)))
            if fault.change and fault.operation == index and rng.random() < 0.2:
                fault = dataclasses.replace(fault, change="compression")
    return dataclasses.replace(job, operations=tuple(operations), fault=fault)


def called(job: Job, rank: int, index: int) -> Operation:
    """Operation that a rank calls at position `index`: that of the plan, unless its fault is a wrong call there."""
    fault, operation = job.fault, job.operations[index]
    if (fault.kind, fault.rank, fault.operation) != ("wrong", rank, index):
        return operation
    return job.operations[index + 1] if fault.change == "next" else changed(operation, fault.change, job.ranks)


def changed(operation: Operation, change: str, ranks: int) -> Operation:
    """Change one property of an operation."""
    if change == "unusable":
        return dataclasses.replace(operation, unusable=True)
    if change == "name":
        return dataclasses.replace(operation, name=operation.name + "'")
    if change == "root":
        return dataclasses.replace(operation, root=(operation.root + 1) % ranks)
    if change == "op":
        other = "Min" if operation.kind != "step" else "Average"
        return dataclasses.replace(operation, op="Sum" if operation.op == other else other)
    if change == "compression":
        other = COMPRESSIONS[(COMPRESSIONS.index(operation.compression) + 1) % len(COMPRESSIONS)]
        return dataclasses.replace(operation, compression=other)
    if change == "shape":
        return dataclasses.replace(operation, shapes=(*operation.shapes[:-1], (*operation.shapes[-1], 2)))
    other = "float64" if operation.dtypes[-1] == "float32" else "float32"  # valid for every reduction
    return dataclasses.replace(operation, dtypes=(*operation.dtypes[:-1], other))


def _fault(rng: random.Random, ranks: int, operations: tuple[Operation, ...]) -> Fault:
    kind = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    rank, where = rng.randrange(ranks), rng.randrange(len(operations))
    if kind == "none":
        return Fault()
    if kind == "wrong":
        return _wrong(rng, rank, where, operations)
    code = rng.randint(1, 120) if kind in ("sys.exit", "SystemExit") else 0
    midway_s = rng.choice((0.0, rng.uniform(0, 0.01))) if kind in ("kill", "stop") else 0.0
    return Fault(kind, rank, where, code=code, midway_s=midway_s)


def _wrong(rng: random.Random, rank: int, where: int, operations: tuple[Operation, ...]) -> Fault:
    operation = operations[where]
    changes = [
        change
        for change in CHANGES.get(operation.kind, ())
        if change != "compression"
        if operation.shapes or change not in ("shape", "dtype")
        if change != "op" or "bool" not in operation.dtypes
    ]
    if where + 1 < len(operations) and operations[where + 1].kind != operation.kind:
        changes += ["next"]
    if not changes:
        return Fault()
    return Fault("wrong", rank, where, change=rng.choice(changes), caught=rng.random() < 0.8)


def _operation(rng: random.Random, ranks: int) -> Operation:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    operation = Operation(
        kind,
        name=rng.choice(("", "", "w", "layers.0.weight", f"é{rng.randrange(10**6)}")) if kind != "barrier" else "",
        root=rng.randrange(ranks),
        specials=rng.random() < 0.1,
        delays=tuple(rng.uniform(0, 0.02) if rng.random() < 0.1 else 0.0 for _ in range(ranks)),
        bucket_bytes=rng.choice((1, 64, 4096, 2**18, 2**20)),
    )
    if kind in REDUCING or kind == "step":
        return _reduction(rng, operation)
    if kind in ("allgather", "alltoall"):
        return _rows(rng, operation, ranks)
    if kind == "barrier":
        return operation
    dtype = rng.choice(DTYPES)
    return dataclasses.replace(operation, dtypes=(dtype,), shapes=(shape_of(rng, ITEMSIZE.get(dtype, 1)),))


def _reduction(rng: random.Random, operation: Operation) -> Operation:
    count = rng.choice((0, 1, 2, 5, 12)) if operation.kind == "grouped_allreduce" else 1
    ops, dtypes = ("Sum", "Average", "Min", "Max", "Product"), DTYPES
    if operation.kind == "step":
        count, ops, dtypes = rng.choice((1, 2, 5, 12)), ("Sum", "Average"), FLOATS
    op = rng.choice(ops)
    dtypes = tuple(dtype for dtype in dtypes if _defined(op, dtype))
    chosen = tuple(rng.choice(dtypes) for _ in range(count))
    shapes = tuple(
        shape_of(rng, ITEMSIZE.get(dtype, 1), least_dimensions=operation.kind == "reducescatter") for dtype in chosen
    )
    return dataclasses.replace(operation, op=op, dtypes=chosen, shapes=shapes)


def _defined(op: str, dtype: str) -> bool:
    return dtype in FLOATS or (op != "Average" and not (dtype == "bool" and op == "Sum"))


def _rows(rng: random.Random, operation: Operation, ranks: int) -> Operation:
    dtype, rest = rng.choice(DTYPES), rng.choice(((), (), (1,), (3,), (0,), (2, 5)))
    most = rng.choice((2, 10, 1000, max(1, 2**20 // (ITEMSIZE.get(dtype, 1) * max(1, math.prod(rest)) * ranks))))
    equal = rng.randint(0, most)
    uneven = rng.random() < 0.7
    count = 1 if operation.kind == "allgather" else ranks
    rows = tuple(tuple(rng.randint(0, most) if uneven else equal for _ in range(count)) for _ in range(ranks))
    return dataclasses.replace(operation, dtypes=(dtype,), shapes=(rest,), rows=rows)


def shape_of(rng: random.Random, itemsize: int, least_dimensions: int = 0) -> Shape:
    """Random shape: often small, sometimes near a chunk size, rarely large."""
    draw = rng.random()
    if draw < 0.6:
        count = rng.choice(SMALL)
    elif draw < 0.85:
        count = max(0, rng.choice(EDGES) // itemsize + rng.randint(-2, 2))
    else:
        count = rng.randint(0, 3 * 2**20) // itemsize
    dimensions = rng.randint(least_dimensions, 3)
    if dimensions == 0:
        return ()
    if dimensions == 1:
        return (count,)
    inner = rng.choice((1, 2, 3, 5))
    return (count // inner, inner) if dimensions == 2 else (2, count // (2 * inner), inner)
