"""Lists all that `make test-gpu` needs and that this machine does not have, and how to get it. Exits with 1 if there is
anything. Each line of the table is tried in a process of its own, with the Python that runs this.
"""

import subprocess
import sys

COMPILES = """
import pathlib, shutil, sysconfig
assert shutil.which("cc") or shutil.which("gcc"), "neither cc nor gcc is in PATH"
header = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
assert header.is_file(), f"there is no {header}"
"""

NEEDED = [  # what, code that fails without it, how to get it
    (
        "Python 3.11",
        "import sys; assert sys.version_info >= (3, 11), sys.version",
        "make test-gpu GPU_PYTHON=python3.12",
    ),
    ("CUDA's driver", "import ctypes; ctypes.CDLL('libcuda.so.1')", "install NVIDIA's driver"),
    ("cupy", "import cupy", "pip install cupy-cuda13x, or the one for your CUDA"),
    ("a GPU", "import cupy; assert cupy.cuda.runtime.getDeviceCount()", "see nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (
        "NVRTC",
        "from cupy_backends.cuda.libs import nvrtc; nvrtc.getVersion()",
        "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for CUDA 12), or set CUDA_PATH to a CUDA toolkit",
    ),
    (
        "the headers of CUDA",
        "import cupy; cupy.arange(1)",
        "pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x for CUDA 12), or set CUDA_PATH to a CUDA toolkit",
    ),
    (
        "NCCL",
        "from cupy.cuda import nccl; nccl.get_version()",
        "pip install nvidia-nccl-cu13, or the one for your CUDA",
    ),
    ("torch with CUDA", "import torch; assert torch.cuda.is_available(), 'it finds no GPU'", "pip install torch"),
    ("mpi4py, with an MPI", "from mpi4py import MPI", "pip install mpi4py mpich, or make test-gpu MPI_WHEEL=mpich.whl"),
    (
        "mpirun",
        "import shutil; assert shutil.which('mpirun'), 'it is not in PATH'",
        "pip install mpich, or make test-gpu MPI_WHEEL=mpich.whl",
    ),
    ("a C compiler, with Python.h", COMPILES, "apt-get install gcc python3-dev"),
    ("numpy", "import numpy", "pip install numpy"),
    ("ml_dtypes", "import ml_dtypes", "pip install ml_dtypes"),
    ("safetensors", "import safetensors", "pip install safetensors"),
    ("scikit-learn", "import sklearn.datasets", "pip install scikit-learn"),
    (
        "pytest 8.2",
        "import pytest; assert pytest.version_tuple >= (8, 2), pytest.__version__",
        "pip install 'pytest>=8.2'",
    ),
    (
        "setuptools 77",
        "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77, setuptools.__version__",
        "pip install 'setuptools>=77'",
    ),
    ("pip", "import pip", "apt-get install python3-pip"),
]


def main():
    tried = [subprocess.Popen([sys.executable, "-c", code], stdout=-3, stderr=-1, text=True) for _, code, _ in NEEDED]
    messages = [process.communicate()[1].strip() for process in tried]
    errors = [text if process.returncode else "" for process, text in zip(tried, messages, strict=True)]
    missing = []
    for (what, _, remedy), error in zip(NEEDED, errors, strict=True):
        if error:
            missing.append(f"  {what}: {remedy}\n      {error.splitlines()[-1]}")
    if missing:
        print(f"{sys.executable} lacks what `make test-gpu` needs:", *missing, sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
