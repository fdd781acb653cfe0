"""The report of one training: curves, what is confused, the hardest images, sizes. From its records, without torch."""

import base64
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from polymask import __version__
from polymask.benchmarks.records import EpochPoint
from polymask.errors import DataError, FileError
from polymask.files import json_object, write_atomically
from polymask.report import canvas, figures
from polymask.report.demo_page import ExampleImage, bits_by_component
from polymask.report.page_parts import (
    INK,
    LINE,
    MUTED,
    PAPER,
    SERIES,
    Cell,
    Heading,
    PageRow,
    PageTable,
    bytes_text,
    duration_text,
    render,
    share_text,
)
from polymask.train.evaluation import Evaluation

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.data.images import DomainData
    from polymask.train.learn import Learned, Loaders

LOG, RECORD, PAGE = "log.jsonl", "evaluation.json", "report.html"
_FORMAT = 1
_MOST_CELLS = 30  # classes that the matrix shows
_NUMBERED = 14  # classes up to which its cells have numbers
_MOST_ROWS = 40  # classes in the table


@dataclass(frozen=True)
class LearnRecord:
    """What a training leaves for its report, beside its log: what it made, and what that says of images."""

    name: str
    method: str
    base: str
    base_parameters: int
    base_bytes: int
    images: Mapping[str, int]  # by split
    pack_bytes: int
    bits_per_weight: float
    components: Mapping[str, int]  # bits of the pack
    command: str
    environment: Mapping[str, str]
    metric: str = "accuracy"  # what it was measured by, in words
    unit: str = " %"
    value: float | None = None  # on `split`
    kept_epoch: int | None = None  # whose domain the pack is
    split: str = "test"  # what was evaluated
    evaluation: Evaluation | None = None
    pictures: tuple[bytes, ...] = field(default=(), repr=False)  # of the hardest images

    def write(self, folder: Path) -> None:
        """Write it to the run's folder."""
        values = asdict(self) | {
            "format": _FORMAT,
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "pictures": [base64.b64encode(picture).decode() for picture in self.pictures],
        }
        write_atomically(folder / RECORD, json.dumps(values).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote."""
        path = folder / RECORD
        try:
            values = json_object(path, path.read_bytes(), "record", DataError)
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}; polymask learn writes it at its end") from error
        if values.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is of another version of polymask; learn again")
        try:
            found = values["evaluation"]
            pictures = tuple(base64.b64decode(text, validate=True) for text in values["pictures"])
            evaluation = None if found is None else Evaluation.from_json(found)
            return cls(**values | {"evaluation": evaluation, "pictures": pictures})
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error!r}); learn again") from error


def record_learning(
    learned: "Learned", base: "Base", data: "DomainData", loaders: "Loaders", pack: Path, method: str, command: str
) -> LearnRecord:
    """The record of a training that is done; without test images its domain is evaluated on validation."""
    import torch

    from polymask.core.accounting import bits_per_weight, component_bits
    from polymask.core.network import named_tensors
    from polymask.train.predict import evaluate_in_detail

    split, held_out, found = "test", loaders.test, learned.evaluation
    if held_out is None and loaders.val is not None:
        split, held_out = "val", loaders.val
        found = learned.val_evaluation
        if found is None and data.target.kind == "classes":  # elsewhere nothing is confused with anything
            found = evaluate_in_detail(base, learned.domain, loaders.val)
    answers = found.hardest if found is not None and held_out is not None else ()
    tensors = [tensor for _, tensor in named_tensors(base.net)]
    return LearnRecord(
        name=pack.stem,
        method=method,
        base=base.name,
        base_parameters=sum(parameter.numel() for parameter in base.net.parameters()),
        base_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        images={name: len(images) for name, images in data.splits().items()},
        pack_bytes=pack.stat().st_size,
        bits_per_weight=bits_per_weight(base, learned.domain),
        components=component_bits(learned.domain),
        command=command,
        metric=data.target.title,
        unit=data.target.unit,
        value=learned.domain.metrics.get(f"{split}_{data.target.metric}"),
        kept_epoch=learned.domain.metrics.get("kept_epoch"),
        environment={"polymask": __version__, "torch": torch.__version__, "python": platform.python_version()},
        split=split,
        evaluation=found,
        pictures=tuple(held_out.cache.thumbnail(answer.image) for answer in answers if held_out is not None),
    )


def is_learn_run(folder: Path) -> bool:
    """Whether a folder is one that `polymask learn` works in."""
    return any((folder / name).is_file() for name in (RECORD, LOG))


def write_learn_report(folder: Path, out: Path | None = None) -> tuple[LearnRecord, Path]:
    """Write the report of a run's folder into it, or into `out`; returns what it is made of, and where it is."""
    if not (folder / RECORD).is_file():
        raise DataError(f"{folder} has no {RECORD}: its training is not done; go on with it, or learn again")
    record = LearnRecord.read(folder)
    page = learn_page(record, read_log(folder / LOG))
    path = (out or folder) / PAGE
    write_atomically(path, page.encode())
    return record, path


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a training was given, and its epochs; those that were repeated after an interruption once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; polymask learn writes it") from error
    header: dict[str, Any] = {}
    epochs: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        entry = json_object(path, line, f"line {number}", DataError)
        if entry.get("event") == "begin":
            header = entry
        elif entry.get("event") == "epoch" and isinstance(entry.get("epoch"), int):
            epochs[entry["epoch"]] = entry
    return header, [epochs[epoch] for epoch in sorted(epochs)]


def learn_page(record: LearnRecord, log: tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]) -> str:
    """The report as HTML; equal records give equal text."""
    header, epochs = log
    found = record.evaluation
    held_out = any(entry.get("val_accuracy") is not None for entry in epochs)
    curve = list(_points(epochs, "val_accuracy" if held_out else "train_accuracy"))
    images = "validation" if held_out else "training"
    sizes = {
        "pack": bytes_text(record.pack_bytes),
        "bits per weight of the base": f"{record.bits_per_weight:.2f}",
        "a full copy of the base": bytes_text(record.base_bytes),
        "of a full copy": share_text(record.pack_bytes, record.base_bytes),
        "training": duration_text(sum(entry.get("seconds", 0.0) for entry in epochs)),
    }
    answers = zip(found.hardest, record.pictures, strict=False) if found else ()
    return render(
        "learn.html.j2",
        record=record,
        found=found,
        recipe=dict(header.get("recipe", {})),
        seed=header.get("seed"),
        data=header.get("data"),
        images=images,
        kept=next((point for point in curve if point.epoch == record.kept_epoch), None) if held_out else None,
        sizes=sizes,
        hardest=[ExampleImage(picture, answer.truth, answer.top) for answer, picture in answers],
        confused=most_confused(found) if found else [],
        classes=class_table(found) if found else None,
        shown=min(_MOST_CELLS, len(found.classes)) if found else 0,
        curves=_curves(record, curve, images) if curve else "",
        matrix=confusion_matrix(found, name="matrix") if found else "",
        bits=bits_by_component({record.name: record.components}, name="bits") if record.components else "",
    )


