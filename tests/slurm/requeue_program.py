"""Trains 100 steps, in the checkpoint directory CHECKPOINTS. The chief of the first start creates READY. With WAITS_AT,
the chief of the first start waits after this step until it has to stop.

The weights depend on every batch and on the order of the batches. At the end the chief prints them, in hexadecimal.
"""

import os
import pathlib
import time

import numpy as np

import allred

allred.init(banner=False)
rng = np.random.default_rng(1)
x, y = rng.normal(size=(200, 3)), rng.normal(size=200)
params, opt = {"w": np.zeros(3)}, allred.distributed(allred.optim.Adam(lr=0.01))
batches = allred.data.batches(x, y, batch_size=8, epochs=4, seed=0)
with allred.Session(checkpoint_dir=os.environ["CHECKPOINTS"], log_steps=None) as session:
    session.track(params=params, optimizer=opt, data=batches)
    begin = session.step
    waits_at = int(os.environ.get("WAITS_AT", "-1")) if session.starts == 1 else -1
    for xs, ys in session.steps(batches):
        while allred.is_chief() and session.step == waits_at and not session.asked:
            time.sleep(0.05)
        opt.step(params, {"w": 2 * xs.T @ (xs @ params["w"] - ys) / len(xs)})
        if allred.is_chief() and session.step == 20:
            pathlib.Path(os.environ["READY"]).touch()
        time.sleep(0.03)
if allred.is_chief():
    print(f"start {session.starts}, steps {begin} to {session.step}: {params['w'].tobytes().hex()}", flush=True)
