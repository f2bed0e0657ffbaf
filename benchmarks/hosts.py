"""Speed between hosts, against the wire, raw MPI and gloo: benchmarks/HOSTS.md. It needs root, and takes 15 minutes.

    python benchmarks/hosts.py                  all; writes benchmarks/HOSTS.md
    python benchmarks/hosts.py --only fsdp      one section, which is replaced there: 200mbit, 1gbit, fsdp
    python benchmarks/hosts.py --only fsdp --layouts 2x1,4x1     prints some rows of it; writes nothing
    python benchmarks/hosts.py --smoke          one small case; writes nothing

Each host is a network namespace, and each link is shaped in both directions. All ratios are of one run, in which calls
of allred and of raw MPI alternate, and the wire's rate is that of a TCP connection in the same run. "2x1": two hosts
with one rank each.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/integration"))
from hosts import hosts  # noqa: E402

PROGRAM, RESULTS = ROOT / "benchmarks/hosts_program.py", ROOT / "benchmarks/HOSTS.md"
SIZES = [4, 2**10, 2**14, 2**16, 2**18, 2**20, 2**24]
COLLECTIVE_SIZES = [2**20, 2**22, 2**24]
COLLECTIVES = ["reducescatter", "allgather"]
RATES = ["200mbit", "1gbit"]
TITLES = {"200mbit": "200mbit", "1gbit": "1gbit", "fsdp": "Traffic of FSDP, 1gbit"}  # of the sections
LAYOUTS = {"2x1": [1, 1], "4x1": [1, 1, 1, 1], "2x2": [2, 2]}
LIMIT_S = 400
FSDP_INTRO = """Formula: (hosts - 1) / hosts of the bytes of the larger array. Of the wire: the time that a link
needs for the formula (of a step: for what was sent), divided by the measured time. CPU: of all ranks, per second.
"""


def shape(here, rate):
    """Limit the links of all hosts to a rate, in both directions."""
    for number, name in enumerate(here.names):
        for namespace, device in ((name, "eth0"), (here.hub, f"p{number}")):
            words = f"qdisc replace dev {device} root tbf rate {rate} burst 256kb latency 50ms"
            subprocess.run(["tc", "-n", namespace, *words.split()], check=True)


def measure(here, mpi, ranks, *arguments, **settings):
    env = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "ALLRED_TRANSPORT": "tcp", **settings}
    env["PRTE_MCA_rmaps_default_mapping_policy"] = None
    forward = [word for name in settings for word in ("-x", name)] + ["-x", "OMP_NUM_THREADS", "-x", "ALLRED_TRANSPORT"]
    options = forward if mpi == "openmpi" else []
    result = here.run(mpi, ranks, PROGRAM, *arguments, options=options, timeout_s=LIMIT_S, env=env)
    if result.code:
        return {"error": result.text}
    [line] = [line for line in result.out.splitlines() if line.startswith("{")]
    return json.loads(line)


def ratio(number):
    return f"{number:.2f}"


def size_name(nbytes):
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB" if nbytes < 2**20 else f"{nbytes >> 20} MiB"


def allreduce_rows(case, found, others):
    """Return a row for each size. others: the results of the other MPI in the same case."""
    hosts = int(case.partition("x")[0])
    for mine, other in zip(found["rows"], (others or found)["rows"], strict=True):
        nbytes, (raw_s, raw_cpu, _), (took_s, cpu, sent) = mine["bytes"], mine["raw"], mine["ours"]
        formula = 2 * (hosts - 1) / hosts * nbytes
        cells = [size_name(nbytes), ratio(took_s / min(raw_s, other["raw"][0])), ratio(took_s / raw_s)]
        large = nbytes >= 2**24
        cells += [ratio(formula / found["wire"] / took_s) if nbytes >= 2**20 else ""]
        cells += [ratio(sent / formula) if large else "", ratio(cpu / raw_cpu) if large else ""]
        yield cells


def collective_rows(case, found):
    """Return a row for each size: for each collective its share of the wire, bytes per formula, and CPU."""
    hosts = int(case.partition("x")[0])
    for row in found["rows"]:
        formula = (hosts - 1) / hosts * row["bytes"]
        cells = [size_name(row["bytes"])]
        for took_s, cpu, sent in (row[kind] for kind in COLLECTIVES):
            cells += [ratio(formula / found["wire"] / took_s), ratio(sent / formula), ratio(cpu / took_s)]
        yield cells


def table(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def places(layout):
    """Return the number of ranks on each of four hosts."""
    return [*LAYOUTS[layout], *[0] * (4 - len(LAYOUTS[layout]))]


class Section:
    """One section of HOSTS.md. `text` is its tables, `failed` says what could not be measured."""

    def __init__(self, here, layouts):
        self.here, self.layouts, self.text, self.failed = here, layouts, [], []

    def measure(self, mpi, ranks, *arguments, **settings):
        """Return what the program measured, or None."""
        found = measure(self.here, mpi, ranks, *arguments, **settings)
        if "error" in found:
            self.failed.append(f"{mpi}, {ranks}, {arguments[0]}: {found['error']}")
            return None
        return found

    def add_table(self, titles, rows):
        self.text.append(table(titles, rows))

    def of_a_rate(self):
        rows, steps, servers = [], [], []
        for case in self.layouts:
            results = {mpi: self.measure(mpi, places(case), "allreduce", *SIZES) for mpi in ("mpich", "openmpi")}
            for mpi, found in results.items():
                other = results["openmpi" if mpi == "mpich" else "mpich"]
                if found:
                    rows += [[case, mpi, *cells] for cells in allreduce_rows(case, found, other)]
        for mpi in ("mpich", "openmpi"):
            if found := self.measure(mpi, [1, 1, 0, 0], "step"):
                wire = found["step_bytes"] / found["wire"] / found["step"]
                thousand = [ratio(found[name] / found["raw_1000"]) for name in ("group_1000", "step_1000")]
                steps.append([mpi, ratio(wire), *thousand, *[ratio(share) for share in found["hidden"].values()]])
        for workers in (1, 2):
            for mpi in ("mpich", "openmpi"):
                settings = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": "1"}
                if found := self.measure(mpi, [1, workers, 0, 0], "ps", **settings):
                    ideal_s = workers * found["step_bytes"] / found["wire"]
                    servers.append([mpi, str(workers), ratio(ideal_s / found["step"])])
        titles = ["hosts x ranks", "MPI", "allreduce", "time / the better MPI", "time / this MPI", "of the wire"]
        self.add_table([*titles, "bytes / formula", "CPU / this MPI"], rows)
        titles = ["MPI", "ResNet-50's step: of the wire", "1000 x 1 KiB / raw: group", "step"]
        self.add_table([*titles, "hidden: sleep", "hidden: Python", "hidden: matmul"], steps)
        self.add_table(["MPI", "workers", "mode ps: of the wire"], servers)

    def of_fsdp(self):
        self.text.append(FSDP_INTRO)
        rows, steps = [], []
        for case in self.layouts:
            if found := self.measure("mpich", places(case), "collectives", *COLLECTIVE_SIZES):
                rows += [[case, *cells] for cells in collective_rows(case, found)]
            if found := self.measure("mpich", places(case), "fsdp", GLOO_SOCKET_IFNAME="eth0"):
                (ours_s, ours_cpu, ours_sent), (gloo_s, gloo_cpu, gloo_sent) = found["allred"], found["gloo"]
                steps.append([case, f"{ours_s:.2f} s", f"{gloo_s:.2f} s", ratio(gloo_s / ours_s)])
                steps[-1] += [ratio(gloo_sent / ours_sent), ratio(ours_sent / found["wire"] / ours_s)]
                steps[-1] += [ratio(ours_cpu / ours_s), ratio(gloo_cpu / gloo_s)]
        titles = [f"{kind}: {what}" for kind in COLLECTIVES for what in ("of the wire", "bytes / formula", "CPU")]
        self.add_table(["hosts x ranks", "size", *titles], rows)
        titles = [
            "FSDP step: allred",
            "gloo",
            "time: gloo / allred",
            "bytes: gloo / allred",
            "of the wire",
            "CPU",
            "of gloo",
        ]
        self.add_table(["hosts x ranks", *titles], steps)


def measure_section(name, layouts):
    """name: a rate, or fsdp."""
    with tempfile.TemporaryDirectory() as directory, hosts(4, pathlib.Path(directory)) as here:
        shape(here, name if name in RATES else "1gbit")
        section = Section(here, layouts)
        if name in RATES:
            section.of_a_rate()
        else:
            section.of_fsdp()
    return section


def write_section(name, text):
    """Replace a section of HOSTS.md."""
    intro = f"# Between hosts\n\n`python benchmarks/hosts.py` on {os.cpu_count()} cores, transport tcp; see there.\n"
    found = dict(part.split("\n", 1) for part in RESULTS.read_text().split("\n## ")[1:])
    found[TITLES[name]] = "\n" + text
    RESULTS.write_text(
        "\n".join([intro, *[f"## {title}\n{found[title].rstrip()}\n" for title in TITLES.values() if title in found]])
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one small case, without a file")
    parser.add_argument("--only", choices=TITLES, help="one section")
    parser.add_argument("--layouts", help="some of %(default)s, without a file", default=",".join(LAYOUTS))
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as directory, hosts(2, pathlib.Path(directory)) as here:
            shape(here, "1gbit")
            found = measure(here, "mpich", [1, 1], "allreduce", 4, 2**16, 2**22)
            more = measure(here, "mpich", [1, 1], "collectives", 2**20)
        for each in (found, more):
            if "error" in each:
                sys.exit(each["error"])
        print(table(["allreduce", "/ MPI", "/ MPI", "wire", "", ""], allreduce_rows("2x1", found, None)))
        print(table(["size", *COLLECTIVES], ([cells[0], *cells[1::3]] for cells in collective_rows("2x1", more))))
        return
    failed, layouts = [], options.layouts.split(",")
    for name in [options.only] if options.only else TITLES:
        section = measure_section(name, layouts)
        text = "\n".join(section.text)
        print(f"## {TITLES[name]}\n\n{text}", flush=True)
        failed += section.failed
        if layouts == [*LAYOUTS] and not section.failed:
            write_section(name, text)
    for text in failed:
        print(text, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
