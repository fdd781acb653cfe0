"""Steps that several processes do together: gradients by torch's DistributedDataParallel, norms over all ranks.

DistributedDataParallel sums the gradients of what a domain learns in buckets, while the backward pass still makes
others, so that on GPUs and slow networks most of the traffic costs no time. It knows only what learns: the base adds
no traffic. Each rank's loss is weighted by its share of the batch, and buckets are summed, not averaged, so pieces may
differ in size. Statistics of norms are combined here, not by it.

Torch's own SyncBatchNorm works on GPUs only, and replaces layers. Here nothing is replaced: while `SyncNorms` is on,
every call of `F.batch_norm` in training mode, by whatever layer, takes its statistics over all ranks. With n images'
worth of values, dy the gradient of y and all sums over all ranks:

    mean = Σ x / n            var = Σ (x - mean)² / n          y = (x - mean) / √(var + eps) · w + b
    dx = w / √(var + eps) · (dy - Σ dy / n - (x - mean) / (var + eps) · Σ dy (x - mean) / n)

A rank sends its mean, its sum of squares about it and its n, 2 C + 1 numbers, and gets those of
all; in the backward pass two sums, 2 C numbers. The gradients of w and b stay sums over the rank's
own images, to be summed with all other gradients.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Function
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.parts import Objective
from polymask.data.batches import Batches
from polymask.errors import LostProcess, TrainingError
from polymask.train.descent import descend, set_rates
from polymask.train.fit import Stop
from polymask.train.learner import DomainLearner, Step, placed
from polymask.train.ranks import Ranks, Shard, losses_explained
from polymask.train.recipe import Recipe


class SyncNorms(TorchFunctionMode):
    """While it is on, batch norms in training mode work on the batch of all ranks.

    Images of a shard that do not count, but keep a rank in step, are normalised like the others, and change nothing.
    """

    def __init__(self, ranks: Ranks, shard: Shard) -> None:
        super().__init__()
        self.ranks, self.shard = ranks, shard

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

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
        return cast(Tensor, _Normalise.apply(input, scale, shift, mean, var, settings))  # type: ignore[no-untyped-call]

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean and biased variance a channel, and the number of values, over all ranks."""
        count = values.numel() / values.shape[1] if self.shard.counted else 0.0
        var, mean = torch.var_mean(values.float(), _all_but_channels(values), correction=0)
        mine = torch.cat([mean, var * count, mean.new_tensor([count])])
        means, squares, counts = torch.stack(self.ranks.gather(mine)).tensor_split([len(mean), -1], dim=1)
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
        settings: tuple[float | None, float, Ranks],
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
    return [0, *range(2, values.ndim)]


_LARGEST = 2.0**14  # of summed gradients in 16 bits, where a number can be 65,504


@dataclass(frozen=True)
class SharedSession:
    """A training of several processes: own pieces of batches, and one stop for all."""

    ranks: Ranks
    shard: Shard
    seed: int
    asked: Stop  # of this process
    stop: Stop = field(default_factory=Stop)  # of all

    def learner(self, *what: Any) -> DomainLearner:
        """What learns by the steps of all."""
        return SharedLearner(self, *what)


