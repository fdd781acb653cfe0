"""Copies of a network that share its tensors, and the places of tensors inside a network."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


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


def digest(tensors: Mapping[str, Tensor]) -> str:
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
