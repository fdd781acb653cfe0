"""From the name of a source to its images: folders, libraries, and the embedded domains.

`letters` are drawn in the fonts that ship with matplotlib: 26 classes, test fonts never seen before.
A class is a letter in either case. The small l is left out: in a sans-serif font it is the capital
I. Fonts are held out by family, since a bold or slanted cut of a font is nearly the font itself:

    train   DejaVu Sans, DejaVu Sans Mono, STIX General     12 fonts
    val     DejaVu Serif                                     4 fonts
    test    Computer Modern                                  6 fonts

Fonts of symbols are not used. Size, place, slant and the greys of ink and paper vary; they depend
on the letter, the font and the number of the drawing alone, so the domain is always the same.

`solar-cells` are 2,624 electroluminescence photos of elpv-dataset, in two classes. Experts judged each cell functional
or defective, and said whether they were sure: a defect probability of 0 (1,508 cells), 1/3 (295), 2/3 (106) or 1
(715). We take the judgement and leave the doubt: below one half is "functional" (68.7 % of the cells), above is
"defective". All photos are kept: dropping the unsure ones would make the domain easier than the work it stands for.
Papers differ in how they label the unsure cells, so accuracies here cannot be set beside published ones (Deitsch et
al., Solar Energy 2019: 88.4 % with a CNN, 75 % for train). A quarter is test, and 15 % of the rest is val, in
proportion to probability and cell type. Cells of one module may fall on both sides, since the dataset does not say
which module a cell is from.
"""

from __future__ import annotations

import difflib
import importlib.util
import string
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polymask.core.target import Target, get_target
from polymask.data.folders import find_table, folders, load_decathlon, load_folder, load_sketch
from polymask.data.images import TRAIN_VAL, TRAIN_VAL_TEST, DomainData, limited, stratified
from polymask.data.libraries import load_hugging_face, load_torchvision
from polymask.data.split import ArraySplit, FileSplit, SubsetSplit, WrappedSplit, require, require_vision, stamp
from polymask.data.tables import load_table
from polymask.errors import DataError
from polymask.files import digest

if TYPE_CHECKING:
    from PIL.Image import Image

# Seven times larger, since 8 pixels leave a random crop few places to be; the margin is what a
# centre crop of 7/8 takes away.
_SCALE, _PAD = 7, ((0, 0), (4, 4), (4, 4))


def load_digits() -> DomainData:
    """Load the digits, enlarged to 64 × 64 and cut 70 / 15 / 15, always alike."""
    pil = require_vision("PIL.Image")
    digits = require("sklearn.datasets", "'polymask[demo]'").load_digits()
    small = np.round(digits.images * (255 / 16)).astype(np.uint8)  # the values are 0 … 16
    side = 8 * _SCALE
    large = [pil.fromarray(image).resize((side, side), pil.Resampling.BICUBIC) for image in small]
    images = np.pad(np.stack([np.asarray(image) for image in large]), _PAD)
    whole = ArraySplit("digits", images, digits.target)
    train, val, test = (SubsetSplit(whole, part) for part in stratified(whole.labels, TRAIN_VAL_TEST, seed=0))
    return DomainData("digits", tuple("0123456789"), train, val, test, mirror=False)


_CUTS = ("", "-Bold", "-Oblique", "-BoldOblique")
_FONTS = {
    "train": [f"DejaVu{family}{cut}" for family in ("Sans", "SansMono") for cut in _CUTS]
    + [f"STIXGeneral{cut}" for cut in ("", "Bol", "Italic", "BolIta")],
    "val": [f"DejaVuSerif{cut}" for cut in ("", "-Bold", "-Italic", "-BoldItalic")],
    "test": ["cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10"],
}
_DRAWINGS = {"train": 6, "val": 4, "test": 6}  # of each letter in each font
_SIDE, _MARGIN = 64, 4  # a centre crop of 7/8 keeps the whole letter


def load_letters() -> DomainData:
    """Letters, drawn when asked for: 1,872 for train, 416 for val, 936 for test."""
    train, val, test = map(_split, _FONTS)
    return DomainData("letters", tuple(string.ascii_uppercase), train, val, test, mirror=False)


def _split(part: str) -> WrappedSplit:
    matplotlib = require("matplotlib", "'polymask[plot]'")
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [folder / f"{font}.ttf" for font in _FONTS[part]]
    for font in fonts:
        if not font.is_file():
            raise DataError(f"{font} is missing; install matplotlib again")
    order = list(product(fonts, range(26), range(_DRAWINGS[part])))
    return WrappedSplit(
        f"letters {part}",
        lambda index: _draw(*order[index]),
        [label for _, label, _ in order],
        lambda: digest(f"letters {part} 1", *map(stamp, fonts)),
    )


