"""A timeline of all ranks: what each of them did when, and who waited for whom (ALLRED_TIMELINE, docs/timeline.md).

While a job runs: recorder.py, and track.py for the operations of a communicator. Afterwards, `python -m allred timeline
merge DIR`: file.py reads what the ranks have written, clock.py aligns their clocks, collectives.py compares when they
arrived, trace.py makes the trace, summary.py the tables.
"""
