"""`bench step`: `opt.step` of mode sync with SGD.

Variants: without the check for NaN; `--arena` on and off; `--sharded`, without and with `opt.share`.

The gradients are zeros in each timed step. All variants have the same parameters, except that of `opt.share`, and run
interleaved.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import allred
from allred import arrays, world
from allred.arrays import Array
from allred.bench import measure, output, verify
from allred.bench.allreduce import Arenas, allocate
from allred.bench.measure import Call
from allred.comm import functions
from allred.comm.communicator import Communicator

_ONE_COPY = "sharded, one copy"  # of the parameters
_Calls = dict[str, tuple[Call, list[Array], list[Array]]]  # by variant: a step, its parameters and its gradients


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure all sets; rank 0 prints. Raises ConfigError or WrongResultError on all ranks. Calls allred.shutdown()."""
    arenas = Arenas(options.arena)
    labels = {"ranks": comm.Get_size(), "dtype": arrays.name_of(options.dtype), "backend": functions.current().name}
    if options.arena:
        labels["arena"] = options.arena[0]
    conditions = {"op": f"Average, SGD with momentum {options.momentum:g}, check for NaN", **conditions}
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    writer.header("step", labels, conditions, "no check")
    for name in options.items:
        shapes = verify.SETS[name]()
        params = allocate(shapes, options.dtype)
        calls = _calls(arenas, name, params, options)
        for variant, (call, updated, grads) in calls.items():
            _check(f"step {name} by {variant}", call, updated, grads, comm)
        times = measure.interleave(
            {variant: call for variant, (call, *_) in calls.items()}, comm, options.seconds * (len(calls) - 1)
        )
        for variant, (*_, grads) in calls.items():
            verify.check_zeros(f"step {name} by {variant}", grads, comm)
        ours, nbytes = times.pop("allred"), sum(param.nbytes for param in params)
        what = {"bench": "step", "set": name, "bytes": nbytes, "tensors": len(params), **labels}
        for variant, theirs in times.items():
            writer.line({**what, **output.result(ours, variant, theirs, nbytes), **conditions})
    comm.Free()
    allred.shutdown()


def _calls(arenas: Arenas, name: str, params: list[Array], options: argparse.Namespace) -> _Calls:
    """Return a step of each communicator with and without the check, and the sharded steps of the first communicator;
    `allred` is the first one, with the check."""
    calls: _Calls = {}

    def add(variant: str, arena: str, params: list[Array], grads: list[Array], **settings: Any) -> None:
        settings = {"name": f"{name}, {variant}", "nonfinite": "raise"} | settings
        opt = allred.distributed(allred.optim.SGD(verify.LR, options.momentum), **settings)
        updated = opt.share(params) if variant == _ONE_COPY else params
        communicator = arenas.communicators.get(arena) or functions.current()
        calls[variant] = functools.partial(_step, opt, communicator, updated, grads), updated, grads

    for arena in arenas.names or [""]:
        grads = arenas.allocate(arena, verify.SETS[name](), options.dtype)
        variant = arenas.variant(arena) if arena else "allred"
        add(variant, arena, params, grads)
        add("no check" if variant == "allred" else f"{variant}, no check", arena, params, grads, nonfinite="ignore")
        if variant == "allred" and options.sharded:
            add("sharded", arena, params, grads, sharded=True)
            add(_ONE_COPY, arena, params, grads, sharded=True)
    return calls


def _step(opt: Any, communicator: Communicator, params: list[Array], grads: list[Array]) -> None:
    """A step over the ranks of this communicator, which are all."""
    here = world.current()
    before, here.communicator = here.communicator, communicator
    try:
        opt.step(params, grads)
    finally:
        here.communicator = before


def _check(title: str, call: Call, params: list[Array], grads: Sequence[Array], comm: Any) -> None:
    """Make one step with known numbers, then set the gradients to zero. Raises WrongResultError. Collective."""
    shapes, dtype = [param.shape for param in params], params[0].dtype
    start, known = verify.whole_params(shapes, dtype), verify.whole_gradients(shapes, dtype)
    for targets, sources in ((params, start), (grads, known)):
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
    call()
    verify.raise_if_any(title, verify.wrong_after_updates(1, params, start, known), comm)
    for grad in grads:
        grad.fill(0)
