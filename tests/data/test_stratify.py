import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymask.data.images import cut, limited, stratified
from polymask.data.split import ArraySplit
from polymask.errors import DataError

labels_of = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)
shares_of = st.sampled_from([(0.7, 0.15, 0.15), (0.85, 0.15), (0.75, 0.25)])
seeds = st.integers(0, 2**32)


def split_of(labels: np.ndarray) -> ArraySplit:
    return ArraySplit("numbers", np.zeros((len(labels), 2, 2), np.uint8), labels)


@given(labels_of, shares_of, seeds)
def test_a_stratified_split_deals_every_image_to_one_part(
    labels: np.ndarray, shares: tuple[float, ...], seed: int
) -> None:
    parts = stratified(labels, shares, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@given(labels_of, shares_of, seeds)
def test_a_stratified_split_keeps_the_proportions_of_every_class(
    labels: np.ndarray, shares: tuple[float, ...], seed: int
) -> None:
    parts = stratified(labels, shares, seed)
    for label in np.unique(labels):
        total = (labels == label).sum()
        counts = [(labels[part] == label).sum() for part in parts]
        assert counts[0] >= 1
        assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))


@given(labels_of, shares_of, seeds)
def test_a_stratified_split_depends_on_the_seed_and_labels_alone(
    labels: np.ndarray, shares: tuple[float, ...], seed: int
) -> None:
    for one, two in zip(stratified(labels, shares, seed), stratified(labels.copy(), shares, seed), strict=True):
        assert np.array_equal(one, two)


def test_another_seed_gives_another_split() -> None:
    labels = np.repeat([0, 1], 50)
    one, two = (stratified(labels, (0.7, 0.3), seed)[0] for seed in (0, 1))
    assert not np.array_equal(one, two)


def test_a_new_class_leaves_those_before_it_where_they_were_and_moves_those_after_it() -> None:
    old = np.repeat([0, 1], 20)
    last, between = np.concatenate([old, np.full(20, 2)]), np.concatenate([2 * old, np.full(20, 1)])
    parts = [stratified(labels, (0.7, 0.3), 3)[0] for labels in (old, last, between)]
    train, with_last, with_one_between = (part[part < 40] for part in parts)
    assert np.array_equal(train, with_last)
    assert np.array_equal(train[train < 20], with_one_between[with_one_between < 20])
    assert not np.array_equal(train, with_one_between)


def test_an_image_that_two_parts_could_claim_is_given_by_lot_class_by_class() -> None:
    labels = np.repeat(np.arange(40), 10)  # 15 % of 10 is one and a half
    val = np.bincount(labels[stratified(labels, (0.85, 0.15), 0)[1]])
    assert set(val.tolist()) == {1, 2}


def test_too_few_images_to_cut_is_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(DataError, match="at least 4 images of each class"):
        cut(split_of(np.array([0, 1])), (0.7, 0.15, 0.15), 0, "pets")


@given(labels_of, seeds, st.data())
def test_a_limit_keeps_all_classes_and_their_proportions(labels: np.ndarray, seed: int, data: st.DataObject) -> None:
    classes, counts = np.unique(labels, return_counts=True)
    limit = data.draw(st.integers(len(classes), len(labels)))
    kept = limited(split_of(labels), limit, seed, "pets")
    assert len(kept) == limit
    found, kept_counts = np.unique(kept.labels, return_counts=True)
    assert np.array_equal(found, classes)
    spare = len(classes)  # each class may claim one image beyond its share
    assert (np.abs(kept_counts - counts * limit / len(labels)) <= spare).all()


@given(labels_of, seeds)
def test_a_larger_limit_keeps_the_images_of_a_smaller_one(labels: np.ndarray, seed: int) -> None:
    split, classes = split_of(labels), len(np.unique(labels))
    kept: set[str] = set()
    for limit in range(classes, len(labels) + 1):
        part = limited(split, limit, seed, "pets")
        origins = {part.origin(index) for index in range(len(part))}
        assert kept <= origins
        kept = origins


def test_a_limit_below_the_number_of_classes_is_an_error() -> None:
    with pytest.raises(DataError, match="limit 2 is below its 3 classes"):
        limited(split_of(np.array([0, 1, 2, 2])), 2, 0, "pets")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("classes", [1, 2])
def test_four_images_of_a_class_are_enough_with_any_seed(classes: int, seed: int) -> None:
    labels = np.repeat(np.arange(classes), 4)
    parts = cut(split_of(labels), (0.7, 0.15, 0.15), seed, "pets")
    assert all(len(part) for part in parts)
    assert set(parts[0].labels.tolist()) == set(range(classes))
    places = np.concatenate([part.indices for part in parts])  # type: ignore[attr-defined]
    assert sorted(places.tolist()) == list(range(len(labels)))
