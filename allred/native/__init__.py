"""The compiled kernels (csrc/), or their numpy twins if the extension was not built.

`available` says which, `reason` why; the banner of allred.init() shows both. `variants` are the instruction sets of
this CPU for which `reduce` was compiled, the fastest last; () for the twins. Arrays must be C-contiguous and support
the buffer protocol (bfloat16 does not: pass a view as uint16). The signatures are those of `twins` and _kernels.pyi.
"""

import functools
import importlib
import importlib.util
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from allred.native import twins

_kernels: Any = twins
available = False
try:
    _name = "allred.native._kernels"
    if "CHAOS_SEED" in os.environ and importlib.util.find_spec(f"{_name}_chaos"):  # a build for tests: csrc/chaos.h
        _name += "_chaos"
    _kernels = importlib.import_module(_name)
    available, reason = True, "built"
except ModuleNotFoundError:
    reason = "not built: it needs gcc and the Python headers (apt-get install gcc python3-dev), then install again"
except ImportError as error:
    reason = f"built, but it cannot be loaded: {error}"

pack: Callable[[list[Any], Any], None] = _kernels.pack
unpack: Callable[[list[Any], Any], None] = _kernels.unpack
reduce: Callable[..., None] = _kernels.reduce
narrow: Callable[..., None] = _kernels.narrow
update: Callable[..., bool] = _kernels.update
update_group: Callable[..., int] = twins.update_group
leaves_of: Callable[[Any, Any], list[Any] | None] = _kernels.leaves_of
hashes: Callable[[list[Any]], list[int]] = _kernels.hashes
crc32: Callable[..., int] = _kernels.crc32 if available and _kernels.crc32_is_fast() else zlib.crc32
exceeds: Callable[..., bool] = _kernels.exceeds
add_numbers: Callable[..., None] = _kernels.add_numbers
match: Callable[[list[Any], list[Any], list[Any]], bool] = twins.match
disjoint: Callable[[list[Any]], bool] = twins.disjoint
hash_window: Callable[[list[Any], bytes, int], int | None] = twins.hash_window
if available and _kernels.reads_arrays(np.zeros((2, 3))):
    match = functools.partial(_kernels.match, np.ndarray)
    disjoint = functools.partial(_kernels.disjoint, np.ndarray)
    hash_window = functools.partial(_kernels.hash_window, np.ndarray)
    _floats = np.dtype(np.float32), np.dtype(np.float64)
    update_group = functools.partial(_kernels.update_group, np.ndarray, _floats)
variants: tuple[str, ...] = _kernels.variants() if available else ()

# None if the extension was not built.
arm_exit: Callable[..., bool] | None = getattr(_kernels, "arm_exit", None)  # see csrc/python/exit.h
run_exit_handler: Callable[[int], None] = getattr(_kernels, "run_exit_handler", lambda status: None)
alarm: Callable[[float, float, str, str, int], bool] | None = getattr(_kernels, "alarm", None)  # see csrc/alarm.h
cancel_alarm: Callable[[], None] | None = getattr(_kernels, "cancel_alarm", None)
report_mpi_call: Callable[[int, int], bool] = getattr(_kernels, "report_mpi_call", lambda number, fd: False)
interrupted: Callable[[], bool] = getattr(_kernels, "interrupted", lambda: False)  # see csrc/python/interrupt.c
call_interruptibly: Callable[..., Any] = getattr(_kernels, "call_interruptibly", lambda call, *given: call(*given))
xla_last_error: Callable[[], BaseException | None] = getattr(_kernels, "xla_last_error", lambda: None)
xla_handlers: Callable[[Any], Any] | None = getattr(_kernels, "xla_handlers", None)

_rows: Any = _kernels if available else importlib.import_module("allred.native.row_twins")
RowTable: Any = _rows.RowTable  # see csrc/row_table.h
distinct_ids: Callable[..., int] = _rows.distinct_ids  # see csrc/distinct_ids.h, also for the next two
spread_rows: Callable[..., None] = _rows.spread_rows
sum_gradients: Callable[..., None] = _rows.sum_gradients

Mailbox: Any = getattr(_kernels, "Mailbox", None)  # see csrc/mailbox.h
StepServer: Any = getattr(_kernels, "StepServer", None)  # see csrc/step_server.h
mailbox_bytes: Callable[[int, int], int] | None = getattr(_kernels, "mailbox_bytes", None)

# None if the extension was not built; see csrc/arena.h and _kernels.pyi.
arena_open: Any = getattr(_kernels, "arena_open", None)
arena_serve_sizes: Any = getattr(_kernels, "arena_serve_sizes", None)
arena_attach: Any = getattr(_kernels, "arena_attach", lambda: False)
arena_serve_torch: Any = getattr(_kernels, "arena_serve_torch", None)
arena_functions: Any = getattr(_kernels, "arena_functions", None)
arena_call: Any = getattr(_kernels, "arena_call", None)
arena_pause: Any = getattr(_kernels, "arena_pause", lambda on: None)
arena_freeze: Any = getattr(_kernels, "arena_freeze", None)
arena_thaw: Any = getattr(_kernels, "arena_thaw", None)
arena_usage: Any = getattr(_kernels, "arena_usage", None)
in_place_bytes: int = getattr(_kernels, "IN_PLACE_BYTES", 0)  # of the smallest array that is reduced in place
