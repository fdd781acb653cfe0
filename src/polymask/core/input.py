"""How to feed a base: the shape, scale and crop of its images."""

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from polymask.errors import BaseError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from polymask.data.preprocess import Preprocess

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class InputSpec:
    """The images that a base expects.

    A pixel p in [0, 1] enters the network as (p - mean) / std, channel by channel.
    At evaluation the short side is resized to side / crop and the centre side x side is kept; with
    `square` both sides are resized to side / crop before that, and with `squash` the whole image is
    resized to side x side and nothing is cut: in both its aspect ratio is lost.

        >>> import polymask as pm
        >>> spec = pm.InputSpec(shape=(3, 64, 64), mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> spec.side, spec.crop
        (64, 0.875)
        >>> pm.InputSpec(**spec.to_json()) == spec
        True
    """

    shape: tuple[int, ...] = (3, 224, 224)  # channels first, without the batch
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    crop: float = 0.875
    squash: bool = False
    square: bool = False

    def __post_init__(self) -> None:
        # JSON gives lists; equality and hashing want tuples.
        for name, kind in (("shape", int), ("mean", float), ("std", float)):
            try:
                object.__setattr__(self, name, tuple(kind(v) for v in getattr(self, name)))
            except (TypeError, ValueError) as error:
                raise BaseError(f"input {name} must be a list of numbers: {error}") from error
        for name in ("squash", "square"):
            if not isinstance(getattr(self, name), bool):
                raise BaseError(f"{name} {getattr(self, name)!r} must be true or false")
        if len(self.shape) < 1 or any(n < 1 for n in self.shape):
            raise BaseError(f"input shape {self.shape} must be positive sizes, channels first")
        channels = self.shape[0]
        if len(self.mean) != channels or len(self.std) != channels:
            raise BaseError(
                f"input has {channels} channels but mean has {len(self.mean)} and std "
                f"{len(self.std)} values; give one of each per channel"
            )
        if not all(map(math.isfinite, self.mean + self.std)) or any(s <= 0 for s in self.std):
            raise BaseError("input mean and std must be finite and std positive")
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise BaseError(
                f"interpolation {self.interpolation!r} is not known; use 'nearest', 'bilinear' or 'bicubic'"
            )
        if not isinstance(self.crop, int | float):
            raise BaseError(f"crop {self.crop!r} must be a number")
        if not 0 < self.crop <= 1:
            raise BaseError(f"crop {self.crop} must be in (0, 1]")

    @property
    def side(self) -> int:
        """Height of the images (equal to their width in every built-in base)."""
        return self.shape[-2] if len(self.shape) > 2 else self.shape[-1]

    @property
    def size(self) -> str:
        """The shape as people write it: 3 × 224 × 224."""
        return " × ".join(map(str, self.shape))

    def at(self, side: int) -> "InputSpec":
        """The same images at another size."""
        return replace(self, shape=(*self.shape[:-2], side, side))

    def transform(self) -> "Preprocess":
        """What makes an image what the network takes, as a torchvision transform does.

        It takes a Pillow image, or uint8 pixels (C, H, W), of any size, to a normalised float32 tensor of this shape.

            >>> import torch, polymask as pm
            >>> spec = pm.InputSpec(shape=(3, 64, 64))
            >>> spec.transform()(torch.zeros(3, 100, 150, dtype=torch.uint8)).shape
            torch.Size([3, 64, 64])
        """
        from polymask.data.preprocess import Preprocess

        return Preprocess(self)

    def check_batch(self, images: "Tensor", whose: str) -> None:
        """Raise unless a batch of float images has this shape, and values that are not plainly 0 to 255."""
        if tuple(images.shape[1:]) != self.shape:
            found = " × ".join(map(str, images.shape[1:]))
            raise InputError(
                f"images are {found}, but {whose} takes {self.size}; resize them, or let its input.transform() do it"
            )
        low, high = (float(bound) for bound in images.aminmax())
        brightest = max((1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        if low >= 0 and high > 8 * max(brightest, 1.0):
            raise InputError(
                f"images have values from {low:g} to {high:g}, but {whose} ({self.size}) takes (pixel / 255 - mean) / "
                "std; let its input.transform() make them from Pillow images or uint8 tensors"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `InputSpec(**object)` reads back."""
        return {name: v for name, v in asdict(self).items() if name != "square" or v}  # older packs have no such member
