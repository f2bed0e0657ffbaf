"""`python -m allred bench`: speed of the collectives, of parameter servers and of the readers, also against raw MPI."""
