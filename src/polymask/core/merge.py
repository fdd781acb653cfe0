"""Merged networks: a domain as an ordinary network, and one network that becomes one domain after another."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from polymask.core.memory import BLOCK, move_together, plan_buffer
from polymask.core.network import copy_with, features_of, named_tensors, owner_of, put_module, structural_copy
from polymask.errors import DomainError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


def merge(domain: "Domain", base: "Base", *, compact: bool = False) -> nn.Module:
    """A structural copy of the base with a domain's tensors; nothing is shared with the domain."""
    check_mergeable(domain)
    own = {id(tensor) for _, tensor in named_tensors(domain)}
    with torch.no_grad(), domain.in_mode(training=False):
        weights = domain.weights(base)
        net = copy_with(base.net, {n: t.detach().clone() if id(t) in own else t for n, t in weights.items()})
    if compact:
        for name, transform in domain.named_transforms():
            layer = name.rpartition(".")[0]
            smaller = transform.compact(net.get_submodule(layer))
            if smaller is not None:
                put_module(net, layer, smaller)
    if domain.head is None:
        return net
    return _with_head(net, base, copy.deepcopy(domain.head).requires_grad_(False)).eval()


class WorkingNetwork:
    """One network that becomes one domain after another, in memory that it keeps.

    What `switch` gives is good until the next `switch`. Transformed weights are written to the
    network's own memory; norms and head are the domain's own tensors, so a domain that learns on
    must be switched to again. One thread at a time.
    """

    def __init__(self, base: "Base") -> None:
        self.base = base
        self._net = structural_copy(base.net)
        self._places = _places_of_tensors(self._net)
        self._memory: dict[str, nn.Parameter] = {}
        self._changed: set[str] = set()

    def switch(self, domain: "Domain") -> nn.Module:
        """The network with a domain's weights, norms and head."""
        check_mergeable(domain)
        with torch.no_grad(), domain.in_mode(training=False):
            tensors = domain.weights(self.base, made=self.write(domain))
        if left := self._changed - tensors.keys():
            original = dict(named_tensors(self.base.net))
            for name in left:
                self._put(name, original.get(name))
        for name, tensor in tensors.items():
            self._put(name, tensor)
        self._changed = set(tensors)
        return _with_head(self._net, self.base, domain.head or nn.Identity())

    def has_room_for(self, domain: "Domain") -> bool:
        """Whether its memory is just what the domain's weights take."""
        return self._memory.keys() == dict(domain.named_transforms()).keys()

    def write(self, domain: "Domain") -> dict[str, Tensor]:
        """The weights of a domain that it transforms, written to the network's memory."""
        transforms = dict(domain.named_transforms())
        self._make_room(list(transforms))
        written = domain.method.together(self.base, domain, self._memory)
        for name, transform in transforms.items():
            if name not in written:
                transform.write(self.base.tensor(name), self._memory[name])
        return {name: self._memory[name] for name in transforms}

    def _make_room(self, names: Sequence[str]) -> None:
        """Memory for weights that had none yet, in one buffer where they are of one type."""
        new = [name for name in names if name not in self._memory]
        weights = [self.base.tensor(name) for name in new]
        empty = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in weights]
        if {w.dtype for w in weights} == {torch.float32}:
            move_together(plan_buffer(tuple(w.numel() for w in weights), BLOCK, weights[0].device), empty)
        for name, memory in zip(new, empty, strict=True):
            self._memory[name] = nn.Parameter(memory, requires_grad=False)

    def _put(self, name: str, tensor: Tensor | None) -> None:
        for owner, leaf in self._places.get(name) or [owner_of(self._net, name)]:
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor
            elif tensor is None or isinstance(tensor, nn.Parameter):
                owner._parameters[leaf] = tensor
            else:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def check_mergeable(domain: "Domain") -> None:
    """Raise where a domain cannot be one network."""
    if not domain.method.mergeable:
        raise DomainError(
            f"{domain.method.name} decides by the image what runs, so it cannot be merged into one network; call the "
            "domain itself, or MultiDomainModel"
        )


def _with_head(net: nn.Module, base: "Base", head: nn.Module) -> nn.Module:
    """The network with a head where the base's classifier stood, or after it."""
    if base.classifier is None or not isinstance(base.head, nn.Linear):
        return _Headed(net, head)
    put_module(net, base.classifier, head)
    return net


class _Headed(nn.Sequential):
    """A network and a head after it; features may come in an object that holds them."""

    def forward(self, images: Tensor) -> Tensor:
        net, head = self
        return cast(Tensor, head(features_of(net(images))))


def _places_of_tensors(net: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each tensor stands, by the first of its names; tied ones stand in several places."""
    by_id: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in net.modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                by_id[id(tensor)].append((module, leaf))
    return {name: by_id[id(tensor)] for name, tensor in named_tensors(net)}
