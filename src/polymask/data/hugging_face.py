"""Hugging Face datasets: a name on the hub, or a local folder or file in their own formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polymask.data.extras import require
from polymask.data.images import DomainData, some
from polymask.data.split import Labels, digest
from polymask.data.wrapped import Part, wrap
from polymask.errors import DataError

_ROLES = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def load_hugging_face(name: str, seed: int, root: Path | None, download: bool) -> DomainData:
    """Load `name`: user/name or user/name#config on the hub, or a local path.

    A path may be what `save_to_disk` wrote, a parquet file, or a folder that `load_dataset` reads.
    `root` is the folder of downloads. The image column is the one of type Image; the label column
    is the one of type ClassLabel, or a column of numbers or words called label.
    """
    tables = _open_set(name, root, download)
    roles = {
        role: next((tables[alias] for alias in aliases if alias in tables), None) for role, aliases in _ROLES.items()
    }
    if roles["train"] is None:
        raise DataError(f"hf:{name} has no split train, only {some(list(tables))}; rename one")
    train = roles["train"]
    image_column = _image_column(name, train)
    label_column = _label_column(name, train)
    classes = _names_in(train, label_column)
    parts = {}
    for role, table in roles.items():
        labels = None if table is None else _labels_in(name, table, label_column, classes)
        if table is not None and labels is not None:
            parts[role] = _part(table, image_column, labels)
    return wrap(Path(name.partition("#")[0]).stem, classes, parts, seed)


def _open_set(name: str, root: Path | None, download: bool) -> dict[str, Any]:
    """The splits of a dataset by name; one table alone is train."""
    datasets = require("datasets", "'polymask[hf]'")
    path, _, config = name.partition("#")
    local = Path(path)
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            found = datasets.load_from_disk(path)
        elif local.suffix == ".parquet" and local.is_file():
            found = datasets.load_dataset("parquet", data_files=path, cache_dir=_text(root))
        else:
            found = datasets.load_dataset(
                path,
                config or None,
                cache_dir=_text(root),
                download_config=datasets.DownloadConfig(local_files_only=not download),
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hf:{name} cannot be loaded ({error}); give user/name on the hub, or a local path") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _image_column(name: str, table: Any) -> str:
    kinds = {column: type(feature).__name__ for column, feature in table.features.items()}
    return _the_one(name, "Image", [c for c, kind in kinds.items() if kind == "Image"], "image")


def _label_column(name: str, table: Any) -> str:
    kinds = {column: type(feature).__name__ for column, feature in table.features.items()}
    found = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    found = found or [column for column in ("label", "labels", "class") if column in kinds]
    return _the_one(name, "ClassLabel", found, "label")


def _the_one(name: str, kind: str, found: Sequence[str], usual: str) -> str:
    if len(found) == 1:
        return found[0]
    if usual in found:
        return usual
    many = f"several columns of type {kind} ({', '.join(found)})" if found else f"no {kind} column"
    raise DataError(f"hf:{name} has {many}; leave one, or call the right one {usual!r}")


def _names_in(train: Any, column: str) -> list[str]:
    feature = train.features[column]
    if type(feature).__name__ == "ClassLabel":
        return list(feature.names)
    return [str(value) for value in sorted(train.unique(column))]


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


def _part(table: Any, column: str, labels: Labels) -> Part:
    datasets = require("datasets", "'polymask[hf]'")
    encoded = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def read(index: int) -> bytes | Path:
        entry = encoded[index][column]
        return Path(entry["path"]) if entry["bytes"] is None else bytes(entry["bytes"])

    return Part(read, labels, lambda: digest(table._fingerprint, column))
