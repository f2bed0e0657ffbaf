"""The modules of the package `horovod`: an import hook makes each of them from the names of modules of allred.

The package itself is in packages/, because the processes that a program starts find it by PYTHONPATH.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from allred.compat import horovod_path

_TORCH, _ELASTIC, _COMMON = "allred.torch", "allred.torch.elastic", "allred.compat.horovod_common"
_STATES = "StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler TorchState"
_STATES += " get_handler_registry set_handler_registry"
_UTIL = (
    "ccl_built check_extension ddl_built extension_available gloo_built gpu_available mpi_built nccl_built split_list"
)
_OBJECTS = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
_COMPRESSION = "Compression Compressor FP16Compressor NoneCompressor"
_SETS = "ProcessSet add_process_set global_process_set remove_process_set"

# By module: its names, by the module of allred that has them; "*": all public names. A module that has others below it
# is a package.
_MODULES: dict[str, dict[str, str]] = {
    "horovod.torch": {_TORCH: "*"},
    "horovod.torch.compression": {f"{_TORCH}.horovod.compression": _COMPRESSION},
    "horovod.torch.functions": {_TORCH: _OBJECTS},
    "horovod.torch.mpi_ops": {_TORCH: "*"},
    "horovod.torch.optimizer": {_TORCH: "DistributedOptimizer"},
    "horovod.torch.sync_batch_norm": {_TORCH: "SyncBatchNorm"},
    "horovod.torch.elastic": {_ELASTIC: "*"},
    "horovod.torch.elastic.sampler": {_ELASTIC: "ElasticSampler"},
    "horovod.torch.elastic.state": {f"{_ELASTIC}.elastic_states": _STATES},
    "horovod.common": {},
    "horovod.common.elastic": {_ELASTIC: "ObjectState State"},
    "horovod.common.exceptions": {
        f"{_TORCH}.horovod.horovod_errors": "HorovodInternalError HostsUpdatedInterrupt",
        _COMMON: "HorovodVersionMismatchError",
    },
    "horovod.common.process_sets": {_TORCH: _SETS},
    "horovod.common.util": {_COMMON: _UTIL},
    "horovod.runner": {"allred.compat.horovodrun.function": "run"},
    "horovod.runner.launch": {"allred.compat.horovodrun.command": "run_commandline"},
}
_IMPORTED_BY_TORCH = ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm")
_MISSING = {f"horovod.{name}" for name in ("tensorflow", "keras", "mxnet", "spark", "ray")}


class _HorovodModules(MetaPathFinder, Loader):
    """Finds and makes the modules of `_MODULES`. Those of other frameworks raise ImportError."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES and name not in _MISSING:
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(f"{name}.") for other in _MODULES))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _MISSING:
            raise ImportError(horovod_path.unavailable(name), name=name)
        module.__doc__ = f"The names of {name}, from allred."
        for source, names in _MODULES[name].items():
            found = importlib.import_module(source)
            words = found.__all__ if names == "*" else names.split()
            vars(module).update({word: getattr(found, word) for word in words})
        if name == "horovod.torch":
            for other in _IMPORTED_BY_TORCH:
                importlib.import_module(f"{name}.{other}")


_FINDER = _HorovodModules()


def activate() -> None:
    """Make the modules in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
