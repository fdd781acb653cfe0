import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymask.core.input import InputSpec
from polymask.data.cache import short_side
from polymask.data.images import DomainData
from polymask.data.preprocess import (
    CentreCrop,
    ManyCrops,
    RandomCrop,
    RandomResizedCrop,
    Whole,
    eval_transform,
    train_transform,
)
from polymask.data.split import ArraySplit
from polymask.errors import BaseError, DataError
from polymask.nets.zoo import import_torchvision
from polymask.train.recipe import get_recipe

import_torchvision()
from torchvision.transforms.v2 import functional  # noqa: E402

SPEC = InputSpec((3, 32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear", 0.8)


def domain(mirror: bool = True, squash: bool = False) -> DomainData:
    split = ArraySplit("grey", np.zeros((2, 4, 4), np.uint8), [0, 1])
    return DomainData("grey", ("a", "b"), split, split, split, mirror=mirror, squash=squash)


def noise(height: int = 40, width: int = 60) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8))


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_evaluation_is_torchvisions_resize_and_centre_crop() -> None:
    image = noise(80, 130)
    ours = eval_transform(domain(), SPEC).crop(image, draw())
    resized = functional.resize(image, [40], antialias=True)
    assert torch.equal(ours, functional.center_crop(resized, [32, 32]))


def test_pixels_are_scaled_by_mean_and_std() -> None:
    image = noise(32, 32)
    transform = eval_transform(domain(), InputSpec((3, 32, 32), SPEC.mean, SPEC.std, crop=1.0))
    batch = transform.batch([transform.crop(image, draw())])
    wanted = functional.normalize(image.float() / 255, list(SPEC.mean), list(SPEC.std))
    assert batch.shape == (1, 3, 32, 32)
    torch.testing.assert_close(batch[0], wanted)


def test_a_network_with_one_channel_gets_grey_images() -> None:
    transform = eval_transform(domain(), InputSpec((1, 32, 32), (0.5,), (0.5,)))
    assert transform.batch([transform.crop(noise(), draw())]).shape == (1, 1, 32, 32)


@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 1000))
def test_a_random_part_lies_in_the_image_and_keeps_its_bounds(height: int, width: int, seed: int) -> None:
    crop = RandomResizedCrop(16, "bilinear")
    top, left, h, w = crop.box(height, width, draw(seed))
    assert h >= 1
    assert w >= 1
    assert 0 <= top <= height - h
    assert 0 <= left <= width - w
    assert crop(noise(height, width), draw(seed)).shape == (3, 16, 16)


def test_a_random_part_has_the_area_and_shape_that_was_asked_for() -> None:
    crop = RandomResizedCrop(16, "bilinear", scale=(0.25, 0.5))
    boxes = [crop.box(1000, 1000, draw(seed)) for seed in range(200)]
    areas = [h * w / 1e6 for _, _, h, w in boxes]
    shapes = [math.log(w / h) for _, _, h, w in boxes]
    assert 0.249 < min(areas) < 0.27
    assert 0.48 < max(areas) < 0.501
    assert abs(np.mean(shapes)) < 0.05
    assert max(map(abs, shapes)) < math.log(4 / 3) + 0.01


def test_the_decathlons_crop_has_no_scale_but_every_place() -> None:
    crop = train_transform(domain(mirror=False), SPEC, scale=None).crop
    image = noise(40, 60)
    assert isinstance(crop, RandomCrop)
    places = set()
    for seed in range(300):
        piece = crop(image, draw(seed))
        top, left = next(
            (top, left)
            for top in range(9)
            for left in range(29)
            if torch.equal(image[:, top : top + 32, left : left + 32], piece)
        )
        places.add((top, left))
    assert {top for top, _ in places} == set(range(9))
    assert len({left for _, left in places}) == 29


