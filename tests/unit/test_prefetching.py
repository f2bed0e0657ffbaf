"""Batches fetched ahead are the same batches, at the same place; nothing is left behind."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import allred
from allred.data import loader
from allred.errors import DataError, InputError

ROWS = np.arange(37)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr(loader, "_without_world", loader.Iterations())
    before = children()
    yield
    gc.collect()
    assert [t for t in threading.enumerate() if t.name == "allred-prefetch"] == []
    assert children() <= before


def children():
    """The child processes of this one, with those that have ended and that nobody has waited for."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found.update(pathlib.Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


class Named:
    """A dataset that says in which process a sample was made, and does something to it first."""

    def __init__(self, do=None, at=20):
        self.do, self.at = do, at

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if self.do is not None and index == self.at:
            self.do()
        return index, os.getpid()


def fail():
    raise KeyError("no sample twenty")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(3)


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail_oddly():
    raise OddError(1, 2)


def data(source=ROWS, **options):
    return allred.data.batches(source, **{"batch_size": 5, "rank": 0, "size": 1, "seed": None, **options})


@pytest.mark.parametrize(("depth", "workers"), [(1, 0), (2, 0), (100, 0), (1, 1), (2, 3)])
def test_the_same_batches_in_the_same_order(depth, workers):
    options = {"seed": 3, "epochs": 2}
    ahead = allred.data.prefetch(data(**options), depth, workers)
    assert [b.tolist() for b in ahead] == [b.tolist() for b in data(**options)]
    assert (len(ahead), ahead.steps_per_epoch, ahead.batch_size, ahead.epochs) == (16, 8, 5, 2)
    assert all(b.flags.writeable for b in allred.data.prefetch(data(**options), depth, workers))


def test_processes_do_the_work():
    pids = {pid for _, batch in allred.data.prefetch(data(Named()), workers=2) for pid in batch.tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_is_that_of_what_was_handed_out(workers):
    batches = data()
    ahead = allred.data.prefetch(batches, depth=4, workers=workers)
    for step, _ in enumerate(ahead, start=1):
        assert ahead.state_dict() == batches.state_dict()
        assert ahead.state_dict()["samples"] == 5 * step
        time.sleep(0.01)  # it fetches
        if step == 3:
            break
    state = ahead.state_dict()
    again = allred.data.prefetch(data(rank=1, size=2, batch_size=8), workers=workers)
    again.load_state_dict(state)
    assert [b.tolist() for b in again] == [[19, 20, 21, 22], [27, 28, 29, 30], [34, 35, 36]]


def test_a_step_claims_the_share_of_the_batch_in_hand():
    training = iter(allred.data.prefetch(data(batch_size=10, size=3), depth=3))
    for expected in (4, 4, 4, 3):
        assert len(next(training)) == expected
        time.sleep(0.02)
        assert loader.claim_samples() == expected
    training.close()
    assert loader.claim_samples() is None


def test_it_is_bounded():
    asked = []

    class Slow(Named):
        def __getitem__(self, index):
            asked.append(index)
            return index

    batches = iter(allred.data.prefetch(data(Slow()), depth=2))
    next(batches)
    time.sleep(0.2)
    assert max(asked) == 19  # one in hand, two that wait, one that waits for a place
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_at_its_batch_with_its_traceback(workers):
    seen = []
    with pytest.raises(KeyError, match="no sample twenty") as caught:
        seen.extend(allred.data.prefetch(data(Named(fail)), depth=8, workers=workers))
    assert len(seen) == 4
    trace = str(caught.value.__cause__) if workers else str(caught.getrepr())
    assert "in fail\n" in trace or "def fail" in trace


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (die, r"process 1 of 2 that prefetches \(pid \d+\) was killed by signal 9 \(SIGKILL\)"),
        (leave, r"process 1 of 2 that prefetches \(pid \d+\) exited with code 3"),
        (sys.exit, r"(?s)process 1 of 2 that prefetches \(pid \d+\) failed:\n.*SystemExit"),
        (fail_oddly, r"(?s)process 1 of 2 that prefetches \(pid \d+\) failed:\n.*in fail_oddly\n.*OddError: 1 2"),
    ],
)
def test_a_process_that_dies_is_named(do, message):
    start = time.monotonic()
    with pytest.raises(DataError, match=message):
        list(allred.data.prefetch(data(Named(do)), workers=2))
    assert time.monotonic() - start < 15


def test_a_process_killed_from_outside_while_it_waits():
    batches = iter(allred.data.prefetch(data(Named()), depth=1, workers=1))
    _, pids = next(batches)
    os.kill(int(pids[0]), signal.SIGKILL)
    with pytest.raises(DataError, match="killed by signal 9"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_break_close_and_an_exception_in_the_loop_end_everything(workers):
    ahead = allred.data.prefetch(data(Named(), epochs=50), workers=workers)
    for _ in ahead:
        break
    iterator = iter(ahead)
    next(iterator)
    iterator.close()
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in ahead]
    del iterator
    iter(ahead)  # never begun


def test_a_thread_that_cannot_be_started_is_the_error(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(allred.data.prefetch(data()))


class Large(Named):
    def __getitem__(self, index):
        return np.zeros(1_000_000)


def test_processes_ended_during_a_batch_print_nothing(capfd):
    for _ in range(3):
        iterator = iter(allred.data.prefetch(data(Large()), depth=1, workers=2))
        assert next(iterator).shape == (5, 1_000_000)
        iterator.close()
    assert capfd.readouterr().err == ""


def test_what_cannot_be_sent_is_an_error_at_the_first_batch():
    with pytest.raises(Exception, match=r"pickle|local object"):
        list(allred.data.prefetch(data(Named(lambda: None)), workers=2))


def test_what_is_refused():
    with pytest.raises(InputError, match=r"takes the result of allred.*, got list"):
        allred.data.prefetch([1, 2])
    with pytest.raises(InputError, match="prefetch: depth must be an integer >= 1, but is 0"):
        allred.data.prefetch(data(), depth=0)
    with pytest.raises(InputError, match="workers must be an integer >= 0, but is -1"):
        allred.data.prefetch(data(), workers=-1)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


LOOP = """
    import os, sys, time
    import numpy as np
    import allred

    class Mine:
        def __len__(self): return 1000
        def __getitem__(self, i): return i, os.getpid()

    if __name__ == "__main__":
        seen = set()
        data = allred.data.batches(Mine(), batch_size=2, epochs=1000, rank=0, size=1)
        for x, pids in allred.data.prefetch(data, workers=WORKERS):
            if not seen and len(pids):
                seen.update(pids.tolist())
                print("pid", *seen, flush=True)
            time.sleep(0.01)
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_program_that_is_interrupted_or_killed_leaves_no_process(tmp_path, workers, signum):
    path = script(tmp_path, LOOP.replace("WORKERS", str(workers)))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        pid = int(program.stdout.readline().split()[1])
        assert (pid != program.pid) == bool(workers)
        program.send_signal(signum)
        try:
            _, err = program.communicate(timeout=20)
        finally:
            program.kill()
    assert program.returncode != 0
    assert err.count("Traceback") == (signum == signal.SIGINT), err
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_script_without_a_main_guard_is_an_error(tmp_path):
    text = """
        import allred, numpy as np
        allred.init(banner=False)
        print(list(allred.data.prefetch(allred.data.batches(np.arange(4), batch_size=2), workers=1)))
    """
    result = subprocess.run([sys.executable, script(tmp_path, text)], capture_output=True, text=True, timeout=40)
    assert result.returncode == 1
    assert "allred.init() was called in a process that prefetches. Such a process imports" in result.stderr
