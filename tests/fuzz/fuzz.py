"""Fuzz test: random jobs under both MPIs for a given time: `python tests/fuzz/fuzz.py --seconds 60`.

A seed defines each job (plan.py). It is printed before the job starts; `--seed N` repeats a job. The ranks check their
results with numpy (rank_program.py), and this program checks the end of the job (promises.py).
"""

import argparse
import collections
import os
import pathlib
import signal
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import mpirun  # noqa: E402
from plan import FAULTS, Job, job_of  # noqa: E402
from promises import KILLED, broken, broken_timeline, environment  # noqa: E402

HANG_S = 40  # time limit of a job, which takes a few seconds on an idle machine


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the job
    counts: collections.Counter[str] = collections.Counter()
    operations, failed, seed, start = 0, [], arguments.seed, time.monotonic()
    while True:
        job = job_of(seed)
        if job.fault.kind in arguments.faults:
            print(job, flush=True)
            counts[job.fault.kind] += 1
            operations += len(job.operations)
            failed += [seed] * (not play(job))
        seed += 1
        if time.monotonic() - start > arguments.seconds and (counts or arguments.seconds):
            break
    faults = ", ".join(f"{kind} {counts[kind]}" for kind in FAULTS if counts[kind])
    print(f"{counts.total()} jobs, {operations} operations; faults: {faults}; {len(failed)} failures {failed or ''}")
    return bool(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0, help="duration; default: one job")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)), help="seed of the first job")
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="run only jobs with these faults"
    )
    return parser.parse_args()


def play(job: Job) -> bool:
    """Run a job. Return whether it kept all promises; if not, print the broken ones and how to repeat the job.

    On an overloaded machine the message about a killed rank may be late (docs/assumptions.md). Then the job runs a
    second time, which is printed.
    """
    found, text = _run(job)
    if len(found) == 1 and KILLED in found[0]:
        print(f"repeated, after {found[0]}", flush=True)
        found, text = _run(job)
    if found:
        again = f".venv/bin/python tests/fuzz/fuzz.py --seed {job.seed}"
        print(f"FAILED {job}\n  " + "\n  ".join(found) + f"\n  repeat: {again}\n{text}", flush=True)
    return not found


def _run(job: Job) -> tuple[list[str], str]:
    program = HERE / "rank_program.py"
    try:
        with tempfile.TemporaryDirectory() as directory:
            env = environment(job) | ({"ALLRED_TIMELINE": directory} if job.recorded else {})
            result = mpirun(job.ranks, program, job.seed, mpi=job.mpi, timeout_s=HANG_S, env=env)
            return broken(job, result) + broken_timeline(job, pathlib.Path(directory)), result.text
    except TimeoutError as error:
        return ["the job hung"], str(error)


if __name__ == "__main__":
    sys.exit(main())