def test_mirroring_happens_half_the_time_and_never_where_it_is_forbidden() -> None:
    image = noise(32, 32)
    for mirror, share in ((True, 0.5), (False, 0.0)):
        crop = train_transform(domain(mirror, squash=True), SPEC).crop
        mirrored = [torch.equal(crop(image, draw(seed)), image.flip(-1)) for seed in range(400)]
        assert abs(np.mean(mirrored) - share) < 0.08


def test_a_squashed_domain_shows_whole_images() -> None:
    crop = eval_transform(domain(squash=True), SPEC).crop
    assert isinstance(crop, Whole)
    image = noise(64, 96)
    wanted = functional.resize(image, [32, 32], antialias=True)
    assert torch.equal(crop(image, draw()), wanted)


SQUARE = InputSpec((3, 64, 64), crop=64 / 72, square=True)


@pytest.mark.parametrize(("height", "width"), [(144, 72), (72, 107), (50, 40)])
def test_the_decathlon_resizes_to_72_by_72_before_it_crops_64(height: int, width: int) -> None:
    image = noise(height, width)
    whole = functional.resize(image, [72, 72], antialias=True)
    assert torch.equal(eval_transform(domain(), SQUARE).crop(image, draw()), whole[:, 4:68, 4:68])
    five = eval_transform(domain(), SQUARE, crops=5).crop(image, draw())
    assert torch.equal(five, torch.stack(functional.five_crop(whole, [64, 64])))
    crop = train_transform(domain(mirror=False), SQUARE, scale=None).crop
    pieces = whole.unfold(1, 64, 1).unfold(2, 64, 1)  # (3, 9, 9, 64, 64)
    for seed in range(20):
        piece = crop(image, draw(seed))
        assert (pieces == piece[:, None, None]).flatten(3).all(3).all(0).any()


def test_images_that_become_a_square_are_kept_as_one() -> None:
    assert eval_transform(domain(), SQUARE).shrink.size(72, 144) == (72, 72)
    assert eval_transform(domain(), SPEC).shrink.size(72, 144) == (40, 80)
    assert eval_transform(domain(squash=True), SQUARE).shrink.size(72, 144) == (64, 64)


def test_the_recipe_of_the_decathlon_resizes_to_a_square_on_every_base() -> None:
    base = InputSpec((3, 224, 224))
    fed = get_recipe("decathlon").input(base)
    assert (fed.side, short_side(fed), fed.square, fed.squash) == (64, 72, True, False)
    assert not get_recipe("residual-adapters").input(base).square
    assert get_recipe("pretrain").input(SQUARE).square
    assert not get_recipe("decathlon", square=False).input(SQUARE).square


def test_a_pack_says_square_only_where_it_is() -> None:
    assert "square" not in SPEC.to_json()
    assert InputSpec(**SQUARE.to_json()) == SQUARE
    with pytest.raises(BaseError, match="square 1 must be true or false"):
        InputSpec(square=1)  # type: ignore[arg-type]


def test_five_and_ten_crops_are_torchvisions() -> None:
    image = noise(40, 60)
    for crops, theirs in ((5, functional.five_crop), (10, functional.ten_crop)):
        ours = eval_transform(domain(), SPEC, crops=crops)
        assert isinstance(ours.crop, ManyCrops)
        assert torch.equal(ours.crop(image, draw()), torch.stack(theirs(image, [32, 32])))
        assert ours.batch([ours.crop(image, draw())] * 2).shape == (2, crops, 3, 32, 32)


def test_an_image_smaller_than_the_network_is_enlarged() -> None:
    assert CentreCrop(32, "bicubic", 40)(noise(3, 5), draw()).shape == (3, 32, 32)


def test_shapes_that_images_cannot_have_are_refused() -> None:
    for shape in ((3, 32, 48), (3, 32), (2, 32, 32)):
        spec = InputSpec(shape, (0.5,) * shape[0], (0.5,) * shape[0])
        with pytest.raises(DataError, match="1 or 3 channels and a square"):
            train_transform(domain(), spec)
    with pytest.raises(DataError, match="give 1, 5 or 10"):
        eval_transform(domain(), SPEC, crops=3)
