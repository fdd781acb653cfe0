"""From a domain to its pack, and back: everything is checked before anything is built."""

import math
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from polymask.core.base import Base
from polymask.core.bits import Bits
from polymask.core.domain import Domain
from polymask.core.heads import BlockLinear, in_blocks
from polymask.core.input import InputSpec
from polymask.core.parts import Stored
from polymask.core.registry import create_method, list_methods, skeleton
from polymask.core.target import CLASSES, Target, read_target
from polymask.core.unknown import Unknown, read_judgement, unknown_skeleton
from polymask.errors import PackError, PackWarning, PolymaskError
from polymask.pack.codec import BitArray
from polymask.pack.format import BLOCKS, SHARED, TARGET, UNKNOWN, Manifest, read_pack, write_pack
from polymask.pack.hub import local_pack
from polymask.pack.shared import read_shared, write_shared
from polymask.pack.sources import check_sources, read_sources

RESPONSE = "base_response"  # the note of `recipe` that says what the base computes
_APART = (RESPONSE, TARGET, SHARED, UNKNOWN, BLOCKS)  # notes that mean something, from format 1, 2, 3, 4 and 4 on
_LIKE = 0.005  # of the largest value: another device rounds otherwise, by less
_LARGEST_IMAGE = 3 * 2048 * 2048
_LARGEST_SIDE = 4096  # pixels of a side that images are resized to
Array = np.ndarray[Any, Any] | BitArray  # a tensor as it stands in a pack


def save_domain(domain: Domain, path: str | Path) -> None:
    """Write a domain's pack: the whole file or nothing. What it shares with others goes to a file beside it, once."""
    if domain.method.name not in list_methods():
        raise PackError(
            f"{path} is not written: the method has no registered name, so nobody could read "
            "it; register(name, method) and make the domain by that name"
        )
    if domain.method.needs:
        check_sources(Path(path), domain.method)
    tensors: dict[str, Array] = {}
    beside = domain.beside()
    shared = {n: t for n, t in domain.stored().items() if n in beside and isinstance(t, torch.Tensor)}
    for name, stored in domain.stored().items():
        if name in beside:
            continue
        if isinstance(stored, Bits):
            tensors[name] = BitArray.encoded(stored.to_bytes(), stored.shape)
            continue
        if stored.dtype == torch.bfloat16 or not torch.isfinite(stored).all():
            raise PackError(
                f"{path} is not written: {name} of the domain holds values that are not "
                "finite, or bfloat16; train it again with a smaller rate, in float32"
            )
        tensors[name] = _narrowed(stored.cpu().numpy())
    note = domain.target.note()
    notes = {name: note for name, note in domain.recipe.items() if name not in _APART}
    notes |= {RESPONSE: domain.base_response} | ({TARGET: note} if note else {})
    if domain.unknown is not None:
        notes[UNKNOWN] = domain.unknown.judgement.note()
    if isinstance(domain.head, BlockLinear):
        notes[BLOCKS] = list(domain.head.blocks)
    if shared:
        notes[SHARED] = write_shared(Path(path).parent, domain.method.name, shared, domain.fingerprint)
    manifest = Manifest(
        method=domain.method.name,
        options=domain.method.options(),
        base=domain.base_name,
        fingerprint=domain.fingerprint,
        input=domain.input.to_json(),
        classes=domain.classes,
        recipe=notes,
        metrics=domain.metrics,
    )
    write_pack(path, manifest, tensors)


