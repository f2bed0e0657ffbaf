"""The reference is complete: docs/reference has every public name, and each name has a docstring."""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import pathlib
import re
import sys
import types

import pytest
from test_docs_pages import code_lines

import allred

PACKAGE = pathlib.Path(allred.__file__).parent
sys.path.append(str(PACKAGE.parent / "docs/site"))
import docstrings  # noqa: E402
import draw_imports  # noqa: E402

MODULES = (
    "allred",
    "allred.optim",
    "allred.data",
    "allred.embeddings",
    "allred.session",
    "allred.ps",
    "allred.client",
    "allred.spark",
    "allred.testing",
    "allred.compat.tf1",
)


def value_of(path):
    """Return the object with a public name such as "allred.data.batches"."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def class_of(value):
    """Return the class whose methods are public with a value, or None: a class itself, or the private class of
    allred.distributed.
    """
    if isinstance(value, types.GenericAlias):
        return None
    if inspect.isclass(value):
        return value
    return type(value) if type(value).__name__.startswith("_") else None


WITH_OTHERS = "jax.md", "keras.md", "tensorflow.md"  # tested in tests/with_jax, tests/with_tensorflow


def entries():
    """Return the names with an entry in docs/reference, except those that need JAX or TensorFlow."""
    pages = sorted(page for page in (PACKAGE.parent / "docs/reference").glob("*.md") if page.name not in WITH_OTHERS)
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)]


@functools.cache
def assigned_docstrings():
    """Return {name: text} of the string literals below assignments in allred."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for statement, after in itertools.pairwise(ast.parse(file.read_text()).body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(statement, ast.Assign) and is_text:
                found |= {target.id: after.value.value for target in statement.targets if isinstance(target, ast.Name)}
    return found


def public_names():
    """Return (module, name) of all public names, without modules."""
    found = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
    return [(module, name) for module, name in found if not inspect.ismodule(value_of(f"{module}.{name}"))]


def is_documented(name, value):
    if inspect.isroutine(value):
        return bool(value.__doc__)
    if kind := class_of(value):
        return bool(kind.__doc__) and not kind.__doc__.startswith(f"{name}(")  # dataclasses generate such a text
    return name in assigned_docstrings()


def methods(kind):
    """Return the names of public methods and properties of a class and its bases in allred."""
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "allred"]
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    return {
        name
        for name, member in members.items()
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    }


@pytest.mark.parametrize(("module", "name"), public_names())
def test_a_public_name_has_a_docstring(module, name):
    value = value_of(f"{module}.{name}")
    assert is_documented(name, value), f"{module}.{name} has no docstring"
    if kind := class_of(value):
        bare = sorted(method for method in methods(kind) if not inspect.getdoc(getattr(kind, method)))
        assert not bare, f"{module}.{name}: methods without a docstring: {', '.join(bare)}"


def test_every_public_name_has_one_entry():
    """A name that two modules export has one entry."""
    listed = entries()
    public = {f"{module}.{name}" for module, name in public_names()}
    reading = {f"allred.checkpoint.{name}" for name in ("SavedTensors", "newest", "read_checkpoint", "verify")}
    assert set(listed) <= public | reading  # the other names of allred.checkpoint are not for programs
    by_value = {id(value_of(path)): path for path in listed}
    assert len(by_value) == len(listed), "docs/reference has two entries for one object"
    missing = sorted(path for path in public if id(value_of(path)) not in by_value)
    assert not missing, f"docs/reference has no line ::: {missing[0]}"


@pytest.mark.parametrize(("module", "name"), public_names())
def test_code_in_a_docstring_has_at_most_80_columns_in_the_reference(module, name):
    value = value_of(f"{module}.{name}")
    kind = class_of(value)
    members = [getattr(kind, method) for method in methods(kind)] if kind else []
    for member in (value, *members):
        text = docstrings.markdown(inspect.getdoc(member) or "", set())
        assert not [line for _, line in code_lines(text) if len(line) > docstrings.CODE_COLUMNS]


def test_every_package_with_public_names_is_checked():
    """Except packages whose names users do not import, and those that need another framework."""
    inner = {"allred.checkpoint", "allred.jax", "allred.keras", "allred.native", "allred.tensorflow", "allred.torch"}
    found = {f"allred.{file.parent.name}" for file in PACKAGE.glob("*/__init__.py") if "__all__" in file.read_text()}
    assert found - inner == set(MODULES) - {"allred", "allred.compat.tf1"}


def test_the_diagram_of_imports_is_current():
    page = draw_imports.PAGE.read_text()
    assert page == draw_imports.page(page), "docs/architecture.md is not current; run `make diagram`"


@pytest.mark.parametrize("module", [docstrings, draw_imports], ids=lambda module: module.__name__)
def test_the_generators_examples(module):
    assert doctest.testmod(module).failed == 0


def test_type_checking_imports_do_not_count():
    source = "if TYPE_CHECKING:\n    from allred.comm import x\nelse:\n    import allred.nest"
    source += "\nfrom allred import __version__"
    assert list(draw_imports.imported_modules(ast.parse(source), {"comm", "nest"})) == ["nest"]
