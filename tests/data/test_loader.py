import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymask.core.input import InputSpec
from polymask.data.cache import Cache, cache_splits
from polymask.data.images import DomainData
from polymask.data.loader import Loader, measure_speed
from polymask.data.preprocess import eval_transform, train_transform
from polymask.data.split import ArraySplit, Shrink
from polymask.errors import DataError

SPEC = InputSpec((3, 8, 8))


def domain(count: int) -> DomainData:
    images = np.random.default_rng(0).integers(0, 256, (count, 12, 10, 3), dtype=np.uint8)
    split = ArraySplit("noise", images, np.arange(count) % 2)
    return DomainData("noise", ("a", "b"), split, split, None)


def loader(count: int = 23, train: bool = True, **options: Any) -> Loader:
    data = domain(count)
    (cache,) = cache_splits([data.train], Shrink(9))
    transform = train_transform(data, SPEC) if train else eval_transform(data, SPEC)
    return Loader(cache, transform, shuffle=train, **{"batch_size": 4, **options})


def equal(one: list, two: list) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, two, strict=True)
    )


def data_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("polymask-data")]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.integers(0, 5), st.integers(2, 5), st.integers(0, 3))
def test_batches_depend_on_seed_and_epoch_alone(seed: int, epoch: int, workers: int, start: int) -> None:
    one = list(loader(seed=seed, workers=1).batches(epoch))
    assert equal(one, list(loader(seed=seed, workers=workers).batches(epoch)))
    assert equal(one[start:], list(loader(seed=seed, workers=workers).batches(epoch, start)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_and_seed_has_its_own_order_and_its_own_crops(shuffle: bool) -> None:
    data = domain(23)
    (cache,) = cache_splits([data.train], Shrink(9))
    varying = eval_transform(data, SPEC) if shuffle else train_transform(data, SPEC)
    first, other = (Loader(cache, varying, seed=seed, shuffle=shuffle) for seed in (0, 1))
    batch = next(first.batches(0))[0]
    assert not torch.equal(batch, next(first.batches(1))[0])
    assert not torch.equal(batch, next(other.batches(0))[0])


def test_an_images_crop_does_not_depend_on_the_batch_it_is_in() -> None:
    small, large = loader(batch_size=2), loader(batch_size=8)
    one = torch.cat([images for images, _ in small.batches(3)])
    two = torch.cat([images for images, _ in large.batches(3)])
    assert torch.equal(one, two)


def test_an_epoch_shows_every_image_once() -> None:
    data = domain(23)
    (cache,) = cache_splits([data.train], Shrink(99))
    seen = Loader(cache, eval_transform(data, SPEC), shuffle=True, batch_size=4)
    kept = Loader(cache, eval_transform(data, SPEC), batch_size=4)
    as_rows = [
        sorted(tuple(image.flatten().tolist()) for images, _ in each.batches() for image in images)
        for each in (seen, kept)
    ]
    assert as_rows[0] == as_rows[1]
    assert len(set(as_rows[0])) == 23


def test_without_shuffling_the_order_is_the_splits() -> None:
    labels = torch.cat([labels for _, labels in loader(train=False).batches()])
    assert labels.tolist() == [index % 2 for index in range(23)]


@pytest.mark.parametrize(
    ("count", "train", "sizes"),
    [
        (8, True, [4, 4]),
        (9, True, [4, 5]),
        (9, False, [4, 4, 1]),
        (10, True, [4, 4, 2]),
        (2, True, [2]),
    ],
)
def test_training_has_no_last_batch_of_one_image(count: int, train: bool, sizes: list[int]) -> None:
    batches = loader(count, train)
    assert [len(labels) for _, labels in batches.batches()] == sizes
    assert len(batches) == len(sizes)


def test_batches_of_one_image_are_given_where_they_are_asked_for() -> None:
    assert len(list(loader(3, batch_size=1).batches())) == 3


def test_closing_early_leaves_no_thread_behind() -> None:
    batches = loader(200, workers=3).batches()
    next(batches)
    assert data_threads()
    batches.close()  # type: ignore[attr-defined]
    assert not data_threads()


def test_an_image_that_fails_raises_in_the_callers_thread() -> None:
    class Failing(Cache):
        def image(self, index: int) -> torch.Tensor:
            if index == 13:
                raise DataError("image 13 has gone")
            return super().image(index)

    good = loader(train=False)
    failing = Failing(good.cache.split, Shrink(9), [None] * len(good.cache))
    batches = Loader(failing, good.transform, batch_size=4, workers=2).batches()
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(DataError, match="image 13 has gone"):
        next(batches)
    assert not data_threads()


def test_few_batches_are_made_ahead() -> None:
    class Counting(Cache):
        made = 0

        def image(self, index: int) -> torch.Tensor:
            Counting.made += 1
            return super().image(index)

    good = loader(400)
    counting = Counting(good.cache.split, Shrink(9), [None] * len(good.cache))
    batches = Loader(counting, good.transform, batch_size=4, workers=2).batches()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert Counting.made <= 6 * 4


def test_throughput_is_measured() -> None:
    assert loader().throughput(0.05) > 10
    assert not data_threads()


def test_impossible_sizes_are_refused() -> None:
    for wrong in ({"batch_size": 0}, {"seed": -1}):
        with pytest.raises(DataError, match="batch_size"):
            loader(**wrong)


def test_the_speed_of_a_domain_is_measured_in_three_ways() -> None:
    speed = measure_speed(domain(40), SPEC, workers=2, seconds=0.05)
    assert min(speed.decode, speed.train, speed.evaluate) > 10


def test_samples_are_the_loaders_images_one_at_a_time():
    made = loader(train=False)
    images = torch.cat([batch for batch, _ in made.batches()])
    labels = torch.cat([answers for _, answers in made.batches()])
    samples = made.samples()
    assert len(samples) == len(images)
    assert [label for _, label in (samples[i] for i in range(len(samples)))] == labels.tolist()
    assert all(torch.equal(samples[i][0], images[i]) for i in range(len(samples)))


def test_random_crops_of_samples_follow_torchs_seed():
    samples = loader().samples()
    torch.manual_seed(0)
    one, other = samples[0][0], samples[0][0]
    torch.manual_seed(0)
    assert torch.equal(samples[0][0], one)
    assert not torch.equal(one, other)
