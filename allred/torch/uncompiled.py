"""`uncompiled`: a decorator for functions that run as they are inside of a step that torch.compile compiles."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Return a function that torch.compile does not compile, nor what it calls."""
    return torch._disable_dynamo(function)  # type: ignore[no-any-return]


def skip_frames(*functions: Any) -> None:
    """Make torch.compile skip functions, but not those that they call. Unlike `uncompiled`, a call takes no time."""
    from torch._dynamo.eval_frame import skip_code  # torch.optim imports it too

    for function in functions:
        skip_code(function.__code__)
