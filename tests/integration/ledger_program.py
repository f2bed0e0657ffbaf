"""Trains on numbers and writes down which; goes on where the job before it was, and is killed where it is told.

ledger_program.py DIRECTORY GENERATION SOURCE BATCH_SIZE KILL_RANK KILL_STEP KILL_PLACE
"""

import json
import os
import pathlib
import re
import signal
import sys

import numpy as np
from mpi4py import MPI  # noqa: F401  (as scripts have it: before the main guard, so the processes import it too)

import allred

ROWS, EPOCHS, SEED = 97, 5, 7
PLACES = ("begin", "ledger", "step", "saving", "saved")


class Numbers:
    """A dataset of the numbers 0 to ROWS - 1."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"number": index}


def number_of(record):
    """What a record says."""
    return {"number": int(record)}


def loader(source, directory, batch_size):
    options = {"batch_size": batch_size, "epochs": EPOCHS}
    if source == "stream":
        records = allred.data.shuffled(allred.data.tfrecord(directory / "numbers"), 16, seed=SEED)
        stream = allred.data.stream(records, decode=number_of, **options)
        return allred.data.prefetch(stream), lambda batch: batch["number"]
    if source == "arrays":
        return allred.data.batches(np.arange(ROWS), **options, seed=SEED), lambda batch: batch
    data = allred.data.batches(Numbers(), **options, seed=SEED)
    return allred.data.prefetch(data, workers=int(source == "processes")), lambda batch: batch["number"]


def main(directory, generation, source, batch_size, kill_rank, kill_step, kill_place):
    allred.init(banner=False)
    directory, rank = pathlib.Path(directory), allred.rank()
    mapped = re.findall(r" (/dev/shm/\S+)$", pathlib.Path("/proc/self/maps").read_text(), re.MULTILINE)
    (directory / f"shm-{rank}.txt").write_text("\n".join({*mapped}))
    position = directory / "position.json"
    saved = json.loads(position.read_text()) if position.exists() else {"step": 0, "data": None}
    saved = allred.broadcast_object(saved)
    data, numbers_of = loader(source, directory, int(batch_size))
    if saved["data"] is not None:
        data.load_state_dict(saved["data"])

    def at(place):
        if (rank, steps, place) == (int(kill_rank), int(kill_step), kill_place):
            os.kill(os.getpid(), signal.SIGKILL)

    params, opt, steps = [np.zeros(1)], allred.distributed(allred.optim.SGD(lr=0.1)), 0
    with open(directory / f"ledger-{generation}-{rank}.txt", "ab", buffering=0) as ledger:
        for batch in data:
            numbers, steps = numbers_of(batch), steps + 1
            at("begin")
            step = saved["step"] + steps
            line = {"step": step, "epoch": data.state_dict()["epoch"], "numbers": numbers.tolist()}
            ledger.write((json.dumps(line) + "\n").encode())
            at("ledger")
            opt.step(params, [np.array([numbers.sum() / max(len(numbers), 1)])])
            at("step")
            if rank == 0:
                new = directory / "position.new"
                with open(new, "w") as file:
                    json.dump({"step": step, "data": data.state_dict()}, file)
                    at("saving")
                os.replace(new, position)
            at("saved")
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
