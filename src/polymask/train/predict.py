"""What a trained domain says of images, by its merged network."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.network import copy_with, put_module
from polymask.errors import BaseError


class Batches(Protocol):
    """Where images come from: the same batches for the same epoch, every time."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(images (N, C, H, W), labels (N,)) of an epoch, from batch `start` on."""


class Located(Protocol):
    """Something that is on a device, and takes images of one type."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of those images."""


def evaluate(base: Base, domain: Domain, batches: Batches) -> float:
    """Accuracy in percent."""
    return accuracy(network(base, domain), batches, base)


def accuracy(net: Callable[[Tensor], Tensor], batches: Batches, place: Located) -> float:
    """Accuracy of a network in percent, on the device of `place`."""
    right, total = count_right(net, batches.batches(), place)
    return 100 * right / total


def count_right(
    net: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]], place: Located
) -> tuple[int, int]:
    """How many images a network classifies right, and of how many."""
    right = total = 0
    for images, labels in batches:
        guesses = logits(net, images.to(place.device, place.dtype)).argmax(1).cpu()
        right += int((guesses == labels).sum())
        total += len(labels)
    return right, total


def network(base: Base, domain: Domain) -> Callable[[Tensor], Tensor]:
    """What runs a domain at inference: its merged network, or itself if it cannot be merged."""
    return domain.merged(base) if domain.method.mergeable else partial(domain.frozen(), base)


def own_network(base: Base, moved: Mapping[str, Tensor] | None = None) -> nn.Module:
    """The base with its own classifier back in its place, and some of its tensors moved."""
    if base.head is None or base.classifier is None:
        raise BaseError(f"base {base.name} has no classifier of its own")
    net = copy_with(base.net, moved or {})
    put_module(net, base.classifier, base.head)
    return net.eval()


@torch.no_grad()
def logits(net: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """(N, classes) of images (N, C, H, W), or of (N, crops, C, H, W), averaged over the crops."""
    crops = images.flatten(0, 1) if images.ndim == 5 else images
    if crops.ndim == 4:  # faster on CPU, and no other values than without
        crops = crops.contiguous(memory_format=torch.channels_last)
    found: Tensor = net(crops)
    return found.view(*images.shape[:2], -1).mean(1) if images.ndim == 5 else found


class Classifier:
    """A domain ready for image files: its network, and how they are fed to it.

    Where the domain can be merged, any number of threads may call it.
    """

    def __init__(self, base: Base, domain: Domain) -> None:
        from polymask.data.cache import shrink_of
        from polymask.data.transforms import Transform, centre_crop

        spec, self.placed = domain.input, base.placed
        self.net = network(base, domain)
        self.shrink = shrink_of(spec)
        self.transform = Transform(centre_crop(spec), spec)

    def __call__(self, files: Sequence[Path | bytes]) -> Tensor:
        """The probabilities (N, classes) of N image files, given by path or as their bytes."""
        from polymask.data.decode import decode

        draw = np.random.default_rng(0)  # a centre crop draws nothing
        crops = []
        for file in files:
            name = "the image" if isinstance(file, bytes) else str(file)
            pixels = torch.from_numpy(self.shrink(decode(file, name, self.shrink.side)))
            crops.append(self.transform.crop(pixels.permute(2, 0, 1), draw))
        images = self.placed(self.transform.batch(crops))
        return logits(self.net, images).softmax(1).cpu()


def predict_files(base: Base, domain: Domain, files: Sequence[Path], *, batch_size: int = 32) -> Iterator[Tensor]:
    """The probabilities (classes,) of each image file, in order."""
    classify = Classifier(base, domain)
    for start in range(0, len(files), batch_size):
        yield from classify(files[start : start + batch_size])
