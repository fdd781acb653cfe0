"""Verbs that say what is on images: evaluate and predict."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import (
    PackVerb,
    check_seed,
    error_console,
    image_files,
    measured_text,
    number_text,
    table,
)
from polymask.errors import DataError, DomainError
from polymask.files import write_atomically
from polymask.train.recipe import split_seed

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.train.predict import Prediction

Answer = Callable[[Sequence[Path]], list[dict[str, Any]]]  # what is on files, in words
AUTO = "auto"  # in place of a domain's name: each image finds its own
_MOST_CLASSES = 20  # that `evaluate` prints


@dataclass(kw_only=True)
class EvaluateVerb(PackVerb):
    """Measure a domain on the test images of a source: accuracy with its interval, by class, and the confusions."""

    data: str
    """A folder of images, or another source (see the documentation of `learn`)."""
    split: str = "test"
    """Which images: train, val, test, or all of the source."""
    seed: int | None = None
    """The seed that split the source, where it does not come with splits; by default the one of the pack's images."""
    csv: Path | None = None
    """A file for a line per class: its numbers, then how many of its images were taken for each class."""

    def needs(self) -> list[str]:
        return ["PIL"]

    @property
    def title(self) -> str:
        return "images" if self.split == "all" else f"{self.split} images"

    def run(self) -> dict[str, Any]:
        from polymask.data.load import load_data
        from polymask.data.loader import loader_at
        from polymask.data.split import JoinedSplit
        from polymask.files import write_atomically
        from polymask.pack.format import inspect
        from polymask.train.predict import evaluate_by_name, evaluate_in_detail

        manifest = inspect(self.pack_path()).manifest
        seed = split_seed(manifest.recipe) if self.seed is None else self.seed
        check_seed(seed)
        if self.csv is not None and self.csv.is_dir():
            raise DataError(f"--csv {self.csv} is a folder; give a file's name")
        data = load_data(self.data, seed=seed, target=manifest.target)
        if self.split not in (there := [*data.splits(), "all"]):
            raise DataError(f"{self.data} has no {self.split} images; it has {', '.join(there)}")
        base, domain = self.open_domain()
        splits = data.with_classes_of(domain.classes or []).splits()
        splits["all"] = JoinedSplit(*splits.values())
        for note in data.notes:
            self.say(note, style="dim")
        if self.split in ("val", "all") and domain.metrics.get("learned_from_val"):
            self.say("the head has learned from the val images that it was trained with, so they are not new to it")
        if self.split != "all":
            self.say(f"--split all measures all {len(splits['all']):,} images of {self.data}", style="dim")
        loader = loader_at(splits[self.split], domain.input)
        about: dict[str, Any] = {"pack": str(self.pack_path())}
        if domain.target.kind != "classes":
            named_results = evaluate_by_name(base, domain, loader)
            if self.csv is not None:
                write_atomically(self.csv, named_results.csv().encode())
            numbers = asdict(named_results)
            return about | {f"{self.split}_{numbers['metric']}": numbers.pop("result")} | numbers
        found = evaluate_in_detail(base, domain, loader)
        if self.csv is not None:
            write_atomically(self.csv, found.csv().encode())
        files = loader.cache.split.origin
        named = {
            "wrong": [files(place) for place in found.wrong],
            "hardest": [asdict(answer) | {"image": files(answer.image)} for answer in found.hardest],
        }
        numbers = found.to_json() | named
        return about | {f"{self.split}_accuracy": numbers.pop("accuracy")} | numbers

    def present(self, result: dict[str, Any], console: "Console") -> None:
        if "by_name" in result:
            metric, words = result["metric"], result["metric"].replace("_", " ")
            measured = measured_text(metric, result[f"{self.split}_{metric}"])
            console.print(f"{words} {measured} on {result['images']:,} {self.title}")
            rows = [[name, measured_text(metric, value)] for name, value in result["by_name"].items()]
            console.print(table("name", words, rows=rows))
            return
        low, high = result["interval"]
        accuracy = number_text(result[f"{self.split}_accuracy"], unit=" %")
        console.print(f"{accuracy} of {result['images']:,} {self.title} (95 % interval {low:.1f} to {high:.1f})")
        if result["top5_accuracy"] is not None:
            console.print(f"{number_text(result['top5_accuracy'], unit=' %')} have their class among the first five")
        classes = sorted((one for one in result["by_class"] if one["images"]), key=lambda one: one["accuracy"])
        rows = []
        for one in classes[:_MOST_CLASSES]:
            right, interval = f"{one['right']:,} of {one['images']:,}", f"{one['low']:.1f} to {one['high']:.1f}"
            rows.append([one["name"], right, f"{one['accuracy']:.1f}", interval, one["taken_for"] or "–"])
        console.print(table("class", "right", "accuracy, %", "95 % interval", "most often taken for", rows=rows))
        if len(classes) > _MOST_CLASSES:
            console.print(f"the {_MOST_CLASSES} hardest of {len(classes):,} classes; --csv FILE has all", style="dim")
        if self.csv is not None:
            console.print(f"wrote {self.csv}", soft_wrap=True, markup=False)


