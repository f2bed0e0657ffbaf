"""Runs with failure points in the C core (csrc/chaos.h): `python tests/fuzz/chaos.py --seconds 40`, after `make chaos`.

A seed selects the points that are on, and the random numbers by which they fire. Each seed runs random jobs (fuzz.py);
with --tiers also the drivers of the C core (tests/csrc), the contract suites and the tests of parameter servers. The
seed is printed before its runs. `--seed N` selects the same points and numbers again, but not the same order of steps.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from allred import testing  # noqa: E402

INTEGRATION = ROOT / "tests/integration"
BIN = ROOT / ".venv/bin"
LIMIT_S = 900  # the time limit of a run
PYTEST = (BIN / "python", "-m", "pytest", "-q", "--color=no")
# This test hides the normal extension from some ranks; with CHAOS_SEED they would load the other one.
HIDDEN = ("--deselect", "tests/integration/test_ps_lifecycle.py::test_with_the_extension_on_some_ranks_only")
TIERS = [
    ("make", "-s", "-f", "tests/csrc/Makefile", "chaos"),
    (BIN / "mpirun", "-np", "3", *PYTEST, "--with-mpi", "tests/parallel"),
    (*PYTEST, "-n", "4", *HIDDEN, *sorted(INTEGRATION.glob("test_ps*.py")), INTEGRATION / "test_tcp.py"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0, help="duration; default: one seed")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="the first seed")
    parser.add_argument("--tiers", action="store_true", help="also run the test suites, which takes minutes")
    given = parser.parse_args()
    words = (BIN / "python", "-c", "from allred import native; print(native._kernels.__name__)")
    loaded = subprocess.run(words, cwd=ROOT, env={**os.environ, "CHAOS_SEED": "1"}, capture_output=True, text=True)
    if not loaded.stdout.strip().endswith("_chaos"):
        sys.exit(f"`make chaos` has not built the extension with failure points. {loaded.stdout}{loaded.stderr}")
    seed, start, failed = given.seed, time.monotonic(), 0
    while not failed and (seed == given.seed or time.monotonic() - start < given.seconds):
        print(f"CHAOS_SEED={seed}", flush=True)
        jobs = (BIN / "python", "tests/fuzz/fuzz.py", "--seconds", "8", "--seed", seed)
        failed += sum(not run(command, seed) for command in (jobs, *(TIERS if given.tiers else ())))
        seed += 1
    print(f"{seed - given.seed} seeds, {failed} failures, {time.monotonic() - start:.0f} s")
    return bool(failed)


def run(command: tuple[object, ...], seed: int) -> bool:
    """Run a command with these failure points. Return whether it succeeded; if not, print its output."""
    words = [*map(str, command)]
    try:
        done = testing.run(words, LIMIT_S, {"CHAOS_SEED": str(seed)}, cwd=ROOT)
        succeeded, text = done.code == 0, done.text
        last = done.out.strip().splitlines()[-1:]
    except TimeoutError as error:
        succeeded, text, last = False, str(error), ["not ended"]
    print(f"  {' '.join(words)[:100]}: {last}", flush=True)
    if not succeeded:
        print(f"{text}\nrepeat: {sys.argv[0]} --seed {seed}, or CHAOS_SEED={seed} {' '.join(words)}")
    return succeeded


if __name__ == "__main__":
    sys.exit(main())
