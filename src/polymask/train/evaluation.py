"""What a domain got right and wrong, class by class: accuracy with its interval, top-5, confusion. Needs no torch.

The interval of k right answers among n is Wilson's, at 95 % (z = 1.96), which holds for few images and near 0 or 100 %:

    (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),  p = k / n
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any, Self

from polymask.errors import DataError

_Z = 1.959964


def wilson(right: int, images: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy, in percent."""
    if images == 0:
        return 0.0, 100.0
    share, spread = right / images, _Z * _Z / images
    middle = share + spread / 2
    half = _Z * sqrt(share * (1 - share) / images + spread / (4 * images))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (100 * low if right else 0.0), (100 * high if right < images else 100.0)


@dataclass(frozen=True)
class Answer:
    """What a domain said of one image: its class, that class's probability, and the likeliest classes, best first."""

    image: int  # its place among those that were evaluated
    truth: str
    probability: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ClassResult:
    """The images of one class; accuracies in percent."""

    name: str
    images: int
    right: int
    accuracy: float | None  # None: there is no image of it
    low: float
    high: float
    taken_for: str | None  # the class that most of the others were taken for


@dataclass(frozen=True)
class Evaluation:
    """What a domain said of images whose classes are known; accuracies are in percent."""

    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]  # [class][answer]: how many images
    in_top5: int  # images whose class is among the five likeliest
    wrong: tuple[int, ...] = ()  # places of the images that were answered wrong
    hardest: tuple[Answer, ...] = ()  # the lowest probabilities of the true class, lowest first

    @property
    def images(self) -> int:
        """How many there are."""
        return sum(map(sum, self.confusion))

    @property
    def right(self) -> int:
        """How many images were given their class."""
        return sum(row[place] for place, row in enumerate(self.confusion))

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.right / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson(self.right, self.images)

    @property
    def top5_accuracy(self) -> float | None:
        """None where there are five classes or fewer."""
        return 100 * self.in_top5 / max(1, self.images) if len(self.classes) > 5 else None

    @property
    def by_class(self) -> list[ClassResult]:
        """Every class, in the domain's order."""
        found = []
        for place, (name, row) in enumerate(zip(self.classes, self.confusion, strict=True)):
            images, right = sum(row), row[place]
            others = [0 if at == place else count for at, count in enumerate(row)]
            most = max(others, default=0)
            taken_for = self.classes[others.index(most)] if most else None
            accuracy = 100 * right / images if images else None
            found.append(ClassResult(name, images, right, accuracy, *wilson(right, images), taken_for))
        return found

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` reads it."""
        return {
            "images": self.images,
            "right": self.right,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "top5_accuracy": self.top5_accuracy,
            "by_class": [asdict(one) for one in self.by_class],
            "classes": list(self.classes),
            "confusion": [list(row) for row in self.confusion],
            "in_top5": self.in_top5,
            "wrong": list(self.wrong),
            "hardest": [asdict(answer) for answer in self.hardest],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        try:
            hardest = tuple(
                Answer(int(a["image"]), str(a["truth"]), float(a["probability"]), _pairs(a["top"]))
                for a in values["hardest"]
            )
            classes = tuple(map(str, values["classes"]))
            confusion = tuple(tuple(map(int, row)) for row in values["confusion"])
            found = cls(classes, confusion, int(values["in_top5"]), tuple(map(int, values["wrong"])), hardest)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is not an evaluation of this version ({error!r}); evaluate again") from error
        if {len(classes)} != {len(confusion), *map(len, confusion)}:
            raise DataError(f"an evaluation has no {len(classes)} × {len(classes)} confusion matrix; evaluate again")
        return found

    def csv(self) -> str:
        """A line for each class: its numbers, then how many of its images were taken for each class."""
        file = io.StringIO()
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["class", "images", "right", "accuracy", "low", "high", *(f"as {c}" for c in self.classes)])
        for one, row in zip(self.by_class, self.confusion, strict=True):
            accuracy = "" if one.accuracy is None else one.accuracy
            table.writerow([one.name, one.images, one.right, accuracy, one.low, one.high, *row])
        return file.getvalue()


@dataclass(frozen=True)
class NamedResults:
    """What a domain of labels or values said of images: the metric of its target, over all and by name."""

    metric: str
    result: float
    images: int
    by_name: Mapping[str, float | None]  # None: no image has the label

    def csv(self) -> str:
        """A line for each name."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([["name", self.metric], *self.by_name.items()])
        return file.getvalue()


def _pairs(values: Any) -> tuple[tuple[str, float], ...]:
    return tuple((str(name), float(probability)) for name, probability in values)


def from_answers(
    classes: Sequence[str], truths: Sequence[int], guesses: Sequence[int], in_top5: int, hardest: Sequence[Answer]
) -> Evaluation:
    """Count what was said of each image; `truths` and `guesses` are places in `classes`."""
    counts = [[0] * len(classes) for _ in classes]
    for truth, guess in zip(truths, guesses, strict=True):
        counts[truth][guess] += 1
    wrong = tuple(i for i, (truth, guess) in enumerate(zip(truths, guesses, strict=True)) if truth != guess)
    return Evaluation(tuple(classes), tuple(map(tuple, counts)), in_top5, wrong, tuple(hardest))


def joined(parts: Sequence[Evaluation], places: Sequence[Sequence[int]]) -> Evaluation:
    """The evaluation of all images, of those of its parts; `places` are where the images of a part are among all."""
    sums = [
        [sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*(p.confusion for p in parts), strict=True)
    ]
    wrong = sorted(at[i] for part, at in zip(parts, places, strict=True) for i in part.wrong)
    answers = [replace(a, image=at[a.image]) for part, at in zip(parts, places, strict=True) for a in part.hardest]
    most = max(len(part.hardest) for part in parts)
    hardest = sorted(answers, key=lambda answer: (answer.probability, answer.image))[:most]
    in_top5 = sum(part.in_top5 for part in parts)
    return Evaluation(parts[0].classes, tuple(map(tuple, sums)), in_top5, tuple(wrong), tuple(hardest))
