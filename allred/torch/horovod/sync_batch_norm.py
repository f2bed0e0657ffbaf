"""Batch normalization over the batches of all ranks, on CPUs and GPUs."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from allred.errors import InputError
from allred.horovod.basics import size
from allred.horovod.operators import Sum
from allred.torch.horovod.allreduce import allreduce


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d, 2d and 3d, with mean and variance over the samples of all ranks.

    In training each forward pass makes two allreduces, of C + 1 and of C numbers, and each backward pass two of
    the same sizes. All ranks must call it. The arguments are those of torch.nn.BatchNorm2d.

    num_features: channels C of an input of shape (N, C, ...). eps: added to the variance. momentum: of the running
    mean and variance; None: the mean over all batches. affine: whether weight and bias are trained.
    track_running_stats: whether evaluation uses the running mean and variance.

    Raises ValueError for an input of fewer than 2 dimensions.

    Example: `layer = hvd.SyncBatchNorm(16)`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InputError(f"SyncBatchNorm: expected an input of shape (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize. Collective in training, and without running mean and variance."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        numbers = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # Two passes: the sum of squares minus the square of the sum would cancel.
        own = numbers.new_tensor([input.numel() / input.shape[1]])
        total: Any = allreduce(torch.cat([numbers.sum(others), own]), op=Sum)
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = numbers - mean.reshape(shape)
        variance = allreduce(centered.square().sum(others), op=Sum) / count
        self._track(mean.detach(), variance.detach(), count)
        result = centered * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            result = result * self.weight.reshape(shape) + self.bias.reshape(shape)
        return result.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running mean and the running variance, which is unbiased."""
        if not (self.training and self.track_running_stats):
            return
        self.num_batches_tracked += 1
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            unbiased = variance * count / (count - 1).clamp(min=1)  # one value: 0
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
