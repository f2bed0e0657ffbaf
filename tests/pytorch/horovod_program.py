"""All cases of horovod_collectives_program.py and horovod_training_program.py in one job."""

import horovod_collectives_program  # noqa: F401
import horovod_training_program  # noqa: F401
import torch
from optimizer_case_runner import run_cases

import allred.torch as hvd

torch.set_num_threads(1)
hvd.init()
run_cases()
