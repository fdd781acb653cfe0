from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polymask.core.input import InputSpec
from polymask.data.cache import Cache, cache_domain, cache_splits
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.split import ArraySplit, FileSplit, Shrink
from polymask.errors import DataError

SPEC = InputSpec((3, 14, 14))  # shorter side 16


def same(one: Cache, two: Cache) -> bool:
    return len(one) == len(two) and all(torch.equal(one.image(index), two.image(index)) for index in range(len(one)))


@pytest.fixture
def data(make_folder: Callable[..., Path]) -> DomainData:
    return load_data(make_folder("cat", "dog", count=10))


def test_images_are_kept_small_with_their_labels(data: DomainData) -> None:
    cache = cache_domain(data, SPEC).train
    assert cache.image(0).dtype == torch.uint8
    assert cache.image(0).shape == (3, 16, 19)  # from 20 × 24
    assert cache.labels.tolist() == data.train.labels.tolist()
    assert cache.nbytes == len(cache) * 3 * 16 * 19


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 300))
def test_no_side_ever_grows_and_the_shorter_one_is_exact(width: int, height: int, side: int) -> None:
    kept = Shrink(side).size(width, height)
    assert min(kept) == min(side, width, height)
    assert kept[0] <= width
    assert kept[1] <= height
    assert Shrink(side, squash=True).size(width, height) == (min(width, side), min(height, side))


def test_a_very_long_image_loses_its_ends() -> None:
    image = Image.new("RGB", (1000, 10))
    image.paste((255, 0, 0), (460, 0, 540, 10))
    kept = Shrink(64)(image)
    assert kept.shape == (10, 80, 3)
    assert (kept == (255, 0, 0)).all()


def test_a_limit_on_memory_changes_what_is_held_and_not_what_is_given(data: DomainData) -> None:
    all_held = cache_domain(data, SPEC)
    some = cache_domain(data, SPEC, memory=5000)
    assert same(all_held.train, some.train)
    assert same(all_held.val, some.val)
    assert 0 < some.train.nbytes <= 5000
    assert some.val.nbytes == 0


def test_the_number_of_threads_does_not_matter(data: DomainData) -> None:
    assert same(cache_domain(data, SPEC, workers=1).train, cache_domain(data, SPEC, workers=5).train)


def test_train_and_val_are_joined_without_a_copy(data: DomainData) -> None:
    caches = cache_domain(data, SPEC)
    both = caches.train_val
    assert len(both) == len(data.train_val) == len(data.train) + len(data.val)
    assert both.image(0).data_ptr() == caches.train.image(0).data_ptr()
    assert torch.equal(both.image(len(data.train)), caches.val.image(0))
    assert both.labels.tolist() == data.train_val.labels.tolist()


def test_a_cache_on_disk_is_found_again_and_equal(data: DomainData, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    in_memory = cache_domain(data, SPEC)
    written = cache_domain(data, SPEC, folder=folder)
    files = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert len(files) == 3
    for split in data.splits().values():
        for index in range(len(split)):
            assert Path(split.origin(index)).exists()
    again = cache_domain(data, SPEC, folder=folder)
    assert same(in_memory.train, written.train)
    assert same(in_memory.train, again.train)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == files


def test_a_changed_image_or_another_size_makes_a_new_cache(data: DomainData, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache_domain(data, SPEC, folder=folder)
    cache_domain(data, InputSpec((3, 7, 7)), folder=folder)
    assert len(list(folder.iterdir())) == 6
    Image.new("RGB", (50, 50), "red").save(data.train.origin(0))
    changed = cache_domain(data, SPEC, folder=folder)
    assert len(list(folder.iterdir())) == 9
    assert changed.train.image(0)[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("keep", [slice(0), slice(10), slice(-1), slice(7, None)])
def test_a_cache_file_that_is_not_whole_is_written_again(data: DomainData, tmp_path: Path, keep: slice) -> None:
    cache_domain(data, SPEC, folder=tmp_path / "cache")
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(file.read_bytes()[keep])
    again = cache_domain(data, SPEC, folder=tmp_path / "cache")
    assert same(again.train, cache_domain(data, SPEC).train)


def test_damaged_images_leave_no_cache_file_behind(data: DomainData, tmp_path: Path) -> None:
    Path(data.train.origin(2)).write_bytes(b"")
    Path(data.val.origin(0)).write_bytes(b"")
    with pytest.raises(DataError, match="2 images cannot be used"):
        cache_domain(data, SPEC, folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_threads_that_write_one_cache_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)

    class Meets(ArraySplit):
        """Images, at the third of which somebody else writes them all."""

        def image(self, index: int, side: int | None = None) -> np.ndarray:
            if index == 2:
                cache_splits([ArraySplit("made", pixels, [0] * 5)], Shrink(8), folder=tmp_path)
            return super().image(index, side)

    (cache,) = cache_splits([Meets("made", pixels, [0] * 5)], Shrink(8), folder=tmp_path, workers=1)
    assert [cache.image(index).permute(1, 2, 0).tolist() for index in range(5)] == pixels.tolist()
    (file,) = tmp_path.iterdir()
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode  # others may read what others may


def test_a_cache_folder_that_cannot_be_written_is_an_error(data: DomainData, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write the cache.*give another folder"):
        cache_domain(data, SPEC, folder=tmp_path / "cache")


def test_unlabelled_images_can_be_cached_too(data: DomainData) -> None:
    files = [Path(data.train.origin(index)) for index in range(3)]
    (cache,) = cache_splits([FileSplit(files, [-1] * 3)], Shrink(16))
    assert cache.labels.tolist() == [-1] * 3


def test_grey_arrays_become_rgb() -> None:
    split = ArraySplit("grey", np.full((2, 4, 4), 9, np.uint8), [0, 1])
    (cache,) = cache_splits([split], Shrink(16))
    assert (cache.image(1) == 9).all()
    assert cache.image(1).shape == (3, 4, 4)