def _curves(record: LearnRecord, curve: Sequence[EpochPoint], images: str) -> str:
    measure = record.metric + {" %": ", %"}.get(record.unit, record.unit)
    return figures.accuracy_and_loss({record.method: curve}, name="curves", images=images, measure=measure)


def _points(epochs: Sequence[Mapping[str, Any]], measure: str) -> list[EpochPoint]:
    """The curve, counted through all stages of the training."""
    known = [entry for entry in epochs if entry.get("loss") is not None and entry.get(measure) is not None]
    return [EpochPoint(entry["epoch"] + 1, entry["loss"], entry[measure]) for entry in known]


def most_confused(found: Evaluation, most: int = 6) -> list[tuple[int, int, str, str]]:
    """(how many, of how many, class, answer) of the errors that occur most, twice at least."""
    pairs = [
        (count, sum(row), found.classes[truth], found.classes[guess])
        for truth, row in enumerate(found.confusion)
        for guess, count in enumerate(row)
        if truth != guess and count > 1
    ]
    return sorted(pairs, key=lambda pair: -pair[0])[:most]


def class_table(found: Evaluation) -> PageTable:
    """Every class, the hardest first."""
    classes = sorted((one for one in found.by_class if one.accuracy is not None), key=lambda one: one.accuracy or 0.0)
    rows = [
        PageRow(
            one.name,
            [
                Cell(f"{one.images:,}"),
                Cell(f"{one.right:,}"),
                Cell(f"{one.accuracy:.1f}"),
                Cell(f"{one.low:.1f} to {one.high:.1f}"),
                Cell(one.taken_for) if one.taken_for else Cell(),
            ],
        )
        for one in classes[:_MOST_ROWS]
    ]
    headings = [Heading("images"), Heading("right"), Heading("accuracy, %"), Heading("95 % interval")]
    headings.append(Heading("most often taken for", words=True))
    notes = ["The interval is Wilson's: where it is wide, there are too few images to say more."]
    if len(classes) > _MOST_ROWS:
        notes.append(f"The {_MOST_ROWS} hardest of {len(classes):,} classes; polymask evaluate --csv FILE writes all.")
    return PageTable("classes", "Every class, hardest first", "", "class", headings, rows, notes)


