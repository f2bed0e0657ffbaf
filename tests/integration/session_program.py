"""A training that a session runs: what it prints is judged by test_session.py.

session_program.py (DIRECTORY ARGUMENTS)...    JSON: see `main`; several trainings run one after the other, each with
its own allred.init()
"""

import json
import math
import os
import pathlib
import random
import signal
import sys
import time

import numpy as np

import allred
from allred import checkpoint
from allred.session import EarlyStopping, Hook, NanLoss, Session


class Numbers:
    """0, 1, 2, ... as data: it knows where it is."""

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Witness(Hook):
    """Notes what it was called for."""

    def __init__(self):
        self.calls, self.values, self.outcome = [], [], None

    def begin(self, session):
        self.calls.append("begin")

    def before_step(self, session):
        self.calls.append("before")

    def after_step(self, session, values):
        self.calls.append("after")
        self.values.append(values)

    def end(self, session, outcome):
        self.outcome = outcome
        print("outcome", json.dumps({"rank": allred.rank(), **vars(outcome)}), flush=True)


class Slow(Hook):
    """Its state takes long, once training has begun."""

    begun = False

    def begin(self, session):
        self.begun = True

    def state_dict(self):
        time.sleep(4.0 * self.begun)
        return {}

    def load_state_dict(self, state):
        pass


class Sharp(allred.optim.SGD):
    """Fails in the middle of an update."""

    fails_at = None

    def update(self, param, grad, slots, lr, step):
        if step == self.fails_at and param.size == 2:
            raise ValueError("torn")
        super().update(param, grad, slots, lr, step)


kept = []  # to the end of the program, as in a script without functions


def main(
    directory,
    count=30,
    fault=None,
    at=7,
    on=1,
    awaits=None,
    whiles=False,
    early=False,
    torn=None,
    elements=3,
    sleep_s=0,
    late_s=0,
    slow=False,
    write_s=0,
    nan_at=None,
    differs=None,
    **given,
):
    """fault: see `act`; at that number, on that rank, once there is the checkpoint that it awaits. differs: arguments
    of the session by rank."""
    allred.init(banner=False)
    if write_s:
        write_at_once = checkpoint.write

        def write(*what):
            time.sleep(write_s)
            return write_at_once(*what)

        checkpoint.write = write
    given = {"checkpoint_dir": directory, **given, **(differs or {}).get(str(allred.rank()), {})}
    optimizer = Sharp(lr=1.0, momentum=0.5)
    optimizer.fails_at = torn
    opt = allred.distributed(optimizer)
    kept.append(optimizer)
    params = {"a": np.zeros(3), "b": np.zeros(2)}
    data, witness = Numbers(count), Witness()
    hooks = [witness] + [EarlyStopping(patience=3)] * early + [Slow()] * slow + [NanLoss()] * (nan_at is not None)
    if allred.rank() == 0:
        random.seed(1)
        np.random.seed(2)
    with Session(hooks=hooks, **given) as session:
        time.sleep(late_s * (allred.rank() == 0))
        restored = session.track(params=params, optimizer=opt, data=data)
        drawn = random.random(), np.random.rand()

        def numbers():
            while not session.should_stop():
                number = next(iter(data), None)
                if number is None:
                    return
                yield number

        for number in numbers() if whiles else session.steps(data):
            if number == at and on in (allred.rank(), "all"):
                while awaits and not pathlib.Path(directory, awaits).exists():
                    time.sleep(0.01)
                act(fault)
            time.sleep(sleep_s)
            opt.step(params, {k: np.full(v.shape, 1.0 + allred.rank()) for k, v in params.items()})
            loss = math.nan if number == nan_at else 1.0 if early else number + allred.rank()
            session.log(loss=loss, examples=1 + allred.rank())
    found = {
        "rank": allred.rank(), "restored": restored, "step": session.step, "at": data.at, "a": params["a"][0],
        "b": params["b"][0], "values": witness.values[:3], "calls": witness.calls, "drawn": drawn,
        "drawn_next": (random.random(), np.random.rand()),
    }  # fmt: skip
    print("found", json.dumps(found), flush=True)


def act(fault):
    if fault is None:
        return
    if fault == "raise":
        raise ValueError("boom")
    if fault == "exit":
        sys.exit(3)
    whom, pid = fault.split()[0], os.getpid()
    if whom == "mpirun":  # MPICH's: the parent of the parent
        pid = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, getattr(signal, fault.split()[-1]))


if __name__ == "__main__":
    for number in range(1, len(sys.argv), 2):
        if number > 1:
            allred.shutdown()
        main(sys.argv[number], **json.loads(sys.argv[number + 1]))
