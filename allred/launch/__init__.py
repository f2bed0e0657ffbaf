"""Tasks that are started one by one, without mpirun: how they meet, and what stands for mpirun then."""
