"""The rendezvous of tasks that are started one by one, without mpirun, and their start of MPI."""
