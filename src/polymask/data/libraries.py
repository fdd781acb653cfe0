"""Datasets of other libraries: torchvision's by name, and Hugging Face's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from polymask.data.images import DomainData, complete, may_mirror, some
from polymask.data.split import Labels, Split, WrappedSplit, require, require_vision, stamp
from polymask.errors import DataError
from polymask.files import digest

Arguments = dict[str, Any]  # a dataset's own way of asking for one split

_WHOLE: dict[str, Arguments] = {"train": {}}
_FLAG: dict[str, Arguments] = {"train": {"train": True}, "test": {"train": False}}
_TWO: dict[str, Arguments] = {"train": {"split": "train"}, "test": {"split": "test"}}
_TRAIN_VAL: dict[str, Arguments] = {"train": {"split": "train"}, "test": {"split": "val"}}
_THREE: dict[str, Arguments] = {**_TWO, "val": {"split": "val"}}
_DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class _Layout:
    """How a dataset splits, and which attributes hold its labels and class names.

    Sets whose test labels are secret (ImageNet, …) use their val as test, as the field does.
    """

    parts: dict[str, Arguments]
    labels: str | None  # None: labels are read with the images
    classes: str | tuple[str, ...] = "classes"
    downloads: bool = True  # whether its constructor has the argument


_LAYOUTS = {
    "Caltech101": _Layout(_WHOLE, "y", "categories"),
    "Caltech256": _Layout(_WHOLE, "y", "categories"),
    "CIFAR10": _Layout(_FLAG, "targets"),
    "CIFAR100": _Layout(_FLAG, "targets"),
    "Country211": _Layout({**_TWO, "val": {"split": "valid"}}, "targets"),
    "DTD": _Layout(_THREE, "_labels"),
    "EMNIST": _Layout({role: {**_FLAG[role], "split": "balanced"} for role in ("train", "test")}, "targets"),
    "EuroSAT": _Layout(_WHOLE, "targets"),
    "FashionMNIST": _Layout(_FLAG, "targets"),
    "FGVCAircraft": _Layout(_THREE, "_labels"),
    "Flowers102": _Layout(_THREE, "_labels"),
    "Food101": _Layout(_TWO, "_labels"),
    "GTSRB": _Layout(_TWO, "_samples", tuple(f"sign {i:02}" for i in range(43))),
    "ImageNet": _Layout(_TRAIN_VAL, "targets", downloads=False),
    "Imagenette": _Layout(_TRAIN_VAL, "_samples"),
    "KMNIST": _Layout(_FLAG, "targets"),
    "MNIST": _Layout(_FLAG, "targets"),
    "OxfordIIITPet": _Layout({**_TWO, "train": {"split": "trainval"}}, "_labels"),
    "PCAM": _Layout(_THREE, None, ("no tumour", "tumour")),
    "RenderedSST2": _Layout(_THREE, "_samples"),
    "SEMEION": _Layout(_WHOLE, "labels", _DIGITS),
    "StanfordCars": _Layout(_TWO, "_samples"),
    "STL10": _Layout(_TWO, "labels"),
    "SUN397": _Layout(_WHOLE, "_labels"),
    "SVHN": _Layout(_TWO, "labels", _DIGITS),
    "USPS": _Layout(_FLAG, "targets", _DIGITS),
}


def load_torchvision(name: str, seed: int, root: Path | None, download: bool) -> DomainData:
    """Load a torchvision dataset kept in `root`, by default a folder of the user's cache."""
    datasets = require_vision("torchvision.datasets")
    if name not in _LAYOUTS:
        near = difflib.get_close_matches(name, _LAYOUTS, n=3, cutoff=0.4) or list(_LAYOUTS)
        raise DataError(f"torchvision:{name} is not known; try one of {', '.join(near)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "polymask/torchvision"
    layout, home = _LAYOUTS[name], root or cache / name
    home.mkdir(parents=True, exist_ok=True)
    attempts: list[Arguments] = [{"download": False}, {"download": True}][: 1 + download]
    attempts = attempts if layout.downloads else [{}]
    sets = {role: _open(getattr(datasets, name), home, arguments, attempts) for role, arguments in layout.parts.items()}
    splits = {role: _split(f"{name} {role}", dataset, layout, home) for role, dataset in sets.items()}
    names = layout.classes if isinstance(layout.classes, tuple) else getattr(sets["train"], layout.classes)
    # ImageNet's names are tuples of synonyms, and two of its classes share the first one.
    return domain_of(name, [n if isinstance(n, str) else ", ".join(n) for n in names], splits, seed)


def _split(title: str, dataset: Any, layout: _Layout, home: Path) -> Split:
    if layout.labels is None:
        labels = [dataset[index][1] for index in range(len(dataset))]
    elif layout.labels == "_samples":
        labels = [label for _, label in dataset._samples]
    else:
        labels = getattr(dataset, layout.labels)

    def fingerprint() -> str:
        # Every file of the folder counts: only torchvision knows which ones it reads.
        return digest(title, *(stamp(path) for path in sorted(home.rglob("*")) if path.is_file()))

    return WrappedSplit(title, lambda index: dataset[index][0], np.asarray(labels, dtype=np.int64), fingerprint)


def domain_of(name: str, classes: Sequence[str], splits: Mapping[str, Split], seed: int) -> DomainData:
    """A domain of another library's splits; class names that no image has are dropped."""
    for role, split in splits.items():
        if bare := int(((split.labels < 0) | (split.labels >= len(classes))).sum()):
            raise DataError(f"{name}: {bare} of {len(split)} {role} images have no label; leave them out")
    used = np.unique(np.concatenate([split.labels for split in splits.values()]))
    numbered = {role: split.relabelled(np.searchsorted(used, split.labels)) for role, split in splits.items()}
    parts, notes = complete(numbered, seed, name)
    if len(used) < len(classes):
        notes.append(f"dropped {len(classes) - len(used)} class names that no image has")
    names = tuple(classes[label] for label in used)
    return DomainData(name, names, *parts, mirror=may_mirror(name), notes=tuple(notes), seed=seed)


def _open(kind: Any, home: Path, arguments: Arguments, attempts: list[Arguments]) -> Any:
    """Open what is there; download it only if it is not."""
    # A loader that gives the path back leaves the decoding, and all its odd cases, to us.
    extra = {"loader": Path} if "loader" in signature(kind.__init__).parameters else {}
    for attempt in attempts:
        try:
            return kind(home, **arguments, **extra, **attempt)
        except (RuntimeError, OSError, ValueError, ImportError) as error:
            problem = error
    raise DataError(
        f"torchvision:{kind.__name__} is not complete in {home} ({problem}); put it there, or name its folder with root"
    ) from problem


ROLES = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}


