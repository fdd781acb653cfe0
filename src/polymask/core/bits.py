"""Masks as bits, 32 to a word, in memory and on a device; and the threshold that makes them.

Element i of the flattened mask is bit i % 32 of word i // 32, least significant first, so the words' little-endian
bytes hold element i at bit i % 8 of byte i // 8. Bits beyond the last element are zero.

    m = h(r) = 1[r >= t]          dE/dr := h~'(r) dE/dm

The threshold h has no useful gradient, so that of a strictly increasing h~ stands in for it: the identity (h~' = 1, the
straight-through estimator), or the sigmoid around the threshold. Since h~' > 0, the step that dE/dr induces moves m the
way that dE/dm asks for.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WORD = 32


@dataclass(frozen=True, eq=False)
class Bits:
    """A boolean tensor of some shape, packed."""

    words: Tensor  # int32, (ceil(numel / 32),)
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def unpack(self) -> Tensor:
        """The boolean tensor."""
        return unpack(self.words, self.numel).reshape(self.shape)

    def to_bytes(self) -> bytes:
        """ceil(numel / 8) bytes, element i at bit i % 8 of byte i // 8."""
        return self.words.cpu().numpy().astype("<i4", copy=False).tobytes()[: -(-self.numel // 8)]

    @classmethod
    def from_bytes(cls, data: bytes, shape: tuple[int, ...]) -> "Bits":
        """The inverse of `to_bytes`; surplus bits must be zero."""
        numel = torch.Size(shape).numel()
        if len(data) != -(-numel // 8):
            raise ValueError(f"{len(data)} bytes cannot be the bits of shape {shape}")
        if numel % 8 and data[-1] >> (numel % 8):
            raise ValueError(f"bits are set beyond the last of {numel} elements")
        padded = bytearray(data.ljust(-(-numel // WORD) * 4, b"\0"))
        words = torch.frombuffer(padded, dtype=torch.int32) if padded else torch.empty(0).int()
        return cls(words, shape)

    @classmethod
    def of(cls, mask: Tensor) -> "Bits":
        """Pack a boolean tensor."""
        return cls(pack(mask), tuple(mask.shape))


def digest_bits(masks: Mapping[str, Bits]) -> str:
    """sha256 over the names, shapes and bits of masks, in order of names."""
    found = hashlib.sha256()
    for name, mask in sorted(masks.items()):
        found.update(f"{name}\0{tuple(mask.shape)}\0".encode())
        found.update(mask.to_bytes())
    return found.hexdigest()


def pack(mask: Tensor) -> Tensor:
    """(…) bool -> (ceil(numel / 32),) int32."""
    flat, count = mask.reshape(-1), -(-mask.numel() // WORD)
    if flat.is_meta:  # only shapes are asked for, and operations on meta tensors are slow
        return torch.empty(count, dtype=torch.int32, device=flat.device)
    padded = torch.zeros(count * WORD, dtype=torch.uint8, device=flat.device)
    padded[: flat.numel()] = flat
    octets = padded.view(-1, 8)
    packed = octets[:, 0].clone(memory_format=torch.contiguous_format)
    for place in range(1, 8):
        packed |= octets[:, place] << place
    return packed.view(torch.int32)


def unpack(words: Tensor, numel: int) -> Tensor:
    """(ceil(numel / 32),) int32 -> (numel,) bool."""
    return unpack_octets(words.view(torch.uint8))[:numel].bool()


def unpack_octets(octets: Tensor) -> Tensor:
    """(n,) uint8 -> (8 n,) uint8 of zeros and ones, the least significant bit of each first."""
    if octets.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.from_numpy(np.unpackbits(octets.numpy(), bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(1) >> places) & 1).reshape(-1)


Surrogate = Literal["identity", "sigmoid"]


def threshold(scores: Tensor, at: float | Tensor) -> Tensor:
    """h(r): a boolean tensor."""
    return scores >= at


def scale_by_surrogate(gradient: Tensor, scores: Tensor, at: float | Tensor, surrogate: Surrogate) -> Tensor:
    """h~'(r) * gradient; writes to `gradient`."""
    if surrogate == "identity":
        return gradient
    slope = torch.sigmoid(scores - at)
    return gradient.mul_(slope).mul_(1 - slope)


class _Binarize(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
        return threshold(scores, at).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, ctx.at, ctx.surrogate = inputs
        ctx.save_for_backward(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        return scale_by_surrogate(grad.clone(), scores, ctx.at, ctx.surrogate), None, None


def binarize(scores: Tensor, at: float = 0.0, surrogate: Surrogate = "identity") -> Tensor:
    """h(r) as zeros and ones of the scores' own type, with the surrogate's gradient."""
    result: Tensor = _Binarize.apply(scores, at, surrogate)  # type: ignore[no-untyped-call]
    return result
