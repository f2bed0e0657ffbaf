"""Custom calls: how a compiled program of JAX calls a function of allred.

A program has a custom call for each operation. When it runs, XLA calls a handler in C (csrc/python/xla_call.c), which
calls `_run` here with the number of the call and the memory of its arguments and results.

XLA reports an exception of a call as an error of its own with the same text. `original` returns the exception itself.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.errors import InputError
from allred.jax import jax_internals
from allred.watch import excepthook

TARGET, IDENTITY = "allred", "allred identity"  # the names by which programs refer to the handlers

# Called with the arguments, the results, which it fills, and an operation that C has begun, or None. Returns None, or
# what C needs to repeat a reduction: (segment, queue, op, name).
Function = Callable[[list[Array], list[Array], Any], tuple[Any, ...] | None]

_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 16: "bfloat16",
}  # fmt: skip

_ERRORS_OF_XLA = jax.errors.JaxRuntimeError, ValueError  # ValueError: from the second call of a program on
_PREFIX = "ABORTED: "  # before the text; see xla_call.c

_functions: list[Function] = []  # by the numbers of the calls
_lock = threading.Lock()


def new_call(function: Function) -> int:
    """Return the number of a new call, which runs this function."""
    with _lock:
        _functions.append(function)
        return len(_functions) - 1


def _array(memory: memoryview, dtype: int, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(memory, arrays.dtype_of(_DTYPES[dtype])).reshape(shape)


def _run(number: int, arguments: list[Any], results: list[Any], operation: Any) -> tuple[Any, ...] | None:
    if number < 0:
        raise InputError(
            "allred.jax: an operation runs on a second device of this process, but a rank has one; set "
            "jax_num_cpu_devices to 1, and start one rank for each device"
        )
    sources, targets = [_array(*each) for each in arguments], [_array(*each) for each in results]
    return _functions[number](sources, targets, operation)


def original(error: BaseException) -> BaseException:
    """Return the exception of allred, or Ctrl-C, that JAX has reported with `error`; else `error` itself."""
    last, text = native.xla_last_error(), str(error)
    if last is None or not isinstance(error, _ERRORS_OF_XLA) or not text.startswith(_PREFIX):
        return error
    if text.removeprefix(_PREFIX).strip() != str(last).strip():
        return error
    return last.with_traceback(error.__traceback__)  # of the program, not of the handler


def install() -> None:
    """Register the handler with XLA. Raises InputError without allred's C extension, or if JAX has run a program."""
    if native.xla_handlers is None:
        raise InputError(f"allred.jax needs the C extension of allred, which is {native.reason}")
    if not jax_internals.disable_async_dispatch():
        raise InputError(
            "allred.jax must be imported before the first computation of JAX, because it changes how JAX runs programs "
            "on CPUs: each one ends before its call returns. Move `import allred.jax` to the top, or call "
            'jax.config.update("jax_cpu_enable_async_dispatch", False) there'
        )
    for target, handler in zip((TARGET, IDENTITY), native.xla_handlers(_run), strict=True):
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    excepthook.originals.append(original)
