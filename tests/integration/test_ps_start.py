"""Mode ps, async: the parameters from which a late worker computes its first gradient."""

import json

from ps_jobs import Case, run_cases

# Worker 1 is late: worker 0 makes 60 steps before it, and none while worker 1 makes its 3.
SESSION = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))

def await_file(name):
    until = time.monotonic() + 30
    while not (here / f"{number}-{name}").exists():
        assert time.monotonic() < until, f"{name} does not come"
        time.sleep(0.01)

class Late(allred.session.Hook):
    def begin(self, session):
        if me == 1 and LATE_IN == "hook":
            await_file("ahead")

def batches():
    if me == 1 and LATE_IN == "data":
        await_file("ahead")
    yield from range(60 if me == 0 else 3)

def by_hand(session, batches):
    while not session.should_stop():
        if (batch := next(batches, None)) is None:
            return
        yield batch

with allred.Session(hooks=[Late()], log_steps=None) as session:
    session.track(params=params, optimizer=opt)
    before = session.step
    for batch in session.steps(batches()) if LATE_IN == "data" else by_hand(session, batches()):
        begun = session.step
        opt.step(params, ones)
        if (me, batch) == (0, 59):
            (here / f"{number}-ahead").touch()
            await_file("done")
        if (me, batch) == (1, 2):
            (here / f"{number}-done").touch()
if me == 0:
    say(json.dumps({"staleness": dict(opt.statistics().staleness), "w": params["w"][0]}))
else:
    assert (before, begun, session.step) == (0, 62, 63), (before, begun, session.step)
"""


ALONE = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)
for _ in range((50 if PULLS else 60) * (me == 0)):
    opt.step(params, ones)
allred.barrier()
if PULLS:
    opt.pull(params)
else:
    time.sleep(1.1)
for _ in range(2 * (me == 1)):
    opt.step(params, ones)
"""
WARNING = (
    "allred: opt.step(): the first gradient of worker 1 was computed from parameters that lack 60 updates; "
    "call opt.broadcast(params) or opt.pull(params) directly before the training loop"
)


def test_a_session_pulls_before_the_first_step_and_without_one_an_old_first_gradient_is_reported(tmp_path):
    cases = {f"late in {what}": Case(f"LATE_IN = {what!r}\n{SESSION}") for what in ("hook", "data")}
    cases |= {f"pulls: {pulls}": Case(f"PULLS = {pulls}\n{ALONE}") for pulls in (False, True)}
    result, said = run_cases(tmp_path, cases, 3)
    for what in ("hook", "data"):
        assert json.loads(said[f"late in {what}"][0]) == {"staleness": {"0": 63}, "w": 1.0 - 63}, what
    assert result.err.count(WARNING) == result.err.count("from parameters that lack") == 1, result.text
