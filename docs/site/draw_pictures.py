"""Draws docs/pictures/*.svg: the two modes, overlap, and the speed against raw MPI from benchmarks/RESULTS.md.

A picture has a background of its own and follows the colours of the browser, light or dark.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #202124; }
.small { font-size: 12px; }
.page { fill: #ffffff; stroke: #d0d4da; }
.compute { fill: #b9d2f5; stroke: #4a78b8; }
.reduce { fill: #f8d3a8; stroke: #b97a2b; }
.update { fill: #c3e6c3; stroke: #4b934b; }
.line { stroke: #5f6368; stroke-width: 1.5; fill: none; }
.tip { fill: #5f6368; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e6eb; }
  .page { fill: #1f2330; stroke: #444a5a; }
  .compute { fill: #2d4a75; stroke: #7ea6de; }
  .reduce { fill: #6b4718; stroke: #e0a75e; }
  .update { fill: #27532a; stroke: #7fc283; }
  .line { stroke: #a4abb8; }
  .tip { fill: #a4abb8; }
}
</style>
<marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">
<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker>"""


def picture(width, height, title, *parts):
    """Return an SVG file. title: for readers who do not see it."""
    view = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img">\n<title>{title}</title>\n{STYLE}\n'
    page = f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
    return head + page + "\n".join(parts) + "\n</svg>\n"


def text(x, y, words, anchor="start", style=""):
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{words}</text>'


def box(x, y, width, height, style, words=""):
    shape = f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, words, "middle") if words else "")


def arrow(x1, y1, x2, y2):
    return f'<path class="line" d="M{x1:g},{y1:g} L{x2:g},{y2:g}" marker-end="url(#tip)"/>'


def modes():
    left = [text(20, 30, "mode sync: every rank updates")]
    for rank in range(3):
        x = 20 + 110 * rank
        left += [text(x + 48, 60, f"rank {rank}", "middle"), box(x, 70, 96, 34, "compute", "gradient")]
        left += [
            arrow(x + 48, 104, x + 48, 132),
            arrow(x + 48, 170, x + 48, 198),
            box(x, 200, 96, 34, "update", "update"),
        ]
    left += [box(20, 134, 316, 34, "reduce", "allreduce: the mean"), text(20, 262, "the same parameters on all ranks")]
    right = [text(390, 30, "mode ps: parameter servers update")]
    right += [box(390, 70, 316, 50, "update", "a parameter server: update")]
    for rank in (0, 1):
        x = 390 + 170 * rank
        right += [arrow(x + 40, 198, x + 40, 124), arrow(x + 106, 120, x + 106, 196)]
        right += [text(x + 44, 150, "push", "start", "small"), text(x + 110, 170, "pull", "start", "small")]
        right += [box(x, 200, 146, 34, "compute", f"rank {rank}, a worker: gradient")]
    right += [text(390, 262, "async, bounded staleness, or sync")]
    return picture(730, 285, "Mode sync and mode ps", *left, *right)


def overlap():
    parts = []
    for y, title, shift in (
        (50, "opt.step alone: communication follows", 0),
        (170, "opt.reduce: it runs meanwhile", 1),
    ):
        parts += [
            text(20, y - 20, title),
            text(20, y + 22, "compute", style="small"),
            text(20, y + 62, "reduce", style="small"),
        ]
        for layer in range(3):
            parts += [box(90 + 110 * layer, y, 106, 34, "compute", f"layer {3 - layer}")]
            start = 200 + 110 * layer if shift else 420 + 80 * layer
            parts += [box(start, y + 40, 76, 34, "reduce", f"layer {3 - layer}")]
        parts += [box(500 if shift else 660, y, 80, 34, "update", "update")]
    parts += [arrow(90, 265, 740, 265), text(740, 285, "time", "end", "small")]
    return picture(760, 300, "A backward pass of three layers without and with overlap", *parts)


def speedups(results):
    """Return {MPI: [(size, MPI's time / allred's)]} of the first table of each MPI in RESULTS.md."""
    found = {}
    for section in results.split("\n## ")[1:]:
        mpi = re.match(r"(\w[\w ]*?) [\d.]+: allreduce\n", section)
        if mpi and mpi[1] not in found:
            rows = [[cell.strip() for cell in row.split("|")] for row in section.splitlines() if row.startswith("| ")]
            column = rows[0].index("speedup")
            found[mpi[1]] = [(row[1], float(row[column])) for row in rows[2:]]
    return found


def speed():
    found = speedups((ROOT / "benchmarks/RESULTS.md").read_text())
    most = max(ratio for rows in found.values() for _, ratio in rows)
    scale, parts = 480 / most, [text(20, 28, "allreduce: time of raw MPI / time of allred (above 1, allred is faster)")]
    bottom = 0
    for series, (style, (mpi, rows)) in enumerate(zip(("compute", "reduce"), found.items(), strict=True)):
        parts += [box(430 + 130 * series, 44, 14, 14, style), text(450 + 130 * series, 56, mpi)]
        for number, (size, ratio) in enumerate(rows):
            y = 74 + 34 * number + 14 * series
            parts += [text(80, y + 20, size, "end")] if not series else []
            parts += [
                box(90, y, ratio * scale, 12, style),
                text(96 + ratio * scale, y + 11, f"{ratio:.2f}", style="small"),
            ]
            bottom = max(bottom, y + 20)
    parts += [f'<path class="line" stroke-dasharray="4 3" d="M{90 + scale:g},66 V{bottom:g}"/>']
    parts += [text(90 + scale, bottom + 16, "1: raw MPI", "middle", "small")]
    return picture(700, bottom + 30, "Speed of allreduce against raw MPI, by size", *parts)


PICTURES = {"modes.svg": modes, "overlap.svg": overlap, "speed.svg": speed}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs/pictures" / name).write_text(draw())
