"""Scenarios of the collectives: operations and oracle of tests/fuzz, some with a wrong call of one rank.

After a wrong call all ranks have raised the same error, and the next operation works.
"""

import dataclasses
import hashlib
import math
import pathlib
import random
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "fuzz"))

import calls
import plan
from arithmetic import difference, expected, inputs, without_nan_payload

import allred
from allred.errors import AllredError, InputError, MismatchError

LARGE = 0.08  # the share of operations that may have large arrays, such as a chunk of shared memory; they take time


def scenario(rng: random.Random, size: int) -> plan.Job:
    operations = []
    for _ in range(rng.randint(1, 6)):
        operation = dataclasses.replace(plan._operation(rng, size), delays=(0.0,) * size)
        operation = _with_twins(operation) if rng.random() < 0.4 else operation
        operations.append(operation if rng.random() < LARGE else _smaller(operation))
    rank, where = rng.randrange(size), rng.randrange(len(operations))
    fault = plan._wrong(rng, rank, where, tuple(operations)) if size > 1 and rng.random() < 0.4 else plan.Fault()
    job = plan.Job(rng.randrange(2**31), size, "", "", "", tuple(operations), dataclasses.replace(fault, caught=True))
    return plan._compressed(job)


# Dtypes that tests/fuzz lacks, because its jobs follow from their seeds.
TWINS = {"float32": "complex64", "float64": "complex128", "int16": "uint16", "int32": "uint32", "int64": "uint64"}


def _with_twins(operation: plan.Operation) -> plan.Operation:
    """Replace dtypes. Products of complex numbers have no NaN and no infinity: MPI may compute with these otherwise."""
    twins = {name: twin for name, twin in TWINS.items() if "complex" not in twin or operation.op not in ("Min", "Max")}
    dtypes = tuple(twins.get(name, name) for name in operation.dtypes)
    return dataclasses.replace(operation, dtypes=dtypes, specials=operation.specials and operation.op != "Product")


def _smaller(operation: plan.Operation) -> plan.Operation:
    """Make large arrays small: those with more elements than the largest small ones of tests/fuzz."""
    most = max(plan.SMALL)
    rows = operation.rows and tuple(tuple(number % most for number in each) for each in operation.rows)
    shapes = tuple(
        tuple(number % 61 for number in shape) if math.prod(shape) > most else shape for shape in operation.shapes
    )
    return dataclasses.replace(operation, rows=rows, shapes=shapes)


def check(job: plan.Job, directory: pathlib.Path) -> Iterator[tuple[str, str]]:
    rank = allred.rank()
    for index in range(len(job.operations)):
        wrong = job.fault.kind == "wrong" and job.fault.operation == index
        operation = plan.called(job, rank, index)
        place = index + (wrong and job.fault.change == "next" and job.fault.rank == rank)
        rng = random.Random(f"{job.seed} {index} {rank}")
        call = calls.Call(operation, inputs(job, place, operation, rank), rank, job.ranks, rng)
        try:
            wait = None if wrong or rng.random() < 0.5 else call.start()
            results, error = call.run() if wait is None else wait(), None
        except AllredError as raised:
            results, error = [], raised
        if wrong or error:
            yield _refused(job, call, error), f"{type(error).__name__}: {error}"
            continue
        problem, bits = "", hashlib.sha256()
        for got, want in zip(results, expected(job, index, operation, rank), strict=True):
            problem = problem or difference(got, want, exactly=False)
            bits.update(without_nan_payload(got) if want.everywhere else b"")
        problem = problem or ("" if call.right_memory(results) else "the result is in the wrong memory")
        yield problem and f"operation {index}, {operation}: {problem}", bits.hexdigest()


def _refused(job: plan.Job, call: calls.Call, error: AllredError | None) -> str:
    has_no_min = job.fault.change == "op" and any("complex" in name for name in call.operation.dtypes)
    is_step = call.operation.kind == "step"  # whose other operator is Average or Sum
    kinds = (InputError,) if job.fault.change == "unusable" or (has_no_min and not is_step) else (MismatchError,)
    if job.fault.kind != "wrong" or not isinstance(error, kinds):
        return f"{call.operation}: {type(error).__name__}: {error}, with {job.fault}"
    return "" if call.untouched() else f"{call.operation}: a call that raised an error changed its arguments"
