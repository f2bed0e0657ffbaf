"""The path of a call: the Python functions of allred that it calls."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allred

PACKAGE = str(Path(allred.__file__).parent)


def path_of(call: Callable[[], None]) -> list[str]:
    """Return the calls of Python functions of allred in a call, as lines, each indented by its depth."""
    calls: list[str] = []
    base = len(_stack(sys._getframe()))

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            depth = len(_stack(frame)) - base - 1
            calls.append(f"{'  ' * depth}{name[len(PACKAGE) + 1 :]}: {frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def _stack(frame: types.FrameType | None) -> list[types.FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def files_of(calls: list[str]) -> set[str]:
    return {call.strip().partition(":")[0] for call in calls}
