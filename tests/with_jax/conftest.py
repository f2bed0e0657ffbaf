import importlib.metadata
import importlib.util
import os
import pathlib
import sys

# Without XLA's library YNN: with it, JAX 0.10.2 computes some products of matrices wrong on our machine.
if importlib.util.find_spec("jax") and int(importlib.metadata.version("jax").split(".")[1]) >= 10:
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "pytorch"))  # optimizer_case_runner
