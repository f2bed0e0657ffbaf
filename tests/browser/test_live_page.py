"""The page of `allred top` in Chromium: a slow, a stopped and a killed rank, and a restart. About 20 s."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import console_errors, overflow, requested, set_size

from allred.counters import Values
from allred.monitor import state as states
from allred.page import write_page

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv/bin"
PROGRAM = """
import os, pathlib, signal, sys, time
import numpy as np
import allred

directory = pathlib.Path(sys.argv[1])
allred.init(banner=False)
rank, first = allred.rank(), os.environ["ALLRED_STARTS"] == "1"
params, opt = {"w": np.zeros(1000)}, allred.distributed(allred.optim.SGD(lr=0.1))
batches = allred.data.batches(np.arange(10**6), batch_size=8, seed=0)
hooks = [allred.session.Summary(directory / "logs", every_steps=2)]
with allred.Session(hooks=hooks, checkpoint_dir=directory / "checkpoints") as session:
    session.track(params=params, optimizer=opt)
    for x in session.steps(batches):
        if rank == 1:
            time.sleep(0.05)
        if rank == 2 and (directory / "stop").exists():
            (directory / "stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        if first and rank == 3 and (directory / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and (directory / "end").exists():
            session.request_stop("the test ends")
        opt.step(params, {"w": np.full(1000, x.sum() * 1.0)})
        session.log(**{"loss": 1 / (1 + session.step), "<b>accuracy</b>": 0.5})
"""
STATE = "return Array.from(document.querySelectorAll('#ranks tbody tr'), row => [row.className, row.innerText])"
TIMES = """
const [frames, done] = arguments, times = [];
let before = performance.now();
function next(now) {
  times.push(now - before);
  before = now;
  if (times.length > frames) return done(times.slice(1).sort((a, b) => a - b));
  change(times.length);
  requestAnimationFrame(next);
}
requestAnimationFrame(next);
"""


def wait_for(browser, script, what, limit_s=60):
    """Wait until `what(result of the script)` is true, and return the result."""
    until = time.monotonic() + limit_s
    while not what(found := browser.execute_script(script)):
        assert time.monotonic() < until, (found, browser.execute_script("return document.body.innerText"))
        time.sleep(0.1)
    return found


def text_of(name):
    return f"return document.getElementById('{name}').innerText"


def report(name, times):
    """Print the frame times; the assertion finds only what is absurd."""
    text = f"{name}: a frame takes {times[len(times) // 2]:.0f} ms (median), {times[-1]:.0f} ms at most"
    sys.__stdout__.write(f"\n{text}\n")
    assert times[len(times) // 2] < 2000, text


@contextlib.contextmanager
def started(*words, env, **options):
    with subprocess.Popen([str(word) for word in words], env=env, text=True, start_new_session=True, **options) as job:
        try:
            yield job
        finally:
            for _ in range(2):  # a second signal ends all processes of `allred run`, also stopped ones
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.terminate()
                    job.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def sockets(pid):
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return sum(link.startswith("socket:") for link in links)


def test_a_job_with_a_slow_a_stopped_and_a_killed_rank(browser, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("ALLRED_")}
    env |= {"XDG_RUNTIME_DIR": str(tmp_path), "ALLRED_STALL_WARNING_S": "2", "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    run = (BIN / "allred", "run", "-np", 4, "--restarts", 1, "--name", "demo", "train.py", tmp_path)
    with started(*run, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        while not (tmp_path / "allred/demo.job").exists():
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.1)
        with started(BIN / "allred", "top", "demo", "--web", env=env, stdout=subprocess.PIPE) as server:
            lines = [server.stdout.readline() for _ in range(4)]
            address = lines[0].split()[-1]
            port = address.split(":")[2].split("/")[0]
            assert f"ssh -L {port}:127.0.0.1:{port} " in lines[1], lines
            assert f"ssh -J LOGIN_NODE -L {port}:127.0.0.1:{port} " in lines[2], lines
            alone = sockets(server.pid)
            watch(browser, address, tmp_path)
            assert sockets(server.pid) > alone
            browser.get("about:blank")
            until = time.monotonic() + 30
            while sockets(server.pid) > alone:  # nobody sees the page: the server is not connected to the job
                assert time.monotonic() < until
                time.sleep(0.1)
        assert job.wait(60) == 0, job.stderr.read()
    page = tmp_path / "page.html"
    subprocess.run([BIN / "allred", "top", "demo", "--html", page], env=env, check=True, stdout=subprocess.DEVNULL)
    browser.get(page.as_uri())
    rows = wait_for(browser, STATE, len)
    assert [text.split()[-2:] for _, text in rows] == 4 * [["has", "ended"]]
    assert browser.execute_script(text_of("badge")) == "ended"
    assert browser.execute_script("return document.querySelector('#charts h3').innerText").startswith("loss: 0.0")
    assert console_errors(browser) == []


def watch(browser, address, directory):
    console_errors(browser), requested(browser)
    set_size(browser, 1600)
    browser.get(address)
    wait_for(browser, STATE, lambda rows: [name for name, _ in rows] == ["", "late", "", ""])
    (directory / "stop").touch()
    rows = wait_for(browser, STATE, lambda rows: "stopped (kill -CONT" in str(rows))
    assert rows[2][0] == "bad", rows
    assert "train.py:" in rows[1][1] or "opt.step()" in rows[1][1], rows
    assert "rank 1 delayed 3 ranks" in wait_for(browser, text_of("delays"), lambda text: "3 ranks" in text)
    wait_for(browser, text_of("messages"), lambda text: "has waited for" in text and "stopped (kill -CONT" in text)
    titles = "return Array.from(document.querySelectorAll('#charts h3'), title => title.innerText)"
    assert [title.split(":")[0] for title in wait_for(browser, titles, len)][:2] == ["loss", "<b>accuracy</b>"]
    for width in (400, 1600):
        for dark in (False, True):
            set_size(browser, width, dark=dark)
            time.sleep(0.3)
            assert overflow(browser) <= 0, width
            if shots := os.environ.get("SHOTS"):
                browser.save_screenshot(f"{shots}/live-{width}-{dark}.png")
    set_size(browser, 1600)
    assert browser.execute_script(
        "return [...document.querySelectorAll('th button')].map(b => (b.click(), b.innerText))"
    )
    (directory / "kill").touch()
    os.kill(int(rows[2][1].split("-CONT ")[1].split()[0]), signal.SIGCONT)
    history = wait_for(browser, text_of("history"), lambda text: "was killed by signal 9" in text)
    assert "first start" in history
    assert "start 2" in wait_for(browser, text_of("about"), lambda text: "start 2" in text)
    assert browser.execute_script(text_of("badge")) == "running"
    wait_for(browser, titles, lambda found: found and found[0].startswith("loss: 0.0"))  # at least ten steps
    (directory / "end").touch()
    wait_for(browser, text_of("badge"), lambda text: text == "ended")
    assert console_errors(browser) == []
    assert {url.split("?")[0].rpartition("/")[0] for url in requested(browser) if url[:5] != "data:"} == {
        address.split("/?")[0]
    }


def simulated(size, step=100):
    ranks = [
        {"rank": rank, "host": f"node{rank // 8}", "role": "", "state": f"in Python at train.py:{rank % 7} (step)"}
        | Values(
            step=step,
            steps=step,
            examples=10 * step,
            seconds=step / 10,
            waiting_s=step / 20 * (rank % 5) / 5,
            communicating_s=step / 100,
        )._asdict()
        for rank in range(size)
    ]
    about = {"job": "</script><b>", "mode": "sync", "starts": 1, "host": "node0", "size": size, "begun": 0.0}
    delays = [[rank, (7 * rank + k) % size, (rank * k % 13) / 3] for rank in range(size) for k in range(4096 // size)]
    found = {"time": step / 10, "state": "running", "ranks": ranks, "delays": delays, "history": [], "summaries": []}
    return {**about, **found, "messages": [{"time": 1.0, "text": "<img src=x onerror=alert(1)>"}]}


def test_256_ranks(browser, tmp_path):
    scalars = {f"value {k}": [[step, (step * k) % 17] for step in range(400)] for k in range(6)}
    now = states.state_of(simulated(256, 50), simulated(256, 100), scalars)
    write_page(str(tmp_path / "page.html"), now)
    set_size(browser, 1600)
    browser.get((tmp_path / "page.html").as_uri())
    assert len(wait_for(browser, STATE, len)) == 256
    assert browser.execute_script("return document.querySelector('h1').innerText") == "</script><b>"
    assert "<img src=x" in browser.execute_script(text_of("messages"))
    change = """
    window.change = (n) => { const now = JSON.parse(arguments[0]); now.ranks.forEach((r) => {
      r.step += n; r.steps_per_s += (n * r.rank) % 7; r.waiting = ((n + r.rank) % 10) / 10; }); show(now); };
    order = { key: "waiting", sign: -1 };
    """
    browser.execute_script(change, json.dumps(now))
    report("256 ranks", browser.execute_async_script(TIMES, 30))
    assert console_errors(browser) == []


@pytest.mark.parametrize("mode", ["ps"])
def test_mode_ps_shows_staleness_and_drops(mode, browser, tmp_path):
    before, now = simulated(3, 50), simulated(3, 100)
    for each, stale in ((before, 0), (now, 75)):
        each["mode"] = mode
        for rank in each["ranks"][1:]:
            rank |= {"staleness": stale, "dropped": stale / 25, "rounds": stale / 5}
    now["ranks"][0] |= {"role": "parameter server 0", "steps": 0}
    write_page(str(tmp_path / "page.html"), states.state_of(before, now))
    browser.get((tmp_path / "page.html").as_uri())
    rows = [text.split() for _, text in wait_for(browser, STATE, len)]
    heads = browser.execute_script("return document.querySelector('#ranks thead').innerText").split()
    assert heads[heads.index("staleness") :][:2] == ["staleness", "dropped"]
    assert heads[heads.index("rounds") :][:2] == ["rounds", "steps/s"]
    assert "15" in rows[1], rows
    assert "1.50 3" in " ".join(rows[1]), rows
    assert "6 gradients dropped" in browser.execute_script(text_of("about"))
    assert browser.execute_script("return document.getElementById('s-matrix').hidden")
