"""Speed between hosts, against the wire and raw MPI: benchmarks/HOSTS.md. It takes about ten minutes and needs root.

    python benchmarks/hosts.py                  all; writes benchmarks/HOSTS.md
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
RATES = ["200mbit", "1gbit"]
LAYOUTS = {"2x1": [1, 1], "4x1": [1, 1, 1, 1], "2x2": [2, 2]}
LIMIT_S = 400


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


def table(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def run_all(directory):
    texts, failed = [], []
    for rate in RATES:
        with hosts(4, directory) as here:
            shape(here, rate)
            rows, steps = [], []
            for case, ranks in LAYOUTS.items():
                ranks = [*ranks, *[0] * (4 - len(ranks))]
                results = {mpi: measure(here, mpi, ranks, "allreduce", *SIZES) for mpi in ("mpich", "openmpi")}
                for mpi, found in results.items():
                    other = results["openmpi" if mpi == "mpich" else "mpich"]
                    if "error" in found:
                        failed.append(f"{rate} {case} {mpi}: {found['error']}")
                    else:
                        usable = None if "error" in other else other
                        rows += [[case, mpi, *cells] for cells in allreduce_rows(case, found, usable)]
            for mpi in ("mpich", "openmpi"):
                found = measure(here, mpi, [1, 1, 0, 0], "step")
                if "error" in found:
                    failed.append(f"{rate} step {mpi}: {found['error']}")
                    continue
                wire = found["step_bytes"] / found["wire"] / found["step"]
                thousand = [ratio(found[name] / found["raw_1000"]) for name in ("group_1000", "step_1000")]
                steps.append([mpi, ratio(wire), *thousand, *[ratio(share) for share in found["hidden"].values()]])
            servers = []
            for workers in (1, 2):
                settings = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": "1"}
                for mpi in ("mpich", "openmpi"):
                    found = measure(here, mpi, [1, workers, 0, 0], "ps", **settings)
                    if "error" in found:
                        failed.append(f"{rate} ps {workers} {mpi}: {found['error']}")
                    else:
                        ideal_s = workers * found["step_bytes"] / found["wire"]
                        servers.append([mpi, str(workers), ratio(ideal_s / found["step"])])
        titles = ["hosts x ranks", "MPI", "allreduce", "time / the better MPI", "time / this MPI", "of the wire"]
        texts.append(f"## {rate}\n\n" + table([*titles, "bytes / formula", "CPU / this MPI"], rows))
        titles = ["MPI", "ResNet-50's step: of the wire", "1000 x 1 KiB / raw: group", "step"]
        texts.append(table([*titles, "hidden: sleep", "hidden: Python", "hidden: matmul"], steps))
        texts.append(table(["MPI", "workers", "mode ps: of the wire"], servers))
    return texts, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one small case, without a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        if options.smoke:
            with hosts(2, directory) as here:
                shape(here, "1gbit")
                found = measure(here, "mpich", [1, 1], "allreduce", 4, 2**16, 2**22)
            if "error" in found:
                sys.exit(found["error"])
            print(table(["allreduce", "/ MPI", "/ MPI", "wire", "", ""], allreduce_rows("2x1", found, None)))
            return
        texts, failed = run_all(directory)
    intro = f"# Between hosts\n\n`python benchmarks/hosts.py` on {os.cpu_count()} cores, transport tcp; see there.\n"
    RESULTS.write_text("\n".join([intro, *texts]))
    print(RESULTS.read_text())
    for text in failed:
        print(text, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
