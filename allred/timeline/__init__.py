"""Timeline of all ranks: what each rank did when, and which rank waited for which (ALLRED_TIMELINE, docs/timeline.md).

Recording: recorder.py. Evaluation, `python -m allred timeline merge DIR`: rank_file.py reads the files and aligns the
clocks, command.py matches the operations of all ranks, makes the tables, and writes the trace.
"""