def _draw(font: Path, label: int, drawing: int) -> Image:
    """Draw one letter, dark on light, wholly inside the picture."""
    pil, fonts = require_vision("PIL.Image"), require_vision("PIL.ImageFont")
    draw = np.random.default_rng([zlib.crc32(font.name.encode()), label, drawing])
    letter = string.ascii_uppercase[label]
    letter = letter.lower() if drawing % 2 and letter != "L" else letter
    size, angle = int(draw.integers(34, 53)), draw.uniform(-15, 15)
    paper, ink = int(draw.integers(190, 256)), int(draw.integers(0, 90))
    glyph = pil.new("L", (2 * _SIDE, 2 * _SIDE))
    require_vision("PIL.ImageDraw").Draw(glyph).text(
        (_SIDE, _SIDE), letter, fill=255, font=fonts.truetype(font, size, layout_engine=fonts.Layout.BASIC), anchor="mm"
    )
    glyph = glyph.rotate(angle, pil.Resampling.BICUBIC)
    glyph = glyph.crop(glyph.getbbox())
    glyph.thumbnail((_SIDE - 2 * _MARGIN, _SIDE - 2 * _MARGIN))
    room = _SIDE - 2 * _MARGIN - np.array(glyph.size)
    left, top = draw.integers(0, room + 1) + _MARGIN
    picture: Image = pil.new("L", (_SIDE, _SIDE), paper)
    picture.paste(ink, (int(left), int(top)), glyph)
    return picture


def load_solar_cells() -> DomainData:
    """Load the cells, always cut alike. Licence of the photos: CC BY-NC-SA 4.0."""
    spec = importlib.util.find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        raise DataError("elpv-dataset is not installed; pip install 'polymask[demo]'")
    folder = Path(spec.origin).parent / "data"
    rows = [line.split() for line in (folder / "labels.csv").read_text("utf-8").splitlines()]
    rows = [row for row in rows if row]
    probability = np.array([float(row[1]) for row in rows])
    whole = FileSplit([folder / row[0] for row in rows], (probability > 0.5).astype(np.int64))
    monocrystalline = np.array([row[2] == "mono" for row in rows])
    strata = np.round(3 * probability).astype(np.int64) * 2 + monocrystalline
    rest, test = stratified(strata, (0.75, 0.25), seed=0)
    train, val = (SubsetSplit(whole, rest[part]) for part in stratified(strata[rest], TRAIN_VAL, seed=0))
    return DomainData("solar-cells", ("functional", "defective"), train, val, SubsetSplit(whole, test))


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
    target: str | Target | None = None,
    fewest: int | None = None,
    root: str | Path | None = None,
    download: bool = True,
) -> DomainData:
    """Load a domain's images.

    `source` is one of

    * a folder: `train/ val/ test/` of class folders, or class folders alone;
    * a table, `labels.csv` or another .csv file, or a folder of images with one in it or beside it;
    * `decathlon:ROOT/NAME` or `sketch:ROOT/SET`: the benchmarks' own layouts;
    * `torchvision:NAME` or `hf:NAME`: kept in `root`, downloaded unless `download` is False;
    * `digits`, `letters`, `solar-cells`: these come with pip (`./digits` is a folder).

    `seed` rules the cuts that a source needs, and `limit`: at most so many training images, in proportion to the
    classes. `classes` keeps the first so many of those. `mirror` overrides whether training may mirror images.
    `target` is what a table's labels are: "classes", "labels" (several for each image) or "values" (numbers). `fewest`
    classes there must be: two for a domain of its own, unless this says otherwise.
    """
    if seed < 0 or (limit is not None and limit < 1):
        raise DataError(f"seed {seed} and limit {limit}: give a seed from 0 and a limit from 1")
    data = _load_table(source, seed, target) or _load(source, seed, None if root is None else Path(root), download)
    if target is not None and get_target(target).kind != data.target.kind:
        found, wanted = data.target.kind, get_target(target).kind
        raise DataError(f"{source} has {found}, not {wanted}; give a table of {wanted}, such as labels.csv")
    data = replace(data, seed=seed)
    data.check_enough(fewest)
    if classes is not None:
        data = data.first_classes(classes)
    if limit is not None:
        data = replace(data, train=limited(data.train, limit, seed, data.name))
    return data if mirror is None else replace(data, mirror=mirror)


def _load_table(source: str | Path, seed: int, target: str | Target | None) -> DomainData | None:
    """The domain of a table, where the source is one or has one."""
    if str(source) in EMBEDDED and not isinstance(source, Path):
        return None
    table = find_table(Path(source))
    return None if table is None else load_table(table, Path(source), seed, target)


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
    kinds = [*BENCHMARKS, *LIBRARIES]
    near = [f"{name}:{rest}" for name in difflib.get_close_matches(kind, kinds)] if colon else []
    near += difflib.get_close_matches(text, EMBEDDED)
    parent = Path(text).parent
    if parent.is_dir():
        names = [child.name for child in folders(parent)]
        near += [str(parent / name) for name in difflib.get_close_matches(Path(text).name, names)]
    all_ways = f"give a folder, a .csv file, {', '.join(f'{name}:…' for name in kinds)}, or {', '.join(EMBEDDED)}"
    hint = f"did you mean {' or '.join(near)}?" if near else all_ways
    raise DataError(f"no data called {text!r}; {hint}")
