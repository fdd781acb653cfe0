"""Which networks may be trained on images that are laid out by channels (channels last)."""

from torch import nn


def trains_channels_last(net: nn.Module) -> bool:
    """Whether the gradients of a network are sound in this layout."""
    return not any(map(_breaks_channels_last, net.modules()))


def _breaks_channels_last(module: nn.Module) -> bool:
    # oneDNN's gradient of a strided 1x1 convolution writes past its memory in this layout where
    # there are fewer input channels than a vector has numbers (its issue 6035).
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels // module.groups < 16
    )
