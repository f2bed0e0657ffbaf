"""Draws docs/live-page.png and docs/timeline.png, light and dark: pages of real jobs in Chromium (make .venv/.browser).

.venv/bin/python docs/site/draw_live_page.py      about 40 s
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/browser"))

import conftest  # noqa: E402
import pages  # noqa: E402
import test_live_page  # noqa: E402
import test_timeline_page  # noqa: E402
from test_live_page import BIN, STATE, started, text_of, wait_for  # noqa: E402

WIDTH = 1040


def draw(browser, name, height):
    """Take the pictures of the page that is open."""
    for dark in (False, True):
        pages.set_size(browser, WIDTH, height, dark)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        browser.save_screenshot(str(ROOT / f"docs/{name}{'-dark' if dark else ''}.png"))


def draw_live_page(browser, directory):
    (directory / "train.py").write_text(
        test_live_page.PROGRAM.replace("<b>accuracy</b>", "accuracy").replace(": 0.5}", ": 1 - 1 / (2 + session.step)}")
    )
    env = os.environ | {"XDG_RUNTIME_DIR": str(directory), "ALLRED_STALL_WARNING_S": "3", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    run = (BIN / "allred", "run", "-np", 4, "--restarts", 1, "--name", "demo", "train.py", directory)
    with started(*run, env=env, cwd=directory) as job:
        while not (directory / "allred/demo.job").exists():
            assert job.poll() is None
        with started(BIN / "allred", "top", "demo", "--web", env=env, stdout=subprocess.PIPE) as server:
            lines = [server.stdout.readline() for _ in range(4)]
            print(*lines, sep="")
            pages.set_size(browser, WIDTH)
            browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            browser.get(lines[0].split()[-1])
            wait_for(browser, "return state && state.ranks[0].steps > 60", bool)
            (directory / "kill").touch()
            wait_for(browser, text_of("about"), lambda text: "start 2" in text)
            wait_for(browser, "return state.ranks[0].steps > 100", bool)
            subprocess.run([BIN / "allred", "top"], env={**env, "COLUMNS": "100"}, check=True)
            (directory / "stop").touch()
            rows = wait_for(browser, STATE, lambda rows: "stopped" in str(rows))
            wait_for(browser, text_of("messages"), lambda text: "stopped" in text)
            draw(browser, "live-page", 1000)
        (directory / "end").touch()
        os.kill(int(rows[2][1].split("-CONT ")[1].split()[0]), signal.SIGCONT)
        assert job.wait(60) == 0


def draw_timeline(browser, directory):
    env = {"ALLRED_TIMELINE": str(directory), "OMP_NUM_THREADS": "1"}
    program = test_timeline_page.PROGRAM.replace("<b>{i}</b>", "w{i}")
    subprocess.run([BIN / "mpirun", "-np", "3", BIN / "python", "-c", program], env=os.environ | env, check=True)
    subprocess.run([BIN / "allred", "timeline", "show", directory], check=True)
    pages.set_size(browser, WIDTH)
    browser.get((directory / "timeline.html").as_uri())
    whole = wait_for(browser, "return view", bool)
    browser.execute_script("look(arguments[0], arguments[1])", whole[1] - 600e3, whole[1])
    draw(browser, "timeline", 720)


if __name__ == "__main__":
    with contextlib.contextmanager(conftest.browser.__wrapped__)() as browser:
        for drawing in (draw_live_page, draw_timeline):
            with tempfile.TemporaryDirectory() as directory:
                drawing(browser, Path(directory))
