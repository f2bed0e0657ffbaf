"""16-bit floats on a GPU, as float32 and rounded again. bfloat16, which older cupy lacks, is uint16 here, by its name.

Pure functions of arrays; `xp` is cupy, or numpy, whose functions take cupy's arrays too.
"""

from typing import Any

import numpy as np

Device = Any  # a cupy array
HALVES = ("float16", "bfloat16")


def widen(bits: Device, name: str) -> Device:
    """16-bit floats as float32."""
    if name == "float16":
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(xp: Any, value: Device, name: str) -> Device:
    """float32 or float64 rounded to 16-bit floats, to the nearest, to even between two."""
    if name == "float16":
        return value.astype(np.float32).astype(np.float16)
    bits = value.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return xp.where(xp.isnan(value), quiet, rounded).astype(np.uint16)


def element(name: str) -> np.dtype[Any]:
    """The dtype in which device arrays hold it here."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)
