"""A network's tensors and modules: their device, copies that share them, their places, unused channels, outputs."""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from polymask.errors import BaseError

M = TypeVar("M", bound=nn.Module)
DEVICES = ("cuda", "mps", "xpu", "cpu")  # "auto" takes the first that works


def choose_device(device: torch.device | str = "auto") -> torch.device:
    """The device of this name, if it works here; "auto" is the first of cuda, mps, xpu and cpu that does."""
    if isinstance(device, torch.device):
        return device
    for name in DEVICES if device == "auto" else (device,):
        if (place := _working(name)) is not None:
            return place
    here = ", ".join(name for name in DEVICES if _working(name) is not None)
    raise BaseError(f"device {device!r} does not work here; there is {here}, and auto takes the first of these")


def _working(name: str) -> torch.device | None:
    try:
        with warnings.catch_warnings():  # of drivers that are too old, say: then it does not work
            warnings.simplefilter("ignore")
            torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None
    return torch.device(name)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its dotted name, tied ones once."""
    return chain(module.named_parameters(), module.named_buffers())


def structural_copy(module: M, replaced: Mapping[int, Tensor] | None = None) -> M:
    """A copy with its own module objects, in which every tensor is the original's own.

    `replaced` maps the id of a tensor to the one that the copy gets in its place.
    """
    shared = {id(tensor): tensor for _, tensor in named_tensors(module)}
    return copy.deepcopy(module, shared | dict(replaced or {}))


def copy_with(module: M, tensors: Mapping[str, Tensor]) -> M:
    """A structural copy with frozen `tensors` at their dotted names and what is tied to them."""
    own = dict(named_tensors(module))
    known = {name: tensor for name, tensor in tensors.items() if name in own}
    replaced = {
        id(own[name]): nn.Parameter(tensor, requires_grad=False) if isinstance(own[name], nn.Parameter) else tensor
        for name, tensor in known.items()
    }
    copied = structural_copy(module, replaced)
    put_tensors(copied, {name: t for name, t in tensors.items() if name not in known})
    return copied


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names, types, shapes and bytes of tensors, in order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor_bytes(tensor))
    return found.hexdigest()


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the tensor `name`, and the tensor's name inside it."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def put_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put frozen `tensors` at their dotted names; a conv without a bias may get one."""
    for name, tensor in tensors.items():
        owner, leaf = owner_of(module, name)
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor.detach()
        else:
            owner.register_parameter(leaf, nn.Parameter(tensor.detach(), requires_grad=False))


def put_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of `root`."""
    path, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(path), leaf, module)


def exchange_tensors(module: nn.Module, replaced: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters where those with these ids stand, in every place of a tied one."""
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if id(parameter) in replaced:
                owner._parameters[leaf] = replaced[id(parameter)]


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class PrunedLayer(nn.Module):
    """A layer that reads only some channels (axis `axis`, from the end) of what it is given."""

    read: Tensor  # (channels read,)

    def __init__(self, layer: nn.Module, read: Tensor, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis
        self.register_buffer("read", read)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs.index_select(self.axis, self.read))
        return outputs


class PrunedGroups(PrunedLayer):
    """A grouped convolution that runs some of its groups; the outputs of the others are their bias alone."""

    written: Tensor  # (output channels that the groups make,)
    constant: Tensor  # (C_out, 1, …): the bias of all output channels

    def __init__(self, layer: nn.Module, read: Tensor, axis: int, written: Tensor, constant: Tensor) -> None:
        super().__init__(layer, read, axis)
        self.register_buffer("written", written)
        self.register_buffer("constant", constant)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        shape = list(outputs.shape)
        shape[self.axis] = len(self.constant)
        whole = self.constant.to(outputs.dtype).expand(shape)
        return whole.index_copy(self.axis, self.written, outputs)


