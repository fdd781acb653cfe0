"""Progressive networks: a column for every domain, which reads what earlier columns see.

    h_i^k = B_i^k(h_{i-1}^k) + sum_{j<k} U_i^{kj} ReLU(V_i^{kj} (s_i^{kj} h_{i-1}^j))

h_i^k is what block i of column k gives. Column 0 is the base, column k the k-th domain: the base's
blocks B with weights and norms of its own. Earlier columns j are frozen. U and V are 1x1
convolutions with fewer channels between them, s is a number. U starts at zero, so that a new
column is the base itself. Where a block changes the resolution, so does its lateral path.

A pack holds the earlier columns too, and needs no other file. So the pack of the last of T domains,
the base's own among them, holds all columns, and is what they cost together, which is what
`account(base, "progressive", domains=T)` gives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.blocks import Block, find_blocks, passes_maps
from polymask.core.method import Method
from polymask.core.parts import COUNTER, NormPolicy, OwnNorm, Route, own_norms
from polymask.core.survey import Site, learned_type
from polymask.errors import BaseError, MethodError
from polymask.methods.baselines import FreeWeights
from polymask.methods.shared_weights import trained_tensors

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


class Column(nn.Module):
    """The column of an earlier domain, frozen: its differences from the base, norms and laterals.

    The tensors are buffers, named as in the network.
    """

    def __init__(self, base: "Base", norms: NormPolicy, laterals: nn.ModuleList) -> None:
        super().__init__()
        tensors = {}
        for site in base.all_sites.values():
            tensors[site.name] = torch.zeros(site.shape, dtype=site.learned_dtype)
            if site.has_bias:
                tensors[site.bias] = torch.zeros(site.channels, dtype=site.learned_dtype)
        self.differences = frozenset(tensors)
        owned = own_norms(base, norms)
        self.norm_places = [norm.places for norm in owned.values()]
        self.tensors = nn.Module()
        for name, tensor in (tensors | _norm_tensors(owned.items())).items():
            _put_buffer(self.tensors, name, tensor)
        self.laterals = laterals

    def take(self, domain: "Domain", laterals: nn.ModuleList) -> None:
        """Copy a domain's column, and the lateral paths that lead to it."""
        buffers = dict(self.tensors.named_buffers())
        with torch.no_grad():
            for name, tensor in (trained_tensors(domain) | _norm_tensors(domain.named_norms())).items():
                buffers[name].copy_(tensor)
        self.laterals.load_state_dict(laterals.state_dict())

    def weights(self, base: "Base") -> dict[str, Tensor]:
        """W + D, and the column's norms, by their names in the network."""
        buffers = dict(self.tensors.named_buffers())
        own = ((name, base.tensor(name)) for name in self.differences)
        weights = {name: (weight + buffers[name]).to(weight.dtype) for name, weight in own}
        for places in self.norm_places:
            norm = {leaf: buffers[name] for leaf, name in places.names.items() if name in buffers}
            weights |= places.in_layer(base, norm)
        return weights


def _norm_tensors(norms: Iterable[tuple[str, OwnNorm]]) -> dict[str, Tensor]:
    """The tensors of norms that a pack keeps, by their names in the network."""
    found = {f"{name}.{leaf}": tensor.detach() for name, norm in norms for leaf, tensor in norm.tensors().items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith(COUNTER)}


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
            setattr(self, name, nn.Parameter(tensor) if learned else nn.Buffer(tensor))

    def forward(self, h: Tensor, output: Tensor) -> Tensor:
        """What is added to the block's output, at its resolution."""
        h = self.scale.to(h.dtype) * h
        if h.shape[2:] != output.shape[2:]:
            h = F.adaptive_avg_pool2d(h, list(output.shape[2:]))  # type: ignore[arg-type]
        return _mix(F.relu(_mix(h, self.reduce)), self.expand)


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


