"""Letters drawn in the fonts that ship with matplotlib: 26 classes, test fonts never seen before.

A class is a letter in either case. The small l is left out: in a sans-serif font it is the capital
I. Fonts are held out by family, since a bold or slanted cut of a font is nearly the font itself:

    train   DejaVu Sans, DejaVu Sans Mono, STIX General     12 fonts
    val     DejaVu Serif                                     4 fonts
    test    Computer Modern                                  6 fonts

Fonts of symbols are not used. Size, place, slant and the greys of ink and paper vary; they depend
on the letter, the font and the number of the drawing alone, so the domain is always the same.
"""

from __future__ import annotations

import string
import zlib
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polymask.data.extras import require, require_vision
from polymask.data.images import DomainData
from polymask.data.split import WrappedSplit, digest, stamp
from polymask.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

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
    splits = {part: _split(part) for part in _FONTS}
    classes = tuple(string.ascii_uppercase)
    return DomainData("letters", classes, splits["train"], splits["val"], splits["test"], mirror=False)


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
        (_SIDE, _SIDE),
        letter,
        fill=255,
        font=fonts.truetype(font, size, layout_engine=fonts.Layout.BASIC),
        anchor="mm",
    )
    glyph = glyph.rotate(angle, pil.Resampling.BICUBIC)
    glyph = glyph.crop(glyph.getbbox())
    glyph.thumbnail((_SIDE - 2 * _MARGIN, _SIDE - 2 * _MARGIN))
    room = _SIDE - 2 * _MARGIN - np.array(glyph.size)
    left, top = draw.integers(0, room + 1) + _MARGIN
    picture: Image = pil.new("L", (_SIDE, _SIDE), paper)
    picture.paste(ink, (int(left), int(top)), glyph)
    return picture
