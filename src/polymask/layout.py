"""Where a network's images and weights lie in memory: by channels (channels last), or by rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from polymask.base import Base
    from polymask.domain import Domain


def trains_channels_last(net: nn.Module) -> bool:
    """Whether the gradients of a network are sound in this layout."""
    return not any(map(_breaks_channels_last, net.modules()))


@contextmanager
def weights_follow(base: "Base", domain: "Domain", *, channels_last: bool) -> Iterator[None]:
    """Lay out weights as the images are while a domain learns, where it can learn on them so.

    A convolution turns weights of the other layout around in every pass, and gives gradients in
    the layout of the images. No value changes; afterwards the base is laid out as it was.
    """
    transforms = [transform for _, transform in domain.named_transforms()]
    tensors = list(base.net.state_dict().values())
    if (
        not (channels_last and base.trains_channels_last and transforms)
        or not all(transform.any_layout for transform in transforms)
        or not all(tensor.is_contiguous() for tensor in tensors)
    ):
        yield
        return
    base.apply(_by_channels)
    domain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        base.apply(Tensor.contiguous)


def match_parameters(optimiser: Optimizer) -> None:
    """Lay out an optimiser's state as its parameters are: fused steps go through both in order."""
    for parameter, state in optimiser.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _by_channels(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _breaks_channels_last(module: nn.Module) -> bool:
    # oneDNN's gradient of a strided 1x1 convolution writes past its memory in this layout where
    # there are fewer input channels than a vector has numbers (its issue 6035).
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels // module.groups < 16
    )
