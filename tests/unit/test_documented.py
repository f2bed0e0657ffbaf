"""Every public name has a docstring, and is on the page that makes the reference of them, docs/api.md."""

import ast
import functools
import importlib
import inspect
import itertools
import pathlib
import re
import types

import pytest

import allred

PACKAGE = pathlib.Path(allred.__file__).parent
PAGE = PACKAGE.parent / "docs/api.md"
ROOMS = (
    "allred",
    "allred.optim",
    "allred.data",
    "allred.session",
    "allred.ps",
    "allred.client",
    "allred.testing",
    "allred.compat.tf1",
)


def names():
    """(room, name) of all that is public, but the rooms themselves."""
    for room in ROOMS:
        module = importlib.import_module(room)
        yield from ((room, name) for name in module.__all__ if not inspect.ismodule(getattr(module, name)))


def value_of(path):
    """What stands behind allred.a.b"""
    *rooms, name = path.split(".")
    return getattr(importlib.import_module(".".join(rooms)), name)


def kind_of(value):
    """The class whose methods are public with it: itself, or, of allred.distributed, a private one."""
    if isinstance(value, types.GenericAlias):
        return None
    if inspect.isclass(value):
        return value
    return type(value) if type(value).__name__.startswith("_") else None


@functools.cache
def assigned():
    """Names of which a string stands under the assignment, somewhere in allred."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        body = ast.parse(file.read_text()).body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.Assign) and isinstance(after, ast.Expr) and _is_text(after.value):
                found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return found


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_documented(name, value):
    if inspect.isroutine(value):
        return bool(value.__doc__)
    if kind := kind_of(value):
        return bool(kind.__doc__) and not kind.__doc__.startswith(f"{name}(")  # what dataclasses write themselves
    return name in assigned()


def methods(kind):
    """Public methods and properties of a class, those of its bases in allred included."""
    found = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] == "allred":
            found |= {n: v for n, v in vars(base).items() if inspect.isroutine(v) or isinstance(v, property)}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(("room", "name"), list(names()))
def test_it_has_a_docstring(room, name):
    value = value_of(f"{room}.{name}")
    assert is_documented(name, value), f"{room}.{name} has no docstring"
    if kind := kind_of(value):
        bare = [method for method in methods(kind) if not inspect.getdoc(getattr(kind, method))]
        assert not bare, f"{room}.{name}: no docstring has {', '.join(sorted(bare))}"


def test_all_of_it_is_in_the_reference():
    """A name that two rooms give is there once."""
    shown = re.findall(r"^::: (\S+)$", PAGE.read_text(), flags=re.MULTILINE)
    public = {f"{room}.{name}" for room, name in names()}
    assert set(shown) <= public
    there = {id(value_of(path)): path for path in shown}
    assert len(there) == len(shown), "something is there twice"
    missing = sorted(path for path in public if id(value_of(path)) not in there)
    assert not missing, f"docs/api.md has no line ::: {missing[0]}"


def test_every_room_with_public_names_is_looked_at():
    """Those that a user imports; the names of the others are for the rooms above them."""
    inner = {"allred.checkpoint", "allred.compression", "allred.native"}
    found = {f"allred.{file.parent.name}" for file in PACKAGE.glob("*/__init__.py") if "__all__" in file.read_text()}
    assert found - inner == set(ROOMS) - {"allred", "allred.compat.tf1"}
