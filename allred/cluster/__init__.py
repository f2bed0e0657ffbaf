"""The machine under the ranks: the launcher, the start of MPI, the topology, cores and limits, ClusterSpec."""