def without_channels(layer: nn.Module, switches: Tensor) -> PrunedLayer | None:
    """The layer without its switched-off input channels; None where that would not be smaller.

        layer(x) = smaller(x[on])        where the layer's weights are zero on all other channels

    `switches` is boolean (C_in,). Without groups, the weights of the channels that are on make a smaller layer. With
    groups, only whole groups can go: those that read nothing give their bias alone, as constant output channels. Of a
    depthwise convolution every channel is such a group. Only torch's own convolutions and `nn.Linear` are made smaller:
    a subclass may do more with its weights.
    """
    if type(layer) not in (nn.Linear, *_CONVOLUTIONS):
        return None
    assert isinstance(layer, nn.Linear | _ConvNd)
    axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
    if isinstance(layer, _ConvNd) and layer.groups > 1:
        return _without_groups(layer, switches, axis)
    if switches.all():
        return None
    read = switches.nonzero().view(-1)
    small = structural_copy(layer)
    put_tensors(small, {"weight": layer.weight.index_select(0 if isinstance(layer, _ConvTransposeNd) else 1, read)})
    setattr(small, "in_features" if isinstance(layer, nn.Linear) else "in_channels", len(read))
    return PrunedLayer(small, read, axis)


def _without_groups(layer: _ConvNd, switches: Tensor, axis: int) -> PrunedGroups | None:
    on = switches.view(layer.groups, -1).any(1)
    if on.all():
        return None
    read, written = (
        torch.arange(channels, device=on.device).view(layer.groups, -1)[on].view(-1)
        for channels in (layer.in_channels, layer.out_channels)
    )
    small = structural_copy(layer)
    by_group = layer.weight.reshape(layer.groups, -1, *layer.weight.shape[1:])
    tensors = {"weight": by_group[on].flatten(0, 1)}
    constant = layer.weight.new_zeros(layer.out_channels)
    if layer.bias is not None:
        constant, tensors["bias"] = layer.bias.detach(), layer.bias[written]
    put_tensors(small, tensors)
    small.groups, small.in_channels, small.out_channels = int(on.sum()), len(read), len(written)
    return PrunedGroups(small, read, axis, written, constant.view(-1, *(1,) * (-1 - axis)))


def trains_channels_last(net: nn.Module) -> bool:
    """Whether the gradients of a network are sound where images lie by channels in memory (channels last)."""
    return not any(map(_breaks_channels_last, net.modules()))


def _breaks_channels_last(module: nn.Module) -> bool:
    # Torch's gradient of a group norm crashes where its input needs none, as that of a first norm that learns after
    # frozen layers. oneDNN's gradient of a strided 1x1 convolution writes past its memory where there are fewer input
    # channels than a vector has numbers (its issue 6035).
    if not isinstance(module, nn.Conv2d):
        return isinstance(module, nn.GroupNorm)
    is_strided = module.kernel_size == (1, 1) and max(module.stride) > 1
    return is_strided and module.in_channels // module.groups < 16


_ONE_TENSOR = ("logits", "pooler_output")  # of a transformers ModelOutput


def features_of(output: Any) -> Any:
    """What a network's output is to a domain.

    A tensor is itself; of a transformers ModelOutput it is the logits, or the pooled features, and of a tuple with
    names, as Inception gives in training, the logits. A dict, list or tuple of tensors is taken for feature maps, which
    take no linear head.
    """
    if isinstance(output, tuple) and isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    if isinstance(output, Mapping):
        output = next((output[key] for key in _ONE_TENSOR if key in output), output)
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | list | tuple) or not parts or not all(isinstance(p, Tensor) for p in parts):
        raise _not_features(output)
    return output


def tensor_of(output: Any) -> Tensor:
    """The one tensor in a network's output, found as `features_of` finds it."""
    features = features_of(output)
    if not isinstance(features, Tensor):
        raise _not_features(output)
    return features


def _not_features(output: Any) -> TypeError:
    return TypeError(
        f"the network returns {type(output).__name__}, not a tensor of features; wrap it in a module that returns one"
    )
