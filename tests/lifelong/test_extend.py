"""New classes for a domain that exists: what stays, what changes, what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

import polymask as pm
from forged_packs import read_parts, write_forged
from image_folders import make_folder
from nets import tiny_base, trained
from polymask.core.target import get_target
from polymask.data.images import DomainData
from polymask.data.loader import loader_at
from polymask.data.split import ArraySplit, Split
from polymask.errors import DataError, DomainError, MethodError, PackError
from polymask.files import exemplars_path
from polymask.lifelong.exemplars import (
    choose_exemplars,
    herded,
    read_exemplars,
    with_exemplars_of,
    write_exemplars,
)
from polymask.train.unknown import calibrate_on, evenly

QUICK = pm.get_recipe("quick", epochs=1, batch_size=8, side=16)


@pytest.fixture(scope="module")
def base():
    return tiny_base()


def data(names, seed=0, each=24):
    """Images of one colour and noise, a class for each name."""
    draw = np.random.default_rng(seed)
    shades = draw.integers(0, 256, (len(names), 1, 1, 3))

    def split(count):
        labels = np.arange(count * len(names)) % len(names)
        colours = shades[labels]
        noise = draw.integers(-20, 20, (len(labels), 20, 20, 3))
        return ArraySplit("made", (colours + noise).clip(0, 255).astype(np.uint8), labels)

    return DomainData("made", tuple(names), split(each), split(8), split(8))


@pytest.fixture(scope="module")
def old(base):
    domain, images = trained(base), data(["class 0", "class 1", "class 2"])
    val = loader_at(images.val, domain.input)
    calibrate_on(base, domain, evenly(loader_at(images.train, domain.input), val), val)
    return domain.frozen()


def logits(base, domain, count=7):
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return domain.merged(base)(images)


@pytest.mark.parametrize("way", ["norms", "mask"])
def test_the_head_that_is_there_is_not_begun_anew(base, old, way, monkeypatch):
    begun = []
    monkeypatch.setattr("polymask.train.fit.begin_head", lambda *parts: begun.append(parts))
    recipe = pm.get_recipe(QUICK, head_start="centred")
    pm.extend(base, old, data(["d", "e"], seed=5), way=way, recipe=recipe)
    assert not begun


@pytest.mark.parametrize("count", [1, 7, 64])
def test_the_head_alone_leaves_old_logits_as_they_were_to_the_bit(base, old, tmp_path, count):
    found = pm.extend(base, old, data(["d", "e"], seed=5)).domain
    assert torch.equal(logits(base, found, count)[:, :3], logits(base, old, count))
    again = pm.extend(base, found, data(["f", "g"], seed=6)).domain
    assert again.classes == ["class 0", "class 1", "class 2", "d", "e", "f", "g"]
    again.save(tmp_path / "grown.safetensors")
    loaded = pm.load_domain(tmp_path / "grown.safetensors", base)
    assert torch.equal(logits(base, loaded, count)[:, :5], logits(base, found, count))
    assert "blocks" not in loaded.recipe
    model = pm.MultiDomainModel(base, library=tmp_path)
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(images, domain="grown")[:, :3], logits(base, old, count))


@pytest.mark.parametrize("way", ["head", "norms", "mask"])
def test_every_way_learns_new_classes_and_leaves_base_and_domain_alone(base, old, way):
    before = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    found = pm.extend(base, old, data(["d", "e"], seed=5), way=way, recipe=QUICK)
    base.verify()
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.state_dict().items())
    assert found.domain.classes[3:] == ["d", "e"]
    assert found.new_test_accuracy is not None
    assert (found.old_classes, found.new_classes, found.way) == (3, 2, way)
    assert logits(base, found.domain).shape == (7, 5)
    same_norms = torch.equal(*(next(iter(d.named_norms()))[1].weight for d in (old, found.domain)))
    assert same_norms == (way == "head")
    for (_, mine), (_, theirs) in zip(old.named_norms(), found.domain.named_norms(), strict=True):
        assert torch.equal(mine.running_mean, theirs.running_mean)


@pytest.mark.parametrize("refit", [0.01, "auto"])
def test_a_recipe_that_fits_heads_again_does_not_do_so_without_old_images(base, old, refit):
    """The whole head would be fitted to images of new classes alone."""
    plain, asked = (
        pm.extend(base, old, data(["d", "e"], seed=5), way="norms", recipe=pm.get_recipe(QUICK, refit=fit)).domain
        for fit in (None, refit)
    )
    assert torch.equal(plain.head.weight, asked.head.weight)


def test_new_classes_are_told_from_each_other_and_from_old_ones(base, old):
    images = data(["d", "e"], seed=5)
    found = pm.extend(base, old, images)
    assert found.new_test_accuracy > 80
    imagined = old.unknown.imagined(20, torch.Generator().manual_seed(3)).flatten(0, 1)
    with torch.no_grad():
        kept = found.domain.classify(imagined).argmax(1) < 3
    assert kept.float().mean() > 0.6


def test_an_extended_domain_keeps_telling_unknown_images(base, old):
    images = data(["d", "e"], seed=5)
    wider = pm.extend(base, old, images).domain
    assert wider.unknown.judgement.threshold <= old.unknown.judgement.threshold
    assert len(wider.unknown.class_means()) == 5
    scored = wider.scored().merged(base)(torch.randn(3, 3, 16, 16))
    assert scored.shape == (3, 6)
    trained_too = pm.extend(base, old, images, way="norms", recipe=QUICK).domain
    assert len(trained_too.unknown.class_means()) == 5
    assert pm.extend(base, trained(base), images).domain.unknown is None


def test_old_images_that_were_kept_are_learned_from_and_grow_with_the_domain(base, old, tmp_path):
    pack = tmp_path / "shapes.safetensors"
    assert read_exemplars(pack, old) is None
    images = data(["class 0", "class 1", "class 2"])
    write_exemplars(pack, old, *choose_exemplars(base, old, images, 4))
    exemplars = read_exemplars(pack, old)
    assert np.bincount(exemplars.labels).tolist() == [4, 4, 4]
    more = data(["d", "e"], seed=5)
    found = pm.extend(base, old, more, way="mask", recipe=QUICK, exemplars=exemplars)
    assert found.exemplars == 12
    assert found.exemplar_accuracy is not None
    with_exemplars_of(pack, base, found.domain, exemplars, more)
    assert np.bincount(read_exemplars(pack, found.domain).labels).tolist() == [4, 4, 4, 4, 4]
    assert np.bincount(read_exemplars(pack, old).labels).tolist() == [4, 4, 4]  # after a rollback
    other = trained(base)
    other.classes = ["x", "y", "z"]
    with pytest.raises(PackError, match="is of another domain"):
        read_exemplars(pack, other)
    exemplars_path(pack).write_bytes(b"nothing")
    with pytest.raises(PackError, match="is damaged"):
        read_exemplars(pack, old)


def test_herding_keeps_the_mean():
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    chosen = herded(features, 10)
    assert len(set(chosen)) == 10
    away = (unit[chosen].mean(0) - unit.mean(0)).norm()
    assert away < (unit[:10].mean(0) - unit.mean(0)).norm()


def test_bad_extensions_are_refused_by_name(base, old):
    with pytest.raises(DomainError, match="'class 1': the domain has this class already"):
        pm.extend(base, old, data(["class 1", "d"]))
    with pytest.raises(DomainError, match="'CLASS 1': the domain has this class already"):
        pm.extend(base, old, data(["CLASS 1", "d"]))
    with pytest.raises(DomainError, match="use the base that it was trained on"):
        pm.extend(tiny_base(seed=1), old, data(["d", "e"]))
    with pytest.raises(DomainError, match="'all' is not known"):
        pm.extend(base, old, data(["d", "e"]), way="all")
    with pytest.raises(DomainError, match="no norms of its own"):
        pm.extend(base, trained(base, "piggyback").frozen(), data(["d", "e"]), way="norms")
    with pytest.raises(MethodError, match="learns in stages or with other domains"):
        pm.extend(base, trained(base, "packnet").frozen(), data(["d", "e"]), way="mask")
    with pytest.raises(MethodError, match="learns in stages or with other domains"):
        pm.extend(base, trained(base, "bitdelta").frozen(), data(["d", "e"]), way="norms")
    labels = pm.new_domain(base, "affine-full", ["a", "b"], target="labels")
    with pytest.raises(DomainError, match="only a domain of classes"):
        pm.extend(base, labels, data(["d", "e"]))
    with pytest.raises(DataError, match="keep_exemplars=0"):
        choose_exemplars(base, old, data(["a", "b"]), 0)


@pytest.mark.parametrize("method", ["affine-full", "piggyback", "finetune", "lora", "bn-only", "series-adapter", "ssf"])
def test_methods_learn_on_from_their_stored_form(base, method):
    domain = trained(base, method).frozen()
    found = pm.extend(base, domain, data(["d", "e"], seed=5), way="mask", recipe=QUICK).domain
    assert len(found.classes) == 5
    base.verify()


@pytest.mark.parametrize("blocks", [None, 3, [], [5, 0], [3, 3], [2, "a"], [True, 4], {"a": 1}])
def test_a_forged_note_on_blocks_is_refused(base, old, tmp_path, blocks):
    path = tmp_path / "grown.safetensors"
    pm.extend(base, old, data(["d", "e"], seed=5)).domain.save(path)
    manifest, header, content = read_parts(path)
    manifest["recipe"]["blocks"] = blocks
    write_forged(path, manifest, header, content)
    if blocks is None:  # as one block: other rounding, the same classes
        assert len(pm.load_domain(path, base).classes) == 5
        return
    with pytest.raises(PackError, match="note on blocks"):
        pm.load_domain(path, base)


def test_a_folder_of_images_is_taken_too(base, old, tmp_path):
    make_folder(tmp_path / "pictures")
    found = pm.extend(base, old, tmp_path / "pictures")
    assert found.domain.classes[3:] == ["class-0", "class-1"]
    assert found.domain.recipe["extended"][0]["new_classes"] == 2


def test_one_class_alone_can_be_added(base, old, tmp_path):
    make_folder(tmp_path / "pictures", classes=1)
    found = pm.extend(base, old, tmp_path / "pictures")
    assert found.domain.classes[3:] == ["class-0"]
    with pytest.raises(DataError, match="only one class"):
        pm.learn(base, tmp_path / "pictures", progress=False)


def test_an_extended_domain_is_calibrated_on_a_folder_whose_classes_are_in_another_order(base, old):
    more = pm.extend(base, old, data(["a class", "another"], seed=5)).domain
    everything = data(sorted(more.classes), seed=3)
    assert everything.classes != tuple(more.classes)
    images = everything.with_classes_of(more.classes)
    assert images.classes == tuple(more.classes)
    for before, after in zip(everything.splits().values(), images.splits().values(), strict=True):
        named = [everything.classes[label] for label in before.labels]
        assert [images.classes[label] for label in after.labels] == named
    pm.calibrate(base, more, everything)
    with pytest.raises(DomainError, match="give images of the same classes"):
        pm.calibrate(base, more, data(["a class", "other"], seed=3))


def test_labels_of_several_columns_follow_their_names():
    rows = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]])
    split = ArraySplit("made", np.zeros((3, 8, 8, 3), np.uint8), rows)
    images = DomainData("made", ("a", "b", "c"), split, split, target=get_target("labels"))
    moved = images.with_classes_of(["c", "a", "b"])
    assert moved.train.labels.tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0]]


def test_images_are_fed_as_the_domain_was_whatever_their_folder_is_called(base, old):
    """A domain of whole images, squashed, gets new classes from a folder that would be cropped."""
    squashed = old.frozen()
    squashed.input = dataclasses.replace(old.input, squash=True)
    wide = data(["d", "e"], seed=5)
    pixels = np.concatenate([np.stack([wide.train.image(i) for i in range(len(wide.train))])] * 2, 2)
    pixels[:, :, :10] = 0  # the ends are cut from what is not squashed
    split = ArraySplit("wide", pixels, wide.train.labels)
    with_ends = dataclasses.replace(wide, train=split, val=split, test=None)
    found = pm.extend(base, squashed, with_ends).domain
    said_so = pm.extend(base, squashed, dataclasses.replace(with_ends, squash=True)).domain
    assert torch.equal(found.head.weight, said_so.head.weight)


def test_exemplars_of_images_of_all_sizes_are_of_one_size(base, old, tmp_path):
    draw = np.random.default_rng(0)
    sizes = [(9, 9), (12, 40), (64, 48), (30, 7)]
    pictures = [draw.integers(0, 256, (*sizes[i % 4], 3), np.uint8) for i in range(12)]
    split = Mixed(pictures, [i % 2 for i in range(12)])
    mixed = DomainData("mixed", ("d", "e"), split, split)
    images, _ = choose_exemplars(base, old, mixed, 4)
    assert len(images) == 8
    assert images.shape[1] == images.shape[2]
    small = np.zeros((6, 5, 5, 3), np.uint8)
    path = tmp_path / "shapes.safetensors"
    write_exemplars(path, old, small, np.arange(6) % 3)
    found = pm.extend(base, old, mixed).domain
    with_exemplars_of(path, base, found, read_exemplars(path, old), mixed)
    assert len(read_exemplars(path, found)) == 6 + 4


class Mixed(Split):
    """Images of several sizes."""

    def __init__(self, pictures, labels):
        super().__init__(labels)
        self.pictures = pictures

    def image(self, index, side=None):
        from PIL import Image

        return Image.fromarray(self.pictures[index])

    def origin(self, index):
        return f"picture {index}"

    def fingerprint(self):
        return "pictures"
