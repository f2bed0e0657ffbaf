"""What the ranks of a test job run. Plain mpi4py: a failure here is not allred's, but Slurm's, the script's or MPI's.

    python rank_program.py          rank 0 prints `world of 2 ranks on nd0,nd1, sum 1`
    python rank_program.py raise    the last rank prints a traceback and leaves without Finalize
    python rank_program.py die      the last rank is killed

In both failures the others wait for the last rank in an allreduce.
"""

import os
import signal
import sys
import time
import traceback

# A heap with much in use and holes in between, as after the import of a framework. It makes the addresses long that
# MPICH's UCX sends through PMI: 6 of 6 jobs on two nodes failed under srun --mpi=pmi2 before slurm.sbatch chose ofi.
ballast = [os.urandom(600 + 37 * i % 600) for i in range(40_000)]
del ballast[::3]

from mpi4py import MPI  # noqa: E402

world = MPI.COMM_WORLD


def fail() -> None:
    raise RuntimeError(f"rank {world.rank} of {world.size} fails on purpose")


is_last = world.rank == world.size - 1
if is_last and sys.argv[1:] == ["raise"]:
    try:
        fail()
    except RuntimeError:
        traceback.print_exc()
        time.sleep(0.2)  # srun drops what a failing task of another node printed just before: 12 of 20 without
        if "Open MPI" in MPI.Get_library_version():
            os._exit(1)  # mpirun ends the others; after Abort it stayed itself in 2 of 130 jobs with prted on one node
        world.Abort(1)  # MPICH's mpirun does not notice an _exit on another node
if is_last and sys.argv[1:] == ["die"]:
    os.kill(os.getpid(), signal.SIGKILL)
total = world.allreduce(world.rank)
nodes = world.gather(os.environ.get("SLURMD_NODENAME", "?"))
if world.rank == 0:
    print(f"world of {world.size} ranks on {','.join(nodes)}, sum {total}", flush=True)
