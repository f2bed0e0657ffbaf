"""The 64-byte header that ranks exchange before an operation moves its first payload byte.

The first 48 bytes must agree on all ranks; the last 16 may differ. If they disagree, the ranks exchange their full
descriptors, and `verdict` makes one error of these, with the same text on all ranks.

    0   sequence   u64   number of the operation on this communicator; shared memory counts itself
    8   kind       u8    see KINDS
    9   op         u8    reduction, 0 if none; next 3 bits: wire dtype of float32 and float64, 0: uncompressed;
                         upper bit: each rank's arrays are multiplied by its weight
    10  dtype      u8    arrays.DTYPES, 254 if another one that is copied only, 255 if none
    11  problem    u8    1: the arguments of this rank cannot be used; no bytes are moved
    12  root       i32   -1 if none
    16  name       u64   hash of the tensor's name
    24  words      u64   hash of what else must agree: dtypes and shapes of an allreduce; else the text of title etc.
    32  count      u64   elements of an allreduce
    40  generation u64   of the world (allred/world.py); with ALLRED_CHECK=full, mixed with a hash of the source line
    48  rows       u64   first dimension on this rank (allgather); may differ
    56  note       u64   a number that the operation sends to all ranks, such as the weight, a float64, or the number of
                         samples of a step_allreduce; may differ

The fast path of backend shm makes the same bytes in C (csrc/header.h).
"""

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from allred.errors import AllredError, InputError, MismatchError
from allred.wording import named

BYTES = 64
AGREED = slice(0, 48)
WIRE_SHIFT = 4
WEIGHTED = 128
KINDS = (
    *("allreduce", "grouped_allreduce", "broadcast", "allgather", "reducescatter", "alltoall"),
    *("barrier", "parameters", "step", "shutdown", "allgather_object", "broadcast_object", "join"),
    "step_allreduce",  # a step whose header exchange and allreduce are one operation
    *("reduce", "gather", "scatter", "argmax", "argmin", "cumsum", "statistics", "allreduce_with"),
    "table",  # a call of an embedding table
)
_LAYOUT = struct.Struct("<QBBBBiQQQQQQ")
_REFUSED_CHARS = 40
_OWN = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True)
class OpDescriptor:
    """One rank's description of an operation: the content of its header, and the texts for errors."""

    kind: str
    name: str = ""
    title: str = ""  # in messages: "allreduce(Sum) 'fc1.weight' float32 (64, 10)"
    tensors: tuple[str, ...] = ()  # one line per tensor of a group
    settings: str = ""  # what else must agree; shown only if it does not
    arrays: tuple[tuple[int, tuple[int, ...]], ...] | None = None  # dtype code and shape of each array of an allreduce
    op: int = 0
    dtype: int = 255
    root: int = -1
    rows: int = 0
    nbytes: int = 0  # of this rank's arrays; only shown
    note: int = 0
    problem: str = ""
    place: str = ""  # the line of the program, "train.py:87", if it must agree
    found_at: str = ""  # the same, found after the ranks disagree
    earlier: str = ""  # the errors of earlier operations
    started_later: tuple[str, ...] = ()  # kind and name of the operations that this rank started after it
    generation: int = 0  # of the world; set only after the ranks disagree

    @property
    def label(self) -> str:
        """Its kind and name."""
        return f"{self.kind}{quoted(self.name)}"

    def pack(self, sequence: int, generation: int = 0) -> bytes:
        """The header's 64 bytes. generation: of the world."""
        return _LAYOUT.pack(
            sequence,
            KINDS.index(self.kind),
            self.op,
            self.dtype,
            bool(self.problem),
            self.root,
            *self._hashes,
            self._count,
            mix(hash_text(self.place), generation) if self.place else generation,
            self.rows,
            self.note,
        )

    def describe(self, number: int) -> str:
        """Return the title with the number of the operation.

        >>> OpDescriptor("allreduce", title="allreduce(sum, compression=fp16) 'w' float32 (2,)").describe(7)
        "allreduce(sum, compression=fp16) #7 'w' float32 (2,)"
        """
        title = self.title or self.kind
        end = title.find(") ") + 1 or (title + " ").find(" ")
        return f"{title[:end]} #{number}{title[end:]}"

    @functools.cached_property
    def _hashes(self) -> tuple[int, int]:
        name = hash_text(self.name)
        if self.arrays is not None:
            words = (word for code, shape in self.arrays for word in (code << 8 | len(shape), *shape))
            return name, functools.reduce(mix, words, mix(0, len(self.arrays)))
        return name, hash_lines(self.title, self.settings, self.tensors)

    @functools.cached_property
    def _count(self) -> int:
        return sum(math.prod(shape) for _, shape in self.arrays or ())


@functools.lru_cache(maxsize=64)  # each step has the same lines, one per gradient
def hash_lines(title: str, settings: str, tensors: tuple[str, ...]) -> int:
    text = "\n".join((title, settings, *tensors)).encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(value: int, word: int) -> int:
    """Continue a 64-bit hash by a word."""
    product = (value ^ word) * 0x9E3779B97F4A7C15 % 2**64
    return product ^ product >> 29


def hash_text(text: str) -> int:
    """The hash of a name."""
    data = text.encode(errors="backslashreplace")
    words = (int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8))
    return functools.reduce(mix, words, mix(0, len(data)))


