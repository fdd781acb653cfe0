"""The two benchmarks: their domains, which of them a folder has, and how they are run: the paper's way unless asked
otherwise.

Selection says which epoch counts, and what is trained on:

* `last`: train and val together, the last epoch. The paper's way on the decathlon, where the
  schedule was found on val; ImageNet-to-Sketch has no val, and the paper names none.
* `val`: the best epoch on val, which is not trained on.
* `test`: the best epoch on test, as Piggyback's published code does. It flatters.

Crops are those of a test image whose logits are averaged: 1 (the centre), 5, 10, or `submission` (10 where a domain may
be mirrored and 5 where not, as in code of the authors' circle). The paper does not say; 1 is the default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

from polymask.benchmarks.records import FACTS
from polymask.errors import BenchmarkError, near_matches
from polymask.train.recipe import Recipe, get_recipe

Value = TypeVar("Value")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's domains, in the order of the paper's table.

    `spellings` gives for each domain its other names, as `_key` writes them. `reference` holds the
    accuracies, in percent, that the score measures against; where it is None they belong to the
    backbone, and come with the accuracies that are to be scored.
    """

    name: str
    spellings: Mapping[str, tuple[str, ...]]
    reference: Mapping[str, float] | None = None

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.spellings)

    def find(self, name: str) -> str:
        """The domain that a name stands for; case, blanks and punctuation do not matter."""
        key = _key(name)
        for domain, others in self.spellings.items():
            if key == _key(domain) or key in others:
                return domain
        raise BenchmarkError(f"{name!r} is not a domain of {self.name}; {near_matches(name, self.domains)}")

    def arrange(self, values: Mapping[str, Value], what: str) -> dict[str, Value]:
        """The values by domain, in the benchmark's order: one for each domain, by any of its names."""
        names: dict[str, str] = {}
        for name in values:
            domain = self.find(name)
            if domain in names:
                raise BenchmarkError(
                    f"a {what} is given for {names[domain]!r} and {name!r}, which are both {domain}; keep one"
                )
            names[domain] = name
        if lacking := [domain for domain in self.domains if domain not in names]:
            raise BenchmarkError(
                f"no {what} is given for {', '.join(lacking)}; the score of {self.name} is over "
                f"all {len(self.domains)} domains"
            )
        return {domain: values[names[domain]] for domain in self.domains}


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of this name."""
    if name not in BENCHMARKS:
        raise BenchmarkError(f"benchmark {name!r} is not known; {near_matches(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def canonical(benchmark: Benchmark, name: str) -> str | None:
    """What a benchmark calls a domain, or None if it has no such domain."""
    try:
        return benchmark.find(name)
    except BenchmarkError:
        return None


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _benchmark(name: str) -> Benchmark:
    """A benchmark as facts.json has it; the decathlon's reference is the organisers' networks, one for each domain."""
    domains = FACTS["benchmarks"][name]
    spellings = {domain: tuple(facts["spellings"]) for domain, facts in domains.items()}
    return Benchmark(
        name, spellings, {domain: f["reference"] for domain, f in domains.items() if "reference" in f} or None
    )


IMAGENET_TO_SKETCH, DECATHLON = _benchmark("imagenet-to-sketch"), _benchmark("decathlon")
BENCHMARKS = {benchmark.name: benchmark for benchmark in (DECATHLON, IMAGENET_TO_SKETCH)}


DEMO = ("digits", "letters", "solar-cells")
NAMED = (*BENCHMARKS, "demo")


@dataclass(frozen=True)
class Suite:
    """A benchmark's domains as they were found: name -> source for `load_data`, in the order ↓.

    `own` is the base's own domain and its source, where its images are there. `lacking` names the benchmark's domains
    that are not there.
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
        domain = canonical(IMAGENET_TO_SKETCH, child.name)
        if domain in found:
            raise BenchmarkError(f"{found[domain]} and {child} are both {domain}; take one of them away")
        if domain is not None:
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
            f"{data} has no domain of {benchmark.name} "
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


Selection = Literal["last", "val", "test"]
Crops = Literal["1", "5", "10", "submission"]

_PAPER_BASES = {
    "imagenet-to-sketch": ("torchvision:resnet50", "torchvision:densenet121", "torchvision:vgg16"),
    "decathlon": ("decathlon-wrn28",),
}


@dataclass(frozen=True)
class Protocol:
    """A recipe, the rules of measuring, and how much of each domain is used."""

    recipe: Recipe
    selection: Selection = "last"
    crops: Crops = "1"
    limit: int | None = None  # training images of a domain
    classes: tuple[tuple[str, int], ...] = ()  # domain ("" for all others), how many of it
    labels: Path | None = None  # the organisers' labels of the decathlon's test images
    searching: bool = False  # val stands for test, and is not trained on

    def __post_init__(self) -> None:
        for name, value, allowed in (("selection", self.selection, Selection), ("crops", self.crops, Crops)):
            if value not in get_args(allowed):
                raise BenchmarkError(f"{name}={value!r} is not one of {', '.join(get_args(allowed))}")

    @property
    def training(self) -> Recipe:
        """The recipe with the selection's rule in it."""
        rule = "last" if self.selection == "last" or self.searching else "best"
        return get_recipe(self.recipe, selection=rule, train_on_val=False)

    def classes_of(self, domain: str) -> int | None:
        """How many of a domain's classes are used, if not all."""
        counts = dict(self.classes)
        return counts.get(domain, counts.get(""))

    def crops_of(self, mirror: bool) -> int:
        """The number of crops for a domain."""
        if self.crops == "submission":
            return 10 if mirror else 5
        return int(self.crops)


def deviations(suite: Suite, protocol: Protocol, base: str, notes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Where a run leaves the paper's protocol, a sentence each; none where the paper has no such benchmark."""
    if suite.name not in BENCHMARKS:
        return ()
    found = []
    if suite.lacking:
        found.append(f"without {', '.join(suite.lacking)}: scores are not those of the benchmark")
    if base not in _PAPER_BASES[suite.name]:
        found.append(f"base {base}; the paper has {', '.join(_PAPER_BASES[suite.name])}")
    paper_recipe = get_recipe(suite.recipe)
    for field in fields(Recipe):
        then, now = getattr(paper_recipe, field.name), getattr(protocol.recipe, field.name)
        if field.name not in ("name", "selection", "train_on_val") and then != now:
            found.append(f"{field.name} {now}; the paper's recipe has {then}")
    if protocol.selection != "last":
        found.append(f"selection by {protocol.selection}; the paper's rule is the last epoch")
    if protocol.crops != "1":
        found.append(f"{protocol.crops} test crops instead of the centre")
    if protocol.limit is not None:
        found.append(f"at most {protocol.limit} training images a domain")
    for domain, said in notes.items():
        found += [f"{domain}: {note}" for note in said]
    return tuple(found)
