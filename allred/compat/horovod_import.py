"""`import horovod`: the directory of allred's package `horovod`, the search for an installed one, and its modules.

The package never replaces an installed one. Its directory is in PYTHONPATH, or at the end of sys.path, only if a
program asked for it; allred.compat.horovod says how. An import hook, which the package installs, makes each of its
modules from the names of modules of allred.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

DIRECTORY = str(Path(__file__).with_name("horovod") / "packages")
VERSION = "0.28.1"  # of Horovod, whose names the packages have
_SUFFIX = os.path.join("", "allred", "compat", "horovod", "packages")  # of DIRECTORY in any installation of allred


def find_installed() -> str:
    """Return the version and the directory of an installed Horovod; "" if there is none."""
    spec = PathFinder.find_spec("horovod", [path for path in sys.path if not path.endswith(_SUFFIX)])
    # A directory without __init__.py has no origin: it is not Horovod.
    where = f" ({os.path.dirname(spec.origin)})" if spec is not None and spec.origin is not None else ""
    try:
        return f"Horovod {importlib.metadata.version('horovod')}{where}"
    except importlib.metadata.PackageNotFoundError:
        return f"a package horovod{where}" if where else ""


def check() -> None:
    """Raise ImportError if another Horovod is installed."""
    if installed := find_installed():
        raise ImportError(
            f"{installed} is installed, and allred.compat.horovod does not replace it; pip uninstall horovod, or start "
            "the program without allred.compat.horovod",
            name="horovod",
        )


def activate() -> None:
    """Let `import horovod` find the packages of allred in this process. Raises ImportError as `check`."""
    check()
    if DIRECTORY not in sys.path:
        sys.path.append(DIRECTORY)


def python_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a process in which `import horovod` finds the packages of allred.

    >>> python_path({"PYTHONPATH": "/home/me/lib"}).split(":")[0]
    '/home/me/lib'
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and not path.endswith(_SUFFIX)]
    return os.pathsep.join([*paths, DIRECTORY])


# The modules of the package.

_TORCH, _ELASTIC, _COMMON = "allred.torch", "allred.torch.elastic", "allred.compat.horovod_common"
_TF, _CORE = "allred.tensorflow", "allred.horovod"
_STATES = "StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler TorchState"
_STATES += " get_handler_registry set_handler_registry"
_UTIL = (
    "ccl_built check_extension ddl_built extension_available gloo_built gpu_available mpi_built nccl_built split_list"
)
_OBJECTS = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
_COMPRESSION = "Compression Compressor FP16Compressor NoneCompressor"
_TF_FUNCTIONS = "allgather_object broadcast_object broadcast_object_fn broadcast_variables"
_SETS = "ProcessSet add_process_set global_process_set remove_process_set"

# By module: its names, by the module of allred that has them; "*": all public names. A module that has others below it
# is a package.
_MODULES: dict[str, dict[str, str]] = {
    "horovod.torch": {_TORCH: "*"},
    "horovod.torch.compression": {f"{_TORCH}.horovod.operations": _COMPRESSION},
    "horovod.torch.functions": {_TORCH: _OBJECTS},
    "horovod.torch.mpi_ops": {_TORCH: "*"},
    "horovod.torch.optimizer": {_TORCH: "DistributedOptimizer"},
    "horovod.torch.sync_batch_norm": {_TORCH: "SyncBatchNorm"},
    "horovod.torch.elastic": {_ELASTIC: "*"},
    "horovod.torch.elastic.sampler": {_ELASTIC: "ElasticSampler"},
    "horovod.torch.elastic.state": {f"{_ELASTIC}.elastic_states": _STATES},
    "horovod.tensorflow": {_TF: "*"},
    "horovod.tensorflow.compression": {_TF: "Compression"},
    "horovod.tensorflow.functions": {_TF: _TF_FUNCTIONS},
    "horovod.tensorflow.mpi_ops": {_TF: "*"},
    "horovod.tensorflow.sync_batch_norm": {_TF: "SyncBatchNormalization"},
    "horovod.tensorflow.keras": {"allred.compat.horovod_keras": "*"},
    "horovod.tensorflow.keras.callbacks": {"allred.compat.horovod_tf_keras_callbacks": "*"},
    "horovod.keras": {"allred.compat.horovod_keras": "*"},
    "horovod.keras.callbacks": {"allred.compat.horovod_keras_callbacks": "*"},
    "horovod.common": {},
    "horovod.common.elastic": {_ELASTIC: "ObjectState State"},
    "horovod.common.exceptions": {
        f"{_CORE}.horovod_errors": "HorovodInternalError HostsUpdatedInterrupt",
        _COMMON: "HorovodVersionMismatchError",
    },
    "horovod.common.process_sets": {f"{_CORE}.process_sets": _SETS},
    "horovod.common.util": {_COMMON: _UTIL},
    "horovod.runner": {"allred.compat.horovodrun.function": "run"},
    "horovod.runner.launch": {"allred.compat.horovodrun.command": "run_commandline"},
}
_IMPORTED_BY = {  # a module: what it imports below itself
    "horovod.torch": ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"),
    "horovod.tensorflow": ("compression", "functions", "mpi_ops", "sync_batch_norm"),
    "horovod.tensorflow.keras": ("callbacks",),
    "horovod.keras": ("callbacks",),
}
_MISSING = {f"horovod.{name}" for name in ("mxnet", "spark", "ray")}
_MISSING |= {f"horovod.{name}.elastic" for name in ("tensorflow", "keras", "tensorflow.keras")}


class _HorovodModules(MetaPathFinder, Loader):
    """Finds and makes the modules of `_MODULES`. Those of other frameworks raise ImportError."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES and name not in _MISSING:
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(f"{name}.") for other in _MODULES))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _MISSING:
            text = f"allred has no {name}: it has horovod.torch, horovod.tensorflow, horovod.keras and horovod.run"
            raise ImportError(text, name=name)
        module.__doc__ = f"The names of {name}, from allred."
        for source, names in _MODULES[name].items():
            found = importlib.import_module(source)
            words = found.__all__ if names == "*" else names.split()
            vars(module).update({word: getattr(found, word) for word in words})
        for other in _IMPORTED_BY.get(name, ()):
            importlib.import_module(f"{name}.{other}")


_FINDER = _HorovodModules()


def install_modules() -> None:
    """Let this process find the modules below `horovod`."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
