from pathlib import Path

import numpy as np
import pytest

from polymask.data.load import _FONTS, load_data


def pixels(split: object, index: int) -> np.ndarray:
    return np.asarray(split.image(index))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "classes", "counts", "mirror"),
    [
        ("digits", 10, (1259, 270, 268), False),
        ("letters", 26, (1872, 416, 936), False),
        ("solar-cells", 2, (1673, 295, 656), True),
    ],
)
def test_an_embedded_domain_is_always_the_same(name: str, classes: int, counts: tuple[int, ...], mirror: bool) -> None:
    one, two = load_data(name, seed=0), load_data(name, seed=5)
    assert (len(one.classes), one.mirror) == (classes, mirror)
    assert tuple(map(len, one.splits().values())) == counts
    for part in ("train", "val", "test"):
        first, second = one.splits()[part], two.splits()[part]
        assert np.array_equal(first.labels, second.labels)
        assert first.fingerprint() == second.fingerprint()
        assert first.origin(3) == second.origin(3)
        assert np.array_equal(pixels(first, 3), pixels(second, 3))


def test_digits_fill_the_grey_scale_and_leave_a_margin() -> None:
    data = load_data("digits")
    image = pixels(data.train, 0)
    assert image.shape == (64, 64, 3)
    assert image.max() > 200
    assert not image[:4].any()
    assert not image[:, -4:].any()


def test_the_fonts_of_train_val_and_test_are_of_different_families() -> None:
    families = {"train": ("DejaVuSans", "STIX"), "val": ("DejaVuSerif",), "test": ("cm",)}
    for part, fonts in _FONTS.items():
        assert all(font.startswith(families[part]) for font in fonts)


def test_a_letter_lies_wholly_inside_its_margin_and_can_be_seen() -> None:
    data = load_data("letters")
    for split in data.splits().values():
        for index in range(0, len(split), 37):
            image = pixels(split, index)
            assert (image[:4] == image[0, 0]).all()
            assert (image[:, -4:] == image[0, 0]).all()
            assert image.max() - image.min() >= 90


def test_capital_and_small_letters_are_one_class_but_the_small_l_is_left_out() -> None:
    data = load_data("letters")
    of_l = np.flatnonzero(data.train.labels == data.classes.index("L"))[:6]
    ink = [(pixels(data.train, int(index)) < 128).any(axis=0).sum() for index in of_l]
    assert min(ink) > 0
    widths = [np.ptp(np.flatnonzero((pixels(data.train, int(i))[..., 0] < 100).any(0))) for i in of_l]
    assert min(widths) > 8  # a small l would be a stroke


def test_solar_cells_take_the_experts_judgement_and_keep_every_photo() -> None:
    data = load_data("solar-cells")
    labels = np.concatenate([split.labels for split in data.splits().values()])
    assert np.bincount(labels).tolist() == [1803, 821]
    shares = [split.labels.mean() for split in data.splits().values()]
    assert max(shares) - min(shares) < 0.01
    files = [split.origin(i) for split in data.splits().values() for i in range(len(split))]
    assert len(set(files)) == 2624
    assert Path(files[0]).name.startswith("cell")


def test_a_limit_cuts_train_only() -> None:
    data = load_data("letters", limit=260)
    assert np.bincount(data.train.labels).tolist() == [10] * 26
    assert len(data.val) == 416
