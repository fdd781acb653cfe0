"""Batch norms that see the whole batch of all ranks, on any device.

Torch's own SyncBatchNorm works on GPUs only, and replaces layers. Here nothing is replaced: while
the mode is on, every call of `F.batch_norm` in training mode, by whatever layer, takes its
statistics over all ranks.

With n images' worth of values, dy the gradient of y and all sums over all ranks:

    mean = Σ x / n            var = Σ (x - mean)² / n          y = (x - mean) / √(var + eps) · w + b
    dx = w / √(var + eps) · (dy - Σ dy / n - (x - mean) / (var + eps) · Σ dy (x - mean) / n)

A rank sends its mean, its sum of squares about it and its n, 2 C + 1 numbers, and gets those of
all; in the backward pass two sums, 2 C numbers. The gradients of w and b stay sums over the rank's
own images, to be summed with all other gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from polymask.errors import TrainingError

if TYPE_CHECKING:
    from polymask.train.ranks import Ranks
    from polymask.train.shards import Shard


class SyncNorms(TorchFunctionMode):
    """While it is on, batch norms in training mode work on the batch of all ranks.

    Images of a shard that do not count, but keep a rank in step, are normalised like the others,
    and change nothing.
    """

    def __init__(self, ranks: "Ranks", shard: "Shard") -> None:
        super().__init__()
        self.ranks, self.shard = ranks, shard

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one torch function, or ours in its place."""
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        mean, var, count = self._statistics(input.detach())
        if count < 2:
            raise TrainingError(
                f"a batch norm has {count:.0f} value a channel in all processes together; give larger images or batches"
            )
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        scale = torch.ones_like(mean) if weight is None else weight
        shift = torch.zeros_like(mean) if bias is None else bias
        settings = (count if self.shard.counted else None, eps, self.ranks)
        normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, scale, shift, mean, var, settings
        )
        return normalised

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean and biased variance a channel, and the number of values, over all ranks."""
        count = values.numel() / values.shape[1] if self.shard.counted else 0.0
        var, mean = torch.var_mean(values.float(), _all_but_channels(values), correction=0)
        mine = torch.cat([mean, var * count, mean.new_tensor([count])])
        parts = torch.stack(self.ranks.gather(mine))
        channels = values.shape[1]
        means, squares, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        squares = (squares + counts * (means - mean) ** 2).sum(0)
        return mean, squares / total, total.item()


class _Normalise(Function):
    """(x - mean) / √(var + eps) · w + b, where mean and var depend on the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        settings: tuple[float | None, float, "Ranks"],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.settings = settings
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, settings[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, mean, var = ctx.saved_tensors
        count, eps, ranks = ctx.settings
        shape = (1, -1, *[1] * (x.ndim - 2))
        centred = x.float() - mean.view(shape)
        inverse = torch.rsqrt(var + eps)
        axes = _all_but_channels(x)
        sums = torch.stack([dy.float().sum(axes), (dy * centred).sum(axes)])
        own_sum, own_product = sums.clone()
        ranks.sum_(sums)
        dx = dy.float()
        if count is not None:  # else the statistics do not depend on this x
            along = (inverse**2 * sums[1] / count).view(shape)
            dx = dx - (sums[0] / count).view(shape) - centred * along
        dx = dx * (weight * inverse).view(shape)
        return dx.to(x.dtype), own_product * inverse, own_sum, None, None, None


def _all_but_channels(values: Tensor) -> list[int]:
    return [axis for axis in range(values.ndim) if axis != 1]
