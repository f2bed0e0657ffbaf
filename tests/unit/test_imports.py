"""The house of allred: imports go downwards only, and importing the package starts nothing."""

import ast
import pathlib
import subprocess
import sys

import allred

ROOT = pathlib.Path(allred.__file__).parent

# Top to bottom, the way a gradient goes. A room may import what stands below it, and its own modules.
HOUSE = (
    *("__main__", "doctor", "bench", "testing", "compat", "__init__", "server", "startup", "session", "client"),
    *("launch", "modes", "ps", "fusion", "comm", "timeline", "compression", "watch", "data", "optim"),
    *(
        "cluster",
        "checkpoint",
        "gpu",
        "native",
        "nest",
        "arrays",
        "validators",
        "world",
        "config",
        "errors",
        "detached",
        "channel",
    ),
)


def room(module: str) -> str:
    """allred.comm.backends.mpi -> comm; allred -> __init__"""
    return [*module.split("."), "__init__"][1]


def _walk(node):
    """All nodes that run; without `if TYPE_CHECKING:`, which is for types only."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _walk(child)


def imports_of(path: pathlib.Path):
    """Modules of allred that a file imports, `from allred import x` counted as allred.x where that is a room."""
    for node in _walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "allred")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "allred":
            for alias in node.names:
                yield f"allred.{alias.name}" if node.module == "allred" and alias.name in HOUSE else node.module


def test_every_room_is_listed():
    found = {
        path.stem if path.is_file() else path.name for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert found - {"__pycache__"} == set(HOUSE)


def test_imports_go_downwards():
    upwards = []
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        for module in imports_of(path):
            there = room(module)
            if there != here and HOUSE.index(there) <= HOUSE.index(here):
                upwards.append(f"{path.relative_to(ROOT)} imports {module}")
    # The banner's version number is the one exception: it stands in __init__, where pyproject.toml reads it.
    assert upwards == ["startup.py imports allred"]


def test_importing_starts_neither_mpi_nor_cuda():
    heavy = ("mpi4py.MPI", "cupy", "torch", "jax", "ml_dtypes", "safetensors")
    code = f"import sys, allred; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_listed_and_documented():
    assert allred.__all__ == sorted(allred.__all__)
    public = {name for name in vars(allred) if not name.startswith("_")}
    rooms = {path.stem for path in ROOT.iterdir()}
    assert public - rooms == set(allred.__all__) - rooms
    for name in allred.__all__:
        assert getattr(allred, name).__doc__, f"{name} has no docstring"


def test_no_submodule_hides_a_public_function():
    rooms = {path.stem for path in ROOT.iterdir()}
    assert {name for name in allred.__all__ if name in rooms} == {"data", "optim"}
