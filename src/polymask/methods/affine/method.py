"""Affine masks, and Piggyback as a special case of them.

    W~ = k0 W + k1 1 + k2 M + k3 W∘M,        M = 1[R >= t]

W is the base's weight, M the mask, R the scores, k0…k3 scalars of a layer or of an output channel.

Facts that decide the presets: the paper draws R from U(1e-4, 2e-4) and thresholds at 0; k1, k2, k3 start at 0 and k0 at
1, so a fresh domain is the base. Piggyback starts at 1e-2 and thresholds at 5e-3. The paper's Piggyback* rows ("as a
special case") come from code that starts at 1e-2 and thresholds at 0.

**The centred form** (`affine-centred`, ours) learns the same transform by other numbers a0…a3. A change of k1 or k2
shifts all weights of a layer, or those under the mask, the same way, which sums up over all n inputs of a channel. The
mask's own part, some weights up and others down, adds up like noise, to √n. So a step of k1 or k2 that is right for the
mask is √n too large for the shift. Around the mask's middle

    W~ = α0 W + α1 1 + α2 (M - ½) + α3 W∘(M - ½)

shift and scale (α1, α0) are numbers of their own, and no part of the mask's. They learn in units of the layer: s is the
standard deviation of its weights, and

    α0 = g a0,   α1 = g s a1 / √n,   α2 = g s a2,   α3 = g a3,        g = 10

so that a step of Adam moves every part of W~ by about the same share. k0 = α0 - α3/2, k1 = α1 - α2/2, k2 = α2, k3 = α3
are stored. Scores start on both sides of the threshold: half of the mask is on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from polymask.core.bits import Surrogate, threshold
from polymask.core.merge import release_memory
from polymask.core.method import Method
from polymask.core.parts import MaskTransform, NormPolicy, Part, Stored
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.affine.compiled import fused_weights
from polymask.methods.affine.formula import (
    AffineMask,
    Matrices,
    Tables,
    affine,
    compiled_kernels,
    from_words,
)

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

Coefficient = float | Literal["learned"]
NAMES = ("k0", "k1", "k2", "k3")
_STEPS_TO_FLIP = 10  # of a mask that learns on
GAIN = 10.0  # g
START = {"k0": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}  # of learned ones: W~ = W


@dataclass(frozen=True, kw_only=True)
class Affine(Method):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M, each k a fixed number or learned.

    `k0="auto"` is 1 where a batch norm follows, which removes any scale, and learned elsewhere. Only the network
    decides: before a norm with frozen statistics (`norms` "shared" or "affine"), which removes no scale, k0 is 1 too,
    and `k0="learned"` learns it there. `scores` is the range that the scores are drawn from, `per` what shares one set
    of scalars. A step of Adam moves a score by about its rate, so how far the scores start from the threshold decides
    when bits can flip: `distance` counts it in steps of the recipe's rate, for the nearest score, and scales `scores`
    to it. None leaves `scores` as they are. `form` says what learns: the scalars themselves ("plain", as published), or
    those of the same transform around its middle ("centred", see above). What is stored is the same.
    """

    k0: Coefficient | Literal["auto"] = "auto"
    k1: Coefficient = "learned"
    k2: Coefficient = "learned"
    k3: Coefficient = "learned"
    per: Literal["layer", "channel"] = "layer"
    scores: tuple[float, float] = (1e-4, 2e-4)
    threshold: float = 0.0
    surrogate: Surrogate = "identity"
    distance: float | None = None
    form: Literal["plain", "centred"] = "plain"

    title: ClassVar[str] = "affine masks, and Piggyback"
    reference: ClassVar[str] = "arXiv 2103.13894, 1801.06519"
    retired: ClassVar[tuple[str, ...]] = ("units",)
    differences: ClassVar[str] = (
        "The authors' code fixes k0 = 1, draws scores from U(1e-5, 2e-5) and thresholds with >; here, as in the paper, "
        "U(1e-4, 2e-4) and >=, and k0 is learned where no batch norm follows. Under norms with the base's statistics "
        "(`shared`, `affine`) nothing removes a scale, and k0 of a layer before a batch norm is still 1, unless "
        "`k0='learned'` is asked for: packs of such domains keep no k0. Piggyback's code thresholds with > and trains "
        "its head by Adam; it stores a byte a weight. The rows marked with a star follow the authors' "
        "reimplementation: scores at 1e-2, threshold 0."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_interval("scores")
        if not isinstance(self.threshold, int | float):
            raise MethodError(f"threshold={self.threshold!r} must be a number")
        if self.distance is not None:
            self.check_range("distance", 0.0, 1e6)
            if not self.scores[0] > self.threshold:
                raise MethodError(
                    f"distance={self.distance:g} needs scores above the threshold "
                    f"({self.threshold:g}); they are drawn from {self.scores}"
                )
        if self.form == "centred" and (self.k0, self.k1) != ("learned", "learned"):
            raise MethodError("form='centred' moves k0 and k1 with the mask; both must be 'learned'")
        for name in NAMES:
            words = ("learned", "auto") if name == "k0" else ("learned",)
            value = getattr(self, name)
            if value not in words and not isinstance(value, int | float):
                raise MethodError(f"{name}={value!r} must be a number or {' or '.join(words)}")

    def transform(self, site: Site) -> "AffineTransform":
        return AffineTransform(self, site)

    def at_rate(self, rate: float) -> "Affine":
        """Scores at the distance from the threshold, in steps of this size."""
        if self.distance is None:
            return self
        low, high = (end - self.threshold for end in self.scores)
        factor = self.distance * rate / low
        return replace(self, scores=(self.threshold + factor * low, self.threshold + factor * high))

    def together(self, base: "Base", domain: "Domain", out: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """All sites in one operation, where compiled kernels are in use; by tables where masks are written from."""
        transforms = {n: cast(AffineTransform, t) for n, t in domain.named_transforms()}
        if compiled_kernels():
            return fused_weights(base, transforms, out)
        plain = [t.scalar_count == 1 and t.scores is None for t in transforms.values()]
        if out is None or not all(plain) or not Tables.suit(*map(base.tensor, transforms), *out.values()):
            return {}
        tables = Tables([t.numbers() for t in transforms.values()])
        for site, (name, transform) in enumerate(transforms.items()):
            if transform.words is not None:
                tables.write(site, base.tensor(name), transform.words, out[name])
        return {name: out[name] for name in transforms}

    def coefficients(self, site: Site) -> dict[str, Coefficient]:
        """The four scalars of a site, with "auto" decided."""
        chosen = {name: getattr(self, name) for name in NAMES}
        if chosen["k0"] == "auto":
            chosen["k0"] = 1.0 if site.batch_norm else "learned"
        return chosen


def as_row(k: Tensor | float) -> Tensor:
    """A scalar of a site as it is stored; on its own device, whatever torch's default is."""
    return (k.detach() if isinstance(k, Tensor) else torch.tensor(k)).reshape(-1)


def put_scalar(name: str, k: Tensor | float, place: Tensor | float, unit: float) -> None:
    """Let what learns in units of its own act as the number k; raise where it is fixed at another, or is of a layer."""
    k = torch.as_tensor(k)
    if not isinstance(place, Tensor):
        if not bool((k == place).all()):
            raise MethodError(f"{name} is fixed at {place:g} here, and it has {k.flatten()[0]:.4g}")
    elif k.numel() > place.numel():
        raise MethodError(f"its {name} are per channel, and these per layer; take per=channel")
    else:
        place.copy_((k / unit).expand(place.shape))


class AffineTransform(MaskTransform):
    """One site's scores (or, stored, its packed mask) and scalars."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask"} | dict.fromkeys(NAMES, "scalars")
    refillable: ClassVar[bool] = True

    def __init__(self, method: Affine, site: Site) -> None:
        super().__init__()
        self.at, self.surrogate = method.threshold, method.surrogate
        self.centred, self.spread, self.inputs = method.form == "centred", 1.0, site.inputs * prod(site.shape[2:])
        self.starts_on = method.scores[0] >= method.threshold
        self.shape, self.view_shape = site.shape, site.channel_view
        self.scalar_shape = site.channel_shape if method.per == "channel" else (1,) * len(self.view_shape)
        dtype = self.dtype = site.learned_dtype
        self.scalar_count = torch.Size(self.scalar_shape).numel()
        self.fixed: dict[str, float] = {}
        for name, value in method.coefficients(site).items():
            if value == "learned":
                start = torch.full(self.scalar_shape, START[name] / (GAIN if self.centred else 1), dtype=dtype)
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.fixed[name] = float(value)
        scores = torch.empty(self.shape, dtype=dtype)
        if not scores.is_meta:  # there torch is slow to draw nothing
            scores.uniform_(*method.scores)
        self.scores = nn.Parameter(scores)
        self.register_buffer("words", None)

    def begin(self, base_weight: Tensor) -> None:
        if self.centred and not base_weight.is_meta:
            self.spread = float(base_weight.double().std(correction=0)) or 1.0

    def weight(self, base_weight: Tensor) -> Tensor:
        """W~ by the fused operation; from bits where there are no scores any more."""
        if self.scores is None and self._reads_words():
            return self.write(base_weight, torch.empty_like(base_weight, memory_format=torch.contiguous_format))
        return self.weight_by(base_weight, self.coefficients())

    def weight_by(self, base_weight: Tensor, ks: Sequence[Tensor | float]) -> Tensor:
        """W~ with the mask as it is and with these k0…k3."""
        W = base_weight.view(self.view_shape)
        if self.scores is None:
            return affine(W, self.mask().view(self.view_shape), *ks).view(self.shape)
        scores = self.scores.view(self.view_shape)
        out = AffineMask.apply(W, scores, *ks, self.at, self.surrogate)  # type: ignore[no-untyped-call]
        return cast(Tensor, out.reshape(self.shape))

    def write(self, base_weight: Tensor, out: Tensor) -> Tensor:
        """W~ in memory that is there already; straight from bits where that is possible."""
        words = self.words
        if words is None or not self._reads_words() or not out.is_contiguous():
            return super().write(base_weight, out)
        if self.scalar_count == 1 and Tables.suit(base_weight, out):
            Tables([self.numbers()]).write(0, base_weight, words, out)
            return out
        shape = Matrices(out, self.scalar_shape)
        W = shape.matrix(base_weight.detach().contiguous())
        ks = [shape.column(k, self.dtype, out.device) for k in self.coefficients()]
        from_words(W, words, ks, shape.matrix(out))
        return out

    def mask_of(self, scores: Tensor) -> Tensor:
        """M = 1[R >= t]."""
        if scores.is_meta:  # only its shape is wanted; torch is slow to say so
            return torch.empty(self.shape, dtype=torch.bool, device="meta")
        return threshold(scores, self.at)

    def flipped(self) -> int | None:
        """The zeros, where all scores started at the threshold or above."""
        mask = self.mask()
        return int(mask.numel() - mask.sum()) if self.starts_on else None

    def scalar_parameters(self) -> list[nn.Parameter]:
        return [k for name in NAMES if isinstance(k := self._parameters.get(name), nn.Parameter)]

    def scalars(self) -> dict[str, Tensor]:
        """k0…k3, fixed or learned, each of one number or one per output channel."""
        named = zip(NAMES, self.coefficients(), strict=True)
        return {name: as_row(k) for name, k in named}

    def stored(self) -> dict[str, Stored]:
        return super().stored() | {name: k for name, k in self.scalars().items() if name not in self.fixed}

    def relearn(self, rate: float) -> bool:
        """Scores so far from the threshold that a bit flips after some steps that all ask for it."""
        sign = 2 * self.mask().to(self.dtype) - 1
        self.scores = nn.Parameter(self.at + _STEPS_TO_FLIP * rate * sign)
        self.words = None
        for scalar in self.scalar_parameters():
            scalar.requires_grad_(True)
        return True

    def begin_as(self, other: Part, rate: float) -> None:
        """The other's mask, its scores as far from the threshold as those of a mask that learns on, and its k0…k3."""
        if not isinstance(other, AffineTransform):
            raise MethodError("it has no affine mask there")
        self.put_coefficients(other.coefficients())
        assert self.scores is not None
        sign = 2 * other.mask().to(self.scores) - 1
        self.scores.copy_(self.at + _STEPS_TO_FLIP * rate * sign)
        self.starts_on = False

    def put_coefficients(self, ks: Sequence[Tensor | float]) -> None:
        """Let k0…k3 be these numbers, whatever form they learn in; raise where one is fixed at another."""
        units = dict.fromkeys(NAMES, 1.0)
        if self.centred:
            units = {"k0": GAIN, "k1": GAIN * self.spread / sqrt(self.inputs), "k2": GAIN * self.spread, "k3": GAIN}
            ks = [ks[0] + ks[3] / 2, ks[1] + ks[2] / 2, ks[2], ks[3]]
        for name, k in zip(NAMES, ks, strict=True):
            put_scalar(name, k, self.fixed[name] if name in self.fixed else self.get_parameter(name), units[name])

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        for name, value in stored.items():
            if isinstance(value, Tensor):
                scalar = nn.Parameter(value.reshape(self.scalar_shape), requires_grad=False)
                self.register_parameter(name, scalar)
        self.centred = False
        release_memory(self)

    def coefficients(self) -> list[Tensor | float]:
        """k0…k3 as they are: fixed numbers, or tensors that are learned."""
        learned = self._parameters
        ks = [self.fixed[n] if n in self.fixed else cast(Tensor, learned[n]) for n in NAMES]
        return self._around_the_middle(*ks) if self.centred else ks

    def _around_the_middle(
        self, a0: Tensor | float, a1: Tensor | float, a2: Tensor | float, a3: Tensor | float
    ) -> list[Tensor | float]:
        """k0…k3 of what learns in the centred form; fixed ones are what they are."""
        k2 = a2 if "k2" in self.fixed else a2 * (GAIN * self.spread)
        k3 = a3 if "k3" in self.fixed else a3 * GAIN
        return [a0 * GAIN - k3 / 2, a1 * (GAIN * self.spread / sqrt(self.inputs)) - k2 / 2, k2, k3]

    def numbers(self) -> list[float]:
        """k0…k3 of a site that has one set of them."""
        return [k.item() if isinstance(k, Tensor) else k for k in self.coefficients()]

    def _reads_words(self) -> bool:
        """Whether kernels can take the packed mask: bits lie row after row, and nothing learns."""
        by_rows = all(size == 1 for size in self.scalar_shape[1:])
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return by_rows and not learns and not is_compiling()


def _piggyback(*, norms: NormPolicy, k1: Coefficient = 0.0, threshold: float = 0.0) -> Affine:
    """W~ = W∘M, and k1 where it is learned."""
    return Affine(k0=0.0, k1=k1, k2=0.0, k3=1.0, norms=norms, scores=(1e-2, 1e-2), threshold=threshold)


PRESETS: dict[str, Affine] = {
    "affine-full": Affine(),
    "affine-simple": Affine(k3=0.0),
    "affine-centred": Affine(k0="learned", form="centred", scores=(-1e-4, 1e-4)),
    "piggyback": _piggyback(norms="shared", threshold=5e-3),
    "piggyback-bn": _piggyback(norms="own", threshold=5e-3),
    # The other rows of the paper's ablations (Tables 5 and 6), in their order.
    "piggyback-star": _piggyback(norms="shared"),
    "piggyback-star-bn": _piggyback(norms="own"),
    "piggyback-star-bn-k1": _piggyback(norms="own", k1="learned"),
    "affine-simple-no-k1": Affine(k1=0.0, k3=0.0),
    "affine-simple-sigmoid": Affine(k3=0.0, surrogate="sigmoid"),
    "affine-full-no-k1": Affine(k1=0.0),
    "affine-full-no-k2": Affine(k2=0.0),
    "affine-full-sigmoid": Affine(surrogate="sigmoid"),
    "affine-full-channel": Affine(per="channel"),
}

ABLATION: tuple[str, ...] = (
    "piggyback",
    "piggyback-star",
    "piggyback-star-bn",
    "piggyback-star-bn-k1",
    "affine-simple-no-k1",
    "affine-simple",
    "affine-simple-sigmoid",
    "affine-full-no-k1",
    "affine-full-no-k2",
    "affine-full",
    "affine-full-sigmoid",
    "affine-full-channel",
)
"""The method of each row of the paper's ablation tables, in their order."""
