"""What a head's outputs mean: losses, measures and notes of classes, labels and values."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from polymask.core.target import CLASSES, TARGETS, ValueTarget, average_precision, read_target, strata
from polymask.errors import DataError, DomainError

LABELS, VALUES = TARGETS["labels"], ValueTarget(mean=(10.0, -1.0), std=(2.0, 0.5))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30).filter(
        lambda p: any(h for _, h in p)
    )
)
def test_average_precision_is_that_of_scikit_learn(pairs):
    from sklearn.metrics import average_precision_score

    scores, has = (list(column) for column in zip(*pairs, strict=True))
    found = average_precision(torch.tensor(scores, dtype=torch.float32), torch.tensor(has))
    assert found == pytest.approx(average_precision_score(has, scores))


def test_a_perfect_ranking_has_a_precision_of_100_and_labels_that_no_image_has_do_not_count():
    truth = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    assert LABELS.measure(truth.float(), truth) == 100
    assert LABELS.by_name(truth.float(), truth)[2] is None
    assert LABELS.measure(-truth.float(), truth) < 100


def test_classes_learn_as_they_always_did():
    logits, truth = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 0, 0])
    assert torch.equal(CLASSES.loss(logits, truth, 0.1), F.cross_entropy(logits, truth, label_smoothing=0.1))
    assert CLASSES.measure(CLASSES.kept(logits), truth) == 100 * CLASSES.tally(logits, truth) / 6
    assert CLASSES.note() == {}


def test_weights_give_every_class_the_same_part_of_the_loss():
    truth = torch.tensor([0] * 6 + [1] * 2)
    balanced = CLASSES.fitted(lambda: truth, "weights")
    assert balanced.weights == pytest.approx((8 / 12, 8 / 4))
    logits = torch.zeros(8, 2)
    each = torch.tensor(balanced.weights)[truth]
    assert each[truth == 0].sum() == pytest.approx(each[truth == 1].sum())
    assert balanced.loss(logits, truth) == pytest.approx(CLASSES.loss(logits, truth)), "on average the weight is 1"
    assert CLASSES.fitted(lambda: pytest.fail("labels are not needed"), None) is CLASSES
    rare = LABELS.fitted(lambda: torch.tensor([[1, 1], [0, 1], [0, 1], [0, 0]]), "weights")
    assert rare.weights == pytest.approx((3, 1 / 3))


def test_values_are_standardised_by_the_training_images_and_told_in_their_own_unit():
    truth = torch.tensor([[1.0, 7.0], [3.0, 7.0]], dtype=torch.float64)
    fitted = TARGETS["values"].fitted(lambda: truth, None)
    assert (fitted.mean, fitted.std) == ((2.0, 7.0), (1.0, 1.0)), "a value that is always the same is not divided by 0"
    outputs = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
    assert torch.equal(VALUES.answers(outputs), torch.tensor([[12.0, -1.0], [8.0, 0.0]]))
    wanted = VALUES.answers(outputs)
    assert VALUES.loss(outputs, wanted) == 0
    assert VALUES.by_name(outputs, wanted + torch.tensor([1.0, 3.0])) == pytest.approx([1.0, 3.0])
    assert VALUES.measure(outputs, wanted + torch.tensor([1.0, 3.0])) == pytest.approx(2.0)
    assert VALUES.better(1.0, 2.0)
    with pytest.raises(DataError, match="balance weights is for classes and labels"):
        VALUES.fitted(lambda: truth, "weights")
    with pytest.raises(DomainError, match="has not seen its training images"):
        TARGETS["values"].loss(outputs, wanted)


def test_what_is_said_of_an_image_depends_on_the_target():
    answer = torch.tensor([0.2, 0.7, 0.6])
    top = [{"class": "b", "probability": pytest.approx(0.7)}, {"class": "c", "probability": pytest.approx(0.6)}]
    assert CLASSES.said(answer, "abc", 2) == {"top": top}
    assert LABELS.said(answer, "abc", 2) == {"top": top, "labels": ["b", "c"]}
    assert VALUES.said(torch.tensor([1.5, 2.0]), ["age", "size"], 1) == {"values": {"age": 1.5, "size": 2.0}}


@pytest.mark.parametrize("target", [LABELS, VALUES])
def test_a_note_is_read_as_what_was_written(target):
    assert read_target(target.note(), ["a", "b"]) == target


@pytest.mark.parametrize(
    "note",
    [
        None,
        {"kind": "classes"},
        {"kind": "values"},
        {"kind": "values", "mean": [1.0], "std": [1.0]},
        {"kind": "values", "mean": [1.0, 2.0], "std": [1.0, 0.0]},
        {"kind": "values", "mean": [1.0, True], "std": [1.0, 1.0]},
    ],
)
def test_a_note_that_makes_no_sense_is_refused(note):
    with pytest.raises(DomainError, match="target"):
        read_target(note, ["a", "b"])


def test_images_are_cut_by_class_rarest_label_or_range():
    assert strata(np.array([2, 0, 1])).tolist() == [2, 0, 1]
    rows = np.array([[1, 0], [1, 1], [1, 0], [0, 0]])
    assert strata(rows).tolist() == [1, 2, 1, 0]
    values = np.linspace(0, 1, 50)[:, None]
    assert np.bincount(strata(values)).tolist() == [10] * 5
