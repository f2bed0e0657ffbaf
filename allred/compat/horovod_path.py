"""The directory with the packages `horovod` of allred, and the search for an installed Horovod.

These packages never replace an installed one. Their directory is in PYTHONPATH, or at the end of sys.path, only if a
program asked for it; allred.compat.horovod says how.
"""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

DIRECTORY = str(Path(__file__).with_name("horovod") / "packages")
VERSION = "0.28.1"  # of Horovod, whose names the packages have
_SUFFIX = os.path.join("", "allred", "compat", "horovod", "packages")  # of DIRECTORY in any installation of allred


def find_installed() -> str:
    """Return the version and the directory of an installed Horovod; "" if there is none."""
    spec = PathFinder.find_spec("horovod", [path for path in sys.path if not path.endswith(_SUFFIX)])
    # A directory without __init__.py has no origin: it is not Horovod.
    where = f" ({os.path.dirname(spec.origin)})" if spec is not None and spec.origin is not None else ""
    try:
        return f"Horovod {importlib.metadata.version('horovod')}{where}"
    except importlib.metadata.PackageNotFoundError:
        return f"a package horovod{where}" if where else ""


def check() -> None:
    """Raise ImportError if another Horovod is installed."""
    if installed := find_installed():
        raise ImportError(
            f"{installed} is installed, and allred.compat.horovod does not replace it; pip uninstall horovod, or start "
            "the program without allred.compat.horovod",
            name="horovod",
        )


def activate() -> None:
    """Let `import horovod` find the packages of allred in this process. Raises ImportError as `check`."""
    check()
    if DIRECTORY not in sys.path:
        sys.path.append(DIRECTORY)


def python_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a process in which `import horovod` finds the packages of allred.

    >>> python_path({"PYTHONPATH": "/home/me/lib"}).split(":")[0]
    '/home/me/lib'
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and not path.endswith(_SUFFIX)]
    return os.pathsep.join([*paths, DIRECTORY])


def unavailable(module: str) -> str:
    """Return the message for a part of Horovod that allred does not have."""
    return f"allred has no {module}: it has horovod.torch, horovod.run and horovodrun; PyTorch only"
