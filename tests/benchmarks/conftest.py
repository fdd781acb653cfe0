"""A few test labels in the organisers' layout, and what developers have beside the project."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polymask.benchmarks.submission import DOMAIN_IDS

SHARED = Path(__file__).parents[2].parent / "shared"
EACH = 4  # test images a domain


def annotations(domain: str, count: int = EACH) -> dict:
    """The last `count` test images of a domain, with classes 0, 1, 0, 1 …"""
    numbers = DOMAIN_IDS[domain]
    answers = [
        {"image_id": image, "category_id": numbers.categories[place % 2], "iscrowd": 0}
        for place, image in enumerate(numbers.images[-count:])
    ]
    return {"images": [], "annotations": answers, "categories": []}


@pytest.fixture
def make_labels(tmp_path: Path) -> Callable[..., Path]:
    """Write labels_test.zip; changes replace or, with None, leave out a domain's content."""

    def make(folder: str = "", **changes: object) -> Path:
        contents = {name: annotations(name) for name in DOMAIN_IDS}
        contents |= {name.replace("_", "-"): content for name, content in changes.items()}
        path = tmp_path / "labels_test.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                if content is not None:
                    archive.writestr(f"{folder}{name}_test.json", json.dumps(content))
        return path

    return make


@pytest.fixture
def shared() -> Path:
    """The folder that developers have beside the project, and a user does not."""
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}")
    return SHARED
