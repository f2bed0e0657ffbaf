"""The collectives' base class, their public functions, compression, conversion of tensors to arrays, and autograd.

Operations match in the order of the calls, which must be the same on all ranks; Horovod matches them by name.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allred.comm import functions, ops
from allred.comm.communicator import Communicator
from allred.comm.header import quoted
from allred.comm.process_set import ProcessSet as RankSet
from allred.comm.work import Work
from allred.errors import InputError
from allred.horovod import handles
from allred.horovod.horovod_errors import as_horovod_error
from allred.horovod.process_sets import ProcessSet, communicator_of
from allred.torch.tensors import as_array, as_raw_array, as_tensor, check_host

# Compression before a collective. Programs may pass a class of their own with the two static methods.


class Compressor:
    """The interface: `compress` returns the tensor to send and a context, `decompress` gets both back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors are sent as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Int8Compressor(NoneCompressor):
    """Between hosts that are connected by TCP, allreduces send `allred.Compression.int8`. Not in Horovod."""

    encoding = ops.Compression.int8


class Int4Compressor(NoneCompressor):
    """Between hosts that are connected by TCP, allreduces send `allred.Compression.int4`. Not in Horovod."""

    encoding = ops.Compression.int4


class Compression:
    """The compressors for the argument `compression`. `int8` and `int4` are not in Horovod; they compress allreduces
    between hosts only (docs/slow-links.md).

    Example: `hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)`.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor


Tensors = Sequence[Tensor]
Operations = Sequence[Work[Any] | handles.DeferredCall]
# Starts the operations of a call. Returns them and `handles.AsyncCall.finish`.
Begin = Callable[[Communicator], tuple[Operations, Callable[[list[Any], int], Any]]]


@dataclasses.dataclass
class CollectiveCall:
    """A call of a collective. is_list: of a list of tensors. is_async: the program waits for it later.

    A subclass defines a collective for `public_function`.
    """

    kind: str
    name: str | None
    process_set: ProcessSet | RankSet
    is_list: bool = False
    is_async: bool = False

    @property
    def label(self) -> str:
        """The name for the functions of allred."""
        return self.name or ""

    def start(self, begin: Begin, operations: int = 1, allows_joined: bool = False) -> int:
        """Call `begin` and return the handle. If it raises InputError, all ranks raise it. operations: how many `begin`
        starts. allows_joined: as in handles.AsyncCall."""
        communicator = communicator_of(self.process_set)
        title = f"{'grouped_' * self.is_list}{self.kind}{quoted(self.label)}"
        key = (getattr(self.process_set, "process_set_id", 0) or 0, title) if self.name else None
        if key is not None:
            handles.check_name(key)
        if self.is_async:
            functions.enable_progress(communicator)
        with as_horovod_error():
            try:
                works, finish = begin(communicator)
            except InputError as error:
                works = [communicator.check(self.kind, title, problem=str(error)) for _ in range(max(1, operations))]
                works[0].wait()
                raise
        return handles.add(handles.AsyncCall(title, works, communicator.size, finish, allows_joined), key)

    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        """Start the collective. Returns a handle."""
        raise NotImplementedError

    def run(self, tensors: Tensors) -> list[Tensor]:
        """Return the results as new tensors, without gradient."""
        return self.results(self.begin_tensors(tensors, False))

    def apply(self, tensors: Tensors, compression: Any) -> list[Tensor]:
        """Return the results as new tensors, with gradient."""
        raise NotImplementedError

    def results(self, handle: int) -> list[Tensor]:
        """Wait for the call, and return its results as a list."""
        found = handles.synchronize(handle)
        return list(found) if self.is_list else [found]


def public_functions(
    make: Callable[..., CollectiveCall],
    name: str,
    forms: Sequence[str],
    doc: str,
    example: str,
    compression_at: int | None = None,
) -> list[Callable[..., Any]]:
    """Return the functions of Horovod `name`, which has the docstring, and `name` with each of the endings `forms`.

    The first argument is `tensor`, or `tensors` with grouped_; the others are those of `make`, which returns the call.
    With _async a function returns a handle; with a last _ it overwrites the tensors, and is not differentiable.

    example: arguments. compression_at: the position among the arguments of `make` of `compression`, which `name` alone
    has.
    """
    found = [_public_function(make, name, doc, compression_at)]
    without = "compression and gradient" if compression_at is not None else "gradient"
    for form in forms:
        if form == "_":
            text = f"As `{name}`, in place: overwrite what it is called with, and return it. Not differentiable."
            shown = f"`hvd.{name}_({example})`"
        else:
            text = f"Start `{name}{form[6:]}`, without {without}. Returns a handle.\n\n    "
            text += "Raises ValueError if an operation of this name is still in progress."
            shown = f"`hvd.synchronize(hvd.{name}{form}({example}))`"
        found.append(_public_function(make, name + form, f"{text}\n\n    Example: {shown}.\n    ", None))
    return found


def _public_function(
    make: Callable[..., CollectiveCall], name: str, doc: str, compression_at: int | None
) -> Callable[..., Any]:
    is_list, is_async, in_place = name.startswith("grouped_"), "_async" in name, name.endswith("_")

    def run(tensors: Tensors, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        compression = Compression.none
        if compression_at is not None and len(arguments) > compression_at:
            if "compression" in options:
                raise TypeError(f"{name}() got multiple values for argument 'compression'")
            compression = arguments[compression_at]
            arguments = (*arguments[:compression_at], *arguments[compression_at + 1 :])
        elif compression_at is not None:
            compression = options.pop("compression", compression)
        call = make(*arguments, **options)
        call.is_list, call.is_async = is_list, is_async
        if is_async:
            return call.begin_tensors(tensors, in_place)
        results = call.results(call.begin_tensors(tensors, True)) if in_place else call.apply(tensors, compression)
        return results if is_list else results[0]

    def grouped(tensors: Tensors, *arguments: Any, **options: Any) -> Any:
        return run(tensors, arguments, options)

    def single(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return run([tensor], arguments, options)

    found: Any = grouped if is_list else single
    found.__name__ = found.__qualname__ = name
    found.__module__, found.__doc__ = make.__module__, doc
    found.__signature__ = _signature(found, make, compression_at)
    return found  # type: ignore[no-any-return]


def _signature(function: Any, make: Callable[..., Any], compression_at: int | None) -> inspect.Signature:
    first, *_ = inspect.signature(function).parameters.values()
    others = list(inspect.signature(make).parameters.values())
    if compression_at is not None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        compression = inspect.Parameter("compression", kind, default=Compression.none, annotation=Any)
        others.insert(compression_at, compression)
    return inspect.Signature([first, *others])


class Differentiable(torch.autograd.Function):
    """forward(run, gradient, *tensors) returns run(tensors). backward returns gradient(gradients of the results): a
    gradient for each tensor. Gradients of complex numbers are often lazy conjugates."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensors], list[Tensor]], gradient: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.gradient([each.resolve_conj().resolve_neg() for each in gradients]))


