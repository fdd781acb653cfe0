"""What a demo run found: plain numbers, names and small pictures that travel as JSON."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Self

from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.errors import PolymaskError


@dataclass(frozen=True)
class MethodResult:
    """What one method reached on a domain, and what it cost."""

    method: str
    test_accuracy: float  # percent
    bytes: int  # of the domain's pack
    bits_per_weight: float
    seconds: float  # of training
    curve: tuple[EpochPoint, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `DemoResult.to_json` wrote of it."""
        return cls(**{**values, "curve": tuple(EpochPoint(**p) for p in values["curve"])})


@dataclass(frozen=True)
class Prediction:
    """One test image, its class, and the most probable classes, best first."""

    image_png: bytes  # a JPEG will do
    truth: str
    top: tuple[tuple[str, float], ...]  # class, probability

    @property
    def right(self) -> bool:
        """Whether the first class is the true one."""
        return bool(self.top) and self.top[0][0] == self.truth

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `DemoResult.to_json` wrote of it."""
        image = base64.b64decode(values["image_png"], validate=True)
        top = tuple((name, probability) for name, probability in values["top"])
        return cls(**{**values, "image_png": image, "top": top})


@dataclass(frozen=True)
class DomainResult:
    """One domain: its data, every method's result, and what the kept one looks like inside."""

    name: str
    title: str
    classes: int
    train_images: int
    test_images: int
    methods: tuple[MethodResult, ...]
    predictions: tuple[Prediction, ...]
    layers: tuple[LayerStatistics, ...]
    unchanged: bool  # its outputs are, to the bit, those right after its own training
    components: Mapping[str, int] = field(default_factory=dict)  # bits of the pack, by component

    def result_of(self, method: str) -> MethodResult | None:
        """The result of a method, if it was tried here."""
        return next((result for result in self.methods if result.method == method), None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `DemoResult.to_json` wrote of it."""
        parts = {
            "methods": tuple(map(MethodResult.from_json, values["methods"])),
            "predictions": tuple(map(Prediction.from_json, values["predictions"])),
            "layers": tuple(LayerStatistics(**layer) for layer in values["layers"]),
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True)
class DemoResult:
    """A whole demo: one base, its domains one after another, and whether anything moved."""

    base: str
    base_parameters: int
    base_bytes: int
    fingerprint_before: str
    fingerprint_after: str
    domains: tuple[DomainResult, ...]
    seconds: float
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    method: str = "affine-full"  # whose packs are kept; the others are there to compare
    command: str = "polymask demo"

    def __post_init__(self) -> None:
        if not self.domains:
            raise PolymaskError("a demo result needs at least one domain")
        for domain in self.domains:
            if domain.result_of(self.method) is None:
                raise PolymaskError(
                    f"domain {domain.name} has no result of {self.method}; "
                    "give one, or name the method whose packs are kept"
                )

    def kept(self, domain: DomainResult) -> MethodResult:
        """The result of the method whose pack is kept."""
        result = domain.result_of(self.method)
        assert result is not None  # checked when this was made
        return result

    @property
    def nothing_forgotten(self) -> bool:
        """Whether the base and every domain are what they were."""
        same_base = self.fingerprint_before == self.fingerprint_after
        return same_base and all(domain.unchanged for domain in self.domains)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; pictures are base64."""
        return {f.name: _json_value(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        try:
            domains = tuple(map(DomainResult.from_json, values["domains"]))
            return cls(**{**values, "domains": domains})
        except PolymaskError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PolymaskError(f"this is not a demo result of this version ({error}); run the demo again") from error


def _json_value(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _json_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value
