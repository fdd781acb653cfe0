"""From the name of a source to its images."""

import difflib
from dataclasses import replace
from pathlib import Path

from polymask.data.embedded import load_digits, load_letters, load_solar_cells
from polymask.data.folders import folders, load_decathlon, load_folder, load_sketch
from polymask.data.images import DomainData
from polymask.data.libraries import load_hugging_face, load_torchvision
from polymask.data.split import limited
from polymask.errors import DataError

EMBEDDED = {"digits": load_digits, "letters": load_letters, "solar-cells": load_solar_cells}
BENCHMARKS = {"decathlon": load_decathlon, "sketch": load_sketch}
LIBRARIES = {"hf": load_hugging_face, "torchvision": load_torchvision}


def load_data(
    source: str | Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    classes: int | None = None,
    mirror: bool | None = None,
    root: str | Path | None = None,
    download: bool = True,
) -> DomainData:
    """Load a domain's images.

    `source` is one of

    * a folder: `train/ val/ test/` of class folders, or class folders alone;
    * `decathlon:ROOT/NAME` or `sketch:ROOT/SET`: the benchmarks' own layouts;
    * `torchvision:NAME` or `hf:NAME`: kept in `root`, downloaded unless `download` is False;
    * `digits`, `letters`, `solar-cells`: these come with pip (`./digits` is a folder).

    `seed` rules the cuts that a source needs, and `limit`: at most so many training images, in
    proportion to the classes. `classes` keeps the first so many of those. `mirror` overrides
    whether training may mirror images.
    """
    if seed < 0 or (limit is not None and limit < 1):
        raise DataError(f"seed {seed} and limit {limit}: give a seed from 0 and a limit from 1")
    data = _load(source, seed, None if root is None else Path(root), download)
    if classes is not None:
        data = data.first_classes(classes)
    if limit is not None:
        data = replace(data, train=limited(data.train, limit, seed, data.name))
    return data if mirror is None else replace(data, mirror=mirror)


def _load(source: str | Path, seed: int, root: Path | None, download: bool) -> DomainData:
    text = str(source)
    kind, colon, rest = text.partition(":")
    if isinstance(source, Path):
        return load_folder(source, seed)
    if text in EMBEDDED:
        return EMBEDDED[text]()
    if colon and kind in BENCHMARKS:
        return BENCHMARKS[kind](rest, seed)
    if colon and kind in LIBRARIES:
        return LIBRARIES[kind](rest, seed, root, download)
    if Path(text).exists():
        return load_folder(Path(text), seed)
    raise DataError(_unknown(text))


def _unknown(text: str) -> str:
    """What was meant, perhaps: an embedded domain, a kind of source, or a folder nearby."""
    kind, colon, rest = text.partition(":")
    near = [f"{name}:{rest}" for name in difflib.get_close_matches(kind, _kinds())] if colon else []
    near += difflib.get_close_matches(text, EMBEDDED)
    parent = Path(text).parent
    if parent.is_dir():
        names = [child.name for child in folders(parent)]
        near += [str(parent / name) for name in difflib.get_close_matches(Path(text).name, names)]
    kinds = ", ".join(f"{kind}:…" for kind in _kinds())
    all_ways = f"give a folder, {kinds}, or {', '.join(EMBEDDED)}"
    hint = f"did you mean {' or '.join(near)}?" if near else all_ways
    return f"no data called {text!r}; {hint}"


def _kinds() -> list[str]:
    return [*BENCHMARKS, *LIBRARIES]
