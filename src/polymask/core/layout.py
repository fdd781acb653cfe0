"""Where images lie in memory while a network learns: by channels (channels last), or by rows.

By channels is the default of recipes (`channels_last`): on a CPU it was measured to be much faster
for a network of depthwise convolutions, and as fast for another. bfloat16 (`autocast`) is off: on a
CPU without instructions for it, it is far slower. docs/speed.md has the numbers. Weights stay as
they are: laying them out by channels too saved less than could be measured in a step.
"""

from torch import nn


def trains_channels_last(net: nn.Module) -> bool:
    """Whether the gradients of a network are sound in this layout."""
    return not any(map(_breaks_channels_last, net.modules()))


def _breaks_channels_last(module: nn.Module) -> bool:
    # In this layout torch's gradient of a group norm crashes where its input needs none, as that
    # of a first norm that learns after frozen layers.
    if isinstance(module, nn.GroupNorm):
        return True
    # oneDNN's gradient of a strided 1x1 convolution writes past its memory in this layout where
    # there are fewer input channels than a vector has numbers (its issue 6035).
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels // module.groups < 16
    )
