"""`python -m allred model`: a cost model of the communication of a step, for numbers of hosts that are not at hand."""