@dataclass(kw_only=True)
class PredictVerb(PackVerb):
    """Say what is on images: files, folders or patterns. With auto for the domain's name each image finds its own."""

    files: tyro.conf.Positional[list[str]]
    """Files, folders or patterns (quote them)."""
    top: int = 3
    """How many classes to name for each image."""
    reject: bool = False
    """Say of each image whether it is unknown: nothing that the domain learned."""
    csv: Path | None = None
    """Write the answers to this file, a line for each image and class."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> list[dict[str, Any]]:
        from polymask.train.predict import without_verdict

        if self.top < 1:
            raise DataError(f"--top {self.top} must be at least 1")
        if self.csv is not None and not self.csv.absolute().parent.is_dir():
            raise DataError(f"--csv {self.csv}: there is no folder {self.csv.parent}")
        auto = str(self.pack) == AUTO and not (self.library / f"{AUTO}.safetensors").is_file()
        if not auto:
            self.pack_path()  # a name that nobody has is said before files are looked for
        files = image_files(self.files)
        if not files:
            raise DataError("no image is given; polymask predict NAME FILES…")
        answer = self._by_likeness() if auto else self._by_name()
        rows: list[dict[str, Any]] = []
        for batch in batched_files(files, "predicting"):
            for file, said in read_some(answer, batch):
                problem = {"problem": str(said)} if isinstance(said, DataError) else said
                rows.append({"image": str(file)} | (problem if self.reject else without_verdict(problem)))
        if self.csv is not None:
            write_predictions(self.csv, rows)
        return rows

    def _by_name(self) -> "Answer":
        """What one domain says of files."""
        from polymask.train.predict import Classifier, judgement_of

        base, domain = self.open_domain()
        if domain.classes is None:
            raise DomainError(f"{self.pack} has no classes: it gives features, not predictions")
        judgement_of(domain, str(self.pack), needed=self.reject)
        return partial(Classifier(base, domain).say, top=self.top)

    def _by_likeness(self) -> "Answer":
        """What the domain of the library says that a file looks most like."""
        from polymask.library.model import MultiDomainModel
        from polymask.pack.format import inspect, packs_in

        packs = packs_in(self.library)
        if not packs:
            raise DomainError(f"{self.library} has no packs to compare; give --library")
        base = self.open_base(self.base or inspect(packs[0]).manifest.base)
        model = MultiDomainModel(base, self.library)
        self.say_device(base.device)

        def answer(files: Sequence[Path]) -> list[dict[str, Any]]:
            return [_said(one) for one in model.predict(list(files), top=self.top, reject=self.reject)]

        return answer

    def exit_code(self, result: list[dict[str, Any]]) -> int:
        return int(any("problem" in row for row in result))

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        answered = [row for row in result if "problem" not in row]
        rows = [[row["image"], *_answer_cells(row)] for row in answered]
        if self.csv is not None:
            console.print(f"wrote {self.csv}: {len(rows)} images", soft_wrap=True)
        elif not console.is_terminal:
            for row in rows:  # whole lines for other programs
                print("\t".join(row))
        elif rows:
            places = ["first", "second", "third"] + [f"{n}th" for n in range(4, self.top + 1)]
            about = ["domain"] * ("domain" in answered[0]) + ["is it known?"] * ("unknown" in answered[0])
            headings = about + list(answered[0].get("values", places))
            width = max(map(len, rows))
            rows = [row + [""] * (width - len(row)) for row in rows]
            console.print(table("image", *headings[: width - 1], rows=rows))
        problems = [row["problem"] for row in result if "problem" in row]
        for problem in problems:
            self.say(f"skipped: {problem}", style="yellow")
        if problems:
            self.say(f"{len(problems)} of {len(result)} files could not be read")


def _said(prediction: "Prediction") -> dict[str, Any]:
    """A prediction as `Classifier.say` gives it, with the name of its domain."""
    named: dict[str, Any] = {"domain": prediction.domain}
    named["top"] = [{"class": label, "probability": share} for label, share in prediction.top]
    others = {name: getattr(prediction, name) for name in ("labels", "values", "unknown", "score")}
    return named | {name: value for name, value in others.items() if value is not None}


def _answer_cells(row: dict[str, Any]) -> list[str]:
    """What is said of one image, as texts: its domain if it was found, unknown or classes with their probabilities."""
    found = [row["domain"]] if "domain" in row else []
    if "unknown" in row:
        found.append("unknown" if row["unknown"] else "known")
    if "values" in row:
        return found + [f"{value:.4g}" for value in row["values"].values()]
    return found + [f"{guess['class']} {100 * guess['probability']:.1f} %" for guess in row["top"]]


def batched_files(files: list[Path], title: str, size: int = 32) -> Iterator[list[Path]]:
    """Files, some at a time, while a bar shows how many are done."""
    from rich.progress import Progress

    with Progress(console=error_console(), transient=True, disable=len(files) <= size) as bar:
        task = bar.add_task(f"  {title}", total=len(files))
        for start in range(0, len(files), size):
            yield files[start : start + size]
            bar.advance(task, size)


def read_some(answer: "Answer", files: list[Path]) -> Iterator[tuple[Path, "dict[str, Any] | DataError"]]:
    """What is said of each file, or why it cannot be read; one that is damaged does not harm the others."""
    try:
        yield from zip(files, answer(files), strict=True)
        return
    except DataError as error:
        if len(files) == 1:
            yield files[0], error
            return
    for file in files:
        yield from read_some(answer, [file])


def write_predictions(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write predictions as CSV: image, rank, class, probability; of values, image and every value by its name.

    After the image come its domain and whether it is unknown, where these are told.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    values = next((row["values"] for row in rows if "values" in row), None)
    told = [name for name in ("domain", "unknown") if any(name in row for row in rows)]
    writer.writerow(["image", *told, *(("rank", "class", "probability") if values is None else values)])
    for row in rows:
        about = [
            row["image"],
            *(str(row.get(name, "")).lower() if name == "unknown" else row.get(name, "") for name in told),
        ]
        if "values" in row:
            writer.writerow([*about, *row["values"].values()])
        for rank, found in enumerate(row.get("top", ()), 1):
            writer.writerow([*about, rank, found["class"], f"{found['probability']:.6f}"])
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))
