"""What a progressive network is made of: frozen columns, and lateral paths between columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.blocks import Block
from polymask.core.method import NormPolicy
from polymask.core.norms import OwnNorm
from polymask.core.precision import learned_type
from polymask.methods.moving import moving_tensors

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


class Column(nn.Module):
    """The column of an earlier domain, frozen: its differences from the base, norms and laterals.

    The tensors are buffers, named as in the network.
    """

    def __init__(self, base: "Base", norms: NormPolicy, laterals: nn.ModuleList) -> None:
        super().__init__()
        differences = {}
        for site in base.all_sites.values():
            dtype = learned_type(site.dtype)
            differences[site.name] = torch.zeros(site.shape, dtype=dtype)
            if site.has_bias:
                differences[site.bias] = torch.zeros(site.channels, dtype=dtype)
        self.differences = frozenset(differences)
        owned = {} if norms == "shared" else base.norms
        own_norms = {name: OwnNorm(base, norm, norms) for name, norm in owned.items()}
        self.fittings = {name: own.fitting for name, own in own_norms.items()}
        self.tensors = nn.Module()
        for name, own in own_norms.items():
            differences |= {f"{name}.{leaf}": tensor for leaf, tensor in own.stored().items()}
        for name, tensor in differences.items():
            _put_buffer(self.tensors, name, tensor)
        self.laterals = laterals

    def take(self, domain: "Domain", laterals: nn.ModuleList) -> None:
        """Copy a domain's column, and the lateral paths that lead to it."""
        tensors = moving_tensors(domain)
        for norm, own in domain.named_norms():
            tensors |= {f"{norm}.{leaf}": tensor for leaf, tensor in own.stored().items()}
        buffers = dict(self.tensors.named_buffers())
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor)
        self.laterals.load_state_dict(laterals.state_dict())

    def weights(self, base: "Base") -> dict[str, Tensor]:
        """W + D, and the column's norms, by their names in the network."""
        buffers = dict(self.tensors.named_buffers())
        weights = {}
        for name in self.differences:
            weight = base.tensor(name)
            weights[name] = (weight + buffers[name]).to(weight.dtype)
        for fitting in self.fittings.values():
            own = {leaf: buffers[place] for leaf, place in fitting.places.items() if place in buffers}
            weights |= fitting(base, own)
        return weights


class Lateral(nn.Module):
    """U ReLU(V (s h)), from what enters a block of an earlier column, (N, C, …) -> (N, C', …).

    Learned, or frozen: the same tensors as buffers.
    """

    scale: Tensor
    reduce: Tensor
    expand: Tensor

    def __init__(self, block: Block, reduction: int, dtype: torch.dtype, learned: bool) -> None:
        super().__init__()
        inputs, outputs = block.input_shape[0], block.output_shape[0]
        hidden = max(1, inputs // reduction)
        start = {
            "scale": torch.ones((), dtype=dtype),
            "reduce": torch.randn(hidden, inputs, dtype=dtype) * (2 / inputs) ** 0.5,
            "expand": torch.zeros(outputs, hidden, dtype=dtype),
        }
        for name, tensor in start.items():
            if learned:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, h: Tensor, output: Tensor) -> Tensor:
        """What is added to the block's output, at its resolution."""
        h = self.scale.to(h.dtype) * h
        if h.shape[2:] != output.shape[2:]:
            h = F.adaptive_avg_pool2d(h, list(output.shape[2:]))  # type: ignore[arg-type]
        return _mix(F.relu(_mix(h, self.reduce)), self.expand)


def lateral_paths(
    blocks: Sequence[Block], columns: int, reduction: int, dtype: torch.dtype, *, learned: bool
) -> nn.ModuleList:
    """For each block a list of the paths from so many earlier columns."""
    return nn.ModuleList(
        nn.ModuleList(Lateral(block, reduction, dtype, learned) for _ in range(columns)) for block in blocks
    )


def _mix(x: Tensor, matrix: Tensor) -> Tensor:
    """Combine the channels of maps (N, C, H, W) or vectors (N, C) by a matrix (C', C)."""
    matrix = matrix.to(x.dtype)
    return F.conv2d(x, matrix[:, :, None, None]) if x.ndim == 4 else F.linear(x, matrix)


def _put_buffer(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a buffer at a dotted name, with the modules on its way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_buffer(leaf, tensor)
