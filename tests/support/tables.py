"""Small folders of images with a table: one class, several labels or numbers for each image."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = ("red", "green", "blue")


def paint(path: Path, shades: tuple[float, float, float], number: int) -> None:
    """A noisy square of a colour, its channels from 0 to 1."""
    pixels = np.random.default_rng(number).integers(0, 40, (24, 24, 3)) + 200 * np.array(shades)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_table(path: Path, rows: list[list[object]], *header: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def make_classes(root: Path, counts: tuple[int, ...] = (8, 8)) -> Path:
    """root/labels.csv of path and label: so many images of each colour."""
    rows: list[list[object]] = []
    for place, count in enumerate(counts):
        for number in range(count):
            shades = tuple(float(place == channel) for channel in range(3))
            paint(root / "photos" / f"{COLOURS[place]}-{number}.png", shades, 100 * place + number)
            rows.append([f"photos/{COLOURS[place]}-{number}.png", COLOURS[place]])
    write_table(root / "labels.csv", rows, "path", "label")
    return root


def make_labels(root: Path, count: int = 48) -> Path:
    """root/labels.csv of path and label, as in red;blue: which channels are bright."""
    rows: list[list[object]] = []
    for number in range(count):
        shades = tuple(float(number >> channel & 1) for channel in range(3))
        paint(root / f"{number}.png", shades, number)
        rows.append([f"{number}.png", ";".join(c for c, shade in zip(COLOURS, shades, strict=True) if shade)])
    write_table(root / "labels.csv", rows, "path", "label")
    return root


def make_values(root: Path, count: int = 48) -> Path:
    """root/labels.csv of path and brightness, from 1000 to 1000 + 10 (count - 1)."""
    rows: list[list[object]] = []
    for number in range(count):
        paint(root / f"{number}.png", (number / count,) * 3, number)
        rows.append([f"{number}.png", 1000 + 10 * number])
    write_table(root / "labels.csv", rows, "path", "brightness")
    return root