def _narrowed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of 32 bits in 16, where these are the same numbers."""
    if values.dtype != np.float32:
        return values
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves if halves.astype(np.float32).tobytes() == values.tobytes() else values


def load_domain(path: str | Path, base: Base) -> Domain:
    """The domain of a pack, in its stored form.

    `path` is a file, or a pack on the Hugging Face Hub: `hf:USER/REPO[@REVISION][/FILE]`.
    Everything is checked before anything is built: the file's sha256 and format, the base's
    fingerprint, the method and its options, and every tensor's name, type, shape and values.

        >>> import torch, polymask as pm
        >>> base = pm.load_base(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4)),
        ...                     input=pm.InputSpec(shape=(3, 2, 2)), classifier=None)
        >>> pm.new_domain(base, "affine-full", ["cat", "dog"]).save("pets.safetensors")
        >>> pm.load_domain("pets.safetensors", base).classes
        ['cat', 'dog']
    """
    return OpenPack.read(path, base).domain()


@dataclass(frozen=True, eq=False)
class OpenPack:
    """A pack that was read and is intact, for the base that it was made for."""

    path: Path
    base: Base
    manifest: Manifest
    tensors: Mapping[str, Array]

    @classmethod
    def read(cls, path: str | Path, base: Base) -> "OpenPack":
        """Read a pack; raise unless it is for this base."""
        path = local_pack(path)
        manifest, tensors = read_pack(path)
        check_made_for(path, manifest, base)
        return cls(path, base, manifest, tensors)

    def domain(self) -> Domain:
        """Its domain, once everything in it is known to be what the method needs on this base."""
        path, base, manifest = self.path, self.base, self.manifest
        try:
            method = create_method(manifest.method, **_current(manifest.method, manifest.options))
            # The sites are the pack's own: which ones the base was loaded with does not matter.
            used = {name.split("/")[1] for name in self.tensors if name.startswith("transform/")}
            sites = {name: site for name, site in base.all_sites.items() if name in used}
            domain = skeleton(base, method, manifest.classes, sites)
        except (PolymaskError, TypeError) as error:
            raise PackError(f"{path}: {error}") from error
        domain.head = self.in_blocks(domain.head)
        self.tell(domain)
        domain.unknown = self.unknown()
        stored = self.checked(domain.stored(), domain.beside())
        if manifest.beside is not None:
            stored |= _shared_by(path, domain, manifest)
        if method.needs:
            stored |= read_sources(path, method, {name: site.shape for name, site in sites.items()})
        return domain.restore(stored).to(base.device)

    def check_same(self, sha256: str) -> None:
        """Raise unless it is the pack of this sha256, which was looked at before."""
        if self.manifest.sha256 != sha256:
            raise PackError(f"{self.path} was replaced since its library was loaded; load it again")

    def in_blocks(self, head: nn.Linear | None) -> nn.Linear | None:
        """A head for the pack, by blocks of classes where it came to them one after another."""
        blocks = self.manifest.recipe.get(BLOCKS) if self.manifest.format > 3 else None
        try:
            return head if blocks is None else in_blocks(head, blocks)
        except PolymaskError as error:
            raise PackError(f"{self.path}: {error}") from error

    def unknown(self) -> Unknown | None:
        """What tells unknown images, without memory yet; None where the pack has no rule for them."""
        manifest = self.manifest
        try:
            if (judgement := read_judgement(manifest.unknown)) is None:
                return None
            shapes = {name.removeprefix("unknown/"): tuple(t.shape) for name, t in self.tensors.items()}
            classes = len(manifest.classes or []) if target_of(manifest) == CLASSES else 0
            return unknown_skeleton(judgement, shapes, self.base.feature_dim, classes)
        except (PolymaskError, TypeError) as error:
            raise PackError(f"{self.path}: {error}") from error

    def tell(self, domain: Domain) -> None:
        """Give a domain what the manifest says beside its tensors; raise where that makes no sense."""
        manifest = self.manifest
        domain.input, domain.target, domain.base_response = facts_of(self.path, manifest, self.base)
        domain.metrics = manifest.metrics
        kept_apart = _APART if manifest.format > 3 else _APART[: manifest.format]
        domain.recipe = {name: note for name, note in manifest.recipe.items() if name not in kept_apart}

    def checked(self, expected: Mapping[str, Stored], elsewhere: Container[str] = ()) -> dict[str, Stored]:
        """The tensors, once each is known to be what is expected of it; those that are elsewhere are not looked for.

        Halves are widened to what is in 32 bits: format 4 keeps in 16 what fits, and bases in halves once learned so.
        """
        path, found = self.path, self.tensors
        widen = self.manifest.format > 3 or self.base.dtype == torch.float16
        expected = {name: tensor for name, tensor in expected.items() if name not in elsewhere}
        if expected.keys() != found.keys():
            odd = sorted(expected.keys() ^ found.keys())
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            raise PackError(
                f"{path} does not fit its method on this base: it lacks or does not know {', '.join(odd[:3])}{more}"
            )
        stored: dict[str, Stored] = {}
        for name, want in expected.items():
            got = found[name]
            if isinstance(want, Bits) != isinstance(got, BitArray) or tuple(want.shape) != got.shape:
                raise PackError(f"{path}: {name} has shape {got.shape}, not {tuple(want.shape)} ")
            if isinstance(got, BitArray):
                try:
                    stored[name] = Bits.from_bytes(got.decoded(), got.shape)
                except ValueError as error:
                    raise PackError(f"{path}: {name}: {error}") from error
                continue
            assert isinstance(want, torch.Tensor)
            if widen and got.dtype == np.float16 and want.dtype == torch.float32:
                got = got.astype(np.float32)
            if str(got.dtype) != str(want.dtype).removeprefix("torch."):
                raise PackError(f"{path}: {name} has type {got.dtype}, not {want.dtype}")
            if not np.isfinite(got).all():
                raise PackError(f"{path}: {name} holds values that are not finite")
            stored[name] = torch.from_numpy(got.copy())
        return stored


class Facts(NamedTuple):
    """What a manifest says of how a domain runs: how images are fed, what outputs mean, what the base computes."""

    input: InputSpec
    target: Target
    response: dict[str, Any]


def facts_of(path: Path, manifest: Manifest, base: Base) -> Facts:
    """What a manifest says; raise where that makes no sense, or not on this base."""
    try:
        spec, target = InputSpec(**manifest.input), target_of(manifest)
    except (PolymaskError, TypeError) as error:
        raise PackError(f"{path}: {error}") from error
    if len(spec.shape) != len(base.input.shape) or spec.shape[0] != base.input.shape[0]:
        raise PackError(f"{path}: its images are {spec.size}, and {base.name} takes {base.input.size}; it is damaged")
    if len(spec.shape) == 3 and max(spec.shape[1:]) > _LARGEST_SIDE * spec.crop:  # resized to side / crop, then cut
        raise PackError(f"{path}: its images would be resized to more than {_LARGEST_SIDE:,} pixels; it is damaged")
    return Facts(spec, target, _checked_response(path, base, manifest.recipe.get(RESPONSE)))


def check_made_for(path: Path, manifest: Manifest, base: Base) -> None:
    """Raise unless a pack is for this base."""
    if manifest.fingerprint != base.fingerprint:
        raise PackError(
            f"{path} was made for base {manifest.base} (fingerprint {manifest.fingerprint[:12]}…), "
            f"this base is {base.name} ({base.fingerprint[:12]}…); load the base that it was "
            "trained on, or retrain"
        )


def _shared_by(path: Path, domain: Domain, manifest: Manifest) -> dict[str, Stored]:
    """What a domain shares with others, from the file beside its pack."""
    try:
        found = read_shared(path.parent, manifest.recipe.get(SHARED), manifest.fingerprint)
    except PackError as error:
        raise PackError(f"{path}: {error}") from error
    beside = domain.beside()
    expected = {name: tensor for name, tensor in domain.stored().items() if name in beside}
    shapes = [{n: (tuple(t.shape), getattr(t, "dtype", None)) for n, t in one.items()} for one in (expected, found)]
    if shapes[0] != shapes[1]:
        raise PackError(f"{path}: {manifest.beside} does not fit its method on this base; copy both again")
    return dict(found)


def _checked_response(path: Path, base: Base, note: Any) -> dict[str, Any]:
    """What a pack's base made of a fixed image; raise unless this one makes the same of it."""
    if note is None:
        message = f"{path} does not tell what its base computes, only its weights; save it again with this polymask"
        warnings.warn(message, PackWarning, stacklevel=3)
        return {"shape": list(base.input.shape), "values": base.response(base.input.shape)}
    try:
        shape, then = tuple(map(int, note["shape"])), [float(value) for value in note["values"]]
        if len(shape) != len(base.input.shape) or min(shape) < 1 or math.prod(shape) > _LARGEST_IMAGE:
            raise ValueError(f"an image of shape {shape}")
        now = base.response(shape)
    except (LookupError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise PackError(f"{path}: what it says of its base makes no sense: {error}") from error
    scale = max((abs(value) for value in now), default=0.0)
    if len(then) != len(now) or any(abs(a - b) > _LIKE * scale for a, b in zip(then, now, strict=True)):
        raise PackError(
            f"{path} was made for a base that has the weights of {base.name} but computes something else (the eps of a "
            "norm, an activation or a padding differ); load the base as it was when the pack was made"
        )
    return {"shape": list(shape), "values": then}


def target_of(manifest: Manifest) -> Target:
    """What the outputs of a pack's head mean; raise where its note makes no sense."""
    if manifest.format == 1 or (manifest.format > 2 and TARGET not in manifest.recipe):
        return CLASSES
    return read_target(manifest.recipe.get(TARGET), manifest.classes)


def _current(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A pack's options as its method has them now: without retired ones, and with newer ones."""
    known = create_method(method)
    return {**known.unnamed, **{name: value for name, value in options.items() if name not in known.retired}}
