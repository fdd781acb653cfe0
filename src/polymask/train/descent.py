"""Down the gradient: where a head begins, what learns by which optimiser, rate and decay; and a quicker gradient.

The quicker gradient is that of depthwise convolutions on small maps. On a CPU, torch has no kernel
for it where the output is smaller than the kernel, 5 × 5 taps over 4 × 4 places, say: it multiplies
a matrix for each channel, which takes ten times as long as all else in the layer. Networks such as
EfficientNet have these layers wherever images are small. Tap by tap it is one product and one sum:

    dw[c, i, j] = Σ g[n, c, y, x] in[n, c, s y + d i - p, s x + d j - p]

Values are torch's own; gradients differ in rounding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import SGD, Adam, Optimizer
from torch.overrides import TorchFunctionMode

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.heads import BlockLinear, CentredLinear, MappedLinear
from polymask.core.parts import Objective
from polymask.errors import TrainingError
from polymask.train.recipe import Optimiser, Recipe

Pair = tuple[int, int]
DecayPull = tuple[nn.Parameter, Tensor, float]  # a parameter, what its decay must add, the decay
FUSING = ("cpu", "cuda", "mps", "xpu")  # devices with fused optimisers
FIRST = 256  # images whose features tell where a head begins
FUSED_TYPES = (torch.float32, torch.float64)  # in half precision, torch's SGD on CPUs does nothing


@torch.no_grad()
def begin_head(base: Base, domain: Domain, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let the head of a new domain begin at 0, on features around the mean of those of some training images.

    Features are those that training will see: norms with own statistics normalise by the batch there, which gives
    quite other features than the base's statistics do on images of another size. What norms note of these batches is
    forgotten. A head that maps features first keeps its map.
    """
    kind = type(domain.head) if isinstance(domain.head, MappedLinear) else CentredLinear
    if domain.head is None or isinstance(domain.head, BlockLinear) or type(domain.head) is CentredLinear:
        return
    seen: list[Tensor] = []
    noted = {name: buffer.clone() for name, buffer in domain.named_buffers()}
    with domain.in_mode(training=True):
        for images, _ in batches:
            seen.append(domain.features(base, images).detach().cpu())
            if sum(map(len, seen)) >= FIRST:
                break
    for name, buffer in domain.named_buffers():
        buffer.copy_(noted[name])
    features = torch.cat(seen) if seen else torch.zeros(1, domain.head.in_features)
    head = kind.around(features, domain.head.out_features, base.weight_dtype)
    domain.head = head.to(base.device)


def has_depthwise(net: nn.Module) -> bool:
    """Whether a network has a depthwise convolution."""
    return any(isinstance(m, nn.Conv2d) and 1 < m.groups == m.in_channels for m in net.modules())


