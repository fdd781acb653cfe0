"""Masks as bits: 32 to a word, in memory and on a device.

Element i of the flattened mask is bit i % 32 of word i // 32, least significant first, so the
words' little-endian bytes hold element i at bit i % 8 of byte i // 8. Bits beyond the last
element are zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
        padded = bytearray(-(-numel // WORD) * 4)
        padded[: len(data)] = data
        words = torch.frombuffer(padded, dtype=torch.int32) if padded else torch.empty(0).int()
        return cls(words, shape)

    @classmethod
    def of(cls, mask: Tensor) -> "Bits":
        """Pack a boolean tensor."""
        return cls(pack(mask), tuple(mask.shape))


def pack(mask: Tensor) -> Tensor:
    """(…) bool -> (ceil(numel / 32),) int32."""
    flat = mask.reshape(-1)
    if flat.is_meta:  # only shapes are asked for, and operations on meta tensors are slow
        return torch.empty(-(-flat.numel() // WORD), dtype=torch.int32, device=flat.device)
    padded = torch.zeros(-(-flat.numel() // WORD) * WORD, dtype=torch.uint8, device=flat.device)
    padded[: flat.numel()] = flat
    octets = padded.view(-1, 8)
    packed = octets[:, 0].clone(memory_format=torch.contiguous_format)
    for place in range(1, 8):
        packed |= octets[:, place] << place
    return packed.view(torch.int32)


def unpack(words: Tensor, numel: int) -> Tensor:
    """(ceil(numel / 32),) int32 -> (numel,) bool."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = (words.view(torch.uint8).unsqueeze(1) >> places) & 1
    return bits.reshape(-1)[:numel].bool()
