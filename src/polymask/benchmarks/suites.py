"""Which domains a benchmark has in a folder, and what the paper does with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from polymask.benchmarks.domains import BENCHMARKS, DECATHLON, IMAGENET_TO_SKETCH, Benchmark
from polymask.errors import BenchmarkError, near_matches

DEMO = ("digits", "letters", "solar-cells")
NAMED = (*BENCHMARKS, "demo")


@dataclass(frozen=True)
class Suite:
    """A benchmark's domains as they were found: name -> source for `load_data`, in the order ↓.

    `own` is the base's own domain and its source, where its images are there. `lacking` names the
    benchmark's domains that are not.
    """

    name: str
    recipe: str
    domains: dict[str, str]
    own: tuple[str, str] | None = None
    lacking: tuple[str, ...] = ()

    def only(self, names: Sequence[str]) -> Self:
        """The suite with these domains alone."""
        for name in names:
            if name not in self.domains:
                raise BenchmarkError(f"{self.name} has no domain {name!r} here; {near_matches(name, self.domains)}")
        kept = {name: source for name, source in self.domains.items() if name in names}
        left = tuple(name for name in self.domains if name not in names)
        return replace(self, domains=kept, lacking=(*self.lacking, *left))


def find_suite(benchmark: str, data: Path | None) -> Suite:
    """The domains of a benchmark, or of a folder with a folder for each domain."""
    if benchmark == "demo":
        return Suite("demo", "quick", {name: name for name in DEMO})
    if benchmark not in BENCHMARKS:
        return _folder(benchmark)
    if data is None:
        raise BenchmarkError(f"{benchmark} needs its images; give --data DIR")
    if not data.is_dir():
        raise BenchmarkError(f"{data} is not a folder; give --data the folder of {benchmark}")
    return _sketch(data) if benchmark == IMAGENET_TO_SKETCH.name else _decathlon(data)


def _sketch(data: Path) -> Suite:
    found: dict[str, Path] = {}
    for child in _folders(data):
        try:
            domain = IMAGENET_TO_SKETCH.find(child.name)
        except BenchmarkError:
            continue
        if domain in found:
            raise BenchmarkError(f"{found[domain]} and {child} are both {domain}; take one of them away")
        found[domain] = child
    sources = {name: f"sketch:{place}" for name, place in found.items()}
    return _suite(IMAGENET_TO_SKETCH, sources, "ImageNet", data)


def _decathlon(data: Path) -> Suite:
    names = {file.stem.removesuffix("_train") for file in data.glob("annotations/*_train.json")}
    sources = {name: f"decathlon:{data / name}" for name in DECATHLON.domains if name in names}
    return _suite(DECATHLON, sources, "imagenet12", data)


def _suite(benchmark: Benchmark, sources: dict[str, str], own: str, data: Path) -> Suite:
    """Domains get names that can be those of files; `Benchmark.find` knows them all the same."""
    lacking = tuple(domain for domain in benchmark.domains if domain not in sources)
    own_source = sources.pop(own, None)
    if not sources:
        raise BenchmarkError(
            f"{data} has none of the domains of {benchmark.name} "
            f"({', '.join(benchmark.domains)}); see docs/reproduce.md for the layout"
        )
    ordered = {domain.lower().replace(" ", "-"): sources[domain] for domain in benchmark.domains if domain in sources}
    own_pair = None if own_source is None else (own.lower(), own_source)
    return Suite(benchmark.name, benchmark.name, ordered, own_pair, lacking)


def _folder(place: str) -> Suite:
    root = Path(place)
    if not root.is_dir():
        raise BenchmarkError(f"{place!r} is neither a benchmark ({', '.join(NAMED)}) nor a folder of domains")
    domains = {child.name: str(child) for child in _folders(root)}
    if not domains:
        raise BenchmarkError(f"{root} has no folders; give a folder with one for each domain")
    return Suite(root.absolute().name, "quick", domains)


def _folders(root: Path) -> list[Path]:
    return sorted(c for c in root.iterdir() if c.is_dir() and not c.name.startswith("."))