def weight_note(weight: float) -> int:
    """Return the note of a header with this weight."""
    return int.from_bytes(struct.pack("<d", weight), "little")


class OwnFields(NamedTuple):
    """The two fields of a header that may differ between ranks.

    rows: of an allgather; in a step, a hash (`Reducer.start_negotiation`).
    """

    rows: int
    note: int


def own_fields(header: bytes) -> OwnFields:
    return OwnFields(*_OWN.unpack(header[48:]))


def agree(headers: list[bytes]) -> bool:
    """Return whether all ranks are in the same operation with arguments that can be used."""
    return all(header[AGREED] == headers[0][AGREED] for header in headers) and headers[0][11] == 0


def repeats_step(calls: list[OpDescriptor]) -> bool:
    """Return whether some ranks have begun a step as one operation and others have not, or with other hashes, and no
    rank reports a problem. Then all run the header exchange of the step, which finds the difference. The steps have one
    title: `check("step")` with it is waited for at once, so no later operation is begun. Other ranks may have joined.
    """
    here = [call for call in calls if call.kind != "join"]
    return (
        "step_allreduce" in {call.kind for call in here} <= {"step_allreduce", "step"}
        and len({call.title for call in here}) == 1
        and not any(call.problem for call in calls)
    )


def verdict(calls: list[OpDescriptor], ranks: Sequence[int] | None = None) -> AllredError:
    """Return the error that all ranks raise, from every rank's descriptor. Pure, so the text is the same on all ranks.
    ranks: the numbers of the ranks; default: 0, 1, ..."""
    error = _verdict(calls, range(len(calls)) if ranks is None else ranks)
    if isinstance(error, MismatchError):
        if any(call.found_at for call in calls):
            places = by_rank([call.found_at or "?" for call in calls], ranks)
            earlier = next((f"\n  {call.earlier}" for call in calls if call.earlier), "")
            error = MismatchError(f"{error}\n  called at {places}{earlier}")
        error.operations_differ = len({call.label for call in calls}) > 1
    return error


def _verdict(calls: list[OpDescriptor], ranks: Sequence[int]) -> AllredError:
    generations = [f"generation {call.generation}" for call in calls]
    if len(set(generations)) > 1:
        return MismatchError(
            f"ranks are in different generations of the world: {by_rank(generations, ranks)}; some "
            "still use the world before the last change of the ranks; restart the job"
        )
    problems = {index: call.problem for index, call in enumerate(calls) if call.problem}
    if problems:
        first = min(problems)
        same = [ranks[index] for index in problems if problems[index] == problems[first]]
        who = "" if len(same) == len(calls) else f"{named('rank', same)}: "
        return InputError(f"{calls[first].title or calls[first].kind}: {who}{problems[first]}")
    titles = [call.title or call.kind for call in calls]
    if words := _swapped(calls, ranks):
        return MismatchError(words)
    if len(set(titles)) > 1:
        return MismatchError(
            f"ranks called different operations: {by_rank(titles, ranks)}; "
            "all ranks must call the same operations in the same order, with the same tensors"
        )
    longest = max(len(call.tensors) for call in calls)
    for index in range(longest):
        lines = [call.tensors[index] if index < len(call.tensors) else "no such tensor" for call in calls]
        if len(set(lines)) > 1:
            return MismatchError(
                f"{titles[0]}: tensor {index} of {longest} differs: {by_rank(lines, ranks)}; "
                "every rank must build the same parameters in the same order"
            )
    if len({call.settings for call in calls}) == 1:
        return MismatchError(
            f"{titles[0]}: ranks call it at different lines of the program, which is an error with ALLRED_CHECK=full"
        )
    return MismatchError(f"{titles[0]}: ranks differ: {by_rank([call.settings for call in calls], ranks)}")


def _swapped(calls: list[OpDescriptor], ranks: Sequence[int]) -> str:
    """Describe two ranks that started the same operations in different orders; "" if there are none."""
    started: dict[tuple[str, str], int] = {}  # the first rank that started an operation before another one
    for one, first in enumerate(calls):
        label = first.label
        found = [started[later, label] for later in first.started_later if (later, label) in started]
        if found:
            other = min(found)
            second = calls[other].label
            return (
                f"ranks started operations in different orders: rank {ranks[other]} started {second} before {label}, "
                f"rank {ranks[one]} started {label} before {second}; all ranks must start the same operations in the "
                "same order"
            )
        for later in first.started_later:
            if later != label:
                started.setdefault((label, later), one)
    return ""


def quoted(name: Any) -> str:
    """Return a tensor's name as shown in titles: quoted, after a space; "" without a name. Characters that cannot be
    printed, such as line ends, are escaped."""
    if name is None:
        return ""
    text = name if isinstance(name, str) else str(name)[:_REFUSED_CHARS]  # of a name that will be refused
    return f" '{text if text.isprintable() else repr(text)[1:-1]}'" if text else ""


def by_rank(texts: list[str], ranks: Sequence[int] | None = None) -> str:
    """Group equal texts: `3 on ranks 0,2; 4 on rank 1`. ranks: their numbers; default: 0, 1, ..."""
    groups: dict[str, list[int]] = {}
    for rank, text in zip(range(len(texts)) if ranks is None else ranks, texts, strict=True):
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {named('rank', ranks)}" for text, ranks in groups.items())
