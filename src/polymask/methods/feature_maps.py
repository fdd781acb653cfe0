"""Blocks that pass feature maps, for the methods that put convolutions beside them."""

from polymask.core.base import Base
from polymask.core.blocks import Block


def passes_maps(base: Base, block: Block) -> bool:
    """Whether a block turns a map (C, H, W) into another.

    It must hold a two-dimensional convolution: transformers that keep (H, W, C) hold none.
    """
    shapes = (block.input_shape, block.output_shape)
    convolves = any(
        site.kind.endswith("2d") and name.startswith(f"{block.name}.") for name, site in base.all_sites.items()
    )
    return convolves and all(len(shape) == 3 for shape in shapes)