class SharedLearner(DomainLearner):
    """A domain that several processes train, each on its piece of every batch."""

    def __init__(
        self, session: SharedSession, base: Base, domain: Domain, recipe: Recipe, objective: Objective | None
    ) -> None:
        super().__init__(base, domain, recipe, objective)
        self.session, self.ranks = session, session.ranks
        with losses_explained(self.ranks):
            self.shared_loss = DistributedDataParallel(
                _Loss(self), find_unused_parameters=domain.route is not None, gradient_as_bucket_view=True
            )
        self.shared_loss.register_comm_hook(self.ranks, _sum_in_16_bits if self.ranks.compress else _sum)

    @property
    def saves(self) -> bool:
        """The first process writes checkpoints, or whoever is left when one is lost."""
        return self.ranks.first or self.ranks.lost

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        """One step of all processes; where one of them is lost, all is as it was before."""
        before = [(buffer, buffer.clone()) for buffer in self.domain.buffers()]
        try:
            return self._step(images, labels, epoch)
        except LostProcess:
            with torch.no_grad():
                for buffer, then in before:
                    buffer.copy_(then)
            raise

    def _step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        head_only = epoch < self.domain.method.head_share * self.recipe.epochs
        set_rates(self.optimisers, self.recipe, epoch, head_only=head_only)
        # Random numbers (dropout) of its own for every rank and step, whatever came before.
        place = np.random.SeedSequence([self.session.seed, self.ranks.rank, round(1e6 * epoch)])
        torch.manual_seed(int(place.generate_state(1)[0]))
        counted = self.session.shard.counted
        images, labels = placed(images, labels, self.base, self.recipe)
        with self._norms():
            loss, logits = self.shared_loss(images, labels)
        right = self.target.tally(logits.detach(), labels) if counted else 0
        mine = [counted, loss.item() * counted if counted else 0.0, right, self.session.asked.is_set()]
        total, summed, right_of_all, asked = self.ranks.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        if asked:
            self.session.stop.set()
        if math.isfinite(summed):
            with losses_explained(self.ranks), warnings.catch_warnings():
                # A gradient that is laid out otherwise than its parameter is copied.
                warnings.filterwarnings("ignore", "Grad strides do not match")
                descend(loss * (counted / total), self.optimisers.values(), self.pulls)
        return Step(summed / total, right_of_all, int(total))

    def end_epoch(self) -> None:
        """Combine what the norms have seen in all processes, unless they saw it together."""
        if not self.ranks.sync_norms:
            combine_statistics(self.domain, self.ranks)

    def settle(self, train: Batches, epoch: int) -> None:
        with self._norms():
            super().settle(train, epoch)
        self.end_epoch()

    def measure(self, val: Batches) -> float:
        return self.ranks.evaluate(self.base, self.domain, val)

    def _norms(self) -> AbstractContextManager[object]:
        return SyncNorms(self.ranks, self.session.shard) if self.ranks.sync_norms else nullcontext()


class _Loss(nn.Module):
    """The loss of a batch as a module whose parameters are what is learned, and nothing else.

    So DistributedDataParallel does not see the buffers of the domain, whose statistics may differ.
    """

    def __init__(self, learner: SharedLearner) -> None:
        super().__init__()
        groups = [group for o in learner.optimisers.values() for group in o.param_groups]
        self.learned = nn.ParameterList(p for group in groups for p in group["params"])
        self._of_batch = learner.loss

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._of_batch(images, labels)


@torch.no_grad()
def combine_statistics(domain: Domain, ranks: Ranks) -> None:
    """Give all processes the mean and variance of what the norms of all of them have seen.

    mean = Σ mean_r / R        var = Σ (var_r + (mean_r - mean)²) / R
    """
    found = [module for module in domain.modules() if "running_var" in module._buffers]
    if not found:
        return
    buffers: list[Tensor] = [m.get_buffer("running_mean") for m in found]
    buffers += [m.get_buffer("running_var") for m in found]
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    means, variances = torch.stack(ranks.gather(flat)).chunk(2, dim=1)  # (R, all)
    mean = means.mean(0)
    combined = torch.cat([mean, (variances + (means - mean) ** 2).mean(0)])
    for buffer, values in zip(buffers, torch.split(combined, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view(buffer.shape))


def _sum(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Sum a bucket of gradients over all ranks; `state` is the ranks."""
    state.note(bucket.buffer(), "gradients")
    return _summed(bucket.buffer()).then(lambda done: done.value()[0])


def _sum_in_16_bits(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """The same in half the bytes.

    Gradients of scores are smaller than 16 bits can hold. So a bucket is multiplied by a power of
    two that all ranks agree on, that of its largest gradient.
    """
    buffer = bucket.buffer()
    largest = buffer.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    room = _LARGEST / (largest * state.world).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.floor(torch.log2(room)).clamp_max(100.0))
    small = (buffer * scale).half()
    state.note(small, "gradients")

    def widened(done: Future[list[Tensor]]) -> Tensor:
        buffer.copy_(done.value()[0])
        return buffer.div_(scale)

    return _summed(small).then(widened)


def _summed(tensor: Tensor) -> Future[list[Tensor]]:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future: Future[list[Tensor]] = work.get_future()
    return future