@dataclass(frozen=True, kw_only=True)
class Progressive(Method):
    """A column beside `columns` earlier ones, the base among them.

    `start`: "base" is the base's weights; "scratch" draws fresh ones, as the original does, while biases and norms
    start at the base's. V gives 1 / `reduction` of its input's channels.
    """

    columns: int = 1
    start: Literal["base", "scratch"] = "base"
    reduction: int = 4

    title: ClassVar[str] = "progressive networks"
    reference: ClassVar[str] = "arXiv 1606.04671"
    differences: ClassVar[str] = (
        "The original starts every column from scratch and joins columns at every layer; here they "
        "start at the base and are joined at every block. Each pair of columns has a path of its "
        "own, where the original puts all earlier columns side by side before one reduction. U is "
        "1x1 and starts at zero, s at one; the head reads its own column alone."
    )
    mergeable: ClassVar[bool] = False
    ordered: ClassVar[bool] = True
    cumulative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("columns", high=256)
        self.check_whole("reduction")

    def transform(self, site: Site) -> FreeWeights:
        return FreeWeights(site) if self.start == "base" else FreshWeights(site)

    def route(self, base: "Base") -> "ColumnRoute":
        return ColumnRoute(self, base)

    def for_domains(self, domains: int) -> "Progressive":
        """The last domain's, with a column before it for each of the others."""
        return replace(self, columns=max(self.columns, domains - 1))

    def after(self, earlier: Sequence["Domain"]) -> "Progressive":
        """One column more for each domain that was learned before."""
        return replace(self, columns=1 + len(earlier))

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Copy the columns of the earlier domains."""
        expected = [replace(self, columns=place) for place in range(1, self.columns)]
        if [other.method for other in earlier] != expected:
            raise MethodError(
                f"{self.name} with columns={self.columns} follows {len(expected)} domains with "
                "columns=1, 2, … and the same other options; give them in the order of learning"
            )
        for column, other in zip(_route(domain).columns, earlier, strict=True):
            cast(Column, column).take(other, _route(other).laterals)


class FreshWeights(FreeWeights):
    """W~ = W + D, where D starts such that W~ is a fresh draw."""

    def begin(self, base_weight: Tensor) -> None:
        """Draw W~ from N(0, 2 / fan-in)."""
        with torch.no_grad():
            fresh = nn.init.kaiming_normal_(torch.empty_like(base_weight))
            self.delta.copy_(fresh - base_weight)


class ColumnRoute(Route):
    """The earlier columns, frozen, and the domain's own lateral paths."""

    def __init__(self, method: Progressive, base: "Base") -> None:
        super().__init__()
        blocks = find_blocks(base)
        for block in blocks:
            is_vector = len(block.input_shape) == len(block.output_shape) == 1
            if not (is_vector or passes_maps(base, block)):
                raise BaseError(
                    f"block {block.name} of base {base.name} turns {block.input_shape} into "
                    f"{block.output_shape}; lateral paths are made for feature maps (C, H, W) and "
                    "vectors: use a convolutional network, or another method"
                )
        self.blocks = tuple(block.name for block in blocks)
        dtype = learned_type(base.weight_dtype)

        def paths(columns: int, *, learned: bool) -> nn.ModuleList:
            """For each block a list of the paths from so many earlier columns."""
            made = ((Lateral(block, method.reduction, dtype, learned) for _ in range(columns)) for block in blocks)
            return nn.ModuleList(nn.ModuleList(of_block) for of_block in made)

        earlier = range(1, method.columns)
        self.columns = nn.ModuleList(Column(base, method.norms, paths(place, learned=False)) for place in earlier)
        self.laterals = paths(method.columns, learned=True)

    def component(self, name: str) -> str:
        """Earlier columns are kept once for all; their statistics count as statistics."""
        if (component := super().component(name)) != "weights":
            return component
        own = "scalars" if name.endswith(".scale") else "weights"
        return "shared" if name.startswith("columns.") else own

    def features(self, base: "Base", weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Run the base, then the earlier columns, then the domain's own."""
        seen: list[dict[str, Tensor]] = []
        with _eval_mode(base.net):
            self._run(base, {}, images, None, seen)
            for module in self.columns:
                column = cast(Column, module)
                self._run(base, column.weights(base), images, column.laterals, seen)
        return self._run(base, weights, images, self.laterals, seen)

    def _run(
        self,
        base: "Base",
        weights: Mapping[str, Tensor],
        images: Tensor,
        laterals: nn.ModuleList | None,
        seen: list[dict[str, Tensor]],
    ) -> Tensor:
        """One column; what enters its blocks is put in `seen`, after that of earlier columns."""
        inputs: dict[str, Tensor] = {}

        def join(block: str, paths: Any, module: nn.Module, entering: tuple[Any, ...], output: Tensor) -> Tensor:
            inputs[block] = entering[0]
            for path, earlier in zip(paths, seen, strict=True):
                output = output + path(earlier[block], output)
            return output

        paths = zip(self.blocks, laterals or [()] * len(self.blocks), strict=True)
        with base.hooked({block: partial(join, block, of_block) for block, of_block in paths}):
            features = base.run(weights, images)
        seen.append(inputs)
        return features


@contextmanager
def _eval_mode(net: nn.Module) -> Iterator[None]:
    """For frozen columns: no statistics are written, whatever the mode of the domain."""
    in_training = [module for module in net.modules() if module.training]
    try:
        for module in in_training:
            module.training = False
        yield
    finally:
        for module in in_training:
            module.training = True


def _route(domain: "Domain") -> ColumnRoute:
    assert isinstance(domain.route, ColumnRoute)
    return domain.route


PRESETS: dict[str, Method] = {"progressive": Progressive()}
