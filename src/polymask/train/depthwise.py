"""Depthwise convolutions on small maps: the gradient of their weights, tap by tap.

On a CPU, torch has no kernel of its own for this gradient where the output is smaller than the
kernel, 5 × 5 taps over 4 × 4 places, say: it multiplies a matrix for each channel, which takes ten
times as long as all else in the layer. Networks such as EfficientNet have these layers wherever
images are small. One tap needs one product and one sum:

    dw[c, i, j] = Σ g[n, c, y, x] in[n, c, s y + d i - p, s x + d j - p]

Values are torch's own; gradients differ in rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


def has_depthwise(net: nn.Module) -> bool:
    """Whether a network has a depthwise convolution."""
    return any(isinstance(m, nn.Conv2d) and 1 < m.groups == m.in_channels for m in net.modules())


class TapByTap(TorchFunctionMode):
    """While it is on, depthwise convolutions that gain by it get this module's gradient."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d:
            return conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
    if groups == 1 or isinstance(padding, str) or not _is_slow(input, weight, groups):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    steps, edges, gaps = _pair(stride), _pair(padding), _pair(dilation)
    sizes = zip(input.shape[2:], weight.shape[2:], steps, edges, gaps, strict=True)
    if all((size + 2 * p - d * (k - 1) - 1) // s + 1 >= k for size, k, s, p, d in sizes):
        return torch.conv2d(input, weight, bias, steps, edges, gaps, groups)
    return cast(Tensor, _Depthwise.apply(input, weight, bias, steps, edges, gaps))  # type: ignore[no-untyped-call]


def _is_slow(input: Tensor, weight: Tensor, groups: int) -> bool:
    depthwise = groups == weight.shape[0] and weight.shape[1] == 1 and input.ndim == 4
    plain = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32
    learns = torch.is_grad_enabled() and weight.requires_grad
    return depthwise and plain and learns and not torch.is_autocast_enabled("cpu")


class _Depthwise(torch.autograd.Function):
    """The convolution as torch has it; in backward, its inputs' gradients by torch too."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.geometry = stride, padding, dilation
        return torch.conv2d(input, weight, bias, stride, padding, dilation, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        by_input = None
        if ctx.needs_input_grad[0]:
            by_input, _, _ = torch.ops.aten.convolution_backward(
                *(gradient, input, weight, None, *ctx.geometry, False, (0, 0), len(weight)),
                (True, False, False),
            )
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(gradient, input, weight.shape, *ctx.geometry)
        by_bias = gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return by_input, by_weight, by_bias, None, None, None


def weight_gradient(
    gradient: Tensor,
    input: Tensor,
    shape: Sequence[int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """dE/dweight (C, 1, kh, kw) of `shape`, from dE/doutput (N, C, …) and the input (N, C, …)."""
    channels, _, height, width = shape
    G, X = (t.permute(0, 2, 3, 1).contiguous() for t in (gradient, input))
    rows = [_overlap(i, G, X, 1, stride[0], padding[0], dilation[0]) for i in range(height)]
    columns = [_overlap(j, G, X, 2, stride[1], padding[1], dilation[1]) for j in range(width)]
    found = torch.zeros(height, width, channels)
    for i, (g_rows, x_rows) in enumerate(rows):
        for j, (g_columns, x_columns) in enumerate(columns):
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
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])
