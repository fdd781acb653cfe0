"""The two benchmarks: their domains, how people spell them, and what they are measured against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from polymask.errors import BenchmarkError, near_matches

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
        """The domains' names."""
        return tuple(self.spellings)

    def find(self, name: str) -> str:
        """The domain that a name stands for; case, blanks and punctuation do not matter."""
        key = _key(name)
        for domain, others in self.spellings.items():
            if key == _key(domain) or key in others:
                return domain
        raise BenchmarkError(f"{name!r} is no domain of {self.name}; {near_matches(name, self.domains)}")

    def arrange(self, values: Mapping[str, Value], what: str) -> dict[str, Value]:
        """The values by domain, in the benchmark's order: one for each domain, by whatever name."""
        names: dict[str, str] = {}
        for name in values:
            domain = self.find(name)
            if domain in names:
                raise BenchmarkError(
                    f"a {what} is given for {names[domain]!r} and {name!r}, which are both {domain}; keep one"
                )
            names[domain] = name
        lacking = [domain for domain in self.domains if domain not in names]
        if lacking:
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


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


_IMAGENET = ("imagenet", "imnet", "imagenet12", "imagenet2012", "ilsvrc12", "ilsvrc2012")
_FLOWERS = ("flowers", "flower", "flwr", "flowers102", "oxfordflowers", "vggflowers")

IMAGENET_TO_SKETCH = Benchmark(
    "imagenet-to-sketch",
    {
        "ImageNet": _IMAGENET,
        "CUBS": ("cub", "cub200", "cub2002011", "cubscropped", "birds"),
        "Stanford Cars": ("cars", "stanfordcarscropped", "carscropped"),
        "Flowers": _FLOWERS,
        "WikiArt": ("wikiart195", "paintings"),
        "Sketch": ("sketches", "tuberlin", "tuberlinsketch"),
    },
)

DECATHLON = Benchmark(
    "decathlon",
    {
        "imagenet12": _IMAGENET,
        "aircraft": ("airc", "fgvcaircraft", "aircrafts"),
        "cifar100": ("c100", "cifar"),
        "daimlerpedcls": ("dped", "daimler", "daimlerped", "pedestrians"),
        "dtd": ("textures", "describabletextures"),
        "gtsrb": ("gtsr", "trafficsigns"),
        "vgg-flowers": _FLOWERS,
        "omniglot": ("oglt", "ogl"),
        "svhn": ("housenumbers",),
        "ucf101": ("ucf",),
    },
    reference={  # the organisers' networks, one fine-tuned for each domain, to two decimals
        "imagenet12": 59.87,
        "aircraft": 60.34,
        "cifar100": 82.12,
        "daimlerpedcls": 92.82,
        "dtd": 55.53,
        "gtsrb": 97.53,
        "vgg-flowers": 81.41,
        "omniglot": 87.69,
        "svhn": 96.55,
        "ucf101": 51.20,
    },
)

BENCHMARKS = {benchmark.name: benchmark for benchmark in (DECATHLON, IMAGENET_TO_SKETCH)}
