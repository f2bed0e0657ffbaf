"""allred for PyTorch. Importing it registers the backend "allred" of torch.distributed; it does not start MPI.

    import torch.distributed as dist
    dist.init_process_group("allred")           # under mpirun or torchrun

With torch >= 2.5 `import torch` alone registers it, too. docs/torch.md has the differences from other backends.
"""

import sys

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"allred.torch needs PyTorch, and {sys.executable} has none: pip install 'allred[torch]'", name="torch"
    ) from None

import _allred_torch

_allred_torch.register()
