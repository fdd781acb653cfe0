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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polymask.core.blocks import find_blocks
from polymask.core.method import Method, Route
from polymask.core.precision import learned_type
from polymask.core.survey import Site
from polymask.errors import BaseError, MethodError
from polymask.methods.baselines import FreeWeights
from polymask.methods.columns import Column, lateral_paths
from polymask.methods.feature_maps import passes_maps

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class Progressive(Method):
    """A column beside `columns` earlier ones, the base among them.

    `start`: "base" is the base's weights; "scratch" draws them anew, as the original does, while
    biases and norms start at the base's. V gives 1 / `reduction` of its input's channels.
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
        self.check_choice("start", ("base", "scratch"))
        for option in ("columns", "reduction"):
            value = getattr(self, option)
            if type(value) is not int or value < 1:
                raise MethodError(f"{option}={value!r} must be a whole number above 0")

    def transform(self, site: Site) -> FreeWeights:
        """The column's own weights."""
        return FreeWeights(site) if self.start == "base" else FreshWeights(site)

    def route(self, base: "Base") -> "ColumnRoute":
        """The earlier columns, and the lateral paths from them."""
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
    """W~ = W + D, where D starts such that W~ is drawn anew."""

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
        dtype = learned_type(next(site.dtype for site in base.all_sites.values()))
        paths = partial(lateral_paths, blocks, reduction=method.reduction, dtype=dtype)
        self.columns = nn.ModuleList(
            Column(base, method.norms, paths(place, learned=False)) for place in range(1, method.columns)
        )
        self.laterals = paths(method.columns, learned=True)

    def component(self, name: str) -> str:
        """Earlier columns are kept once for all; their statistics count as statistics."""
        component = super().component(name)
        if component != "weights":
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
        hooks = {}
        for place, block in enumerate(self.blocks):
            paths = nn.ModuleList() if laterals is None else cast(nn.ModuleList, laterals[place])
            hooks[block] = partial(_join, block, inputs, list(zip(paths, seen, strict=True)))
        with base.hooked(hooks):
            features = base.run(weights, images)
        seen.append(inputs)
        return features


def _join(
    block: str,
    inputs: dict[str, Tensor],
    laterals: Sequence[tuple[nn.Module, Mapping[str, Tensor]]],
    module: nn.Module,
    entering: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    """A hook: note what enters the block, and add what comes from earlier columns."""
    inputs[block] = entering[0]
    for lateral, column in laterals:
        output = output + lateral(column[block], output)
    return output


@contextmanager
def _eval_mode(net: nn.Module) -> Iterator[None]:
    """For frozen columns: no statistics are written, whatever the mode of the domain."""
    before = [(module, module.training) for module in net.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _route(domain: "Domain") -> ColumnRoute:
    assert isinstance(domain.route, ColumnRoute)
    return domain.route


PRESETS: dict[str, Method] = {"progressive": Progressive()}
