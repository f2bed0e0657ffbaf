"""Fixtures of the browser tier: headless Chromium, driven by selenium.

.venv/bin/python -m pytest tests/browser        skips, with the reason, where Chromium or selenium is missing
BROWSER_REQUIRED=1 ...                          fails there instead
"""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A selenium driver. It blocks nothing: `requested` tells which addresses a page has loaded."""
    reason = "" if shutil.which("chromium") and shutil.which("chromedriver") else "chromium or chromedriver is missing"
    try:
        from selenium import webdriver
    except ImportError:
        reason = "selenium is missing"
    if reason:
        (pytest.fail if os.environ.get("BROWSER_REQUIRED") == "1" else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """serve(DIRECTORY) returns the address of an HTTP server on loopback for the files of a directory."""
    servers = []

    def start(directory: Path) -> str:
        handler = functools.partial(_Quiet, directory=str(directory))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def site(serve: Callable[[Path], str]) -> str:
    """The address of the site that `make docs` has built."""
    directory = Path(__file__).parents[2] / "build/site"
    assert (directory / "index.html").exists(), "run `make docs` first"
    return serve(directory)
