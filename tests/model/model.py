"""Model-based tests: random scenarios of one part of the API (a surface), each compared after every action with an
oracle (a reference computation in one process).

    python tests/model/model.py --surface optimizers --number 1000 --seed 7       under mpirun, in all worlds
    python tests/model/model.py --surface optimizers --seed 123 --number 1 --ranks 3 --world shm     one scenario

A surface is a module with `scenario(rng, size)`, which makes a scenario from a `random.Random`, and `check(scenario,
directory)`, a generator that runs it on this rank. It yields after each action two texts: the difference from the
oracle, or ""; and what must be equal on all ranks, None on a rank that takes no part. The seed of a failure is printed.
The scenario follows from the seed and the number of ranks. test_model.py runs scenarios in threads, where hypothesis
shrinks failures.
"""

import argparse
import importlib.util
import itertools
import os
import pathlib
import random
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import mpirun  # noqa: E402

OF_TORCH = ["hooked", "process_group", "hvd"]  # torch is in the environment of MPICH only
SURFACES = ["optimizers", "collectives", "several", "data", "servers", "checkpoints", "tables"]
SURFACES += OF_TORCH if importlib.util.find_spec("torch") else []
# By name: environment variables.
WORLDS = {
    "shm": {},
    "no arenas": {"ALLRED_ARENA": "0"},
    "tcp": {"ALLRED_TRANSPORT": "tcp"},
    "mpi": {"ALLRED_BACKEND": "mpi"},
    "openmpi": {},
}
NODES = {2: "1,1", 3: "2,1", 4: "2,2"}  # of world tcp: numbers of ranks on pretended nodes
BATCH, BATCH_OF_SLOW = 100, 20  # scenarios of a job
SLOW = ("servers", "checkpoints", "tables")
ONE_PROCESS = ("data",)  # without communication: a process runs all ranks of a scenario


def main() -> int:
    arguments = _arguments()
    failures, done, start = [], 0, time.monotonic()
    seed, jobs = arguments.seed, [(ranks, world) for world in arguments.world for ranks in arguments.ranks]
    surfaces, most = itertools.cycle(arguments.surface), -(-arguments.number // len(arguments.surface))
    print(f"seed {seed}", flush=True)
    while done < arguments.number and (not arguments.seconds or time.monotonic() - start < arguments.seconds):
        surface = next(surfaces)
        ranks, world = random.Random(seed).choice(jobs)
        world = "shm" if world == "openmpi" and surface in OF_TORCH else world
        ranks, world = (1, "shm") if surface in ONE_PROCESS else (ranks, world)
        last = seed + min(BATCH_OF_SLOW if surface in SLOW else BATCH, most, arguments.number - done)
        done += last - seed
        while seed < last:  # continue after a scenario that failed
            failed, text = play(surface, ranks, world, seed, last)
            if failed is None:
                print(text, end="", flush=True)
                break
            failures.append(f"--surface {surface} --seed {failed} --number 1 --ranks {ranks} --world {world!r}")
            print(f"FAILED {failures[-1]}\n{text}", flush=True)
            seed = failed + 1
        seed = last
    print(f"{done} scenarios in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    print(*failures, sep="\n")
    return bool(failures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--surface", nargs="+", choices=SURFACES, default=SURFACES)
    parser.add_argument("--number", type=int, default=1000, help="of scenarios")
    parser.add_argument("--seconds", type=float, default=0, help="stop after this time; default: no limit")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)), help="of the first scenario")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--world", nargs="+", choices=WORLDS, default=list(WORLDS))
    return parser.parse_args()


def play(surface: str, ranks: int, world: str, first: int, last: int) -> tuple[int | None, str]:
    """Run scenarios as one job. Return the seed of the first one that failed, and the output; None if none did,
    and notes."""
    environment = WORLDS[world] | {"ALLRED_TIMEOUT_S": "30", "ALLRED_BANNER": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"ALLRED_OVERLAP": "always"}  # auto depends on the time that a backward pass computes
    environment |= {"ALLRED_PRETEND_NODES": NODES[ranks]} if world == "tcp" and ranks > 1 else {}
    limit_s, program = 60 + 5 * (last - first), [HERE / "rank_program.py", surface, str(first), str(last)]
    mpi = "openmpi" if world == "openmpi" else "mpich"
    try:
        done = mpirun(ranks, *program, mpi=mpi, timeout_s=limit_s, env=environment)
        text, ended = done.text, done.code == 0 and not done.left
    except TimeoutError as error:
        text, ended = str(error), False
    lines = text.splitlines()
    if ended and f"passed {first} to {last}" in lines:
        return None, "".join(f"{surface}: {line}\n" for line in lines if line.startswith("ended early: "))
    started = [int(line.split()[1]) for line in lines if line.startswith("scenario ")]
    kept = [line for line in lines if line and not line.startswith(("scenario ", "Abort(", "rank "))]
    problems = dict.fromkeys(line for line in lines if line.startswith("rank "))
    return max(started, default=first), "\n".join(["\n".join(kept)[-4000:], *problems])


if __name__ == "__main__":
    sys.exit(main())
