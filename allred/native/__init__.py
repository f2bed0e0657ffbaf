"""The compiled kernels (csrc/), or their numpy twins if the extension was not built.

`available` says which, `reason` why; the banner of allred.init() shows both. `variants` are the instruction sets of
this CPU for which `reduce` was compiled, the fastest last; () for the twins. Arrays must be C-contiguous and support
the buffer protocol (bfloat16 does not: pass a view as uint16). The signatures are those of `twins` and _kernels.pyi.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from allred.native import twins

pack: Callable[[list[Any], Any], None]
unpack: Callable[[list[Any], Any], None]
reduce: Callable[..., None]
narrow: Callable[..., None]
update: Callable[..., bool]
hashes: Callable[[list[Any]], list[int]]
match: Callable[[list[Any], list[Any], list[Any]], bool]
exceeds: Callable[..., bool]
variants: tuple[str, ...]
arm_exit: Callable[..., bool] | None  # see csrc/exit.h
alarm: Callable[[float, float, str, str, int], bool] | None  # see csrc/alarm.h
cancel_alarm: Callable[[], None] | None
Mailbox: Any  # see csrc/mailbox.h; None if it was not built
mailbox_bytes: Callable[[int, int], int] | None

try:
    import allred.native._kernels as _kernels
except ImportError as error:
    available = False
    reason = "not built: it needs gcc and the Python headers (apt-get install gcc python3-dev), then install again"
    if not isinstance(error, ModuleNotFoundError):
        reason = f"built, but it cannot be loaded: {error}"
    pack, unpack, reduce, arm_exit = twins.pack, twins.unpack, twins.reduce, None
    hashes, exceeds, update, narrow = twins.hashes, twins.exceeds, twins.update, twins.narrow
    match = twins.match
    alarm, cancel_alarm, Mailbox, mailbox_bytes = None, None, None, None
    variants = ()
else:
    available, reason = True, "built"
    pack, unpack, reduce, arm_exit = _kernels.pack, _kernels.unpack, _kernels.reduce, _kernels.arm_exit
    hashes, exceeds, update, narrow = _kernels.hashes, _kernels.exceeds, _kernels.update, _kernels.narrow
    match = twins.match
    if _kernels.reads_arrays(np.zeros((2, 3))):
        match = functools.partial(_kernels.match, np.ndarray)
    alarm, cancel_alarm = _kernels.alarm, _kernels.cancel_alarm
    Mailbox, mailbox_bytes = _kernels.Mailbox, _kernels.mailbox_bytes
    variants = _kernels.variants()
