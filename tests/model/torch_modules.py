"""Small torch modules of random parts, whose losses are independent, so that each rank may leave parts out."""

import dataclasses
from typing import Any

import array_nests
import torch
from torch import nn

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
KINDS = ["linear", "linear", "tied", "conv", "embedding", "scalar", "empty", "transposed", "norm", "checkpoint"]


@dataclasses.dataclass(frozen=True, repr=False)
class Loss(array_nests.Plan):
    """What one backward pass of one rank computes. parts: those that it uses. fault: "nan" or "inf" in one part."""

    seed: int
    parts: tuple[int, ...]
    fault: str = ""
    place: int = 0  # of `parts`


class Net(nn.Module):
    def __init__(self, kinds: tuple[str, ...], dtype: str, seed: int) -> None:
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.dtype, self.parts = DTYPES[dtype], nn.ModuleList(NetPart(kind, DTYPES[dtype]) for kind in kinds)
        torch.random.set_rng_state(generator)

    def loss(self, given: Loss) -> torch.Tensor:
        total = torch.zeros((), dtype=self.dtype)
        for place, index in enumerate(given.parts):
            generator = torch.Generator().manual_seed(1000 * given.seed + index)
            value = self.parts[index](generator)
            total = total + (value * float(given.fault) if given.fault and place == given.place else value)
        return total


class NetPart(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        if kind in ("linear", "tied", "checkpoint"):
            self.one = nn.Linear(3, 3)
        if kind == "tied":
            self.two = nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
        if kind == "conv":
            self.one = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        if kind in ("embedding", "sparse"):
            self.words = nn.Embedding(5, 2, sparse=kind == "sparse")
        if kind == "norm":
            self.one = nn.LayerNorm(3)
        plain = {"scalar": torch.tensor(0.5), "empty": torch.zeros(0, 3), "transposed": torch.randn(3, 2).t()}
        if kind in plain:
            self.weight = nn.Parameter(plain[kind])
        self.to(dtype)
        if kind == "complex":
            wide = torch.complex128 if dtype is torch.float64 else torch.complex64
            self.weight = nn.Parameter(torch.randn(3, dtype=wide))

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        if self.kind in ("embedding", "sparse"):
            rows = self.words(torch.randint(0, 5, (3,), generator=generator))
            return (rows * random(3, 2)).sum() + rows.square().mean()
        if self.kind == "conv":
            return torch.tanh(self.one(random(1, 2, 3, 3))).square().sum()
        if self.kind == "complex":
            return (
                (self.weight * torch.complex(torch.tensor(1.0), random(3).float())).abs().square().sum().to(self.dtype)
            )
        if self.kind in ("scalar", "empty", "transposed"):
            return (torch.sin(self.weight) * random(*self.weight.shape)).sum()
        if self.kind == "checkpoint":
            x = random(2, 3).requires_grad_()
            return torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(self.one(y)), x, use_reentrant=True).sum()
        x = torch.tanh(self.one(random(2, 3)))
        return ((self.two(x) if self.kind == "tied" else x) * random(2, 3)).sum()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy in double precision."""
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach().clone()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def local_gradients(net: Net, parameters: list[Any], given: Loss, scale: float) -> tuple[float, list[Any]]:
    """Return the loss, and a gradient in double precision or None for each parameter, of one rank."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss = net.loss(given)
    if loss.requires_grad:
        (loss * scale).backward()
    found = [None if parameter.grad is None else wide(parameter.grad) for parameter in parameters]
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad
    return float(loss.detach()), found
