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


def main(url: str, job: str, seconds: str) -> None:
    panels, start = json.loads((DOCS / "grafana.json").read_text())["panels"], time.time() - float(seconds)
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, figsize=(12, 13))
    for axis, panel in zip(axes.ravel(), panels, strict=False):
        for target in panel["targets"]:
            query = target["expr"].replace("$job_name", job).replace("[1m]", "[10s]")
            for line in series(url, query, start):
                name = target.get("legendFormat", "")
                for key, value in line["metric"].items():
                    name = name.replace("{{" + key + "}}", value)
                axis.plot(*zip(*((at - start, float(value)) for at, value in line["values"]), strict=True), label=name)
                if name:
                    axis.legend(fontsize=7)
        axis.set_title(panel["title"], fontsize=10)
        axis.set_xlabel("s", fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes.ravel()[len(panels) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(DOCS / "dashboard.png", dpi=70)


if __name__ == "__main__":
    main(*sys.argv[1:])
