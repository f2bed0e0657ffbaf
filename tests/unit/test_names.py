"""Names and sentences of allred/: one name for one thing, and plain sentences."""

import ast
import collections
import io
import pathlib
import re
import tokenize

import pytest

import allred

ROOT = pathlib.Path(allred.__file__).parent

# Modules and packages that share a name on purpose, with the reason.
CONVENTIONAL_MODULES = {
    "__init__": "Python's name",
    "__main__": "Python's name",
    "base": "the base class of a package",
    "command": "a command of python -m allred",
    "hooks": "hooks of a session: allred's own, and those of TensorFlow 1.x",
    "mpi": "the part of a package about MPI: it starts MPI, moves arrays by MPI, examines MPI",
    "gpu": "the part of a package about GPUs: it measures, examines or uses GPUs",
    "data": "bench/data.py measures the package data",
    "allreduce": "allreduce of Horovod, and the benchmark of an allreduce",
    "ps": "parameter servers: the package, their mode, their benchmark",
    "torch": "bench/torch.py measures the package torch",
    "horovod": "torch/horovod has the functions of horovod.torch, compat/horovod the packages for `import horovod`",
    "session": "session/session.py has the class Session of the package",
}

# Classes that share a name on purpose, with the reason.
CONVENTIONAL_CLASSES = {
    "Compression": "Horovod's class beside allred's",
    "Embedding": "the module of torch, on a table of allred.Embedding",
    "ProcessSet": "Horovod's class beside allred's",
    "State": "Horovod's class of elastic training beside the states of a replica",
}

ANYWHERE = {
    r"\bin words\b": "describe",
    r"\bwhoever\b": "name the subject",
    r"\bto whom\b": "name the receiver",
    r"\bof which\b": "make two sentences",
    r"\b(has|have|had) (come|gone)\b": "arrived, returned, ended",
    r"\bso many\b": "the number, or as many as",
    r"\b(told|tells?|telling) (of|about)\b": "report, describe, warn",
    r"\bto be had\b": "available, cannot be created",
    r"\bfor certain\b": "always",
    r"\bas (it|they) comes?\b": "in order of arrival",
    r"\b(the|a|this|each|every|other) (house|rooms?)\b": "package, layer",
}
BEGINNINGS = {
    r"Of ": "say what the thing is or does",
    r"The same[,.:; ]": "repeat the sentence, or: As `name`, ...",
    r"What ": "say what the thing is or does",
    r"Whom? ": "say what the thing is or does",
    r"That ": "say what the thing is or does",
}


def modules() -> dict[str, pathlib.Path]:
    """All modules by their path in the repository, without those that have the names of Horovod's modules."""
    of_horovod = ROOT / "compat/horovod/packages"
    found = [path for path in sorted(ROOT.rglob("*.py")) if not path.is_relative_to(of_horovod)]
    return {str(path.relative_to(ROOT.parent)): path for path in found}


def names_of_modules() -> dict[str, list[str]]:
    """The paths of the modules and packages of each name."""
    found = collections.defaultdict(list)
    for name, path in modules().items():
        found[path.stem].append(name)
        if path.stem == "__init__" and path.parent != ROOT:
            found[path.parent.name].append(str(path.parent.relative_to(ROOT.parent)))
    return found


def names_of_classes() -> dict[str, list[str]]:
    """The paths of the modules that define a class of each name, without leading underscores."""
    found = collections.defaultdict(list)
    for name, path in modules().items():
        classes = {node.name.lstrip("_") for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)}
        for each in classes:
            found[each].append(name)
    return found


def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def shared(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_module_name_stands_for_one_thing():
    several = shared(names_of_modules())
    assert {name: several[name] for name in several if name not in CONVENTIONAL_MODULES} == {}


def test_a_class_name_stands_for_one_thing():
    several = shared(names_of_classes())
    assert {name: several[name] for name in several if name not in CONVENTIONAL_CLASSES} == {}


def test_conventional_names_are_in_use():
    assert set(CONVENTIONAL_MODULES) <= {*names_of_modules()}
    assert set(CONVENTIONAL_CLASSES) <= {*shared(names_of_classes())}


def texts(path: pathlib.Path):
    """(line, whether it is a docstring or a comment, text) of all docstrings, comments and other strings of a file."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree := ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node in docstrings, " ".join(node.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], True, token.string.lstrip("# ")


def problems(text: str, begins: bool) -> list[str]:
    """The forbidden phrases of a text, each with what to write instead. begins: it is a docstring or a comment."""
    found = [
        f"{match[0]!r}: {better}"
        for pattern, better in ANYWHERE.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    if begins:
        found += [f"{match[0]!r}: {better}" for start, better in BEGINNINGS.items() if (match := re.match(start, text))]
    return found


@pytest.mark.parametrize("name", modules())
def test_sentences_are_plain_english(name):
    found = [
        f"{name}:{line}: {problem}"
        for line, begins, text in texts(modules()[name])
        for problem in problems(text, begins)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["Of one worker.", "What it costs.", "The same, in place.", "Says in words why.",
                                  "Whoever waits is told of it.", "The ranks, of which one has gone."])  # fmt: skip
def test_a_forbidden_phrase_is_found(text):
    assert problems(text, begins=True)
    assert not problems("As `allreduce`, in place: overwrite the array.", begins=True)
