"""One rank of a job of the model: `mpirun -np N python rank_program.py SURFACE FIRST LAST` (model.py)."""

import importlib
import pathlib
import random
import sys
import tempfile

from mpi4py import MPI

import allred


def main(surface: str, first: int, last: int) -> None:
    module = importlib.import_module(surface)
    creates_worlds = getattr(module, "CREATES_WORLDS", False)
    if not creates_worlds:
        allred.init()
    comm = MPI.COMM_WORLD.Dup()
    with tempfile.TemporaryDirectory(prefix="allred-model-") as own:
        root = pathlib.Path(comm.bcast(own))
        for seed in range(first, last):
            if comm.rank == 0:
                print(f"scenario {seed}", flush=True)
            plan = module.scenario(random.Random(seed), comm.size)
            for problem, shared in module.check(plan, root / str(seed)):
                if problem:  # shown at once: the other ranks may wait for this one
                    print(f"\nrank {comm.rank}: {problem}", flush=True)
                everyone = comm.allgather((problem, shared))
                if text := difference(everyone):
                    if comm.rank == 0:
                        print(f"{plan}\n{text}", flush=True)
                    comm.Barrier()
                    comm.Abort(1)
        comm.Barrier()
    if comm.rank == 0:
        for reason, count in getattr(module, "ENDED_EARLY", {}).items():
            print(f"ended early: {count} scenarios, {reason}")
        print(f"passed {first} to {last}", flush=True)
    if not creates_worlds:
        allred.shutdown()


def difference(everyone: list[tuple[str, str | None]]) -> str:
    """Describe what should be equal on all ranks and is not, or that there are problems; "" if all is well."""
    if any(problem for problem, _ in everyone):
        return "see above"
    texts = {text for _, text in everyone if text is not None}
    return "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone)) if len(texts) > 1 else ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
