"""What the ranks run where allred itself is under test.

    python allred_program.py          every rank prints `allred rank R of N`, or `ConfigError: ...` if init() refuses
    python allred_program.py fail     the last rank raises after init, while the others are in MPI's barrier

Nothing here ends the other ranks: no `-m mpi4py`, no Abort. allred has to.
"""

import sys
import time

import allred

try:
    allred.init()
except allred.ConfigError as error:
    print(f"ConfigError: {error}", flush=True)
    time.sleep(0.2)  # srun drops what was printed just before a failure, see rank_program.py
    sys.exit(1)
print(f"allred rank {allred.rank()} of {allred.size()}", flush=True)
if sys.argv[1:] == ["fail"]:
    if allred.rank() == allred.size() - 1:
        raise RuntimeError(f"rank {allred.rank()} of {allred.size()} fails on purpose")
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
