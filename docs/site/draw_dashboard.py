"""Draws the panels of docs/grafana.json from a running Prometheus: draw_dashboard.py URL JOB SECONDS

Writes docs/dashboard.png. It needs matplotlib. The windows of rates have 10 s here instead of a minute.
"""

import json
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]


def series(url: str, query: str, start: float) -> list[dict]:
    words = urllib.parse.urlencode({"query": query, "start": start, "end": time.time(), "step": 1})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{words}") as answer:
        return json.load(answer)["data"]["result"]


def lines(url: str, panel: dict, job: str, start: float) -> dict[str, tuple[list[float], list[float]]]:
    """Return {label: (seconds, values)} of a panel."""
    found = {}
    for target in panel["targets"]:
        for line in series(url, target["expr"].replace("$job_name", job).replace("[1m]", "[10s]"), start):
            name = target.get("legendFormat", "")
            for key, value in line["metric"].items():
                name = name.replace("{{" + key + "}}", value)
            found[name] = [at - start for at, _ in line["values"]], [float(value) for _, value in line["values"]]
    return found


def main(url: str, job: str, seconds: str) -> None:
    """Draw the panels that are not zero throughout."""
    start = time.time() - float(seconds)
    panels = {
        panel["title"]: lines(url, panel, job, start)
        for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]
    }
    panels = {title: drawn for title, drawn in panels.items() if any(any(values) for _, values in drawn.values())}
    plt.rcParams.update({"font.size": 13, "axes.titlesize": 14, "lines.linewidth": 2})
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, figsize=(13, 3.4 * -(-len(panels) // 2)), squeeze=False)
    for axis, (title, drawn) in zip(axes.ravel(), panels.items(), strict=False):
        for name, (times, values) in drawn.items():
            axis.plot(times, values, label=name)
        if any(drawn):
            axis.legend(fontsize=11)
        axis.set_title(title)
        axis.set_xlabel("s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes.ravel()[len(panels) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(DOCS / "dashboard.png", dpi=75)


if __name__ == "__main__":
    main(*sys.argv[1:])
