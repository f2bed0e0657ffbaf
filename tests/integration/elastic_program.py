"""The program of test_elastic.py: momentum SGD on fixed data, with a ledger of samples by step and world.

ELASTIC_PROGRAM: JSON with
directory     each process writes ledger-PID, a line of JSON for each event, and result-PID at its end
rows, batch_size, epochs, elements     of the data, and of the parameters
form          of the parameters: dict, bare, list, nested
pause_s       in each step
session       the directory of its checkpoints, or None: a plain loop
max_steps     of the session
stream        whether the data is a shuffled stream
prefetch      None, or the arguments of allred.data.prefetch
kill          {"rank": R, "step": S, "how": "SIGKILL" or another end}: of this rank in the first world; "host": of all
              processes in its network namespace
"""

import contextlib
import functools
import json
import os
import random
import signal
import sys
import time

import numpy as np

import allred

given = json.loads(os.environ["ELASTIC_PROGRAM"])
elements, rows = given["elements"], given["rows"]
ledger = open(f"{given['directory']}/ledger-{os.getpid()}", "w", buffering=1)  # noqa: SIM115  (until the end)


def note(**event):
    ledger.write(json.dumps({"time": time.monotonic(), **event}) + "\n")


def sample_of(targets, row):
    return row, targets[row]


def fail(how):
    note(event="fails", how=how)
    if how == "raise":
        raise ValueError("wrong")
    if how == "exit":
        sys.exit(3)
    if how == "segfault":
        import ctypes

        ctypes.string_at(0)
    if how == "host":
        network = os.readlink("/proc/self/ns/net")
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if pid != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") == network:
                    os.kill(pid, signal.SIGKILL)
        how = "SIGKILL"
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def pack(flat):
    """Return the parameters in the form that is asked for, as views of `flat`."""
    half = elements // 2
    forms = {
        "bare": lambda: flat, "dict": lambda: {"w": flat}, "list": lambda: [flat[:half], flat[half:]],
        "nested": lambda: {"a": {"b": [flat[:half]]}, "c": (flat[half:],)},
    }  # fmt: skip
    return forms[given["form"]]()


class Count(allred.session.Hook):
    """A hook with a state: the calls of after_step, and the last logged value."""

    def __init__(self):
        self.calls, self.values, self.total = 0, {}, 0.0

    def after_step(self, session, values):
        self.calls, self.values = self.calls + 1, values
        self.total += values["loss"]

    def state_dict(self):
        return {"calls": self.calls, "total": self.total}

    def load_state_dict(self, state):
        self.calls, self.total = state["calls"], state["total"]


count = Count()


def loop(batches, params, opt):
    if not given.get("session"):
        yield from batches
        return
    with allred.Session(
        given["session"], save_steps=given.get("save_steps", 5), log_steps=None, hooks=[count],
        max_steps=given.get("max_steps"),
    ) as session:  # fmt: skip
        session.track(params=params, optimizer=opt, data=batches)
        note(event="tracked", step=session.step)
        for batch in session.steps(batches):
            yield batch
            loss = float(np.sum(batch[1]))  # another one on each rank
            session.log(loss=loss, examples=len(batch[0]))


def main():
    allred.init(banner=False)
    note(event="init", rank=allred.rank(), size=allred.size(), pid=os.getpid())
    samples = np.arange(rows)
    targets = np.random.default_rng(7).standard_normal((rows, 8)).astype("f4")
    flat = np.full(elements, 1.0 + allred.rank(), "f4")  # the broadcast makes them equal
    params = pack(flat)
    opt = allred.distributed(allred.optim.SGD(lr=0.05, momentum=0.9))
    if not given.get("session"):
        opt.broadcast(params)
    mine, attempts = given.get("kill") or {}, 0
    batches = allred.data.batches(samples, targets, batch_size=given["batch_size"], epochs=given["epochs"])
    if given.get("stream"):
        records = allred.data.shuffled(range(rows), buffer=rows)  # with this buffer any order is possible
        decode = functools.partial(sample_of, targets)
        batches = allred.data.stream(records, batch_size=given["batch_size"], epochs=given["epochs"], decode=decode)
    if given.get("prefetch") is not None:
        batches = allred.data.prefetch(batches, **given["prefetch"])
    for ids, values in loop(batches, params, opt):
        step = opt.global_step + 1
        note(event="attempt", step=step, world=allred.world.current().generation, ids=ids.tolist())
        attempts += 1
        if mine.get("rank") == allred.rank() and step == mine["step"] and "pid" not in mine:
            mine["pid"] = 0
            if (
                mine.get("where") != "after"
                and allred.world.current().generation == 1
                and os.environ.get("ALLRED_STARTS", "1") == "1"
            ):
                fail(mine["how"])
        gradient = np.zeros(elements, "f4")
        if len(ids):
            gradient[:8] = flat[:8] - values.mean(axis=0)
            gradient[8:] = flat[8:] * np.float32(0.01)
        time.sleep(given["pause_s"] * random.random() * 2)
        opt.step(params, pack(gradient))
        if mine.get("where") == "after" and mine.get("pid") == 0 and allred.world.current().generation == 1:
            fail(mine["how"])
        if opt.interrupted:
            note(event="interrupted", step=step)
        else:
            note(event="commit", step=opt.global_step, world=allred.world.current().generation)
    descriptors = len(os.listdir("/proc/self/fd"))
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as status:
        pages = int(status.read().split()[1])
        mappings = sum("memfd" in line for line in maps)
    result = {
        "pid": os.getpid(), "rank": allred.rank(), "size": allred.size(), "step": opt.global_step,
        "digest": allred.nest.digest(params), "head": flat[:9].tolist(), "descriptors": descriptors,
        "mappings": mappings, "pages": pages, "attempts": attempts,
        "calls": count.calls, "total": count.total,
        "world": allred.world.current().generation, "summary": opt.summary(),
    }  # fmt: skip
    with open(f"{given['directory']}/result-{os.getpid()}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
