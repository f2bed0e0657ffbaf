"""The compiled kernels (csrc/), or their numpy twins where the extension was not built.

`available` says which, `reason` why; allred.init() prints it in the banner. Arrays must be C-contiguous and of a type
that has the buffer protocol (bfloat16 has not: pass a view as uint16).
"""

from collections.abc import Callable
from typing import Any

from allred.native import twins

pack: Callable[[list[Any], Any], None]
unpack: Callable[[list[Any], Any], None]
arm_exit: Callable[[int, int, int, int, int, str, bool], bool] | None

try:
    import allred.native._kernels as _kernels
except ImportError as error:
    available = False
    reason = "not built: it needs gcc and the Python headers (apt-get install gcc python3-dev), then install again"
    if not isinstance(error, ModuleNotFoundError):
        reason = f"built, but it cannot be loaded: {error}"
    pack, unpack, arm_exit = twins.pack, twins.unpack, None
else:
    available, reason = True, "built"
    pack, unpack, arm_exit = _kernels.pack, _kernels.unpack, _kernels.arm_exit

__all__ = ["arm_exit", "available", "pack", "reason", "unpack"]
