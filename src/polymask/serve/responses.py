"""What the server answers, as the OpenAPI describes it, and what it counts for Prometheus.

With several workers `PROMETHEUS_MULTIPROC_DIR` names a folder in which each keeps its numbers;
the worker that answers adds them up.
"""

import os
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel, Field

from polymask.library.cache import CacheStats
from polymask.pack.sources import needs_of
from polymask.serve.engine import Answer, Best, Engine, Rule
from polymask.serve.library import Entry
from polymask.train.predict import said_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own name for it
_RANKED = 20
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Guess(BaseModel):
    """One class and how likely it is."""

    label: str = Field(serialization_alias="class")
    probability: float


class Seen(BaseModel):
    """What is on one image."""

    top: list[Guess] = Field(description="the likeliest classes or labels; empty for values")
    labels: list[str] | None = Field(None, description="only of a domain of labels: those likelier than not")
    values: dict[str, float] | None = Field(None, description="only of a domain of values: the numbers by name")
    unknown: bool | None = Field(None, description="nothing that the domain learned; only where its pack can tell")
    score: float | None = Field(None, description="what tells it: unknown below the domain's threshold")


class DomainPrediction(BaseModel):
    """What a domain sees on each image."""

    domain: str
    pack: str = Field(description="sha256 of the pack that answered")
    warm: bool = Field(description="the domain's network was merged already")
    milliseconds: float
    images: list[Seen]


class DomainScore(BaseModel):
    """How well a domain fits an image: larger is better."""

    domain: str
    score: float


class SeenByBest(Seen):
    """What is on one image, by the domain that fits it best."""

    domain: str
    pack: str = Field(description="sha256 of the pack that answered")
    ranking: list[DomainScore] = Field(description="the best domains, at most 20")


class AutoPrediction(BaseModel):
    """What the best domain sees on each image."""

    rule: Rule = Field(description="what the scores are: see docs/serve.md")
    milliseconds: float
    images: list[SeenByBest]


class DomainSummary(BaseModel):
    """A domain in the list."""

    name: str
    method: str
    target: str = Field(description="what the head gives: classes, labels or values")
    class_count: int
    bytes: int
    test_accuracy: float | None = Field(description="in percent, where the pack says it")
    test_metric: str = Field(description="what was measured on test: an accuracy or precision in percent, an error")
    test_result: float | None = Field(description="its result, where the pack says it")
    warm: bool = Field(description="its network is merged, in the process that answers")
    sha256: str
    versions: list[int] = Field(description="earlier versions that are kept, which it can be rolled back to")


class Judged(BaseModel):
    """How a domain tells unknown images; see docs/unknown.md."""

    rule: str
    temperature: float = Field(description="what logits are divided by before they become probabilities")
    threshold: float = Field(description="an image whose score is below is unknown")
    accepted: float = Field(description="the share of validation images that the threshold accepts")


class DomainDetail(DomainSummary):
    """A domain with its classes and its numbers."""

    classes: list[str]
    metrics: dict[str, str | float | None]
    options: dict[str, str | float | None]
    input_shape: list[int]
    base: str
    written_by: str = Field(description="the version of polymask that wrote the pack")
    sources: list[str] = Field(description="the domains whose masks it draws on, which must be in the library too")
    unknown: Judged | None = Field(description="how it tells unknown images; null where its pack keeps nothing for it")


class BaseSummary(BaseModel):
    """The network that all domains share."""

    name: str
    fingerprint: str


class Rejected(BaseModel):
    """A pack in the folder that cannot be served."""

    name: str
    reason: str


class DomainList(BaseModel):
    """The library."""

    base: BaseSummary
    total: int
    domains: list[DomainSummary]
    next: str | None = Field(description="give it as `after` to see more")
    rejected: list[Rejected]
    writable: bool = Field(description="whether packs may be uploaded and deleted")


class Problem(BaseModel):
    """Why a request was not answered."""

    error: str
    request: str = Field(description="the request's id, as in the server's log")


def _seen(answer: Answer, row: int, top_k: int) -> dict[str, Any]:
    """The fields of `Seen` for one image."""
    entry = answer.entry
    said = said_of(entry.target, entry.judgement, answer.outputs[row], entry.classes, top_k)
    top = [Guess(label=guess["class"], probability=guess["probability"]) for guess in said.pop("top", [])]
    return said | {"top": top}


