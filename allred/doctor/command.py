"""`python -m allred doctor`: the order of things.

    every rank looks for itself -> MPI starts -> what all have seen goes to rank 0, which judges and prints
    -> the trials, by all ranks together -> what came of them goes to rank 0, which judges and prints -> the end

Whatever waits for other ranks has a limit: here, or by a guard (guard.py) where it waits in C. The exit code is 1 if a
line says FAIL, else 0.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import allred
from allred.bench import setting
from allred.comm import functions
from allred.doctor import gather, library, phases, ranks, start, topics, trials
from allred.doctor.arguments import parsed
from allred.doctor.guard import Guard
from allred.doctor.line import FAIL, NOTE, Line, exit_code, words
from allred.doctor.printer import Printer
from allred.doctor.ranks import Rank, Unseen

Trial = tuple[str, str, Callable[[], Any]]  # its topic in what is gathered, its title in the report, and what to call

_LOOKING = 3  # limits, for what a rank looks at by itself: each probe that could take long has a limit of its own
_PATIENCE = 4  # limits, for rank 0's answer: it may be waiting for others
_GUARD_S = 10.0  # after which the guard ends what should have ended by its own limit
_BEHIND_S = 1.0  # by which ranks that say nothing go on later than the one that speaks, where nothing else orders them


def main(arguments: list[str]) -> int:
    """Examine what is here; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m allred doctor",
        description="What is good here, what is not, and what to type. Under mpirun ranks are compared.",
        epilog="Verdicts: ok; note, good to know; warn, slow or not as meant; FAIL, which makes the exit code 1.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line: verdict, topic, found, remedy")
    parser.add_argument("--limit-s", type=float, default=30.0, help="longest wait for other ranks; default 30")
    options = parsed(parser, arguments)
    if isinstance(options, int):
        return options
    return examine(Printer(options.json), options.limit_s)


def examine(printer: Printer, limit_s: float) -> int:
    """Look, start MPI, judge, try; the exit code."""
    guard = Guard(printer.speaks)
    try:
        with phases.waiting(guard, printer, "ranks", _LOOKING * limit_s):
            seen = ranks.look(topics.TOPICS)
            warned = phases.warning(seen)
            printer.add(warned)
        if warned:  # MPI may end all ranks as soon as the first starts it; their launcher drops what it has not read
            time.sleep(_BEHIND_S if printer.speaks else 3 * _BEHIND_S)
        with phases.starting(guard, printer, seen, limit_s):
            loaded = seen["MPI library"]
            text = loaded.text if isinstance(loaded, library.Library) else ""
            MPI, world = start.start(text)  # noqa: N806  (mpi4py's spelling)
            comm = MPI.COMM_WORLD.Dup() if MPI is not None else None
        printer.speaks = world.rank == 0 and (world.size > 1 or setting.first_rank())
        rank = Rank(world.rank, world.host, {**seen, "world": world})
        code = _examine(guard, printer, comm, rank, limit_s)
        if comm is not None and allred.is_initialized() and functions.current().queue.poisoned:
            comm.Abort(1)  # an operation of MPI's is under way for ever
        with phases.waiting(guard, printer, "MPI's end", limit_s):
            _finish(MPI)
    finally:
        guard.close()
    if code and not printer.speaks and world.worlds_of_one:
        time.sleep(_BEHIND_S)
    return code


def _examine(guard: Guard, printer: Printer, comm: Any, rank: Rank, limit_s: float) -> int:
    """Judge and try, with all ranks of the world; the exit code, on all of them."""
    with phases.waiting(guard, printer, "ranks", 2 * limit_s):
        found = gather.to_first(comm, rank, limit_s)
    printer.add(topics.judge(list(found.values())))
    _require_all(printer, comm, found, limit_s)
    if not gather.from_first(comm, exit_code(printer.lines) == 0, _PATIENCE * limit_s):
        printer.add([Line(NOTE, "allreduce", "not tried: first put right what fails")])
    else:
        for made in _rounds(comm, limit_s):
            tried = Rank(rank.rank, rank.host, _tried(guard, printer, made, limit_s))
            with phases.waiting(guard, printer, "ranks", 3 * limit_s):
                found = gather.to_first(comm, tried, 2 * limit_s)
            printer.add(trials.judge(list(found.values())))
            _require_all(printer, comm, found, 2 * limit_s)
    return int(gather.from_first(comm, printer.end(), _PATIENCE * limit_s))


def _rounds(comm: Any, limit_s: float) -> list[list[Trial]]:
    """The trials. MPI's own sums come last, when the rest is printed: an error in them ends the process in MPICH."""
    alone: list[Trial] = [
        ("init", "allred.init()", lambda: trials.init(limit_s)),
        ("allreduce", "allreduce", lambda: [trials.time_allreduce(nbytes) for nbytes in trials.SIZES]),
    ]
    if comm is None or comm.Get_size() == 1:
        return [alone]
    together: Trial = ("sharing", "shared memory", lambda: trials.share(comm))
    return [[together, *alone], [("mpi", trials.MPI_SUMS, lambda: trials.mpi_sums(comm))]]


def _tried(guard: Guard, printer: Printer, made: list[Trial], limit_s: float) -> dict[str, Any]:
    """What came of the trials on this rank; an Unseen for one that raised."""
    tried: dict[str, Any] = {}
    for name, title, trial in made:
        if name == "allreduce" and not allred.is_initialized():
            break
        try:
            with phases.waiting(guard, printer, title, limit_s + _GUARD_S):
                tried[name] = trial()
        except Exception as error:  # a trial that fails must not end the others
            tried[name] = Unseen(words(error))
    return tried


def _require_all(printer: Printer, comm: Any, found: dict[int, Any], limit_s: float) -> None:
    """End the job where rank 0 lacks a rank's answer: nothing collective can be done any more."""
    missing = set(range(comm.Get_size())) - set(found) if comm is not None and comm.Get_rank() == 0 else set()
    if missing:
        number = setting.cores(missing)
        who = f"rank{'s' * (len(missing) > 1)} {number} of {comm.Get_size()}"
        remedy = "look there with top or py-spy for what hangs; --limit-s 120 if the machine is only slow"
        printer.add([Line(FAIL, "ranks", f"no answer from {who} within {limit_s:g} s", remedy)])
        printer.end()
        comm.Abort(1)


def _finish(MPI: Any) -> None:  # noqa: N803
    """Leave the world, so that the exit code is what the launcher gets."""
    if allred.is_initialized():
        allred.shutdown()
    if MPI is not None and not MPI.Is_finalized():
        MPI.Finalize()
