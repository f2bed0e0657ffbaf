"""allred's calls of cupy, and its stand-in for tests, have the names, arguments and constants of the real cupy.

cupy can be imported without a GPU. Its compiled functions have their signatures in their docstrings.
"""

import ast
import contextlib
import inspect
import pathlib
import pickle
import sys
import typing

import cupy
import numpy as np
import pytest
from cupy.cuda import nccl

import allred
from allred.comm.backends import nccl as nccl_backend
from allred.doctor import host as doctor_host

ROOT = pathlib.Path(allred.__file__).parent
sys.path.append(str(pathlib.Path(__file__).parents[1] / "parallel"))

import cuda_stand_in  # noqa: E402
import standin_gpu  # noqa: E402


class Instance(typing.NamedTuple):
    """An object of a class of cupy."""

    kind: type


# What a name, or the last name of an attribute, is in allred's sources.
NAMES = {
    "cupy": cupy,
    "xp": cupy,
    "_xp": cupy,
    "nccl": nccl,
    "runtime": cupy.cuda.runtime,
    "_nccl": Instance(nccl.NcclCommunicator),
}
RESULTS = {"get_current_stream": cupy.cuda.Stream, "alloc_pinned_memory": cupy.cuda.PinnedMemoryPointer}

# Calls of methods of objects whose class cannot be read from the sources.
METHODS = [
    (cupy.cuda.Stream, "wait_event(event)"),
    (cupy.cuda.Stream, "record()"),
    (cupy.cuda.Stream, "synchronize()"),
    (cupy.cuda.Event, "record(stream)"),
    (cupy.cuda.Event, "synchronize()"),
    (cupy.ndarray, "get(stream=stream, out=target, blocking=False)"),
    (cupy.ndarray, "set(source, stream=stream)"),
    (cupy.ndarray, "astype(dtype)"),
    (cupy.ndarray, "flatten()"),
    (cupy.ndarray, "fill(0)"),
    (cupy.ndarray, "data"),
    (cupy.cuda.MemoryPointer, "ptr"),
    (cupy.cuda.MemoryPointer, "device_id"),
    (cupy.RawModule, "get_function(name)"),
    (cupy.RawModule, "compile()"),
    (cupy.RawKernel, "__call__(grid, block, arguments)"),
    (nccl.NcclCommunicator, "check_async_error()"),
    (nccl.NcclCommunicator, "abort()"),
    (nccl.NcclCommunicator, "destroy()"),
]


def signature(function):
    """The signature of a function or a class, of compiled ones by the first line of the docstring:
    `Name.get(self, size_t count, out=None) -> type`."""
    with contextlib.suppress(ValueError, TypeError):
        return inspect.signature(function)
    listed = function.__doc__.strip().splitlines()[0].partition("(")[2].rpartition(")")[0].replace("\\", "")
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in filter(None, listed.split(", ")):
        name, _, default = text.partition("=")
        if name == "/":
            parameters = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in parameters]
        elif name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif name.startswith("**"):
            parameters.append(inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            value = default if default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name.split()[-1], kind, default=value))
    return inspect.Signature(parameters)


def member(owner, name):
    """An attribute of a module, a class or an instance. Raises AttributeError."""
    return getattr(owner.kind if isinstance(owner, Instance) else owner, name)


def resolve(node):
    """What an expression is, if it begins with a name of NAMES; else None."""
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return NAMES.get(node.attr) if owner is None else member(owner, node.attr)
    if isinstance(node, ast.Call):
        called = resolve(node.func)
        result = called if inspect.isclass(called) else RESULTS.get(getattr(called, "__name__", ""))
        return Instance(result) if result is not None else None
    return NAMES.get(node.id) if isinstance(node, ast.Name) else None


def check_call(called, node, is_method):
    """Raises TypeError if cupy's function does not take the arguments of a call."""
    if any(isinstance(argument, ast.Starred) for argument in node.args) or None in [one.arg for one in node.keywords]:
        return
    given = [None] * (len(node.args) + is_method)
    signature(called).bind(*given, **{one.arg: None for one in node.keywords})


