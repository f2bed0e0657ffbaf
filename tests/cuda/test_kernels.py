"""The GPU's kernels, compiled by the real NVRTC in the way of the real cupy: without warnings, without register spills.

Neither needs a GPU. The launches of allred/gpu/kernels.py are compared with the parameters of the compiled kernels.
What the kernels compute is tested by tests/unit/test_fuse_cu.py and, on a GPU, by tests/gpu.
"""

import io
import re
import types

import cupy
import numpy as np
import pytest
from cupy.cuda import compiler

from allred.gpu import kernels

ARCHITECTURES = ["80", "90", "100"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
BUFFERS = {  # dtypes of buffers with scaled values, by the dtype of the tensors
    "float16": ["float32"],
    "bfloat16": ["float32"],
    "float32": ["float32", "float16", "bfloat16"],
    "float64": ["float64", "float16", "bfloat16"],
}
RULES = ["sgd", "adagrad", "rmsprop", "adam", "adamw"]
PARAMETERS = {
    "float64": "f64",
    "uint32": "u32",
    "uint64": "u64",
    "int64": "u64",
}  # PTX's types of the scalars that are passed


class Array(np.ndarray):
    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class RecordingCupy:
    """The functions of cupy that kernels.py uses; keeps modules and launches."""

    def __init__(self):
        self.modules, self.launches = [], []

    def asarray(self, a):
        return np.asarray(a)

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def RawModule(self, code, options):  # noqa: N802
        self.modules.append((code, options))
        return self

    def get_function(self, name):
        return lambda grid, block, args: self.launches.append((name, args))


@pytest.fixture(scope="module")
def recorded():
    """What is recorded while each function of kernels.py is called, for each dtype."""
    xp = RecordingCupy()
    made = kernels.Kernels(xp)
    for name in [*FLOATS, "uint8"]:
        dtype = np.dtype(np.uint16 if name == "bfloat16" else name)
        part, buffer = np.zeros(8, dtype).view(Array), np.zeros(8)
        table = made.table([part], part.itemsize)
        made.pack(table, name, buffer, name, None)
        made.unpack(buffer, table, name, name, None)
        for moved in BUFFERS.get(name, ()):
            made.pack(table, name, buffer, moved, 2.0)
            made.unpack(buffer, table, name, moved, 2.0)
        if name in FLOATS:
            made.unpack(buffer, table, name, name, None, np.zeros(1, np.uint32))
        if name in ("float16", "bfloat16"):
            made.combine(name, part, 2, 0, part, part, False, 1.0)
        if name in FLOATS:
            made.exceeds([part], part.itemsize, 1)
            made.squares([part], name)
    caches = kernels._update_kernel, kernels._update_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy, "RawModule", xp.RawModule)
        for cache in caches:
            cache.cache_clear()
        for rule in RULES:
            for dtype in (np.float32, np.float64):
                assert kernels.update(rule, [np.zeros(3, dtype)] * 2, [0.1])
        for cache in caches:
            cache.cache_clear()
    return xp


def compiled(code, options, architecture, method):
    """The output of NVRTC with all options that cupy adds, and its messages."""
    made = []
    module = types.SimpleNamespace(load=made.append, _set_mapping=lambda mapping: None)
    log, real = io.StringIO(), method == "cubin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "function", types.SimpleNamespace(Module=lambda: module))
        option = f"-arch={'sm' if real else 'compute'}_{architecture}"
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (option, method))
        compiler._compile_with_cache_cuda(code, options, architecture, cache_in_memory=True, log_stream=log)
    return made[0], log.getvalue()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_warnings_and_register_spills(recorded, architecture):
    for code, options in recorded.modules:
        _, log = compiled(code, (*options, "--ptxas-options=-v"), architecture, "cubin")
        lines = [line for line in log.splitlines() if "bytes stack frame" not in line]
        assert [line for line in lines if line.strip("\0") and not line.startswith("ptxas info")] == []
        spills = re.findall(r"(\d+) bytes spill", log)
        assert len(spills) == 2 * log.count("Compiling entry function") > 0
        assert set(spills) == {"0"}


def test_launches_pass_the_parameters_of_the_kernels(recorded):
    assert len(recorded.modules) == 2
    found = {}
    for code, options in recorded.modules:
        ptx, _ = compiled(code, options, "80", "ptx")
        for name, parameters in re.findall(r"\.entry (\w+)\(([^)]*)\)", ptx.decode()):
            found[name] = re.findall(r"\.param \.(\w+)", parameters)
    launched = {
        name: ["u64" if isinstance(arg, np.ndarray) else PARAMETERS[arg.dtype.name] for arg in args]
        for name, args in recorded.launches
    }
    assert launched == found
