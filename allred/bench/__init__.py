"""`python -m allred bench`: how fast the collectives are on this machine, and against raw MPI."""
