"""The program of test_elastic_local.py: mode local in an elastic job. `elastic_local_program.py DIRECTORY`.

Each process writes the numbers of its samples into ledger-PID when it has used them, and result-PID at its end.
ELASTIC_LOCAL: JSON with options (of allred.distributed), session (whether there is one), kill ([rank, step] of the
first world; step "end": after the last one), collective (whether each step has a collective of the program), pause_s
(in each step).
"""

import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

import allred

HERE, GIVEN = pathlib.Path(sys.argv[1]), json.loads(os.environ["ELASTIC_LOCAL"])
ROWS, BATCH = 1440, 12
LEDGER = open(HERE / f"ledger-{os.getpid()}", "w", buffering=1)  # noqa: SIM115  (until the end)


def batches():
    data = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("f4")
    loader = allred.data.batches(np.arange(ROWS), data, batch_size=BATCH, seed=1)
    if not GIVEN.get("session"):
        yield from loader
        return
    with allred.Session(HERE / "checkpoints", save_steps=20, log_steps=None) as session:
        session.track(params=PARAMS, optimizer=OPT, data=loader)
        for batch in session.steps(loader):
            yield batch
            session.log(loss=1.0)


allred.init(banner=False)
PARAMS = {"w": np.full((5, 2), 1.0 + allred.rank(), "f4"), "b": [np.zeros(())]}
OPT = allred.distributed(allred.optim.SGD(0.05, momentum=0.5), every=8, **GIVEN.get("options", {}))
if not GIVEN.get("session"):
    OPT.broadcast(PARAMS)
is_in_first_world = allred.world.current().generation == 1
for ids, x in batches():
    step = OPT.global_step + 1
    if is_in_first_world and GIVEN.get("kill") == [allred.rank(), step] and allred.world.current().generation == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(GIVEN.get("pause_s", 0.002))
    gradient = np.repeat((PARAMS["w"][:, :1] - x.mean(0)[:, None]), 2, axis=1) if len(ids) else 0 * PARAMS["w"]
    try:
        if GIVEN.get("collective"):
            allred.allreduce(np.ones(3))
        OPT.step(PARAMS, {"w": gradient, "b": [np.ones(())]})
    except allred.RanksChanged:
        continue
    if not OPT.interrupted:
        print(*ids.tolist(), file=LEDGER)
if is_in_first_world and GIVEN.get("kill") == [allred.rank(), "end"] and allred.world.current().generation == 1:
    os.kill(os.getpid(), signal.SIGKILL)
OPT.round()
result = {"rank": allred.rank(), "step": OPT.global_step, "digest": allred.digest(PARAMS), "w": PARAMS["w"].tolist()}
(HERE / f"result-{os.getpid()}").write_text(json.dumps(result))
