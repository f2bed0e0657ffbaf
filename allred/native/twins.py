"""numpy versions of the C kernels: slow and simple. Tests compare the kernels with them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred.arrays import DTYPES, Array, is_complex, pairs_sharing_memory, view_as_complex, view_as_real

# The constants of hashes (csrc/scan.h), and the bytes per block: numpy's temporaries for a block stay in the cache.
_HASH_A, _HASH_B = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_HASH_LENGTH = 0xC2B2AE3D27D4EB4F
_AT_ONCE_BYTES = 2**18

# The operators by their codes (allred/comm/ops.py).
_AVERAGE, _SUM, _MIN, _MAX, _PRODUCT = range(1, 6)
_REFUSED = {"b": (_AVERAGE, _SUM), "i": (_AVERAGE,), "u": (_AVERAGE,), "c": (_MIN, _MAX)}  # by the kind of a dtype
_FUNCTIONS: dict[int, Any] = {_AVERAGE: np.add, _SUM: np.add, _MIN: np.minimum, _MAX: np.maximum, _PRODUCT: np.multiply}


def pack(tensors: list[Array], buffer: Array) -> None:
    """Copy the tensors' bytes, in order and without gaps, to the start of `buffer`. ValueError if it is too small."""
    for tensor, part in _parts(tensors, buffer):
        part[:] = tensor


def unpack(tensors: list[Array], buffer: Array) -> None:
    """Fill the tensors, in order, from the start of `buffer`. ValueError if it is too small."""
    for tensor, part in _parts(tensors, buffer):
        tensor[:] = part


def _parts(tensors: list[Array], buffer: Array) -> list[tuple[Array, Array]]:
    """Return the bytes of each tensor, and its part of the buffer."""
    ends = np.cumsum([tensor.nbytes for tensor in tensors], dtype=np.int64)
    if len(ends) and ends[-1] > buffer.nbytes:
        raise ValueError(f"the tensors take {ends[-1]} bytes but the fusion buffer has {buffer.nbytes}")
    return list(zip(map(_bytes, tensors), np.split(_bytes(buffer), ends), strict=False))


def reduce(
    sources: list[Array], out: Array, dtype_code: int, op_code: int, divisor: int, variant: str = "", into: int = -1
) -> None:
    """Reduce arrays: out = sources[0] op sources[1] op ..., in this order. See csrc/reduce.h.

    sources: one or more arrays of one size. The codes are those of headers. divisor: of an Average, 1 to 2**24.
    `out` may be one of the sources. `variant` selects a C kernel; ignored here. into: the dtype code of `out`, if
    16-bit floats are reduced into wider ones; then it overlaps no source. Raises ValueError for an undefined operator
    or dtype, or sizes that differ.
    """
    into = dtype_code if into < 0 else into
    _check_reduction(sources, out, dtype_code, op_code, divisor, into)
    dtype = DTYPES[dtype_code]
    with np.errstate(all="ignore"):
        result = _widened(sources[0], dtype)
        for source in sources[1:]:
            result = _combined(op_code, result, _widened(source, dtype))
        if op_code == _AVERAGE:
            numbers = view_as_real(result)
            np.divide(numbers, numbers.dtype.type(divisor), out=numbers)
        elif op_code in (_MIN, _MAX) and "float" in dtype:
            result = result + result.dtype.type(0)  # -0.0 becomes 0.0
        _bytes(out)[:] = _narrowed(result, DTYPES[into]).view(np.uint8)


def narrow(source: Array, out: Array, dtype_code: int, wire_code: int, variant: str = "") -> None:
    """Round float32 or float64 into 16-bit floats of the dtype `wire_code`. See csrc/reduce.h. Raises ValueError for
    other dtypes, or if `out` has another number of elements."""
    if not narrows(dtype_code, wire_code):
        raise ValueError(f"dtype {dtype_code} does not travel as dtype {wire_code}")
    item = np.dtype(DTYPES[dtype_code]).itemsize
    if source.nbytes % item or out.nbytes != source.nbytes // item * 2:
        raise ValueError(f"{source.nbytes} bytes cannot be rounded into {out.nbytes}")
    with np.errstate(all="ignore"):
        wide = _bytes(source).view(DTYPES[dtype_code]).astype(np.float32)
        _bytes(out)[:] = _narrowed(wide, DTYPES[wire_code]).view(np.uint8)


