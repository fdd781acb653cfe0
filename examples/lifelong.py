""".venv/bin/python examples/lifelong.py: a domain that says "unknown", learns new classes, and helps another.

Scikit-learn's digits: a domain learns 0 to 4 and calls a letter unknown, then learns 5 to 9 without the images of the
first five, and goes back. Letters are then learned by a few numbers a layer that draw on the digits' masks.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import polymask as pm
from polymask.data.split import SubsetSplit
from polymask.library.versions import keep_version


def classes_of(data: pm.DomainData, begin: int, end: int) -> pm.DomainData:
    """Some of the classes, numbered from 0."""
    parts = {}
    for name, split in data.splits().items():
        some = SubsetSplit(split, np.flatnonzero((split.labels >= begin) & (split.labels < end)))
        parts[name] = some.relabelled(some.labels - begin)
    return replace(data, classes=data.classes[begin:end], **parts)


def main() -> None:
    """Learn, reject, extend, roll back, and draw on what was learned."""
    base = pm.load_base("efficientnet-lite0")
    recipe = pm.get_recipe("quick", side=48, batch_size=16, epochs=3)
    digits, letters = (pm.load_data(name, limit=400) for name in ("digits", "letters"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        first = pm.learn(base, classes_of(digits, 0, 5), recipe=recipe, progress=False).domain
        first.save(path)

        model = pm.MultiDomainModel(base, library=folder)
        for name, data in (("digits", classes_of(digits, 0, 5)), ("letters", letters)):
            images = [data.val.image(place) for place in range(20)]
            unknown = sum(bool(found.unknown) for found in model.predict(images, domain="digits", reject=True))
            print(f"{unknown} of 20 {name} are unknown to the digits 0 to 4")

        keep_version(path)
        wider = pm.extend(base, first, classes_of(digits, 5, 10))
        wider.domain.save(path)
        print(f"{len(wider.domain.classes or [])} classes; new ones {wider.new_test_accuracy:.1f} % right among all")
        before, now = pm.rollback(path)
        print(f"version {before} is version {now} again: {pm.inspect(path).manifest.classes}")

        mixed = pm.learn(base, letters, "affine-mix", recipe, sources={"digits": first}, progress=False).domain
        mixed.save(Path(folder) / "letters.safetensors")
        alone = pm.bake(mixed)
        alone.save(Path(folder) / "alone.safetensors")
        print(f"letters draw on {[name for name, _ in mixed.method.needs]}, and alone on {list(alone.method.needs)}")
    base.verify()


if __name__ == "__main__":
    main()
