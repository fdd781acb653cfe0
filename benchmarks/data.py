"""Whether images keep up with training: the share of training time spent waiting for them.

    python benchmarks/data.py --out results/data.json    # about 2 minutes on two free cores
    python benchmarks/data.py --table results/data.json  # print it again

Waiting is wall-clock time between the end of a step and the next batch, as a share of an epoch.
"Making" is the CPU time of a batch by itself, relative to that of a step: threads make batches while
steps run, on the same cores. "Reading" is the decoding of all images before the first epoch; its
share is of a run with as many epochs as the recipe has. The photographs are JPEG files of
500 × 375 pixels, generated for this benchmark, in one folder per class.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cost.timing import markdown
from PIL import Image

import polymask as pm
from polymask.train.learn import make_loaders
from polymask.train.learner import DomainLearner
from polymask.train.recipe import get_recipe

BASE, METHOD = "efficientnet-lite0", "affine-full"
PHOTOGRAPHS, CLASSES = 500, 5
SIDES = {"digits": 48, "letters": 64, "solar-cells": 96, "photographs": 96}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--table", type=Path, help="print what was measured before")
    parser.add_argument("--limit", type=int, default=320, help="images to learn from, at most")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    options = parser.parse_args()
    if options.table is not None:
        results = json.loads(options.table.read_text())
    else:
        results = measure_all(options.only, options.limit)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1) if options.json else table(results))


def measure_all(sources: list[str], limit: int) -> dict[str, Any]:
    """Measure every source, one after another."""
    base, rows = pm.load_base(BASE), {}
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            place = source
            if source == "photographs":
                place = folder
                draw_photographs(Path(folder))
            rows[source] = measure(base, place, SIDES[source], limit)
    return {
        "setup": {
            "base": BASE,
            "method": METHOD,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "polymask": pm.__version__,
        },
        "sources": rows,
    }


def measure(base: pm.Base, source: str, side: int, limit: int) -> dict[str, Any]:
    """Measure two epochs, of which the second counts, and the cost of batches and steps alone."""
    recipe = get_recipe("quick", side=side)
    begin = time.perf_counter()
    images = pm.load_data(source, limit=limit)
    loaders = make_loaders(images, base.input, recipe)
    reading = time.perf_counter() - begin
    domain = pm.new_domain(base, METHOD, images.classes, norms="affine").train()
    learner = DomainLearner(base, domain, recipe)
    waited = worked = 0.0
    for epoch in range(2):  # the first one pays for imports
        waited = worked = 0.0
        begin = time.perf_counter()
        for batch, labels in loaders.train.batches(epoch):
            came = time.perf_counter()
            learner.step(batch, labels, float(epoch))
            done = time.perf_counter()
            waited, worked, begin = waited + came - begin, worked + done - came, done
    used = time.process_time()
    batches = list(loaders.train.batches(2))
    making = time.process_time() - used
    used = time.process_time()
    for batch, labels in batches[:4]:
        learner.step(batch, labels, 1.0)
    stepping = (time.process_time() - used) / 4 * len(batches)
    return {
        "side": side,
        "images": len(loaders.train.cache),
        "waiting_share": round(waited / (waited + worked), 4),
        "making_share": round(making / (making + stepping), 4),
        "reading_share": round(reading / (reading + recipe.epochs * (waited + worked)), 4),
        "reading_seconds": round(reading, 2),
        "training_images_per_second": round(len(loaders.train.cache) / (waited + worked), 1),
    }


def draw_photographs(folder: Path) -> None:
    """Write JPEG files with the fine and coarse detail of photographs, in one folder per class."""
    random = np.random.default_rng(0)
    for number in range(PHOTOGRAPHS):
        place = folder / f"class {number % CLASSES}"
        place.mkdir(exist_ok=True)
        pixels = np.zeros((375, 500, 3), np.float32)
        for size in (4, 16, 64):
            coarse = random.integers(0, 255, (size, size, 3), dtype=np.uint8)
            pixels += np.asarray(Image.fromarray(coarse).resize((500, 375)), np.float32) / 3
        pixels += random.normal(0, 6, pixels.shape)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(place / f"{number}.jpg", quality=90)


def table(results: dict[str, Any]) -> str:
    """Shares in percent."""
    rows = [["images", "px", "waiting", "making, of CPU", "reading, of a run", "images a second"]]
    for source, row in results["sources"].items():
        shares = [f"{100 * row[f'{name}_share']:.1f} %" for name in ("waiting", "making", "reading")]
        rows.append([source, str(row["side"]), *shares, str(row["training_images_per_second"])])
    return markdown(rows)


if __name__ == "__main__":
    main()
