"""Failure detection: a watcher process on every node, the ranks' connections to it, and the exit of a rank."""
