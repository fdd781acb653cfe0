"""Small pictures on disk, and the folder of real data where there is one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def picture(seed: int = 0, width: int = 24, height: int = 20) -> Image.Image:
    """A smooth picture that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write `count` pictures into each named folder below a new root."""

    def make(*folders: str, count: int = 8, root: str = "pets") -> Path:
        for number, folder in enumerate(folders):
            place = tmp_path / root / folder
            place.mkdir(parents=True)
            for index in range(count):
                picture(1000 * number + index).save(place / f"{index:03}.png")
        return tmp_path / root

    return make


@pytest.fixture
def shared() -> Path:
    """The folder of small real data, which a user does not have."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real data in {SHARED}")
    return SHARED
