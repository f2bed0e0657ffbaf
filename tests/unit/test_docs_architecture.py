"""docs/architecture.md: it is short, and each file and function that it names exists."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def references(text):
    """Return (path, name) of each `path` and `path:name` in backticks, without repetitions. name: "" for a file."""
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.(?:py|c|h|cu))(?::([\w.]+))?`", text)))


def file_of(path):
    """Python files are named by their paths in allred/, others by their paths in the repository."""
    return ROOT / "allred" / path if path.endswith(".py") and not path.startswith("tests/") else ROOT / path


def python_names(tree):
    """Return the names of the module: variables, functions, classes, and `Class.name` of their bodies."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in python_names(node)}
    return found


def defines(file, name):
    """Return whether a file defines a name; in C, a function."""
    if file.suffix == ".py":
        return name in python_names(ast.parse(file.read_text()))
    return re.search(rf"^\w[\w *]*\b{name}\([^;]*?\) {{$", file.read_text(), re.MULTILINE | re.DOTALL) or re.search(
        rf"^\w[\w *]*\b{name}\(.*\) {{.*}}$", file.read_text(), re.MULTILINE
    )


@pytest.mark.parametrize(("path", "name"), references(PAGE), ids=lambda value: value or "file")
def test_files_and_functions_of_the_page_exist(path, name):
    file = file_of(path)
    assert file.exists(), f"docs/architecture.md names {path}, which does not exist"
    assert not name or defines(file, name), f"docs/architecture.md names {name} in {path}, which does not define it"


def test_each_question_names_at_most_three_files():
    rows = re.findall(r"^\| (How|What|Where) (.*)$", PAGE, re.MULTILINE)
    assert len(rows) >= 10
    for _, row in rows:
        files = {path for path, _ in references(row)}
        assert 1 <= len(files) <= 3, row


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 200


def test_references_of_a_text():
    text = "`fusion.py:Plan.buckets`, `csrc/operation.h`, `opt.step`"
    assert references(text) == [("fusion.py", "Plan.buckets"), ("csrc/operation.h", "")]


@pytest.mark.parametrize(
    "reference", ["csrc/allreduce.c:no_such_function", "csrc/allreduce.c:memcpy", "fusion.py:Plan.no"]
)
def test_a_missing_name_is_found(reference):
    path, name = reference.split(":")
    assert not defines(file_of(path), name)


def test_the_map_of_the_code_names_all_modules():
    """The map in CONTRIBUTING.md, without modules named __init__ and the names of other libraries in packages/."""
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    named = set(re.findall(r"\w+\.py\b", max(blocks, key=len)))
    own = {file.name for file in (ROOT / "allred").rglob("[!_]*.py") if "packages" not in file.parts}
    others = {file.name for place in ("benchmarks", ".") for file in (ROOT / place).glob("*.py")}
    assert own - named == set()
    assert named - own - others == {"__init__.py", "__main__.py"}