def domain_prediction(answer: Answer, top_k: int, milliseconds: float) -> DomainPrediction:
    """The answer of one domain."""
    return DomainPrediction(
        domain=answer.entry.name,
        pack=answer.entry.info.manifest.sha256,
        warm=answer.warm,
        milliseconds=round(milliseconds, 2),
        images=[Seen(**_seen(answer, row, top_k)) for row in range(len(answer.outputs))],
    )


def auto_prediction(best: Best, top_k: int, milliseconds: float) -> AutoPrediction:
    """The answer of the best domain for each image."""
    images = [
        SeenByBest(
            **_seen(answer, 0, top_k),
            domain=answer.entry.name,
            pack=answer.entry.info.manifest.sha256,
            ranking=[DomainScore(domain=entry.name, score=score) for entry, score in ranking[:_RANKED]],
        )
        for answer, ranking in zip(best.answers, best.rankings, strict=True)
    ]
    return AutoPrediction(rule=best.rule, milliseconds=round(milliseconds, 2), images=images)


def domain_summary(entry: Entry, warm: bool, versions: Sequence[int]) -> DomainSummary:
    """A pack in the list."""
    manifest = entry.info.manifest
    metrics, metric = _single_values(manifest.metrics), manifest.tested[0]
    accuracy, result = metrics.get("test_accuracy"), metrics.get(metric)
    return DomainSummary(
        name=entry.name,
        method=manifest.method,
        target=entry.target.kind,
        class_count=len(entry.classes),
        bytes=entry.info.bytes,
        test_accuracy=accuracy if isinstance(accuracy, float) else None,
        test_metric=metric.removeprefix("test_").replace("_", " "),
        test_result=result if isinstance(result, float) else None,
        warm=warm,
        sha256=manifest.sha256,
        versions=list(versions),
    )


def domain_detail(entry: Entry, warm: bool, versions: Sequence[int]) -> DomainDetail:
    """A pack with all that its manifest tells."""
    manifest = entry.info.manifest
    return DomainDetail(
        **dict(domain_summary(entry, warm, versions)),
        classes=entry.classes,
        metrics=_single_values(manifest.metrics),
        options=_single_values(manifest.options),
        input_shape=list(entry.input.shape),
        base=manifest.base,
        written_by=manifest.library,
        sources=[name for name, _ in needs_of(manifest)],
        unknown=None if entry.judgement is None else Judged(**entry.judgement.note()),
    )


def _single_values(notes: dict[str, Any]) -> dict[str, str | float | None]:
    """The notes that are single values; a pack may hold anything."""
    single = {name: value for name, value in notes.items() if value is None or isinstance(value, str | int | float)}
    return {name: float(value) if isinstance(value, int) else value for name, value in single.items()}


class Metrics:
    """The numbers of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("polymask_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self.seconds = self._histogram(
            "polymask_request_seconds", "Time from a request's first byte to its answer", _SECONDS, ("route",)
        )
        self.images = self._counter("polymask_images", "Images run")
        self.batch_images = self._histogram("polymask_batch_images", "Images in a batch", _IMAGES)
        self.batch_seconds = self._histogram(
            "polymask_batch_seconds", "Time to run a batch, with the merge where the domain was cold", _SECONDS
        )
        self.waiting = self._gauge("polymask_waiting_images", "Images admitted, not yet answered")
        self.hits = self._counter("polymask_cache_hits", "Batches that found a network warm")
        self.misses = self._counter("polymask_cache_misses", "Networks merged")
        self.evictions = self._counter("polymask_cache_evictions", "Networks dropped for others")
        self.cache_bytes = self._gauge("polymask_cache_bytes", "Bytes of warm networks")
        self.budget = self._gauge("polymask_cache_budget_bytes", "Bytes that they may take")
        self._counted = CacheStats()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def observe_batch(self, images: int, seconds: float) -> None:
        self.images.inc(images)
        self.batch_images.observe(images)
        self.batch_seconds.observe(seconds)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def observe_engine(self, engine: Engine) -> None:
        """The cache and the queue as they are now."""
        before, now = self._counted, engine.cache.stats
        self._counted = now
        self.hits.inc(now.hits - before.hits)
        self.misses.inc(now.misses - before.misses)
        self.evictions.inc(now.evictions - before.evictions)
        self.cache_bytes.set(now.bytes)
        self.budget.set(engine.cache.budget_bytes)
        self.waiting.set(engine.batcher.admitted)

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        if FOLDER not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