class TapByTap(TorchFunctionMode):
    """While it is on, depthwise convolutions that gain by it get this module's gradient."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (conv2d if func is torch.conv2d else func)(*args, **(kwargs or {}))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d`, and its gradient tap by tap where that is quicker."""
    depthwise = 1 < groups == weight.shape[0] and weight.shape[1] == 1 and input.ndim == 4
    plain = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32
    learns = torch.is_grad_enabled() and weight.requires_grad and not torch.is_autocast_enabled("cpu")
    if depthwise and plain and learns and not isinstance(padding, str):
        steps, edges, gaps = _pair(stride), _pair(padding), _pair(dilation)
        sizes = zip(input.shape[2:], weight.shape[2:], steps, edges, gaps, strict=True)
        if any((size + 2 * p - d * (k - 1) - 1) // s + 1 < k for size, k, s, p, d in sizes):
            return cast(Tensor, _Depthwise.apply(input, weight, bias, steps, edges, gaps))  # type: ignore[no-untyped-call]
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


class _Depthwise(torch.autograd.Function):
    """The convolution as torch has it; in backward, its inputs' gradients by torch too."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.geometry = stride, padding, dilation
        return torch.conv2d(input, weight, bias, stride, padding, dilation, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        by_input = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            layer = (gradient, input, weight, None, *ctx.geometry, False, (0, 0), len(weight))
            by_input, _, _ = torch.ops.aten.convolution_backward(*layer, (True, False, False))
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(gradient, input, weight.shape, *ctx.geometry)
        if ctx.needs_input_grad[2]:
            by_bias = gradient.sum((0, 2, 3))
        return by_input, by_weight, by_bias, None, None, None


def weight_gradient(
    gradient: Tensor, input: Tensor, shape: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """dE/dweight (C, 1, kh, kw) of `shape`, from dE/doutput (N, C, …) and the input (N, C, …)."""
    channels, _, height, width = shape
    G, X = (t.permute(0, 2, 3, 1).contiguous() for t in (gradient, input))
    down = [_overlap(i, G, X, 1, stride[0], padding[0], dilation[0]) for i in range(height)]
    across = [_overlap(j, G, X, 2, stride[1], padding[1], dilation[1]) for j in range(width)]
    found = torch.zeros(height, width, channels)
    for i, (g_rows, x_rows) in enumerate(down):
        for j, (g_columns, x_columns) in enumerate(across):
            products = G[:, g_rows, g_columns] * X[:, x_rows, x_columns]
            torch.sum(products.view(-1, channels), 0, out=found[i, j])
    return found.permute(2, 0, 1).unsqueeze(1)


def _overlap(tap: int, G: Tensor, X: Tensor, dim: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice]:
    """The places of the output whose tap falls on the input, and where it falls."""
    shift = dilation * tap - padding
    first = max(0, -(shift // stride))
    last = min(G.shape[dim] - 1, (X.shape[dim] - 1 - shift) // stride)
    if last < first:
        return slice(0), slice(0)
    return slice(first, last + 1), slice(first * stride + shift, last * stride + shift + 1, stride)


def _pair(value: int | Sequence[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def decay_pulls(base: Base, domain: Domain, recipe: Recipe) -> list[DecayPull]:
    """What decay adds to the gradients of changes of whole weights.

    Optimisers add decay times the change D; for W~ = W + D to decay, decay times W is missing.
    """
    if not recipe.weight_decay:
        return []
    found: list[DecayPull] = []
    for name, transform in domain.named_transforms():
        site = domain.sites[name]
        bias = base.tensor(site.bias) if site.has_bias else None
        for parameter, origin in transform.origins(base.tensor(name), bias):
            if parameter.requires_grad:
                found.append((parameter, origin, recipe.weight_decay))
    return found


def descend(loss: Tensor, optimisers: Iterable[Optimizer], pulls: Iterable[DecayPull] = ()) -> float:
    """One step down the gradient of `loss`, unless it is not finite; the loss as a number."""
    value = loss.item()
    if not math.isfinite(value):
        return value
    chosen = list(optimisers)
    for optimiser in chosen:
        optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, origin, decay in pulls:
        if parameter.grad is not None:
            parameter.grad.add_(origin, alpha=decay)
    for optimiser in chosen:
        optimiser.step()
        optimiser.zero_grad()  # the next step's weights can use their memory
    return value


def learned_by(domains: Sequence[Domain], objectives: Sequence[Objective | None]) -> dict[str, list[nn.Parameter]]:
    """What several domains and their objectives learn, by part; what they share is there once.

    Scores and scalars are parts of their own here, apart from the other transforms.
    """
    groups: dict[str, dict[int, nn.Parameter]] = defaultdict(dict)
    for domain, objective in zip(domains, objectives, strict=True):
        for name, parameters in domain.param_groups().items():
            groups[name] |= {id(p): p for p in parameters}
        if objective is not None:
            groups["head"] |= {id(p): p for p in objective.parameters()}
        for _, part in domain.named_parts():
            for name, some in (("scores", part.score_parameters()), ("scalars", part.scalar_parameters())):
                groups[name] |= {id(p): groups["transforms"].pop(id(p)) for p in some if p.requires_grad}
    return {name: list(parameters.values()) for name, parameters in groups.items()}


def make_optimisers(groups: dict[str, list[nn.Parameter]], recipe: Recipe) -> dict[str, Optimizer]:
    """One for transforms and norms, one for whole weights, and the head's own.

    Scalars are the first one's, unless the recipe has a rate for them.
    """
    decaying, scalars = list(groups["transforms"]), list(groups.get("scalars", []))
    if recipe.scalar_rate is None:
        decaying, scalars = decaying + scalars, []
    body, rates = (recipe.optimiser, recipe.momentum), rates_of(recipe)
    chosen = {
        "body": (decaying, recipe.transform_decay, body),
        "scalars": (scalars, recipe.transform_decay, body),
        "weights": (groups["weights"], recipe.weight_decay, body),
        "head": (groups["head"], recipe.head_decay, (recipe.head_optimiser, recipe.head_momentum)),
    }
    fixed = {"body": list(groups.get("scores", [])) + list(groups["norms"])}  # these never decay
    optimisers: dict[str, Optimizer] = {}
    for name, (parameters, decay, (kind, momentum)) in chosen.items():
        parts = [(parameters, decay), (fixed.get(name, []), 0.0)]
        made = [{"params": some, "weight_decay": its} for some, its in parts if some]
        if made:
            optimisers[name] = make_optimiser(made, kind, rates[name], momentum)
    if not optimisers:
        raise TrainingError("the domain has nothing to learn; make a new one, not a stored one")
    return optimisers


def make_optimiser(groups: list[dict[str, Any]], kind: Optimiser, rate: float, momentum: float) -> Optimizer:
    """Adam, or SGD with a momentum; each in one pass over memory where the device can do that.

    A group has its `params` and its `weight_decay`.
    """
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.dtype in FUSED_TYPES and p.device.type in FUSING for p in parameters)
    if kind == "adam":
        return Adam(groups, rate, fused=fused)
    return SGD(groups, rate, momentum, fused=fused)


def rates_of(recipe: Recipe) -> dict[str, float]:
    """The recipe's rate for each optimiser."""
    scalars = recipe.rate if recipe.scalar_rate is None else recipe.scalar_rate
    return {"body": recipe.rate, "scalars": scalars, "weights": recipe.weight_rate, "head": recipe.head_rate}


def set_rates(optimisers: dict[str, Optimizer], recipe: Recipe, epoch: float, *, head_only: bool = False) -> None:
    """The recipe's rates at this point of training; only the head's where that goes first."""
    rates = rates_of(recipe)
    for name, optimiser in optimisers.items():
        for group in optimiser.param_groups:
            group["lr"] = 0.0 if head_only and name != "head" else rates[name] * recipe.factor(epoch)
