"""A domain that takes on one pack after another, in memory that it keeps.

Packs of one method on one base differ in values only. Building a domain for each takes longer than reading it: hundreds
of modules and tensors. A mould is built once. Its numbers lie in one piece of memory and its masks in another, and the
next pack is written there; a network that runs on these tensors has them at once.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.bits import WORD, Bits
from polymask.core.domain import check_classes
from polymask.core.heads import linear_head
from polymask.core.merge import BLOCK, plan_buffer
from polymask.core.network import put_tensors
from polymask.core.unknown import ScoredHead
from polymask.errors import DomainError, PackError
from polymask.pack.codec import BitArray
from polymask.pack.format import Manifest
from polymask.pack.storing import OpenPack

Kind = tuple[str, str, bool]  # what packs have in common that a mould may take on one after another


def kind_of(manifest: Manifest) -> Kind:
    """The method, its options, and whether there is a head."""
    return manifest.method, repr(sorted(manifest.options.items())), manifest.classes is None


def poured(path: str | Path, base: Base, mould: "Mould | None" = None, *, sha256: str | None = None) -> "Mould":
    """The mould with a pack's domain in it; another one where this is None, or of another shape.

    With `sha256` the pack must be the one that has it.
    """
    pack = OpenPack.read(path, base)
    if sha256 is not None:
        pack.check_same(sha256)
    return mould if mould is not None and mould.fill(pack) else Mould(pack)


class Mould:
    """A domain in its stored form, which can become that of another pack of its kind.

    Heads differ in their classes, so each pack has its own; it gives scores too where the pack tells unknown images.
    """

    def __init__(self, pack: OpenPack) -> None:
        self.domain, self.kind = pack.domain().scored(), kind_of(pack.manifest)
        stored = {name: tensor for name, tensor in self.domain.stored().items() if not _is_own(name)}
        self._bits = {name: tensor for name, tensor in stored.items() if isinstance(tensor, Bits)}
        self._numbers = {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}
        self._shapes = [tuple(tensor.shape) for tensor in self._numbers.values()]
        self._shapes += [bits.shape for bits in self._bits.values()]
        parts = [part for _, part in (*self.domain.named_parts(), *self.domain.named_norms())]
        alike = {tensor.dtype for tensor in self._numbers.values()} == {torch.float32}
        self.fills = alike and all(part.refillable for part in parts) and not self.domain.beside()
        if self.fills:
            self._lay_out()

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks, which no network holds."""
        return sum(bits.words.nbytes for bits in self._bits.values())

    def fill(self, pack: OpenPack) -> bool:
        """Become a pack's domain; False, and nothing is changed, where it is of another shape.

        A pack that is wrong raises, and nothing is changed either.
        """
        own = {name: tensor for name, tensor in pack.tensors.items() if not _is_own(name)}
        if not self.fills or kind_of(pack.manifest) != self.kind or own.keys() != {*self._numbers, *self._bits}:
            return False
        numbers = [tensor for name in self._numbers if isinstance(tensor := own[name], np.ndarray)]
        masks = [tensor for name in self._bits if isinstance(tensor := own[name], BitArray)]
        found = [array.shape for array in numbers] + [mask.shape for mask in masks]
        if found != self._shapes or not {array.dtype.str for array in numbers} <= {"<f4", "<f2"}:
            return False
        head = self._head_of(pack)
        try:
            words = [Bits.from_bytes(mask.decoded(), mask.shape).words for mask in masks]
        except ValueError as error:
            raise PackError(f"{pack.path}: a mask: {error}") from error
        values = np.concatenate([array.reshape(-1) for array in numbers], dtype=np.float32)
        if not np.isfinite(values).all():
            raise PackError(f"{pack.path}: it holds values that are not finite")
        pack.tell(self.domain)
        self.domain.head, self.domain.classes = head, pack.manifest.classes
        self._memory.copy_(torch.from_numpy(values))
        for bits, new in zip(self._bits.values(), words, strict=True):
            bits.words.copy_(new)
        return True

    def _lay_out(self) -> None:
        """Move numbers and masks to where the next ones will be written; masks as kernels want them, block by block."""
        self._memory = torch.cat([tensor.reshape(-1) for tensor in self._numbers.values()])
        pieces = torch.split(self._memory, [tensor.numel() for tensor in self._numbers.values()])
        for (name, tensor), piece in zip(list(self._numbers.items()), pieces, strict=True):
            self._numbers[name] = piece.view(tensor.shape)
        words = [bits.words for bits in self._bits.values()]
        if words:
            plan = plan_buffer(tuple(w.numel() for w in words), BLOCK // WORD, words[0].device)
            places = plan.pieces(plan.buffer(torch.int32), words)
            for (name, bits), place in zip(list(self._bits.items()), places, strict=True):
                self._bits[name] = Bits(place.copy_(bits.words), bits.shape)
        head = {name: tensor for name, tensor in self.domain.stored().items() if _is_own(name)}
        self.domain.restore({**self._numbers, **self._bits, **head})

    def _head_of(self, pack: OpenPack) -> nn.Linear | None:
        old, unknown = self.domain.head, pack.unknown()
        given = {name: tensor for name, tensor in pack.tensors.items() if _is_own(name)}
        expected = {} if unknown is None else {f"unknown/{name}": t for name, t in unknown.stored().items()}
        head = None
        if old is not None:
            try:
                count = len(check_classes(pack.manifest.classes or []))
            except DomainError as error:
                raise PackError(f"{pack.path}: {error}") from error
            plain = linear_head(old.in_features, count, pack.base.weight_dtype, device="meta").requires_grad_(False)
            head = pack.in_blocks(plain)
            assert head is not None
            expected |= {f"head/{name}": parameter for name, parameter in head.named_parameters()}
        found = replace(pack, tensors=given).checked(expected)
        for place, part in (("head", head), ("unknown", unknown)):
            if part is not None:
                own = {
                    n.partition("/")[2]: t for n, t in found.items() if n.startswith(place) and isinstance(t, Tensor)
                }
                put_tensors(part, {name: tensor.to(pack.base.device) for name, tensor in own.items()})
        return head if head is None or unknown is None else ScoredHead(head, unknown).eval()


def _is_own(name: str) -> bool:
    """Whether each pack of a kind may have another tensor of this name, or none."""
    return name.startswith(("head/", "unknown/"))
