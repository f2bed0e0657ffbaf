"""The last checkpoint: after training without an error, after an exception, and after all ranks have joined.

1  well: all ranks are at the end of the same step (mode ps: of their own), the chief writes, all hear what came of it
2  after an exception: the rank that raised it writes. In mode sync its parameters are those of all, so long as no
   update was cut short. Often all ranks fail at once: then one of them writes, and the others wait for it
3  the others, who wait for that rank in a collective or have failed too, wait as long as it writes, and so does the end
   of the job (allred.watch.wait.busy). The same holds for a checkpoint that was being written
4  after allred.join(): the rank that joined last writes, if it has made updates that the chief lacks
"""

import contextlib
import os
import time
from collections.abc import Callable

from allred import checkpoint
from allred.cluster import report, topology
from allred.comm import functions
from allred.errors import (
    AllredError,
    CheckpointError,
    CollectiveTimeout,
    DriftError,
    InputError,
    NonFiniteError,
    RemoteRankError,
)
from allred.modes.optimizer import DistributedOptimizer
from allred.session import together
from allred.session.saver import Saver
from allred.watch import wait

Make = Callable[[], Callable[[str], str]]  # gives what writes the checkpoint of now

# Others have caused them, or the ranks differ: what this rank has is not to be kept.
_OTHERS = (RemoteRankError, CollectiveTimeout, DriftError)
_ANOTHERS_S = 600.0  # at most: until another rank that has failed too has written it


def write(saver: Saver, optimizer: DistributedOptimizer, step: int, make: Make) -> str | None:
    """At a good end, on all ranks: the chief writes, if there is a directory; its path there. Raises CheckpointError or
    InputError, on all, if it could not."""
    path: str | None = None
    failure: AllredError | None = None
    if saver.directory and topology.rank() == 0:
        try:
            with wait.busy():
                path = saver.save_last(step, make)
        except (CheckpointError, InputError) as error:
            failure = CheckpointError(f"the last checkpoint was not written: {error}; {_what_stands(saver.directory)}")
    together.hear_of(optimizer, failure)
    return path


def write_joined(saver: Saver, optimizer: DistributedOptimizer, writer: int, make: Make) -> int:
    """Write a checkpoint after all ranks have joined, if rank `writer`, which joined last, has made updates that the
    chief lacks. Collective. Returns the global step of rank `writer`. If the checkpoint cannot be written, the chief
    prints a warning and training continues."""
    steps = functions.allgather_object(optimizer.global_step)
    step = int(steps[writer])
    if not saver.directory or step == steps[0]:
        return step
    path, failure = None, ""
    if topology.rank() == writer:
        try:
            path = saver.save_last(step, make)
        except (CheckpointError, InputError) as error:
            failure = str(error)
    with together.waiting():
        path, failure = functions.broadcast_object((path, failure), writer)
    if failure:
        report.say(
            f"rank {writer}, which joined last, could not write the checkpoint of step {step}: {failure}. Rank 0 does "
            f"not have the last updates of rank {writer}; call opt.broadcast(params, root={writer}) on all ranks"
        )
        return step
    saver.begin(step)
    report.inform(f"checkpoint {path}, written by rank {writer}, which joined last")
    return step


def unwritable(saver: Saver) -> AllredError | None:
    """The error of a directory in which no checkpoint can be written, before training rather than behind it."""
    try:
        if saver.directory:
            checkpoint.abandon(checkpoint.begin(saver.directory, 0))
    except CheckpointError as error:
        return CheckpointError(f"Session: no checkpoint can be written to {saver.directory}: {error}")
    return None


def _what_stands(directory: str) -> str:
    with contextlib.suppress(CheckpointError):
        if newest := checkpoint.newest(directory):
            return f"the newest one is {newest}"
    return "there is none"


def write_after(
    error: BaseException, in_step: bool, saver: Saver, optimizer: DistributedOptimizer, token: str, make: Make
) -> str | None:
    """Keep what there is, if it is of a step and the error this rank's own; the path if this rank has written it.

    in_step: whether the step at hand was not over. token: of the session, the same on all ranks.
    """
    with wait.busy():
        saver.wait()  # the checkpoint that is being written may be the newest
        if isinstance(error, (*_OTHERS, GeneratorExit)):
            return None
        if why := _why_not(error, in_step, optimizer):
            _tell_why_none(f"{why}; the newest one stands")
            return None
        try:
            step = optimizer.session_support.latest_step()
            if checkpoint.has(saver.directory, step):
                return None
            claim = os.path.join(saver.directory, f".step-{step:08d}.{token}.0.tmp")
            if _is_first(claim):
                try:
                    path = saver.save_last(step, make)
                    if path is None:
                        _tell_why_none(f"no update has been made since step {step}, where training began")
                    else:
                        report.say_here(f"the last checkpoint is {path}")
                    return path
                finally:
                    with contextlib.suppress(OSError):  # if nothing was written, nobody is to wait for it
                        os.rmdir(claim)
            deadline = time.monotonic() + _ANOTHERS_S
            while os.path.exists(claim) and not checkpoint.has(saver.directory, step) and time.monotonic() < deadline:
                time.sleep(0.05)  # who is killed while it writes, takes the job with it
        except AllredError as failure:
            _tell_why_none(str(failure))
    return None


def _why_not(error: BaseException, in_step: bool, optimizer: DistributedOptimizer) -> str:
    if isinstance(error, NonFiniteError) and not in_step:  # of a hook, behind the update
        return "the parameters may not be finite"
    return "an update was cut short" if optimizer.session_support.update_interrupted else ""


def _is_first(claim: str) -> bool:
    """Whether no other rank writes it. Who makes a directory does; it has the name of something that is being written,
    so that commits leave it alone until it is old."""
    try:
        os.makedirs(os.path.dirname(claim), exist_ok=True)
        os.mkdir(claim)
    except FileExistsError:
        return False
    except OSError:  # then the checkpoint will say it better
        pass
    return True


def _tell_why_none(why: str) -> None:
    report.say_here(f"no checkpoint was written at the end: {why}")
