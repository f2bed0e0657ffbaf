import importlib.util
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # without lines of TensorFlow at each start
if importlib.util.find_spec("jax"):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")  # see tests/with_jax/conftest.py
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "pytorch"))  # optimizer_case_runner
