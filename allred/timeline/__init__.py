"""Timeline of all ranks: what each rank did when, and which rank waited for which (ALLRED_TIMELINE, docs/timeline.md).

Recording: recorder.py; track.py for the operations of a communicator. Evaluation, `python -m allred timeline merge
DIR`: rank_file.py reads the files and aligns the clocks, collectives.py matches the operations of all ranks, trace.py
makes the trace, summary.py the tables.
"""
