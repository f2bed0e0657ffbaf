"""Trainings by examples/mnist_towers.py, one after the other in one job: mnist_towers_program.py JSON

JSON: {name of the training: [dtype, arguments of the example]}; dtype: float32, which is the example's own, or float64.
The chief prints the result of each, as JSON: the losses by step and the accuracies, or the error.
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch

import allred
from allred.session import Averaging, Hook

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/mnist_towers.py"


class Losses(Hook):
    """Records the loss of each step."""

    def __init__(self):
        self.losses, self.averages = {}, []  # averages: the sum of the magnitudes of each

    def after_step(self, session, values):
        self.losses[session.step] = values["loss"]

    def end(self, session, outcome):
        averaging = next(hook for hook in session.hooks if isinstance(hook, Averaging))
        self.averages = [float(np.abs(each).sum()) for each in averaging.state_dict()["averages"].values()]


def load_example(dtype):
    spec = importlib.util.spec_from_file_location("mnist_towers", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    load = example.load
    example.load = lambda directory: [of.astype(dtype) if of.dtype.kind == "f" else of for of in load(directory)]
    torch.set_default_dtype(getattr(torch, dtype))  # of the parameters
    return example


if __name__ == "__main__":
    for name, (dtype, arguments) in json.loads(sys.argv[1]).items():
        witness, error = Losses(), ""
        try:
            load_example(dtype).main(arguments, hooks=[witness])
        except FileNotFoundError as raised:
            error = str(raised)
        if allred.rank() == 0:
            print(f"training {name}:", json.dumps([witness.losses, witness.averages, error]), flush=True)
        allred.shutdown()
