"""Parameter servers: which updates wait for which workers (consistency, and the coordinators that decide it)."""
