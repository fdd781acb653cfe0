from collections.abc import Callable
from pathlib import Path

import pytest

from polymask.data.load import load_data
from polymask.errors import DataError

FOLDERS = ("train/b", "train/a", "test/a", "test/b")


@pytest.mark.parametrize(("name", "squash"), [("cubs_cropped", True), ("flowers", False)])
def test_only_cropped_sets_lose_their_aspect_ratio(make_folder: Callable[..., Path], name: str, squash: bool) -> None:
    data = load_data(f"sketch:{make_folder(*FOLDERS, root=name)}")
    assert (data.name, data.classes, data.squash) == (name, ("a", "b"), squash)
    assert data.mirror


def test_a_set_without_test_is_an_error(make_folder: Callable[..., Path]) -> None:
    root = make_folder("train/a", "train/b")
    with pytest.raises(DataError, match=r"lacks train/ or test/; give sketch:ROOT/SET"):
        load_data(f"sketch:{root}")
    with pytest.raises(DataError, match="lacks train/ or test/"):
        load_data(f"sketch:{root}/nowhere")


@pytest.mark.parametrize(
    ("name", "classes", "train", "test"),
    [("flowers", 102, 2040, 2040), ("cubs", 200, 5000, 2399), ("cars", 196, 3920, 1960)],
)
def test_the_real_sets_load(shared: Path, name: str, classes: int, train: int, test: int) -> None:
    data = load_data(f"sketch:{shared}/sketch-mini/{name}")
    assert len(data.classes) == classes
    assert (len(data.train) + len(data.val), len(data.test or ())) == (train, test)
