"""Mode ps, async: the parameters from which a late worker computes its first gradient."""

import json

import pytest
from ps_jobs import check_end, job

# Worker 1 is late: worker 0 makes 60 steps before it, and none while worker 1 makes its 3.
SESSION = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))

def await_file(name):
    until = time.monotonic() + 30
    while not (here / name).exists():
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
    for number in session.steps(batches()) if LATE_IN == "data" else by_hand(session, batches()):
        begun = session.step
        opt.step(params, ones)
        if (me, number) == (0, 59):
            (here / "ahead").touch()
            await_file("done")
        if (me, number) == (1, 2):
            (here / "done").touch()
if me == 0:
    import json
    print(json.dumps({"staleness": dict(opt.statistics().staleness), "w": params["w"][0]}))
else:
    assert (before, begun, session.step) == (0, 62, 63), (before, begun, session.step)
"""


@pytest.mark.parametrize("late_in", ["hook", "data"])
def test_a_session_pulls_right_before_the_first_step(tmp_path, late_in):
    result = job(tmp_path, SESSION, 2, elements=1000, make=f"LATE_IN = {late_in!r}\n")
    check_end(result, 0)
    assert json.loads(result.out) == {"staleness": {"0": 63}, "w": -63.0}


ALONE = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)
for _ in range(60 * (me == 0)):
    opt.step(params, ones)
allred.barrier()
if PULLS:
    opt.pull(params)
for _ in range(2 * (me == 1)):
    opt.step(params, ones)
"""
WARNING = (
    "allred: opt.step(): the first gradient of worker 1 was computed from parameters that lack 60 updates; "
    "call opt.broadcast(params) or opt.pull(params) directly before the training loop"
)


@pytest.mark.parametrize("pulls", [False, True])
def test_without_a_session_a_worker_tells_that_its_first_gradient_is_old(tmp_path, pulls):
    result = job(tmp_path, ALONE, 2, elements=1000, make=f"PULLS = {pulls}\n")
    check_end(result, 0)
    assert result.err.count(WARNING) == (not pulls), result.text
    assert ("from parameters that lack" in result.err) == (not pulls), result.text
