"""Silent mistakes, found: what would make the ranks train wrongly without an error anywhere.

finite.py     a gradient with NaN or infinity                     every step, before it is averaged
drift.py      parameters or optimizer states that differ          at the first three steps, then every check_steps
repeated.py   the same batch on all ranks; averaging twice        at the same steps
batch_arguments.py   batches of different arguments on the ranks  at the first step with new arguments on a rank
outside.py    an optimizer stepped around its wrapper             at the next step, and at the end
stale.py      mode ps: a first gradient from old parameters       at the first step
checks.py     the object that an optimizer asks at each step, and that asks these
"""
