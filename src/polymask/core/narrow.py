"""Layers without the input channels that nothing is read from.

    layer(x) = narrow(x[kept])        where the layer's weights are zero on all other channels

Without groups, the weights of the kept channels make a smaller layer. With groups, only whole
groups can go: those that read nothing give their bias alone, as constant output channels. Of a
depthwise convolution every channel is such a group.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from polymask.core.network import put_tensors, structural_copy

# A subclass may do more with its weights than these do; it is left as it is.
_NARROWED: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Narrow(nn.Module):
    """A layer that reads some of the channels (axis `axis`, from the end) of what it is given."""

    kept: Tensor  # (channels read,)

    def __init__(self, layer: nn.Module, kept: Tensor, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis
        self.register_buffer("kept", kept)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output for the kept channels."""
        outputs: Tensor = self.layer(inputs.index_select(self.axis, self.kept))
        return outputs


class NarrowGroups(Narrow):
    """A grouped convolution that runs some of its groups; the others give their bias."""

    made: Tensor  # (output channels that the groups make,)
    idle: Tensor  # (C_out, 1, …): what all channels have without a group

    def __init__(self, layer: nn.Module, kept: Tensor, axis: int, made: Tensor, idle: Tensor) -> None:
        super().__init__(layer, kept, axis)
        self.register_buffer("made", made)
        self.register_buffer("idle", idle)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the groups make, in its place among the idle channels."""
        outputs = super().forward(inputs)
        shape = list(outputs.shape)
        shape[self.axis] = len(self.idle)
        whole = self.idle.to(outputs.dtype).expand(shape)
        return whole.index_copy(self.axis, self.made, outputs)


def narrowed(layer: nn.Module, switches: Tensor) -> Narrow | None:
    """The layer without its switched-off channels; None where that would not be smaller.

    `switches` is boolean (C_in,). The weights of a channel that is off must be zero. Only torch's
    own convolutions and `nn.Linear` are narrowed.
    """
    if type(layer) not in _NARROWED:
        return None
    assert isinstance(layer, nn.Linear | _ConvNd)
    axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
    if isinstance(layer, _ConvNd) and layer.groups > 1:
        return _without_groups(layer, switches, axis)
    if switches.all():
        return None
    kept = switches.nonzero().view(-1)
    columns = 0 if isinstance(layer, _ConvTransposeNd) else 1
    small = structural_copy(layer)
    put_tensors(small, {"weight": layer.weight.index_select(columns, kept)})
    setattr(small, "in_features" if isinstance(layer, nn.Linear) else "in_channels", len(kept))
    return Narrow(small, kept, axis)


def _without_groups(layer: _ConvNd, switches: Tensor, axis: int) -> NarrowGroups | None:
    alive = switches.view(layer.groups, -1).any(1)
    if alive.all():
        return None
    kept, made = (
        torch.arange(channels, device=alive.device).view(layer.groups, -1)[alive].view(-1)
        for channels in (layer.in_channels, layer.out_channels)
    )
    small = structural_copy(layer)
    by_group = layer.weight.reshape(layer.groups, -1, *layer.weight.shape[1:])
    tensors = {"weight": by_group[alive].flatten(0, 1)}
    idle = layer.weight.new_zeros(layer.out_channels)
    if layer.bias is not None:
        idle, tensors["bias"] = layer.bias.detach(), layer.bias[made]
    put_tensors(small, tensors)
    small.groups, small.in_channels, small.out_channels = int(alive.sum()), len(kept), len(made)
    return NarrowGroups(small, kept, axis, made, idle.view(-1, *(1,) * (-1 - axis)))