def load_hugging_face(name: str, seed: int, root: Path | None, download: bool) -> DomainData:
    """Load `name`: user/name or user/name#config on the hub, or a local path.

    A path may be what `save_to_disk` wrote, a parquet file, or a folder that `load_dataset` reads.
    `root` is the folder of downloads. The image column is the one of type Image; the label column
    is the one of type ClassLabel, or a column of numbers or words called label.
    """
    tables = _open_set(name, root, download)
    roles = {
        role: next((tables[alias] for alias in aliases if alias in tables), None) for role, aliases in ROLES.items()
    }
    train = roles["train"]
    if train is None:
        raise DataError(f"hf:{name} has no split train, only {some(list(tables))}; rename one")
    kinds = {column: type(feature).__name__ for column, feature in train.features.items()}
    images, labels = ([c for c, kind in kinds.items() if kind == wanted] for wanted in ("Image", "ClassLabel"))
    image_column = _the_one(name, "Image", images, "image")
    usual = [column for column in ("label", "labels", "class") if column in kinds]
    label_column = _the_one(name, "ClassLabel", labels or usual, "label")
    numbered = kinds[label_column] == "ClassLabel"
    values = train.features[label_column].names if numbered else map(str, sorted(train.unique(label_column)))
    classes, splits, title = list(values), {}, Path(name.partition("#")[0]).stem
    for role, table in roles.items():
        if table is not None and (found := _labels_in(name, table, label_column, classes)) is not None:
            splits[role] = _table_split(f"{title} {role}", table, image_column, found)
    return domain_of(title, classes, splits, seed)


def _open_set(name: str, root: Path | None, download: bool) -> dict[str, Any]:
    """The splits of a dataset by name; one table alone is train."""
    datasets = require("datasets", "'polymask[hf]'")
    path, _, config = name.partition("#")
    local, cache = Path(path), None if root is None else str(root)
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            found = datasets.load_from_disk(path)
        elif local.suffix == ".parquet" and local.is_file():
            found = datasets.load_dataset("parquet", data_files=path, cache_dir=cache)
        else:
            fetch = datasets.DownloadConfig(local_files_only=not download)
            found = datasets.load_dataset(path, config or None, cache_dir=cache, download_config=fetch)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hf:{name} cannot be loaded ({error}); give user/name on the hub, or a local path") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _the_one(name: str, kind: str, found: Sequence[str], usual: str) -> str:
    if len(found) == 1:
        return found[0]
    if usual in found:
        return usual
    many = f"several columns of type {kind} ({', '.join(found)})" if found else f"no {kind} column"
    raise DataError(f"hf:{name} has {many}; leave one, or call the right one {usual!r}")


def _labels_in(name: str, table: Any, column: str, classes: Sequence[str]) -> Labels | None:
    """Labels as positions in `classes`; None where the source keeps them secret."""
    values = table[column][:]
    if type(table.features[column]).__name__ == "ClassLabel":
        labels = np.array([-1 if value is None else value for value in values], dtype=np.int64)
        return None if (labels < 0).all() else labels
    number = {text: label for label, text in enumerate(classes)}
    unknown = sorted({str(value) for value in values} - set(number))
    if unknown:
        raise DataError(f"hf:{name}: train has no image of {some(unknown)}; add some")
    return np.array([number[str(value)] for value in values], dtype=np.int64)


def _table_split(title: str, table: Any, column: str, labels: Labels) -> Split:
    datasets = require("datasets", "'polymask[hf]'")
    encoded = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def read(index: int) -> bytes | Path:
        entry = encoded[index][column]
        return Path(entry["path"]) if entry["bytes"] is None else bytes(entry["bytes"])

    return WrappedSplit(title, read, labels, lambda: digest(table._fingerprint, column))
