"""Counts and times for Prometheus, over all worker processes of a server.

With several workers `PROMETHEUS_MULTIPROC_DIR` names a folder in which each keeps its numbers;
whichever worker is asked adds them up.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from polymask.library.cache import CacheStats
from polymask.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own name for it

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The numbers of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("polymask_requests", "Requests answered", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "polymask_request_seconds",
            "Time from a request's first byte to its answer",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.images = self._counter("polymask_images", "Images run")
        self.batch_images = Histogram("polymask_batch_images", "Images in a batch", buckets=_IMAGES, registry=registry)
        self.batch_seconds = Histogram(
            "polymask_batch_seconds",
            "Time to run a batch, with the merge where the domain was cold",
            buckets=_SECONDS,
            registry=registry,
        )
        self.waiting = self._gauge("polymask_waiting_images", "Images admitted, not yet answered")
        self.hits = self._counter("polymask_cache_hits", "Batches that found a network warm")
        self.misses = self._counter("polymask_cache_misses", "Networks merged")
        self.evictions = self._counter("polymask_cache_evictions", "Networks dropped for others")
        self.cache_bytes = self._gauge("polymask_cache_bytes", "Bytes of warm networks")
        self.budget = self._gauge("polymask_cache_budget_bytes", "Bytes that they may take")
        self._seen = CacheStats()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode="livesum")

    def observe_batch(self, images: int, seconds: float) -> None:
        """A batch was run."""
        self.images.inc(images)
        self.batch_images.observe(images)
        self.batch_seconds.observe(seconds)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def observe_engine(self, engine: Engine) -> None:
        """The cache and the queue as they are now."""
        seen, self._seen = self._seen, engine.cache.stats
        self.hits.inc(self._seen.hits - seen.hits)
        self.misses.inc(self._seen.misses - seen.misses)
        self.evictions.inc(self._seen.evictions - seen.evictions)
        self.cache_bytes.set(self._seen.bytes)
        self.budget.set(engine.cache.budget_bytes)
        self.waiting.set(engine.batcher.admitted)

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        if FOLDER not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
