"""torch's CPU tensors in the arena of this process (allred/arena.py), so that their ranks reduce them in place.

With the setting `torch_arena`, `install` compiles an allocator (arena_allocator.cpp) against the torch that is
installed, in about a second, and sets it for the rest of the process. It allocates in the arena

    the sizes of gradients   known from the parameters of a hooked optimizer, and from the collectives of a process
                             group, such as those of FSDP (`learn`)
    the buckets of DDP       all that `torch.distributed.Reducer` allocates while it makes buckets, from 16 KiB

and everything else as torch does without it, also if the arena is full.
"""

import ctypes
import functools
import importlib.resources
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allred import arena, log, native, world
from allred.torch.optimizer_hooks import uncompiled

_COMPILE_S = 300  # limit of a compilation, in seconds
_STANDARDS = ("c++17", "c++20")  # of torch's headers: 2.5 to 2.13 need the first one

_lock = threading.Lock()
_tried = False  # whether `install` has tried
_is_installed = False


def install() -> None:
    """Set the allocator, if the setting `torch_arena` demands it and this rank has an arena. If that is not possible,
    warn once; gradients then pass through the ring. Call it after init()."""
    global _tried, _is_installed
    if not world.config().torch_arena or arena.memory() is None:
        return
    with _lock:
        if _tried:
            return
        _tried = True
        problem = _install()
    if problem:
        log.warning(f"ALLRED_TORCH_ARENA=1: {problem}; gradients are not reduced in place")
        return
    _is_installed = True
    arena.note_torch()
    for name in ("__init__", "_rebuild_buckets"):
        if method := getattr(dist.Reducer, name, None):
            setattr(dist.Reducer, name, _in_arena(method))


def learn(tensors: Iterable[torch.Tensor]) -> None:
    """From now on, allocate memory of the sizes of these tensors in the arena."""
    if _is_installed:
        arena.learn(each.untyped_storage().nbytes() for each in tensors if _has_host_memory(each))


def _has_host_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor on the host: not an uninitialized parameter, a DTensor or another subclass."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _in_arena(method: Callable[..., Any]) -> Any:
    """Wrap a method: while it runs, the arena serves torch all sizes from 16 KiB."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        native.arena_serve_torch(True)
        try:
            return method(*arguments, **named)
        finally:
            native.arena_serve_torch(False)

    return uncompiled(call)


def _install() -> str:
    """Compile, load and set the allocator. Return why that is not possible, or ""."""
    with tempfile.TemporaryDirectory(prefix="allred-") as directory:
        path = Path(directory) / "arena_allocator.so"
        try:
            if problem := _compile(path):
                return problem
            library = ctypes.CDLL(str(path))  # never unloaded: the file may be deleted
        except (OSError, subprocess.SubprocessError) as error:
            return f"torch's allocator cannot be made: {error}"
    functions = map(ctypes.c_void_p, native.arena_functions())
    return (
        "the CPU allocator that the program has set in torch has no raw_deleter()"
        if library.allred_set_torch_allocator(*functions)
        else ""
    )


def _compile(path: Path) -> str:
    """Compile the allocator. Return the compiler's error, or ""."""
    root = Path(torch.__file__).parent
    source = importlib.resources.files("allred.torch") / "arena_allocator.cpp"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = [*shlex.split(os.environ.get("CXX") or "c++"), "-O2", "-fPIC", "-shared", "-w", abi]
    with importlib.resources.as_file(source) as file:
        files = [f"-I{root / 'include'}", str(file), f"-L{root / 'lib'}", "-lc10", "-o", str(path)]
        for standard in _STANDARDS:
            done = subprocess.run(
                [*compiler, f"-std={standard}", *files], capture_output=True, text=True, timeout=_COMPILE_S
            )
            if done.returncode == 0:
                return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return f"{compiler[0]} cannot compile torch's allocator: {(errors or [str(done.returncode)])[0].strip()}"