def confusion_matrix(found: Evaluation, *, name: str) -> str:
    """A row for each class, a column for each answer: cells are the shares of the row's images.

    Of many classes it has those that are most often mistaken or given by mistake.
    """
    chosen = _shown_classes(found)
    labels = [found.classes[place] for place in chosen]
    beside, below = 14 + canvas.room_for(labels), 32 + canvas.room_for(labels)
    cell = min(36.0, (640 - beside - 10) / len(chosen))
    side = round(cell * len(chosen))
    with canvas.open_canvas(round(beside + side + 10), round(24 + side + below)) as page:
        axes = page.axes(left=beside, right=10, top=24, bottom=below)
        axes.set_xlim(-0.5, len(chosen) - 0.5)
        axes.set_ylim(len(chosen) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.tick_params(size=0)
        axes.set_xticks([])
        axes.set_yticks([])
        edges = [place - 0.5 for place in range(len(chosen) + 1)]
        axes.hlines(edges, -0.5, len(chosen) - 0.5, color=LINE.light, linewidth=0.6)
        axes.vlines(edges, -0.5, len(chosen) - 0.5, color=LINE.light, linewidth=0.6)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for row, truth in enumerate(chosen):
            total = sum(found.confusion[truth]) or 1
            for column, guess in enumerate(chosen):
                if count := found.confusion[truth][guess]:
                    _cell(axes, row, column, count, count / total, numbered=len(chosen) <= _NUMBERED)
        for place, label in enumerate(labels):
            text = canvas.shortened(label)
            canvas.write(axes, -0.5 - 7 / cell, place, text, ha="right", va="center_baseline")
            canvas.write(axes, place, len(chosen) - 0.5 + 7 / cell, text, rotation=90, ha="center", va="top")
        canvas.heading(axes, "class, by row")
        bottom = (below - 4) / axes.bbox.height
        canvas.write(axes, 0, -bottom, "answer, by column", transform=axes.transAxes, color=MUTED.light)
        told = ", ".join(f"{count} of {total} {a} as {b}" for count, total, a, b in most_confused(found))
        return page.svg(
            name, f"Confusion matrix, {found.accuracy:.1f} % right; most often confused: {told or 'nothing'}."
        )


def _cell(axes: Any, row: int, column: int, count: int, share: float, *, numbered: bool) -> None:
    """One cell: right answers in one colour, wrong ones in another, the more the darker."""
    colour = SERIES[0 if row == column else 1].light
    axes.fill_between(
        [column - 0.5, column + 0.5], row - 0.5, row + 0.5, color=colour, alpha=0.12 + 0.88 * share, linewidth=0
    )
    if numbered:
        ink = PAPER if share > 0.5 else INK
        canvas.write(axes, column, row, f"{count:,}", ha="center", va="center_baseline", color=ink.light)


def _shown_classes(found: Evaluation) -> list[int]:
    """Places of the classes that the matrix has, in the domain's order."""
    matrix, every = found.confusion, range(len(found.classes))
    if len(every) <= _MOST_CELLS:
        return list(every)
    errors = [sum(matrix[at]) + sum(row[at] for row in matrix) - 2 * matrix[at][at] for at in every]
    return sorted(sorted(every, key=lambda at: -errors[at])[:_MOST_CELLS])
