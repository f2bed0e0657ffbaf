"""What a page in the browser has done: messages of its console, addresses it loaded, its width."""

import json
import time
from typing import Any

LAYOUT_S = 5.0  # limit of the layout of a page


def console_errors(browser: Any) -> list[str]:
    """Return the console's errors since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def requested(browser: Any) -> list[str]:
    """Return the addresses that were requested since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def set_size(browser: Any, width: int, height: int = 1000, dark: bool = False) -> None:
    """Show the page as on a screen of this width in CSS pixels. A window of Chromium has at least 500."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def overflow(browser: Any) -> int:
    """Return by how many pixels the page is wider than its screen, without the bar for vertical scrolling, once its
    scripts and styles have laid it out: a page that is too wide stays so."""
    until = time.monotonic() + LAYOUT_S
    while True:
        width = int(
            browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )
        if width <= 0 or time.monotonic() > until:
            return width
        time.sleep(0.05)
