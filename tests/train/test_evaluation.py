"""What a domain got right and wrong, class by class."""

import csv
import io
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymask as pm
from nets import tiny_base, trained
from polymask.errors import DataError
from polymask.train.evaluation import Evaluation, wilson
from polymask.train.predict import examine, logits
from polymask.train.ranks import Shard, joined


class Pictures:
    """Random images with random classes, in batches of `size`."""

    def __init__(self, images: int, classes: int, size: int = 7) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(images, 3, 16, 16, generator=generator)
        self.labels = torch.randint(classes, (images,), generator=generator)
        self.size = size

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / self.size)

    def batches(self, epoch=0, start=0):
        yield from zip(self.images.split(self.size), self.labels.split(self.size), strict=True)


@pytest.fixture(scope="module")
def setting():
    base = tiny_base()
    return base, trained(base, classes=8), Pictures(40, 8)


@pytest.fixture(scope="module")
def found(setting):
    return pm.evaluate_in_detail(*setting)


def test_an_evaluation_counts_what_the_network_says(setting, found):
    base, domain, pictures = setting
    said = logits(domain.merged(base), pictures.images)
    assert found.accuracy == pm.evaluate(base, domain, pictures)
    for truth, guess in zip(pictures.labels.tolist(), said.argmax(1).tolist(), strict=True):
        assert found.confusion[truth][guess] > 0
    assert [sum(row) for row in found.confusion] == torch.bincount(pictures.labels, minlength=8).tolist()
    assert found.wrong == tuple((said.argmax(1) != pictures.labels).nonzero()[:, 0].tolist())
    within = (said.topk(5).indices == pictures.labels[:, None]).any(1)
    assert found.top5_accuracy == pytest.approx(100 * within.float().mean().item())
    assert found.top5_accuracy >= found.accuracy


def test_the_hardest_images_are_those_whose_class_is_least_likely(setting, found):
    base, domain, pictures = setting
    shares = logits(domain.merged(base), pictures.images).softmax(1)
    own = shares.gather(1, pictures.labels[:, None])[:, 0]
    assert {answer.image for answer in found.hardest} == set(own.argsort()[:12].tolist())
    probabilities = [answer.probability for answer in found.hardest]
    assert probabilities == sorted(probabilities)
    first = found.hardest[0]
    assert first.truth == domain.classes[pictures.labels[first.image]]
    assert first.top[0][0] == domain.classes[shares[first.image].argmax()]


def test_five_classes_have_no_top_five(setting):
    base, _, _ = setting
    assert pm.evaluate_in_detail(base, trained(base, classes=5), Pictures(9, 5)).top5_accuracy is None


def test_pieces_of_several_processes_join_to_the_evaluation_of_one(setting, found):
    base, domain, pictures = setting
    shards = [Shard(pictures, rank, 3) for rank in range(3)]
    parts = [examine(base, domain, shard.counted_batches(), 12) for shard in shards]
    whole = joined(parts, [shard.places for shard in shards])
    assert (whole.confusion, whole.in_top5, whole.wrong) == (found.confusion, found.in_top5, found.wrong)
    assert [answer.image for answer in whole.hardest] == [answer.image for answer in found.hardest]


def test_an_evaluation_survives_json_and_says_where_it_is_damaged(found):
    values = json.loads(json.dumps(found.to_json()))
    assert Evaluation.from_json(values) == found
    with pytest.raises(DataError, match="not an evaluation"):
        Evaluation.from_json({name: value for name, value in values.items() if name != "confusion"})
    with pytest.raises(DataError, match="8 × 8"):
        Evaluation.from_json(values | {"confusion": values["confusion"][:-1]})


def test_the_table_has_a_line_for_each_class_with_its_row_of_the_matrix(found):
    lines = list(csv.DictReader(io.StringIO(found.csv())))
    assert [line["class"] for line in lines] == list(found.classes)
    for line, row in zip(lines, found.confusion, strict=True):
        assert [int(line[f"as {name}"]) for name in found.classes] == list(row)
        assert int(line["images"]) == sum(row)


def test_a_class_says_what_its_images_are_most_often_taken_for():
    one, other, none = Evaluation(("a", "b", "c"), ((1, 0, 3), (0, 2, 0), (0, 0, 0)), 6).by_class
    assert (one.accuracy, one.taken_for) == (25.0, "c")
    assert (other.accuracy, other.taken_for) == (100.0, None)
    assert (none.accuracy, none.images) == (None, 0)


def test_the_interval_is_wilsons():
    assert wilson(8, 10) == pytest.approx((49.02, 94.33), abs=0.01)  # as R's prop.test(correct=FALSE)
    assert wilson(0, 10) == pytest.approx((0.0, 27.75), abs=0.01)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_accuracy_and_stays_within_percents(counts):
    low, high = wilson(*counts)
    assert 0 <= low <= 100 * counts[0] / counts[1] <= high <= 100
