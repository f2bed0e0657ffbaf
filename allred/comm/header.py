"""The 64-byte header that every rank shows every other before an operation moves its first payload byte.

The first 48 bytes must agree on all ranks; the last 16 are each rank's own. When they disagree, the ranks exchange
their full descriptions and `verdict` turns these into one error, the same text everywhere.

    0   sequence   u64   operations started on this communicator before
    8   kind       u8    see KINDS
    9   op         u8    reduction, 0 if none
    10  dtype      u8    arrays.DTYPES, 255 if none
    11  problem    u8    1: this rank's arguments cannot be used; nobody moves anything
    12  root       i32   -1 if none
    16  name       16s   hash of the tensor's name
    32  words      16s   hash of the operation in words: names, shapes, dtypes, settings, as far as they must agree
    48  rows       u64   this rank's first dimension (allgather), own
    56  note       u64   whatever the operation tells its peers, own
"""

import dataclasses
import functools
import hashlib
import struct

from allred.arrays import DTYPES
from allred.errors import AllredError, InputError, MismatchError

BYTES = 64
AGREED = slice(0, 48)
KINDS = (
    *("allreduce", "grouped_allreduce", "broadcast", "allgather", "reducescatter", "alltoall"),
    *("barrier", "parameters", "step", "shutdown", "allgather_object", "broadcast_object"),
)
_LAYOUT = struct.Struct("<QBBBBi16s16sQQ")
_OWN = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True)
class Call:
    """One rank's view of an operation: what the header is made of, and the words for it if the ranks disagree."""

    kind: str
    name: str = ""
    title: str = ""  # how messages call it: "allreduce(Sum) 'fc1.weight' float32 (64, 10)"
    tensors: tuple[str, ...] = ()  # one line a tensor, where there are several
    settings: str = ""  # what else must agree, told only where it does not
    op: int = 0
    dtype: int = 255
    root: int = -1
    rows: int = 0
    note: int = 0
    problem: str = ""

    def pack(self, sequence: int) -> bytes:
        """The header's 64 bytes."""
        return _LAYOUT.pack(
            sequence,
            KINDS.index(self.kind),
            self.op,
            self.dtype,
            bool(self.problem),
            self.root,
            *self._hashes,
            self.rows,
            self.note,
        )

    @functools.cached_property
    def _hashes(self) -> tuple[bytes, bytes]:
        return _hash(self.name), _hash("\n".join((self.title, self.settings, *self.tensors)))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).digest()


def rows_and_note(header: bytes) -> tuple[int, int]:
    """The two fields of a header that are each rank's own."""
    rows, note = _OWN.unpack(header[48:])
    return rows, note


def agree(headers: list[bytes]) -> bool:
    """Whether all ranks are in the same operation with arguments that can be used."""
    return all(header[AGREED] == headers[0][AGREED] for header in headers) and headers[0][11] == 0


def decode(header: bytes) -> str:
    """A header in words, for who has nothing but its bytes (a debugger, a post-mortem)."""
    sequence, kind, op, dtype, problem, root, _, _, rows, note = _LAYOUT.unpack(header)
    kind_name = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
    dtype_name = DTYPES[dtype] if dtype < len(DTYPES) else "none"
    return f"#{sequence} {kind_name} op={op} dtype={dtype_name} root={root} rows={rows} note={note} problem={problem}"


def verdict(calls: list[Call]) -> AllredError:
    """The error that all ranks raise, given every rank's call: a pure function, so its text is the same everywhere."""
    problems = {rank: call.problem for rank, call in enumerate(calls) if call.problem}
    if problems:
        rank = min(problems)
        same = [r for r in problems if problems[r] == problems[rank]]
        who = "" if len(same) == len(calls) else f"{_ranks(same)}: "
        return InputError(f"{calls[rank].title or calls[rank].kind}: {who}{problems[rank]}")
    titles = [call.title or call.kind for call in calls]
    if len(set(titles)) > 1:
        return MismatchError(
            f"ranks called different operations: {_by_rank(titles)}; "
            "all ranks must call the same operations in the same order, with the same tensors"
        )
    longest = max(len(call.tensors) for call in calls)
    for index in range(longest):
        lines = [call.tensors[index] if index < len(call.tensors) else "no such tensor" for call in calls]
        if len(set(lines)) > 1:
            return MismatchError(
                f"{titles[0]}: tensor {index} of {longest} differs: {_by_rank(lines)}; "
                "every rank must build the same parameters in the same order"
            )
    return MismatchError(f"{titles[0]}: ranks differ: {_by_rank([call.settings for call in calls])}")


def _by_rank(texts: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {_ranks(ranks)}" for text, ranks in groups.items())


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
