"""The blocks that a base's network runs one after another, read off one forward pass.

Hooks note the tensors that enter and leave every module while the network runs on a blank image that asks for its
gradient. The autograd graph of that pass then says how the data flowed: a tensor is a *waist* if every path from the
image to the features goes through it. A module between two waists is a link of a chain. Links lie inside one another (a
stage, its blocks, their layers); the rule of `find_blocks` says which of them are the blocks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from polymask.core.base import Base
from polymask.core.network import tensor_of
from polymask.errors import BaseError


@dataclass(frozen=True)
class Block:
    """One block of a base's network.

    Shapes are of one image, laid out as the network has it: (C, H, W) for feature maps, (L, C)
    for a sequence of tokens, (F,) for a vector.
    """

    name: str  # of the module inside `base.net`
    stage: int  # blocks between two changes of resolution share one: 0, 1, 2, …
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def find_blocks(base: Base) -> list[Block]:
    """The blocks of `base`, in order of execution.

    A block is called once in a forward pass, takes one tensor, gives one, holds a site, and all that the network makes
    of an image goes through it; no block is inside another. Looked for from the root on:

    * An `nn.Sequential` or a container that is never called is looked into, never a block itself.
    * Any other module with children is a block, unless it is a stage: it has two or more blocks
      inside, and no module of its class in this network has a way around its layers. (A strided
      residual block may lack the shortcut; its class has one elsewhere.)
    * A layer without children is a block if an `nn.Sequential` or an `nn.ModuleList` holds it and
      the network has no other blocks, as in a VGG.

    A new stage starts where the resolution of a block's output is not that of its input, or not that of the block
    before. Like `Base.run`, this needs the base for itself while it runs.
    """
    chain = _Chain(base)
    chosen = chain.blocks_in(base.net) or chain.layers()
    if not chosen:
        raise BaseError(
            f"base {base.name} has no chain of blocks; looked for modules that a forward pass calls once, with one "
            "tensor in and one out, that hold a site and have no way around them: put the network's layers into block "
            "modules or an nn.Sequential that run one after another, or use a method that does not need blocks"
        )
    blocks: list[Block] = []
    stage = 0
    for module, (before, after) in chain.links.items():
        if module not in chosen:
            continue
        shapes = before.shape, after.shape
        if blocks and len({_resolution(s) for s in (blocks[-1].output_shape, *shapes)}) > 1:
            stage += 1
        blocks.append(Block(chain.names[module], stage, *shapes))
    return blocks


def stage_ends(blocks: Sequence[Block]) -> list[Block]:
    """The last block of each stage."""
    return list({block.stage: block for block in blocks}.values())


_Point = tuple[Node, int]  # a tensor's place in the autograd graph: its maker, which output of it


@dataclass(frozen=True)
class _Value:
    """One tensor at the time of a call."""

    shape: tuple[int, ...]  # without the batch
    point: _Point


_Call = tuple[_Value, _Value] | None  # of a module: its one input and one output, if it has them


class _Chain:
    """One forward pass of a base, and its modules that lie between two waists."""

    def __init__(self, base: Base) -> None:
        self.names = {module: name for name, module in base.net.named_modules()}
        self.called, waists = _run(base)
        sites = {id(base.tensor(name)) for name in base.all_sites}
        self.with_sites = {module for module in self.names if any(id(p) in sites for p in module.parameters())}
        self.links = {  # in order of execution
            module: call
            for module, (call, *more) in self.called.items()
            if module in self.with_sites and call is not None and not more
            if all(value.point in waists for value in call)
        }
        self.with_a_way_around = {
            type(module) for module in self.called if any(part not in self.links for part in self._parts(module))
        }

    def blocks_in(self, module: nn.Module) -> set[nn.Module]:
        """The blocks inside a module; it may be one itself if nobody looks into it."""
        found: set[nn.Module] = set()
        for part in self._parts(module):
            inside = self.blocks_in(part)
            is_stage = len(inside) > 1 and type(part) not in self.with_a_way_around
            if part not in self.links or type(part) is nn.Sequential or is_stage:
                found |= inside
            elif not _is_layer(part):
                found.add(part)
        return found

    def layers(self) -> set[nn.Module]:
        """The links that are single layers, in containers that do nothing but hold them."""
        return {
            layer
            for holder in self.names
            if isinstance(holder, nn.Sequential | nn.ModuleList)
            for layer in holder.children()
            if layer in self.links and _is_layer(layer)
        }

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """The children that hold sites; in place of one that was not called, its own parts."""
        for child in module.children():
            if child in self.called and child in self.with_sites:
                yield child
            elif child in self.with_sites:
                yield from self._parts(child)


def _run(base: Base) -> tuple[dict[nn.Module, list[_Call]], set[_Point]]:
    """Every call of every module in one forward pass, in order, and the waists of the pass."""
    entered: dict[nn.Module, list[_Value | None]] = defaultdict(list)
    left: dict[nn.Module, list[_Value | None]] = defaultdict(list)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[module].append(_only_tensor(*args, *kwargs.values()))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left[module].append(_only_tensor(output))

    handles = []
    try:
        for module in base.net.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        with torch.inference_mode(False), torch.enable_grad(), base.device:
            blank = torch.zeros(1, *base.input.shape, device=base.device, dtype=base.weight_dtype)
            image = blank.requires_grad_().clone()  # not a leaf: the network may write to it
            start, end = _point(image), _point(tensor_of(base.net(image)))
    finally:
        for handle in handles:
            handle.remove()
    called: dict[nn.Module, list[_Call]] = {}
    for module, values in entered.items():
        called[module] = [(a, b) if a and b else None for a, b in zip(values, left[module], strict=True)]
    return called, _waists(start, end) if start and end else set()


def _only_tensor(*values: Any) -> _Value | None:
    """The one tensor among `values`, of one image, if all else are plain settings."""
    found = [v for v in values if v is not None and not isinstance(v, bool | int | float | str)]
    if len(found) != 1 or not isinstance(found[0], Tensor) or found[0].shape[:1] != (1,):
        return None
    point = _point(found[0])
    return _Value(tuple(found[0].shape[1:]), point) if point else None


def _point(tensor: Tensor) -> _Point | None:
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _waists(start: _Point, end: _Point) -> set[_Point]:
    """The points p that are on every path from `start` to `end`.

    paths(start -> p) · paths(p -> end) = paths(start -> end)
    """
    sources: dict[_Point, list[_Point]] = {start: []}
    order = {start: None}  # each point after its sources
    pending = [end]
    while pending:
        point = pending[-1]
        if point in sources:
            order[pending.pop()] = None
            continue
        sources[point] = [(node, nr) for node, nr in point[0].next_functions if node is not None]
        pending += [source for source in sources[point] if source not in sources]
    before, after = Counter({start: 1}), Counter({end: 1})
    for point in order:
        before[point] += sum(before[source] for source in sources[point])
    for point in reversed(order):
        for source in sources[point]:
            after[source] += after[point]
    return {point for point in order if before[point] * after[point] == before[end]}


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _resolution(shape: tuple[int, ...]) -> tuple[int, ...]:
    """H and W of a feature map; tokens and vectors have none."""
    return shape[1:] if len(shape) > 2 else ()


def passes_maps(base: Base, block: Block) -> bool:
    """Whether a block turns a map (C, H, W) into another.

    It must hold a two-dimensional convolution: transformers that keep (H, W, C) hold none.
    """
    inside = [site for name, site in base.all_sites.items() if name.startswith(f"{block.name}.")]
    passes = len(block.input_shape) == len(block.output_shape) == 3
    return passes and any(site.kind.endswith("2d") for site in inside)