def narrows(dtype_code: int, wire_code: int) -> bool:
    """Whether numbers of a dtype can travel in this narrower dtype."""
    names = [DTYPES[code] if 0 <= code < len(DTYPES) else "" for code in (dtype_code, wire_code)]
    return names[0] in ("float32", "float64") and names[1] in ("float16", "bfloat16")


def hashes(tensors: list[Array]) -> list[int]:
    """Return a 64-bit hash of each tensor's bytes. See csrc/scan.h."""
    return [_hash(_bytes(tensor)) for tensor in tensors]


def _hash(memory: NDArray[np.uint8]) -> int:
    total = memory.nbytes * _HASH_LENGTH
    for start in range(0, memory.nbytes, _AT_ONCE_BYTES):
        chunk = memory[start : start + _AT_ONCE_BYTES]
        words = np.concatenate([chunk, np.zeros(-len(chunk) % 8, np.uint8)]).view(np.uint64)
        j = np.arange(start // 8, start // 8 + len(words)).astype(np.uint32)
        a, b = words.astype(np.uint32) + j * _HASH_A, (words >> 32).astype(np.uint32) + j * _HASH_B
        total += int((a.astype(np.uint64) * b + words).sum(dtype=np.uint64))
    return total % 2**64


def exceeds(tensors: list[Array], element_bytes: int, limit: int, variant: str = "") -> bool:
    """Whether the magnitude of any element is above `limit`, compared as bits. See csrc/scan.h.

    element_bytes: 2, 4 or 8. `variant` selects a C kernel; ignored here. Raises ValueError for other sizes, or a limit
    that has the sign's bit.
    """
    if element_bytes not in (2, 4, 8):
        raise ValueError(f"elements must have 2, 4 or 8 bytes, got {element_bytes}")
    if limit > (np.iinfo(np.int16).max if element_bytes == 2 else np.iinfo(np.int32).max):
        raise ValueError(f"the limit {limit} has the sign's bit or more")
    for tensor in tensors:
        memory = _bytes(tensor.T if tensor.flags.f_contiguous else tensor)
        for start in range(0, memory.nbytes, _AT_ONCE_BYTES):
            bits = memory[start : start + _AT_ONCE_BYTES].view(f"u{element_bytes}")
            magnitude = bits >> 32 & 0x7FFFFFFF if element_bytes == 8 else bits & (2 ** (8 * element_bytes - 1) - 1)
            if (magnitude > limit).any():
                return True
    return False


def add_numbers(values: Any, first: int, *numbers: float) -> None:
    """Add numbers to the float64 of a buffer, from position `first` on. Raises ValueError if there are fewer."""
    into = np.frombuffer(values, np.float64)
    if first < 0 or first + len(numbers) > len(into):
        raise ValueError(f"{len(numbers)} numbers from {first} on do not fit into {len(into)}")
    into[first : first + len(numbers)] += numbers


def update(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...], variant: str = "") -> bool:
    """Update a parameter in place by a C kernel. Always False here: the caller then uses numpy (allred/optim)."""
    return False


def update_group(
    rule: str,
    params: list[Array],
    grads: list[Array],
    slots: list[dict[str, Array]],
    slot_names: tuple[str | None, ...],
    numbers: tuple[float, ...],
    start: int = 0,
) -> int:
    """Update parameters in place by a C kernel, in order, from position `start`. Returns the position of the first one
    that has not changed, because C does not support its arrays: always `start` here. The caller uses `update` or numpy.

    slots: the slots of each parameter by name. slot_names: those of the rule (csrc/update.h); None for a missing slot.
    """
    return start


def leaves_of(structure: Any, tree: Any) -> list[Any] | None:
    """Return the leaves of a nest with this structure (nest.structure); None if it has another one. Leaves may be any
    objects. See csrc/python/nest.c."""
    found: list[Any] = []
    return found if _add_leaves(structure, tree, found) else None


def _add_leaves(structure: Any, tree: Any, found: list[Any]) -> bool:
    if structure is None:
        found.append(tree)
        return True
    kind, keys, children = structure
    if type(tree) is not kind or len(tree) != len(children):
        return False
    if keys is not None and not all(key in tree for key in keys):
        return False
    values = tree if keys is None else [tree[key] for key in keys]
    return all(_add_leaves(child, value, found) for child, value in zip(children, values, strict=True))