def apply_compressed(
    compression: Any, run: Callable[[Tensors], list[Tensor]], gradient: Callable[..., Any], tensors: Tensors
) -> list[Tensor]:
    """As Differentiable, on compressed tensors. Return the decompressed results."""
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = Differentiable.apply(run, gradient, *(compressed for compressed, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def check_compression(compression: Any) -> None:
    """Raise InputError unless it is a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InputError(
            f"compression={compression!r}: expected hvd.Compression.none, .fp16, .int8 or .int4, or a class with "
            "static methods compress and decompress"
        )


def detached(tensors: Tensors) -> list[Tensor]:
    """Return the tensors without gradient. Raises InputError for other objects and tensors that are not dense."""
    for tensor in tensors:
        if not getattr(tensor, "is_cuda", False):
            check_host(tensor)
    return [tensor.detach() for tensor in tensors]


def copies(tensors: Tensors) -> list[Tensor]:
    """As `detached`, in new memory."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in detached(tensors)]


def view(tensor: Tensor) -> Any:
    """Return a tensor as the reductions of allred take it: an array on the host, or a tensor on a GPU."""
    return tensor if tensor.is_cuda else as_array(tensor)


def rows_of(tensor: Tensor) -> Any:
    """As `view`, for collectives that move rows of any dtype. A 0-d tensor counts as one of shape (1,)."""
    tensor = tensor if tensor.ndim else tensor.reshape(1)
    return tensor if tensor.is_cuda else as_raw_array(tensor)


def result_as_tensor(array: Any, like: Tensor) -> Tensor:
    """Return the result of a collective on `rows_of` as a tensor of the dtype and device of `like`."""
    if like.is_cuda:
        return torch.as_tensor(array, device=like.device)
    found = as_tensor(np.ascontiguousarray(array))
    if not array.size:  # numpy's strides are zeros, which view_as_complex refuses
        found = found.new_empty(array.shape)
    if like.dtype.is_complex and not found.is_complex():
        return torch.view_as_complex(found)
    return found if found.dtype == like.dtype else found.view(like.dtype)
