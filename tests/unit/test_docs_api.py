"""docs/api.md is current and complete: it has every public name, each name has a docstring."""

import ast
import doctest
import importlib
import inspect
import pathlib
import sys

import pytest

import allred

PACKAGE = pathlib.Path(allred.__file__).parent
sys.path.append(str(PACKAGE.parent / "docs/site"))
import docstrings  # noqa: E402
import draw_imports  # noqa: E402
import write_api  # noqa: E402

MODULES = (
    "allred",
    "allred.optim",
    "allred.data",
    "allred.session",
    "allred.ps",
    "allred.client",
    "allred.spark",
    "allred.testing",
    "allred.compat.tf1",
)


def public_names():
    """Return (module, name) of all public names, without modules."""
    found = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
    return [(module, name) for module, name in found if not inspect.ismodule(write_api.value_of(f"{module}.{name}"))]


def is_documented(name, value):
    if inspect.isroutine(value):
        return bool(value.__doc__)
    if kind := write_api.class_of(value):
        return bool(kind.__doc__) and not kind.__doc__.startswith(f"{name}(")  # dataclasses generate such a text
    return name in write_api.assigned_docstrings()


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
    value = write_api.value_of(f"{module}.{name}")
    assert is_documented(name, value), f"{module}.{name} has no docstring"
    if kind := write_api.class_of(value):
        bare = sorted(method for method in methods(kind) if not inspect.getdoc(getattr(kind, method)))
        assert not bare, f"{module}.{name}: methods without a docstring: {', '.join(bare)}"


def test_every_public_name_has_one_entry():
    """A name that two modules export has one entry."""
    entries = write_api.entries()
    public = {f"{module}.{name}" for module, name in public_names()}
    assert set(entries) <= public
    by_value = {id(write_api.value_of(path)): path for path in entries}
    assert len(by_value) == len(entries), "docs/site/api.in.md has two entries for one object"
    missing = sorted(path for path in public if id(write_api.value_of(path)) not in by_value)
    assert not missing, f"docs/site/api.in.md has no line ::: {missing[0]}"


def test_every_package_with_public_names_is_checked():
    """Except packages whose names users do not import, and allred.torch: there is no torch here."""
    inner = {"allred.checkpoint", "allred.native", "allred.torch"}
    found = {f"allred.{file.parent.name}" for file in PACKAGE.glob("*/__init__.py") if "__all__" in file.read_text()}
    assert found - inner == set(MODULES) - {"allred", "allred.compat.tf1"}


def test_the_page_is_current():
    assert write_api.PAGE.read_text() == write_api.reference(), "docs/api.md is not current; run `make api`"


def test_the_diagram_of_imports_is_current():
    page = draw_imports.PAGE.read_text()
    assert page == draw_imports.page(page), "docs/architecture.md is not current; run `make diagram`"


@pytest.mark.parametrize("module", [docstrings, draw_imports], ids=lambda module: module.__name__)
def test_the_generators_examples(module):
    assert doctest.testmod(module).failed == 0


def function_with_all_kinds(first, /, second: int = 1, *rest: str, third, fourth: "float | None" = None, **more):
    """Do nothing."""


def test_a_signature_has_the_arguments_of_the_source():
    text = write_api.signature("f", function_with_all_kinds)
    flat = "f(first, /, second: int = 1, *rest: str, third, fourth: float | None = None, **more)"
    assert text == write_api.call(
        "f", [*write_api.arguments(ast.parse(flat.replace("f(", "def f(") + ": pass").body[0].args)]
    )
    assert " ".join(text.split()).replace("( ", "(").replace(", )", ")") == flat


def test_type_checking_imports_do_not_count():
    source = "if TYPE_CHECKING:\n    from allred.comm import x\nelse:\n    import allred.nest"
    source += "\nfrom allred import __version__"
    assert list(draw_imports.imported_modules(ast.parse(source), {"comm", "nest"})) == ["nest"]
