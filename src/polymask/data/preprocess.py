"""From an image to what the network sees, with torchvision's v2 functions on uint8.

One `Preprocess` feeds training, evaluation, serving and export: an image is decoded and made small, a crop of it is
cut, and the crops of a batch are scaled. A crop takes uint8 (3, H, W) to uint8 (3, side, side); all randomness comes
from the generator that it is given, so a sample depends on nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from polymask.core.input import InputSpec
from polymask.data.cache import short_side, shrink_of
from polymask.data.images import DomainData
from polymask.data.split import Pixels, Shrink, open_image, require_vision
from polymask.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Draw = np.random.Generator


def _functional() -> Any:
    return require_vision("torchvision.transforms.v2.functional")


@dataclass(frozen=True)
class Crop(ABC):
    """A piece of an image, `side` × `side`."""

    side: int
    interpolation: str

    @abstractmethod
    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        """Take uint8 (3, H, W) to uint8 (3, side, side)."""

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """Resize with antialiasing, if there is anything to do."""
        if image.shape[-2:] == (height, width):
            return image
        how = require_vision("torchvision.transforms.v2").InterpolationMode(self.interpolation)
        resized: Tensor = _functional().resize(image, [height, width], how, antialias=True)
        return resized

    def cut(self, image: Tensor, top: int, left: int) -> Tensor:
        """The square at (top, left)."""
        return image[..., top : top + self.side, left : left + self.side]


@final
@dataclass(frozen=True)
class RandomResizedCrop(Crop):
    """A random part of the image, resized: its share of the area, its shape and place vary.

    Area is uniform in `scale`, aspect ratio log-uniform in `ratio`; after ten draws that do not fit
    in the image, the largest centre piece with an allowed ratio.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mirror: bool = True

    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        top, left, height, width = self.box(image.shape[-2], image.shape[-1], draw)
        piece = image[:, top : top + height, left : left + width]
        return _maybe_mirror(self.resize(piece, self.side, self.side), self.mirror, draw)

    def box(self, height: int, width: int, draw: Draw) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part."""
        low, high = (math.log(bound) for bound in self.ratio)
        for _ in range(10):
            area = height * width * draw.uniform(*self.scale)
            shape = math.exp(draw.uniform(low, high))
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < w <= width and 0 < h <= height:
                return int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1)), h, w
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class FixedScaleCrop(Crop):
    """A piece of the image with its shorter side resized to `short`; with `square`, both sides."""

    short: int = 0
    square: bool = False

    def resized(self, image: Tensor) -> tuple[Tensor, int, int]:
        """The image that a square is cut out of, and the lowest and rightmost place of one."""
        height, width = (1, 1) if self.square else image.shape[-2:]
        smaller = min(height, width)
        image = self.resize(image, self.short * height // smaller, self.short * width // smaller)
        return image, image.shape[-2] - self.side, image.shape[-1] - self.side


@final
@dataclass(frozen=True)
class RandomCrop(FixedScaleCrop):
    """A square from anywhere in the image."""

    mirror: bool = True

    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        image, bottom, right = self.resized(image)
        top, left = int(draw.integers(bottom + 1)), int(draw.integers(right + 1))
        return _maybe_mirror(self.cut(image, top, left), self.mirror, draw)


@final
@dataclass(frozen=True)
class Whole(Crop):
    """The whole image resized to the square, its aspect ratio lost."""

    mirror: bool = False

    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        return _maybe_mirror(self.resize(image, self.side, self.side), self.mirror, draw)


@final
@dataclass(frozen=True)
class CentreCrop(FixedScaleCrop):
    """The centre of the image."""

    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        image, bottom, right = self.resized(image)
        return self.cut(image, round(bottom / 2), round(right / 2))


@final
@dataclass(frozen=True)
class ManyCrops(FixedScaleCrop):
    """Four corners and the centre, and with `mirror` the same five mirrored: (5 or 10, 3, …)."""

    mirror: bool = False

    def __call__(self, image: Tensor, draw: Draw) -> Tensor:
        image, bottom, right = self.resized(image)
        centre = round(bottom / 2), round(right / 2)
        places = [(0, 0), (0, right), (bottom, 0), (bottom, right), centre]
        images = [image, image.flip(-1)] if self.mirror else [image]
        return torch.stack([self.cut(each, *place) for each in images for place in places])


def _maybe_mirror(image: Tensor, mirror: bool, draw: Draw) -> Tensor:
    return image.flip(-1) if mirror and draw.random() < 0.5 else image


@dataclass(frozen=True)
class Preprocess:
    """How images are fed by an input: the centre crop, unless there is another."""

    spec: InputSpec
    crop: Crop

    def __init__(self, spec: InputSpec, crop: Crop | None = None) -> None:
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "crop", crop or centre_crop(spec))

    @cached_property
    def shrink(self) -> Shrink:
        """How images are made small before they are cut."""
        return shrink_of(self.spec)

    def __call__(self, image: Any) -> Tensor:
        """One image as the network sees it, float32 (C, H, W), however it is given (see `open_image`)."""
        return self.batch([self.read(image)])[0]

    def read(self, image: Any, origin: str = "the image") -> Tensor:
        """The crop of an image, however it is given; `origin` names it in errors."""
        return self.piece(open_image(image, origin, self.shrink.side))

    def piece(self, image: Image) -> Tensor:
        """The crop of one RGB image, uint8 (3, side, side), where it draws nothing: not in training."""
        return self.cut(self.shrink(image))

    def cut(self, pixels: Pixels) -> Tensor:
        """The crop of one image that was made small, where it draws nothing."""
        return self.crop(torch.from_numpy(pixels).permute(2, 0, 1), np.random.default_rng(0))

    def pixels(self, crops: Tensor | Sequence[Tensor]) -> Tensor:
        """Crops as one batch uint8 (N, C, H, W), grey where the network takes one channel."""
        images = crops if isinstance(crops, Tensor) else torch.stack(list(crops))
        return images if self.spec.shape[0] == 3 else _functional().rgb_to_grayscale(images)

    def batch(self, crops: Tensor | Sequence[Tensor]) -> Tensor:
        """Crops as the network sees them: float32 (N, C, H, W), (p / 255 - mean) / std."""
        mean = torch.tensor(self.spec.mean).view(-1, 1, 1)
        std = torch.tensor(self.spec.std).view(-1, 1, 1)
        return self.pixels(crops).float().mul_(1 / (255 * std)).sub_(mean / std)


def train_transform(
    data: DomainData, spec: InputSpec, *, scale: tuple[float, float] | None = (0.08, 1.0)
) -> Preprocess:
    """The paper's augmentation: a random resized crop, and mirroring where the domain allows it.

    `scale` bounds the crop's share of the area. With None the crop has the network's size and only
    its place is random, as in the decathlon's 72 → 64 (where `spec.square` makes the image a square
    first). A squashed domain is mirrored only.
    """
    return augmenting(replace(spec, squash=data.squash), mirror=data.mirror, scale=scale)


def augmenting(spec: InputSpec, *, mirror: bool, scale: tuple[float, float] | None) -> Preprocess:
    """The same of images that no `DomainData` describes."""
    side, how = _square(spec), spec.interpolation
    if spec.squash:
        return Preprocess(spec, Whole(side, how, mirror=mirror))
    if scale is None:
        return Preprocess(spec, RandomCrop(side, how, short_side(spec), spec.square, mirror=mirror))
    return Preprocess(spec, RandomResizedCrop(side, how, scale, mirror=mirror))


def eval_transform(data: DomainData, spec: InputSpec, *, crops: int = 1) -> Preprocess:
    """The centre crop, or 5 or 10 crops whose logits the caller averages: (N, crops, C, H, W)."""
    side, how, spec = _square(spec), spec.interpolation, replace(spec, squash=data.squash)
    if crops not in (1, 5, 10):
        raise DataError(f"{crops} crops are not known; give 1, 5 or 10")
    if crops == 1 or data.squash:
        return Preprocess(spec)
    many = ManyCrops(side, how, short_side(spec), spec.square, mirror=crops == 10)
    return Preprocess(spec, many)


def centre_crop(spec: InputSpec) -> Crop:
    """The piece of an image that is fed by `spec` at evaluation."""
    if spec.squash:
        return Whole(spec.side, spec.interpolation)
    return CentreCrop(spec.side, spec.interpolation, short_side(spec), spec.square)


def _square(spec: InputSpec) -> int:
    if len(spec.shape) != 3 or spec.shape[0] not in (1, 3) or spec.shape[1] != spec.shape[2]:
        raise DataError(f"images cannot be given the shape {spec.shape}; 1 or 3 channels and a square are known")
    return spec.side
