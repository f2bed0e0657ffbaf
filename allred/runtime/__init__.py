"""The parts of background processes: an event loop, an authenticated channel, and the table of time limits."""
