"""Reads the bytes of marshal.dumps (version 4) for lists, tuples, dicts, text, bytes, numbers and None.

marshal.loads alone is for trusted bytes only: it reserves the memory that a length in them states, 16 GiB for five
bytes.
"""

import marshal
import re
from typing import Any

# Objects whose size follows from their first bytes: small integers, references, short tuples, None, booleans, the end
# of a dict, floats, and integers of up to five digits of 15 bits. The top bit of a code: references to the object
# follow.
_OF_FIXED_SIZE = re.compile(
    rb"(?:[ir\xe9].{4}|[)\xa9].|[NTF0]|[g\xe7].{8}|[l\xec](?:"
    rb"(?:\x01\0\0\0|\xff\xff\xff\xff).{2}|(?:\x02\0\0\0|\xfe\xff\xff\xff).{4}|(?:\x03\0\0\0|\xfd\xff\xff\xff).{6}|"
    rb"(?:\x04\0\0\0|\xfc\xff\xff\xff).{8}|(?:\x05\0\0\0|\xfb\xff\xff\xff).{10}))*+",
    re.DOTALL,
)
_SHORT_TEXT, _LONG, _LIST, _DICT = b"zZ", b"aAuts", b"([", b"{"
_REFERENCE = 0x80


def loads(data: bytes) -> Any:
    """Return the object. Needs memory in proportion to the bytes. Raises ValueError, EOFError, TypeError or LookupError
    if they are damaged."""
    at, items = 0, 0
    while (match := _OF_FIXED_SIZE.match(data, at)) is not None and (at := match.end()) < len(data):
        code = data[at] & ~_REFERENCE
        size, at = int.from_bytes(data[at + 1 : at + 5], "little"), at + 1
        if code in _SHORT_TEXT:
            at += 1 + (size & 0xFF)
        elif code in _LONG:
            at += 4 + size
        elif code in _LIST:
            at += 4
            items += size
        elif code not in _DICT:
            raise ValueError(f"an object of type {code:#x}")
        if max(at, items) > len(data):  # an object in a list has at least one byte
            raise ValueError("an object is longer than its chunk")
    return marshal.loads(data)
