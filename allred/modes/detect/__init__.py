"""Checks for silent mistakes: conditions under which the ranks would train wrongly without any error.

mistake_checks.py    calls the others at each step; compares averaged gradients between the ranks; finds an
                     optimizer that is stepped without its wrapper: in the next step, and at the end
finite.py            gradients with NaN or infinity: at every step, before the reduction
drift.py             parameters or optimizer states that differ: in the first three steps, then every check_steps
batch_arguments.py   different arguments of `batches` or `stream`: in the first step with new arguments on a rank
"""
