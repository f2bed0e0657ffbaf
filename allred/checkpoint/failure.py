"""What a failed file operation becomes: one CheckpointError that says what failed, why, and what to do about it."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from allred.errors import CheckpointError

_PERMISSION = "let this user write there, or save to another directory"
_ADVICE = {
    errno.ENOENT: "it is gone, or this host does not see it: use a directory on a file system that all share",
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: delete something, or keep fewer checkpoints",
    errno.EFBIG: "the limit of file sizes is too low: raise it with `ulimit -f unlimited`",
    errno.EROFS: "the file system is mounted read-only: save to another directory",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EEXIST: "something else is in the way: move it, or save to another directory",
    errno.ENOTDIR: "a file is where a directory is expected: move it, or save to another directory",
}


@contextlib.contextmanager
def explained(doing: str, path: pathlib.Path) -> Iterator[None]:
    """An OSError or safetensors' own error inside becomes a CheckpointError that begins with `doing` and the path."""
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointError:
        raise  # it is an OSError too, and says all already
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _errno_in(str(error))
        reason = os.strerror(number) if number else str(error)
        advice = _ADVICE.get(number or 0, "look at the file system, and at what the kernel says of it (dmesg)")
        raise CheckpointError(f"{doing} {path} failed: {reason}{_free(number, path)}; {advice}") from error


def _errno_in(text: str) -> int | None:
    """safetensors gives the system's error as text only: '(os error 28)', before 0.6 'Os { code: 28'."""
    found = re.search(r"\b(?:os error|code:) (\d+)", text)
    return int(found[1]) if found else None


def _free(number: int | None, path: pathlib.Path) -> str:
    if number != errno.ENOSPC:
        return ""
    with contextlib.suppress(OSError):
        return f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free)"
    return ""
