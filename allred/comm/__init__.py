"""Communication: the collectives as functions, the communicator, and its backends."""
