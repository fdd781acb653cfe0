"""Small image folders in the layouts of the benchmarks."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from polymask.benchmarks.submission import DOMAIN_IDS


def draw_image(path: Path, label: int, number: int) -> None:
    """A noisy square whose colour tells its class."""
    draw = np.random.default_rng([label, number])
    pixels = draw.integers(0, 60, (32, 32, 3))
    pixels[..., label % 3] += 150
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def make_folder(root: Path, classes: int = 2, train: int = 8, test: int = 4) -> Path:
    """root/{train,test}/CLASS/…"""
    for part, count in (("train", train), ("test", test)):
        for label in range(classes):
            for number in range(count):
                place = root / part / f"class-{label}" / f"{number}.png"
                draw_image(place, label, number + 1000 * (part == "test"))
    return root


def make_decathlon(root: Path, name: str, *, labelled: bool = True, each: int = 6) -> Path:
    """A domain in the challenge's layout, with the ids of its first classes and test images."""
    numbers = DOMAIN_IDS[name]
    first = numbers.images[0]
    for part, start in (("train", first - 1000), ("val", first - 500), ("test", first)):
        images, answers = [], []
        for place in range(2 * each if part == "train" else each):
            file = f"data/{name}/{part}/{place + 1:06}.png"
            draw_image(root / file, place % 2, place + start)
            images.append({"id": start + place, "file_name": file})
            category = numbers.categories[place % 2]
            answers.append({"image_id": start + place, "category_id": category})
        categories = [{"id": numbers.categories[label], "name": f"c{label}"} for label in (0, 1)]
        stripped = part == "test" and not labelled
        content = {
            "images": images,
            "annotations": [] if stripped else answers,
            "categories": categories,
        }
        notes = root / "annotations" / f"{name}_{part}{'_stripped' if stripped else ''}.json"
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text(json.dumps(content))
    return root