def problems_of(tree, where):
    found, checked = [], 0
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute) and (owner := resolve(node.value)) is not None:
                member(owner, node.attr)
            if not isinstance(node, ast.Call):
                continue
            called = resolve(node.func)
            is_method = isinstance(node.func, ast.Attribute) and isinstance(resolve(node.func.value), Instance)
            if where == "comm/backends/nccl.py" and ast.unparse(node.func) == "self._call":  # name, arguments
                called, is_method = getattr(nccl.NcclCommunicator, node.args[0].value), False
            if callable(called):
                check_call(called, node, is_method)
                checked += 1
        except (AttributeError, TypeError) as error:
            found.append(f"{where}:{node.lineno}: {ast.unparse(node)}: {error}")
    return found, checked


def test_the_calls_in_the_sources():
    found, checked = [], 0
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    trees["doctor/host.py, GPU_PROBE"] = ast.parse(doctor_host.GPU_PROBE)
    for where, tree in trees.items():
        problems, calls = problems_of(tree, where)
        found += problems
        checked += calls
    assert found == []
    assert checked > 40


def test_a_call_that_cupy_does_not_have():
    """Line 1 is right."""
    lines = [
        "xp.zeros(3, order='C')",
        "xp.zero(3)",
        "self.xp.cuda.Event(timing=False)",
        "self._call('send', x, stream)",
    ]
    found, checked = problems_of(ast.parse("\n".join(lines)), "comm/backends/nccl.py")
    assert sorted({text.split(":")[1] for text in found}) == ["2", "3", "4"]
    assert checked == 1


@pytest.mark.parametrize(("kind", "text"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_the_calls_of_methods(kind, text):
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Call):
        check_call(getattr(kind, node.func.id), node, True)
    else:
        assert not inspect.isroutine(getattr(kind, node.id))


def test_constants():
    for name in (*nccl_backend.TYPES.values(), *nccl_backend._OPS.values()):
        assert getattr(nccl, name) == getattr(standin_gpu.Nccl, name), name
    sizes = {getattr(nccl, constant): np.dtype(name).itemsize for name, constant in nccl_backend.TYPES.items()}
    assert sizes == {number: np.dtype(standin_gpu.Nccl.DTYPES[number]).itemsize for number in sizes}


def test_an_identifier_of_nccl_can_be_sent_to_other_ranks():
    identifier = pickle.loads(pickle.dumps(nccl.get_unique_id()))
    with contextlib.suppress(nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError):  # there is no GPU
        nccl.NcclCommunicator(1, identifier, 0).destroy()


def public(kind, own=()):
    return {name: value for name, value in vars(kind).items() if name[0] != "_" and name not in own}


STAND_INS = [
    (standin_gpu.Namespace, cupy, {"cuda"}),
    (standin_gpu.Namespace.cuda, cupy.cuda, {"Device", "Stream", "Event", "nccl"}),
    (standin_gpu.Namespace.cuda.Device, cupy.cuda.Device, ()),
    (standin_gpu.Namespace.cuda.runtime, cupy.cuda.runtime, ()),
    (standin_gpu.Namespace.RawModule, cupy.RawModule, ()),
    (standin_gpu.Pointed, cupy.ndarray, ()),
    (cuda_stand_in.Stream, cupy.cuda.Stream, {"at", "work", "follows"}),
    (cuda_stand_in.Event, cupy.cuda.Event, {"at"}),
    (standin_gpu.Nccl, None, {"start", "DTYPES", "OPS", "grouped", "open_groups", "launches"}),
]


@pytest.mark.parametrize(("stand_in", "real", "own"), STAND_INS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_stand_in_takes_no_more_than_cupy(stand_in, real, own):
    """A function of the stand-in has the first parameters of cupy's, with the same names and in the same order; its
    keyword-only parameters are in any place."""
    for name, value in public(stand_in, own).items():
        owner = real or (nccl if hasattr(nccl, name) else nccl.NcclCommunicator)
        theirs = getattr(owner, name)
        if isinstance(value, np.ufunc) or not callable(value):
            assert callable(theirs) == callable(value), name
            continue
        if value is bytearray:
            continue
        parameters = signature(theirs).parameters
        ours = [one for one in signature(value).parameters.values() if one.name != "self"]
        names = [one.name for one in ours if one.kind is not one.KEYWORD_ONLY]
        assert names == [name for name in parameters if name != "self"][: len(names)], name
        assert {one.name for one in ours} <= set(parameters), name
