"""Runs the cases of a program on all ranks, one after the other, and reads their results."""

import gc
import pathlib
import re
import sys
import traceback

import allred

CASES = {}
OVERLAP_CASES = {}  # those that run in both variants of a program


def case(function):
    CASES[function.__name__] = function
    return function


def case_with_overlap(function):
    OVERLAP_CASES[function.__name__] = function
    return case(function)


def run_cases(variant="", functions=CASES):
    """Run the cases that the command line names, or all, and print the result of each on rank 0. A case fails if it
    raises an exception on any rank."""
    for name in sys.argv[1:] or functions:
        run_case(name, CASES[name], variant)


def run_case(name, function, variant=""):
    """Run one case on all ranks."""
    if not gc.get_freeze_count():
        gc.freeze()  # the objects of torch, which each gc.collect() would visit for a tenth of a second
    try:
        function()
        problem = ""
    except Exception:
        problem = traceback.format_exc()
        print(f"rank {allred.rank()}: {name}: {problem}", file=sys.stderr, flush=True)  # if others are blocked
    gc.collect()
    everyone = allred.allgather_object(problem)
    if allred.rank() == 0:
        failed = "".join(f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text)
        print(f"case {variant}{name}: {failed or 'ok'}", flush=True)


def named(model):
    """The parameters of a module for an optimizer, with their names where torch accepts these: since 2.6."""
    import torch  # not where pytest imports this file

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return list(model.named_parameters() if version >= (2, 6) else model.parameters())


def names(program, decorators="case|case_with_overlap"):
    """The names of the cases in the file of a program."""
    found = re.findall(rf"^@({decorators})\ndef (\w+)", pathlib.Path(program).read_text(), re.MULTILINE)
    return [name for _, name in found]


def results(output):
    """The result of each case by name: "ok", or the tracebacks of the ranks."""
    found = re.split(r"^case ([\w ]+): ", output, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], map(str.strip, found[1::2]), strict=True))
