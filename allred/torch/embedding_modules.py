"""`Embedding` and `EmbeddingBag`: modules of torch on a table of `allred.Embedding`."""

from typing import Any

import torch

from allred.arrays import Array
from allred.embeddings.embedding import Embedding as EmbeddingTable
from allred.embeddings.table_form import Uniform
from allred.errors import InputError
from allred.optim.base import Optimizer
from allred.torch.tensors import as_array


class _LookupFunction(torch.autograd.Function):
    """The lookup of a table. anchor: a tensor that requires a gradient, so that torch calls `backward`."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, table: EmbeddingTable, vectors: Array) -> torch.Tensor:
        ctx.table, ctx.vectors = table, vectors
        return torch.from_numpy(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        ctx.table.gradient(as_array(grad.detach().cpu()), ctx.vectors)
        return None, None, None


class Embedding(torch.nn.Module):
    """As torch.nn.Embedding, with a table that is held by the ranks or by parameter servers.

        users = allred.torch.Embedding("user", 64, optimizer=allred.optim.Adagrad(0.05, row_wise=True))
        model = Model(users)                                 # a torch module that uses it
        opt = allred.distributed(torch.optim.Adam(model.parameters()), tables=[users.table])

    Arguments: see `allred.Embedding`. The rows are no parameters of the module: they are neither in `parameters()` nor
    in `state_dict()`. The optimizer's `allred.save`, and sessions, save them.

    forward(ids): an integer tensor of any shape. Returns float32 of shape ids.shape + (dim,), on the CPU. Without
    gradients (torch.no_grad()), and after `eval()`, it is a lookup with train=False. Collective in mode sync.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        rows: int | None = None,
        *,
        optimizer: Optimizer,
        init: float | Any = Uniform(-0.05, 0.05),  # noqa: B008  (it is frozen)
        **options: Any,
    ) -> None:
        super().__init__()
        self.table = EmbeddingTable(name, dim, rows, init, optimizer, **options)
        self._anchor = torch.zeros(0, requires_grad=True)

    def extra_repr(self) -> str:
        return self.table.form.text

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._look_up(ids, None, "sum")

    def _look_up(self, ids: torch.Tensor, offsets: torch.Tensor | None, pooling: str) -> torch.Tensor:
        train = self.training and torch.is_grad_enabled()
        starts = None if offsets is None else as_array(offsets.cpu())
        vectors = self.table.lookup(as_array(ids.cpu()), starts, pooling, train=train)
        if not train:
            return torch.from_numpy(vectors)
        found: torch.Tensor = _LookupFunction.apply(self._anchor, self.table, vectors)
        return found


class EmbeddingBag(Embedding):
    """As torch.nn.EmbeddingBag: the sum or mean of the vectors of each bag of ids. See `Embedding`.

    mode: "sum" or "mean". forward(ids, offsets): ids and offsets are integer tensors with one axis, and bag i has the
    ids from offsets[i] to offsets[i + 1]. Or ids has two axes, and each row is a bag. Returns float32, (bags, dim).
    """

    def __init__(self, name: str, dim: int, rows: int | None = None, *, mode: str = "sum", **options: Any) -> None:
        super().__init__(name, dim, rows, **options)
        if mode not in ("sum", "mean"):
            raise InputError(f"EmbeddingBag {name!r}: mode={mode!r} must be 'sum' or 'mean'")
        self.mode = mode

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if ids.dim() == 2 and offsets is None:
            offsets = torch.arange(0, ids.numel(), ids.shape[1]) if ids.shape[1] else torch.zeros(len(ids)).long()
            ids = ids.reshape(-1)
        elif offsets is None:
            raise InputError(f"EmbeddingBag {self.table.name!r}: ids with one axis need offsets")
        return self._look_up(ids, offsets, self.mode)
