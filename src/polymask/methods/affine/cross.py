"""Affine masks that draw on the masks of other domains.

    W~ = k0 W + k1 1 + k2 M + k3 W∘M + Σ_s (a_s M_s + b_s W∘M_s),        s over chosen sources

M_s are masks of domains that were learned before; they are frozen, so a source costs two scalars a layer (or a
channel). `affine-cross` has a mask M of its own too, `affine-mix` has none: k2 = k3 = 0, a domain of a few scalars. All
a_s and b_s start at 0, so a fresh domain is the base.

In the centred form the scalars that learn are those of (a_s + b_s W)∘(M_s - ½), in units of the layer as k2 and k3 are
there (see `affine-centred`): a step of a_s must not shift all weights under M_s the same way. The halves are part of
k0 and k1 in what is stored.

A pack names its sources and the digest of their masks. The masks are in the sources' packs, in the same folder, and
nowhere else, unless the domain was baked: then its pack has them too, and stands alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from polymask.core.bits import Bits, digest_bits
from polymask.core.method import Method
from polymask.core.parts import Part, Stored, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.files import NAME
from polymask.methods.affine.method import GAIN, NAMES, START, Affine, AffineTransform, as_row, put_scalar

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

_MOST = 16  # sources
_UNITS = ("k0", "k1", "a", "b")  # what learns in units of the layer, in the centred form


@dataclass(frozen=True, kw_only=True)
class AffineCross(Affine):
    """Affine masks plus Σ_s (a_s M_s + b_s W∘M_s) over the masks of other domains.

    `sources` are their names and the digests of their masks, "NAME:DIGEST"; training sets it. `own_mask` is whether the
    domain learns a mask too. `baked` says that the pack holds the sources' masks as well.
    """

    sources: tuple[str, ...] = ()
    own_mask: bool = True
    baked: bool = False

    title: ClassVar[str] = "cross-domain affine masks"
    reference: ClassVar[str] = "arXiv 2103.13894, its outlook"
    differences: ClassVar[str] = (
        "The paper names cross-domain affine transformations as future work and gives no formula; this one is ours. "
        "Without sources, `affine-cross` is `affine-full` in the centred form, and `affine-mix` learns k0 and k1 alone."
    )
    takes_sources: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        texts = self.sources
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise MethodError(f"sources={str(texts)[:100]} must be a list of NAME:DIGEST")
        for text in texts:
            if not re.fullmatch(rf"{NAME}:[0-9a-f]{{64}}", text):
                raise MethodError(f"sources has {text[:100]!r}, which is not NAME:DIGEST")
        if len(texts) > _MOST or len(set(texts)) < len(texts):
            raise MethodError(f"{len(texts)} sources, of which some are the same or which are more than {_MOST}")
        object.__setattr__(self, "sources", tuple(texts))

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """(name, digest of masks) of the packs that a pack by this method cannot do without."""
        return () if self.baked else tuple(_named(text) for text in self.sources)

    def transform(self, site: Site) -> "CrossTransform":  # type: ignore[override]
        return CrossTransform(self, site)

    def together(self, base: "Base", domain: "Domain", out: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        return {}

    def drawing_on(self, sources: "Mapping[str, Domain]") -> "AffineCross":
        masks = {name: masks_of(name, domain) for name, domain in sources.items()}
        return replace(self, sources=tuple(f"{name}:{digest_bits(own)}" for name, own in masks.items()))

    def draw_on(self, domain: "Domain", sources: "Sequence[Domain]") -> None:
        for place, (text, source) in enumerate(zip(self.sources, sources, strict=True)):
            masks = masks_of(_named(text)[0], source)
            for name, transform in domain.named_transforms():
                if name not in masks:
                    raise MethodError(f"source {_named(text)[0]} has no mask at {name}; take a source with masks there")
                cast(CrossTransform, transform).put_source(place, masks[name])

    def bake(self, domain: "Domain") -> None:
        domain.method = replace(self, baked=True)
        for _, transform in domain.named_transforms():
            cast(CrossTransform, transform).baked = True


def _named(text: str) -> tuple[str, str]:
    name, _, digest = text.rpartition(":")
    return name, digest


def masks_of(name: str, domain: "Domain") -> dict[str, Bits]:
    """The masks of a domain over whole weights, by site; raise where it has none."""
    found = {}
    for site, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is not None and tuple(mask.shape) == tuple(domain.sites[site].shape):
            found[site] = Bits.of(mask)
    if not found:
        raise MethodError(f"source {name} ({domain.method.name}) has no masks of weights; take a domain that has some")
    return found


class CrossTransform(Transform):
    """One site's own mask and scalars, and two scalars for every source's mask."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask"} | dict.fromkeys((*NAMES, "a", "b"), "scalars")

    def __init__(self, method: AffineCross, site: Site) -> None:
        super().__init__()
        self.baked, self.sources = method.baked, len(method.sources)
        self.shape, self.view_shape = site.shape, site.channel_view
        self.centred, self.units = method.form == "centred", dict.fromkeys(_UNITS, 1.0)
        self.inputs = site.inputs * prod(site.shape[2:])
        self.own = AffineTransform(method, site) if method.own_mask else None
        self.scalar_shape = site.channel_shape if method.per == "channel" else (1,) * len(self.view_shape)
        dtype = site.learned_dtype
        self.fixed = {name: float(v) for name, v in method.coefficients(site).items() if v != "learned"}
        for name in ("k0", "k1") if self.own is None else ():
            if name not in self.fixed:
                start = START[name] / (GAIN if self.centred else 1)
                self.register_parameter(name, nn.Parameter(torch.full(self.scalar_shape, start, dtype=dtype)))
        for name in ("a", "b") if self.sources else ():
            self.register_parameter(name, nn.Parameter(torch.zeros(self.sources, *self.scalar_shape, dtype=dtype)))
        for place in range(self.sources):
            words = torch.zeros(-(-site.numel // 32), dtype=torch.int32)
            self.register_buffer(f"source{place}", words)
        self._unpacked: list[Tensor] | None = None

    @property
    def beside(self) -> tuple[str, ...]:  # type: ignore[override]
        """The masks of sources, which are in their own packs."""
        return () if self.baked else tuple(f"source{place}" for place in range(self.sources))

    def component(self, name: str) -> str:
        return "sources" if name.startswith("source") else super().component(name)

    def put_source(self, place: int, mask: Bits) -> None:
        """Take the mask of a source."""
        setattr(self, f"source{place}", mask.words.to(self.get_buffer(f"source{place}").device))
        self._unpacked = None

    def begin(self, base_weight: Tensor) -> None:
        if self.own is not None:
            self.own.begin(base_weight)
        if self.centred and not base_weight.is_meta:
            spread = GAIN * (float(base_weight.double().std(correction=0)) or 1.0)
            self.units = {"k0": GAIN, "k1": spread / sqrt(self.inputs), "a": spread, "b": GAIN}

    def begin_as(self, other: Part, rate: float) -> None:
        """The network of a source: a_s and b_s are its k2 and k3, and an own mask does nothing yet."""
        if not isinstance(other, AffineTransform):
            raise MethodError("it has no affine mask there")
        theirs = other.bits().words
        places = [place for place in range(self.sources) if torch.equal(self.get_buffer(f"source{place}"), theirs)]
        if not places:
            raise MethodError("its masks are not those of a source; draw on it too")
        k0, k1, a, b = other.coefficients()
        for name, number in (("a", a), ("b", b)):
            put_scalar(name, number, self.get_parameter(name)[places[0]], self.units[name])
        around = (k0 + b / 2, k1 + a / 2) if self.centred else (k0, k1)
        if self.own is not None:
            self.own.put_coefficients([*around, 0.0, 0.0])
            return
        for name, k in zip(("k0", "k1"), around, strict=True):
            put_scalar(name, k, self.fixed[name] if name in self.fixed else self.get_parameter(name), self.units[name])

    def weight(self, base_weight: Tensor) -> Tensor:
        W = base_weight.view(self.view_shape)
        if self.own is None:
            k0, k1 = self._coefficients()
            made = W * k0 + k1
        elif self.centred:
            made = self.own.weight_by(base_weight, self._coefficients()).view(self.view_shape)
        else:
            made = self.own.weight(base_weight).view(self.view_shape)
        for a, b, mask in zip(self._of_sources("a"), self._of_sources("b"), self._masks(), strict=True):
            made = made + (b * W + a) * mask
        return made.to(base_weight.dtype).reshape(self.shape)

    def _of_sources(self, name: str) -> Sequence[Tensor]:
        """a_s or b_s of every source, as they act."""
        return list(self.get_parameter(name) * self.units[name]) if self.sources else []

    def _coefficients(self) -> list[Tensor | float]:
        """k0…k3 (k0 and k1 without an own mask) as they act: less the halves that sources' masks stand around."""
        if self.own is not None:
            ks = self.own.coefficients()
        else:
            named = ((name, self._parameters.get(name)) for name in ("k0", "k1"))
            ks = [self.fixed[name] if k is None else k * self.units[name] for name, k in named]
        for a, b in zip(self._of_sources("a"), self._of_sources("b"), strict=True) if self.centred else ():
            ks[:2] = ks[0] - b / 2, ks[1] - a / 2
        return ks

    def _masks(self) -> list[Tensor]:
        """M_s as booleans; while it learns they are kept, since they are the same in every step."""
        if self._unpacked is not None:
            return self._unpacked
        found = [bits.unpack().view(self.view_shape) for bits in self._source_bits()]
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            self._unpacked = found
        return found

    def _source_bits(self) -> list[Bits]:
        return [Bits(self.get_buffer(f"source{place}"), self.shape) for place in range(self.sources)]

    def mask(self) -> Tensor | None:
        return None if self.own is None else self.own.mask()

    def flipped(self) -> int | None:
        return None if self.own is None else self.own.flipped()

    def score_parameters(self) -> list[nn.Parameter]:
        return [] if self.own is None else self.own.score_parameters()

    def scalar_parameters(self) -> list[nn.Parameter]:
        named = [p for name, p in self._parameters.items() if p is not None]
        return named + ([] if self.own is None else self.own.scalar_parameters())

    def scalars(self) -> dict[str, Tensor]:
        """k0…k3 and, for each source s, a_s and b_s."""
        found = {n: as_row(k) for n, k in zip(NAMES, self._coefficients(), strict=False)}
        for name in ("a", "b"):
            found |= {f"{name}{place}": k.detach().reshape(-1) for place, k in enumerate(self._of_sources(name))}
        return found

    def stored(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {} if self.own is None else {"mask": self.own.bits()}
        fixed = self.fixed if self.own is None else self.own.fixed
        named = zip(NAMES, self._coefficients(), strict=False)
        found |= {name: as_row(k) for name, k in named if name not in fixed}
        for name in ("a", "b") if self.sources else ():
            found[name] = (self.get_parameter(name).detach() * self.units[name]).reshape(-1)
        return found | {f"source{place}": bits for place, bits in enumerate(self._source_bits())}

    def relearn(self, rate: float) -> bool:
        for scalar in self.scalar_parameters():
            scalar.requires_grad_(True)
        return self.own is None or self.own.relearn(rate)

    def restore(self, stored: Mapping[str, Stored]) -> None:
        mine = {"a", "b", *(f"source{place}" for place in range(self.sources))}
        if self.own is not None:
            self.own.restore({name: value for name, value in stored.items() if name not in mine})
        else:
            mine |= {"k0", "k1"}
        for name in mine & stored.keys():
            value = stored[name]
            if isinstance(value, Bits):
                setattr(self, name, value.words)
                continue
            shape = (self.sources, *self.scalar_shape) if name in ("a", "b") else self.scalar_shape
            self.register_parameter(name, nn.Parameter(value.reshape(shape), requires_grad=False))
        self.centred, self.units = False, dict.fromkeys(_UNITS, 1.0)
        self._unpacked = None


# In the form and with the k0 of `affine-centred`, the default of `learn`, so that they can begin as a domain by it.
PRESETS: dict[str, Method] = {
    "affine-cross": AffineCross(form="centred", k0="learned"),
    "affine-mix": AffineCross(form="centred", k0="learned", own_mask=False),
}
