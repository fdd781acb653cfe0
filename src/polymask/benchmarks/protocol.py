"""How a benchmark is run: the paper's way unless asked otherwise, and what was asked otherwise.

Selection says which epoch counts, and what is trained on:

* `last`: train and val together, the last epoch. The paper's way on the decathlon, where the
  schedule was found on val; ImageNet-to-Sketch has no val, and the paper names none.
* `val`: the best epoch on val, which is not trained on.
* `test`: the best epoch on test, as Piggyback's published code does. It flatters.

Crops are those of a test image whose logits are averaged: 1 (the centre), 5, 10, or `submission`
(10 where a domain may be mirrored and 5 where not, as in code of the authors' circle). The paper
does not say; 1 is the default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from polymask.benchmarks.domains import BENCHMARKS
from polymask.benchmarks.suites import Suite
from polymask.errors import BenchmarkError
from polymask.train.recipe import Recipe, get_recipe

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
        for name, allowed in (("selection", get_args(Selection)), ("crops", get_args(Crops))):
            if getattr(self, name) not in allowed:
                raise BenchmarkError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

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
    """Where a run leaves the paper's protocol, a sentence each; none where there is no such."""
    if suite.name not in BENCHMARKS:
        return ()
    found = []
    if suite.lacking:
        found.append(f"without {', '.join(suite.lacking)}: scores are not those of the benchmark")
    if base not in _PAPER_BASES[suite.name]:
        paper = ", ".join(_PAPER_BASES[suite.name])
        found.append(f"base {base}; the paper has {paper}")
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
