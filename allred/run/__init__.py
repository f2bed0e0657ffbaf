"""python -m allred run: starts a program with mpirun, restarts it after failures, and changes its number of ranks."""