def match(tensors: list[Any], params: list[Any], grads: list[Any]) -> bool:
    """Whether params and grads are C-contiguous numpy arrays with the shapes and dtypes of the tensors (fusion.py
    Tensor), and the params are writable. See csrc/python/match.c."""
    return len(tensors) == len(params) == len(grads) and all(map(_matches, tensors, params, grads))


def disjoint(group: list[Any]) -> bool:
    """Whether these are writable, contiguous numpy arrays that share no memory. See csrc/python/match.c."""
    usable = all(type(array) is np.ndarray and array.flags.writeable and array.flags.forc for array in group)
    return usable and next(pairs_sharing_memory(group), None) is None


def hash_window(group: list[Any], starts: bytes, step: int) -> int | None:
    """Return a hash of up to 1024 consecutive elements of C-contiguous numpy arrays, others in each step; its lowest 16
    bits are 0. None if another value is among the elements. starts: by array, the number of elements before it, int64,
    and the number of all elements. See csrc/python/match.c."""
    total, count, before = 0, 1024, np.frombuffer(starts, np.int64)
    at = step % max(1, -(-int(before[-1]) // count)) * count
    first = int(np.searchsorted(before, at, "right")) - 1
    start = at - int(before[first])
    for array in group[first:]:
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return None
        part = array.reshape(-1)[start : start + count]
        start, count = 0, count - part.size
        if part.size:
            total = (total ^ hashes([part])[0]) * 0x9E3779B97F4A7C15 % 2**64  # allred_mix in csrc/header.h
            total ^= total >> 29
        if not count:
            break
    return total >> 16 << 16


def _matches(tensor: Any, param: Any, grad: Any) -> bool:
    return (
        type(param) is np.ndarray
        and type(grad) is np.ndarray
        and param.dtype is tensor.dtype
        and grad.dtype is tensor.dtype
        and param.shape == tensor.shape
        and grad.shape == tensor.shape
        and (flags := param.flags).writeable
        and flags.c_contiguous
        and grad.flags.c_contiguous
    )


def _combined(op_code: int, one: Array, other: Array) -> Array:
    if op_code == _PRODUCT and is_complex(one.dtype):  # np.multiply may round once where C rounds twice
        (a, b), (c, d) = (one.real, one.imag), (other.real, other.imag)
        return view_as_complex(np.stack([a * c - b * d, a * d + b * c], axis=-1))
    return _FUNCTIONS[op_code](one, other)  # type: ignore[no-any-return]


def _widened(array: Array, dtype: str) -> Array:
    memory = _bytes(array)
    if dtype == "bfloat16":  # the upper half of a float32
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return memory.view(dtype).astype(np.float32 if dtype == "float16" else dtype)


def _narrowed(result: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return result.astype(dtype)
    bits = result.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(result), 0x7FC0, rounded).astype(np.uint16)


def _check_reduction(sources: list[Array], out: Array, dtype_code: int, op_code: int, divisor: int, into: int) -> None:
    dtype = DTYPES[dtype_code] if 0 <= dtype_code < len(DTYPES) else ""
    kind = "f" if dtype == "bfloat16" else np.dtype(dtype or "bool").kind
    refused = op_code in _REFUSED.get(kind, ())
    if not dtype or op_code not in _FUNCTIONS or refused or not (into == dtype_code or narrows(into, dtype_code)):
        what = f"for dtype {dtype_code}" if into == dtype_code else f"from dtype {dtype_code} into dtype {into}"
        raise ValueError(f"operator {op_code} is not defined {what}")
    if not 1 <= divisor <= 2**24:
        raise ValueError(f"the divisor must be from 1 to 2**24, got {divisor}")
    if not sources:
        raise ValueError("there is no source to reduce")
    element, wide = (
        2 if DTYPES[code] == "bfloat16" else np.dtype(DTYPES[code]).itemsize for code in (dtype_code, into)
    )
    if out.nbytes % wide:
        raise ValueError(f"out has {out.nbytes} bytes, not a multiple of its elements' {wide}")
    for i, source in enumerate(sources):
        if source.nbytes != out.nbytes // wide * element:
            raise ValueError(f"source {i} has {source.nbytes} bytes but out has {out.nbytes}")
        apart = source.ctypes.data != out.ctypes.data or into != dtype_code
        if apart and np.may_share_memory(source, out):
            raise ValueError(f"out overlaps source {i}; it must be that source's memory or none of it")


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8) if array.nbytes else np.empty(0, np.uint8)
