"""benchmarks/bench.py overlap: how much of the communication is hidden behind a synthetic backward pass.

A step runs the backward pass, which produces the gradients of a model from the last layer to the first, and `opt.step`
of a distributed optimizer that leaves the parameters unchanged. The pass takes about as long as the communication
alone, where overlap can save most. It has one part per tensor, proportional to the tensor's size.

    sleep    the core is free during the pass, as when a GPU computes
    numpy    the pass computes in numpy: a communication thread competes for cores
    python   the pass computes in one call of Python code per part, which holds the GIL

after: all communication in step(). early: opt.reduce(name, grad) after each part. share: (after - early) / (compute +
communicate - max of the two), the hidden part of the communication that can be hidden. --progress: the thread or the
caller advances the operations. The last two lines are times of the peers of rank 0: an allreduce of 64 KiB that all
ranks have started, while rank 0 waits too, and while rank 0 is in one call that holds the GIL for `busy_ms`.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import allred
from allred.arrays import Array
from allred.bench import measure, output, verify
from allred.bench.allreduce import allocate
from allred.bench.measure import Call
from allred.comm import functions
from allred.wording import count

Part = Callable[[float], object]  # takes the seconds to work
SETS = {**verify.SETS, "mlp": lambda: [(512, 512), (512,)] * 8}
BUSY_S = 0.2
PEER_BYTES = 65536
PEER_CALLS = 200


class _NoUpdate:
    """An optimizer that leaves the parameters unchanged."""

    def step(self, params: Any, grads: Any) -> None:
        pass


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure; rank 0 prints. Calls allred.shutdown()."""
    labels = {"ranks": comm.Get_size(), "backend": functions.current().name, "progress": options.progress}
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    assert not functions.current().queue.engine.has_progress_thread
    ranks = count(labels["ranks"], "rank")
    writer.text(f"overlap: {ranks}, backend {labels['backend']}, progress {labels['progress']}")
    writer.text("\n".join(output.condition_lines(conditions)))

    def write(name: str, result: dict[str, Any]) -> None:
        record = {"bench": "overlap", "set": name, **labels, **result, **conditions}
        texts = {key: output.number(value) for key, value in record.items() if key.endswith(("_us", "share"))}
        label = f"{name:>12} {record.get('backward') or 'rank 0 ' + record['rank_0']:>12}"
        writer.result(record, label + "".join(f"  {key.removesuffix('_us')} {text}" for key, text in texts.items()))

    for name in options.items:  # the first step with reduce() starts the progress thread
        for result in _measure_steps(name, options, comm):
            write(name, result)
    for result in _measure_peers(comm):
        write("peers", result)
    comm.Free()
    allred.shutdown()


def _measure_steps(name: str, options: argparse.Namespace, comm: Any) -> Iterator[dict[str, Any]]:
    group = allocate(SETS[name](), options.dtype)
    grads = {f"{index:04}": array for index, array in enumerate(group)}
    params = dict(zip(grads, allocate([array.shape for array in group], options.dtype), strict=True))
    opt = allred.distributed(_NoUpdate(), name=name)
    for _ in range(2):  # overlap starts with the second step
        _step(opt, params, grads, 0.0, time.sleep, early=True)
    alone = measure.interleave({"step": lambda: opt.step(params, grads)}, comm, options.seconds / 2)
    compute_s = float(np.median(alone["step"].seconds))
    for kind, part in (("sleep", time.sleep), ("numpy", _numpy_part()), ("python", _python_part())):
        calls: dict[str, Call] = {
            "compute": functools.partial(_backward, grads, compute_s, part, None),
            "after": functools.partial(_step, opt, params, grads, compute_s, part, False),
            "early": functools.partial(_step, opt, params, grads, compute_s, part, True),
        }
        times = measure.interleave(calls, comm, options.seconds)
        compute, after, early = (times[name].us(50) for name in calls)
        communicate = compute_s * 1e6
        can_be_hidden = compute + communicate - max(compute, communicate)
        yield {
            "backward": kind,
            "compute_us": output.rounded(compute),
            "communicate_us": output.rounded(communicate),
            "after_us": output.rounded(after),
            "early_us": output.rounded(early),
            "share": output.rounded((after - early) / can_be_hidden),
            "samples": len(times["early"].seconds),
        }


def _step(
    opt: Any, params: dict[str, Array], grads: dict[str, Array], compute_s: float, part: Part, early: bool
) -> None:
    _backward(grads, compute_s, part, opt if early else None)
    opt.step(params, grads)


def _backward(grads: dict[str, Array], compute_s: float, part: Part, opt: Any) -> None:
    """One part per tensor. A sleep that took too long shortens the following ones, so that the sum is right."""
    elements, end = sum(grad.size for grad in grads.values()), time.perf_counter()
    for name in reversed(grads):
        part_s = compute_s * grads[name].size / elements
        end += part_s
        if part is not time.sleep:
            part(part_s)
        elif (left := end - time.perf_counter()) > 0:
            part(left)
        if opt is not None:
            opt.reduce(name, grads[name])


def _numpy_part() -> Part:
    x, y = np.full(8192, 1.1, np.float32), np.empty(8192, np.float32)
    return _calibrated(lambda count: [np.sqrt(x, out=y) for _ in range(count)])


def _python_part() -> Part:
    return _calibrated(lambda count: sum(range(100 * count)))


def _calibrated(work: Callable[[int], object]) -> Part:
    """A function of seconds, from a function of a repeat count; the seconds hold if nothing else uses the core."""
    work(1000)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work(2000)
        times.append((time.perf_counter() - start) / 2000)
    each_s = min(times)
    return lambda seconds: work(max(1, round(seconds / each_s)))


def _measure_peers(comm: Any) -> list[dict[str, Any]]:
    """How long the peers of rank 0 wait for each of PEER_CALLS allreduces, while rank 0 waits and while it is busy."""
    busy, found = _python_part(), []
    group = allocate([(PEER_BYTES // 4,)] * PEER_CALLS, np.dtype(np.float32))
    for state in ("waits", "busy"):
        times: list[float] = []
        for _ in range(5):
            comm.Barrier()
            works = [allred.allreduce_async_(array, allred.Sum) for array in group]
            if comm.Get_rank() == 0 and state == "busy":
                busy(BUSY_S)
            for work in works:
                start = time.perf_counter()
                work.wait()
                times.append(time.perf_counter() - start)
        times_of_ranks = comm.gather(times)
        if times_of_ranks is not None and len(times_of_ranks) > 1:
            us = np.array(times_of_ranks[1:]).reshape(-1) * 1e6
            found.append(
                {
                    "rank_0": state,
                    "busy_ms": BUSY_S * 1e3,
                    "bytes": PEER_BYTES,
                    "p50_us": output.rounded(float(np.percentile(us, 50))),
                    "p99_us": output.rounded(float(np.percentile(us, 99))),
                    "longest_us": output.rounded(float(us.max())),
                }
            )
    return comm.bcast(found)  # type: ignore[no-any-return]
