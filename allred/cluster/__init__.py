"""The machine under the ranks: MPI's start, who is on which node, and the lines printed for a person."""
