"""examples/mnist_towers.py with the arguments given; at the end the chief prints the losses of all steps, as JSON.

mnist_towers_program.py DTYPE ARGUMENTS...    DTYPE: float32, which is the example's own, or float64
"""

import importlib.util
import json
import pathlib
import sys

import torch

import allred
from allred.session import Hook

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/mnist_towers.py"


class Losses(Hook):
    """Of all ranks, by step."""

    def __init__(self):
        self.losses = {}

    def after_step(self, session, values):
        self.losses[session.step] = values["loss"]


def load_example(dtype):
    spec = importlib.util.spec_from_file_location("mnist_towers", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    load = example.load
    example.load = lambda directory: [of.astype(dtype) if of.dtype.kind == "f" else of for of in load(directory)]
    torch.set_default_dtype(getattr(torch, dtype))  # of the parameters
    return example


if __name__ == "__main__":
    witness = Losses()
    load_example(sys.argv[1]).main(sys.argv[2:], hooks=[witness])
    if allred.rank() == 0:
        print("losses", json.dumps(witness.losses))
