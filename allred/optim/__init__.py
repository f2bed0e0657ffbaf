"""Optimizers, learning-rate schedules and gradient clipping for nests of numpy or cupy arrays.

They use no communicator: an optimizer updates the parameters of one rank, and `allred.distributed` makes it a
distributed optimizer. Formulas and names of hyper-parameters are those of torch.optim.

>>> import numpy as np
>>> params = {"w": np.array([1.0, 2.0]), "b": np.array(0.0)}
>>> SGD(lr=0.5).step(params, {"w": np.array([0.2, -0.2]), "b": 1.0})
>>> print(params)
{'w': array([0.9, 2.1]), 'b': array(-0.5)}
"""

from allred.optim.base import Optimizer
from allred.optim.clip import clip_by_global_norm_, clip_by_value_, global_norm
from allred.optim.optimizers import SGD, Adagrad, Adam, AdamW, RMSProp
from allred.optim.schedules import Schedule, constant, cosine, exponential_decay, linear_warmup, step_decay

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSProp", "Schedule", "clip_by_global_norm_", "clip_by_value_",
    "constant", "cosine", "exponential_decay", "global_norm", "linear_warmup", "step_decay",
]  # fmt: skip
