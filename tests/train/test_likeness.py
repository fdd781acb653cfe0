"""The direction of a domain's mean feature, as a note in its pack."""

import numpy as np
import pytest
import torch

from nets import tiny_base
from polymask.data.preprocess import Preprocess
from polymask.data.split import ArraySplit
from polymask.train.predict import likeness, likeness_cosines, likeness_note, read_likeness, write_likeness


@pytest.fixture(scope="module")
def base():
    return tiny_base()


def pictures(mean, count=40, seed=0):
    noise = np.random.default_rng(seed).normal(mean, 30, (count, 20, 20, 3))
    return ArraySplit("made up", noise.clip(0, 255).astype(np.uint8), np.zeros(count, int))


def features(base, split):
    feed = Preprocess(base.input)
    crops = [feed.piece(split.image(i)) for i in range(len(split))]
    with torch.no_grad():
        return base.net(feed.batch(crops))


def test_a_likeness_is_the_direction_of_the_mean_feature(base):
    split = pictures(120)
    found = read_likeness(likeness(base, split), base.feature_dim)
    mean = features(base, split).mean(0)
    assert float(found.norm()) == pytest.approx(1)
    torch.testing.assert_close(found, mean / mean.norm(), rtol=0, atol=1e-3)


def test_it_is_the_same_every_time(base):
    assert likeness(base, pictures(90)) == likeness(base, pictures(90))


def test_the_note_of_the_same_images_is_computed_once_for_each_base(base, monkeypatch):
    import polymask.train.predict as module

    computed = []
    monkeypatch.setattr(module, "likeness", lambda base, images: computed.append(base) or "note")
    other, split = tiny_base(seed=5), pictures(90)
    for one in (base, base, other):
        assert likeness_note(one, split) == {"likeness": "note"}
    assert computed == [base, other]


def test_images_fit_their_own_domain_best(base):
    means = ((220, 40, 40), (40, 40, 220))
    notes = [likeness(base, pictures(mean)) for mean in means]
    both = torch.stack([read_likeness(note, base.feature_dim) for note in notes])
    for place, mean in enumerate(means):
        scores = likeness_cosines(features(base, pictures(mean, seed=1)), both)
        assert (scores.argmax(1) == place).float().mean() > 0.9


def test_a_base_without_feature_vectors_gives_none():
    from torch import nn

    import polymask as pm
    from nets import SPEC

    maps = pm.load_base(nn.Sequential(nn.Conv2d(3, 4, 3)), name="maps", input=SPEC)
    assert likeness(maps, pictures(100)) is None


@pytest.mark.parametrize(
    "note",
    [
        None,
        7,
        "",
        "no base64!",
        "é",
        "AAAA",
        write_likeness(torch.ones(11)),
        write_likeness(torch.zeros(12)),
        write_likeness(torch.full((12,), float("nan"))),
    ],
)
def test_a_note_that_is_none_is_read_as_none(note):
    assert read_likeness(note, 12) is None
    assert read_likeness(write_likeness(torch.ones(12)), None) is None
    assert read_likeness(write_likeness(torch.ones(12)), 12) is not None


def test_a_domain_that_learns_from_images_keeps_what_they_look_like(base, tmp_path):
    import polymask as pm
    from polymask.data.images import DomainData
    from polymask.train.learn import learn
    from polymask.train.recipe import get_recipe

    split = pictures(120, count=16)
    split.labels[:8] = 1
    data = DomainData("noise", ("one", "two"), split, split, None)
    recipe = get_recipe("quick", epochs=1, side=20)
    learn(base, data, "classifier-only", recipe).domain.save(tmp_path / "noise.safetensors")
    notes = pm.inspect(tmp_path / "noise.safetensors").manifest.recipe
    torch.testing.assert_close(
        read_likeness(notes["likeness"], base.feature_dim),
        read_likeness(likeness(base, split), base.feature_dim),
    )
