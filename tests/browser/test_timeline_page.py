"""The page of `allred timeline show` in Chromium: a job with a slow rank, and 256 simulated ranks. About 10 s."""

import json
import os
import subprocess
import sys
from pathlib import Path

from pages import console_errors, overflow, requested, set_size
from test_live_page import TIMES, report, text_of, wait_for

from allred.page import write_page
from allred.testing import mpirun
from allred.timeline.show import page_document

PROGRAM = """
import time, numpy as np, allred
allred.init(banner=False)
opt = allred.distributed(allred.optim.SGD(lr=0.1))
params = [np.zeros((500, 20), np.float32), np.zeros(10, np.float32)]
opt.broadcast(params)
for step in range(10):
    time.sleep(0.05 * (allred.rank() == 1))
    opt.step(params, [np.full_like(p, allred.rank()) for p in params])
works = [allred.allreduce_async(np.ones(1000), name=f"<b>{i}</b>") for i in range(3)]
for work in works: work.wait()
allred.shutdown()
"""
PIXELS = """
const canvas = document.querySelector("#lanes canvas"), context = canvas.getContext("2d");
const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
return new Set(new Uint32Array(data.buffer)).size;
"""
MOVE = """
const canvas = document.querySelector("#lanes canvas"), box = canvas.getBoundingClientRect(), texts = [];
for (let y = 20; y < box.height; y += 4) for (let x = 100; x < box.width; x += 4) {
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + x, clientY: box.y + y }));
  if (!document.getElementById("tip").hidden) texts.push(document.getElementById("tip").textContent);
}
return texts.join("\\n");
"""


def test_a_job_with_a_slow_rank(browser, tmp_path):
    result = mpirun(3, "-c", PROGRAM, env={"ALLRED_TIMELINE": str(tmp_path)}, timeout_s=90)
    assert result.code == 0, result.text
    command, page = [sys.executable, "-m", "allred", "timeline"], tmp_path / "page.html"
    subprocess.run([*command, "merge", tmp_path], check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run([*command, "show", tmp_path, "-o", page], check=True, capture_output=True, text=True).stdout
    assert shown.startswith(f"{page}: a job of "), shown
    assert "3 ranks" in shown
    requested(browser)
    set_size(browser, 1600)
    browser.get(page.as_uri())
    rows = "return Array.from(document.querySelectorAll('#waits tbody tr'), row => row.innerText)"
    waits = [row.split("\t") for row in wait_for(browser, rows, len)]
    assert sum(late == "rank 1" for _, late, _, _ in waits) >= 10, waits
    assert browser.execute_script(PIXELS) > 5
    texts = browser.execute_script(MOVE)
    assert "waits for rank 1" in texts
    assert "step" in texts
    whole = browser.execute_script("return view")
    # The shortest of them: two ranks wait in each of ten steps. The longest may be half of the job on a busy machine.
    browser.execute_script("document.querySelector('#waits tbody tr:last-child').click()")
    start, end = wait_for(browser, "return view", lambda view: view != whole)
    assert end - start < whole[1] / 2
    browser.execute_script("document.getElementById('out').click()")
    zoomed = browser.execute_script("return view")
    assert zoomed[1] - zoomed[0] > end - start
    browser.execute_script("document.getElementById('all').click()")
    assert browser.execute_script("return view") == whole
    assert "rank 1 was waited for longest" in browser.execute_script(text_of("summary"))
    for width in (400, 1600):
        for dark in (False, True):
            set_size(browser, width, dark=dark)
            assert overflow(browser) <= 0, width
            if shots := os.environ.get("SHOTS"):
                browser.save_screenshot(f"{shots}/timeline-{width}-{dark}.png")
    assert console_errors(browser) == []
    assert [url for url in requested(browser) if url[:5] != "data:"] == [page.as_uri()]
    of_trace = tmp_path / "other.html"
    subprocess.run([*command, "show", tmp_path / "trace.json", "-o", of_trace], check=True, stdout=subprocess.DEVNULL)

    def document(path):
        return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])

    assert document(of_trace) == document(page)
    assert {"<b>0</b>", "<b>2</b>"} <= {name.split()[-1] for name in document(page)["names"] if name}


def simulated(ranks, steps):
    """A trace of `merge`: in each step a computation, an allreduce and a wait for another rank."""
    for rank in range(ranks):
        for what, name, tid in (("process_name", f"rank {rank} (node)", 0), ("thread_name", "waits for", 1)):
            yield {"ph": "M", "pid": rank, "tid": tid, "name": what, "args": {"name": name}}
        for step in range(steps):
            span = {"ph": "X", "pid": rank, "tid": 0, "ts": 1000.0 * step, "args": {}}
            yield {**span, "cat": "step", "name": "step", "dur": 900.0}
            yield {**span, "cat": "allreduce", "name": "allreduce <i>", "ts": 1000.0 * step + 500, "dur": 300.0}
            wait = {"ts": 1000.0 * step + 500, "dur": 3.0 * (rank % 90) + 1, "args": {"late": 7}}
            yield {**span, "cat": "wait", "name": "rank 7", "tid": 1, **wait}


def test_256_ranks(browser, tmp_path):
    made = page_document({"traceEvents": list(simulated(256, 300))})
    assert made["left_out"] > 0
    assert 150_000 < sum(len(row["spans"]) for row in made["rows"]) <= 200_000
    write_page(str(tmp_path / "page.html"), made)
    set_size(browser, 1600)
    browser.get((tmp_path / "page.html").as_uri())
    wait_for(browser, PIXELS, lambda colors: colors > 5)
    assert (Path(tmp_path / "page.html").stat().st_size) < 10e6
    browser.execute_script("window.change = (n) => { zoom(n % 2 ? 0.9 : 1.1); $('lanes').scrollTop = 10 * n; };")
    report("a timeline of 256 ranks", browser.execute_async_script(TIMES, 30))
    assert console_errors(browser) == []
