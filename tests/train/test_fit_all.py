"""Several domains by one call: in turn, together, cut and resumed, and what is forgotten."""

import dataclasses

import pytest
import torch

import polymask as pm
from image_folders import make_folder
from nets import block_base, logits, tiny_base
from polymask.errors import InterruptedTraining, TrainingError
from polymask.pack.format import inspect
from polymask.train.fit import Listener, fit
from polymask.train.fit_all import Lesson, _measured, fit_all
from polymask.train.recipe import Recipe, split_seed
from sequences import Interrupt
from short_training import Fixed

RECIPE = Recipe(epochs=2, rate=1e-3, head_rate=1e-2, drops=(), batch_size=8)


def lessons(*names: str) -> dict[str, Lesson]:
    return {name: Lesson(["a", "b", "c"], Fixed(4, 10 * i), Fixed(1, 10 * i + 99)) for i, name in enumerate(names)}


def same(a: pm.Domain, b: pm.Domain) -> bool:
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items()
    )


def test_domains_of_a_method_that_treats_them_alone_are_those_that_fit_gives():
    base = tiny_base()
    fitted = fit_all(base, lessons("one", "two"), "affine-full", RECIPE, seed=3)
    for name, lesson in lessons("one", "two").items():
        torch.manual_seed(3)
        alone = pm.new_domain(base, "affine-full", lesson.classes)
        fit(base, alone, lesson.train, lesson.val, RECIPE, seed=3)
        assert same(alone, fitted.domains[name])
    assert fitted.forgotten == {"one": 0.0, "two": 0.0}
    assert fitted.base is None


def test_the_order_is_the_one_asked_for():
    fitted = fit_all(tiny_base(), lessons("one", "two"), "bn-only", RECIPE, order=["two", "one"])
    assert list(fitted.domains) == ["two", "one"]


@pytest.mark.parametrize(
    ("names", "order", "message"),
    [
        (("one",), ["one", "one"], "each of"),
        (("one", "two"), ["one"], "each of"),
        (("one",), ["won"], "did you mean one"),
        ((), None, "no domain"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(names, order, message):
    with pytest.raises(TrainingError, match=message):
        fit_all(tiny_base(), lessons(*names), "bn-only", RECIPE, order=order)


def test_packs_are_written_and_a_second_call_learns_nothing_again(tmp_path):
    base, seen = tiny_base(), []

    class Watch(Listener):
        def step(self, epoch, step, loss, images, density):
            seen.append(step)

    first = fit_all(base, lessons("one", "two"), "affine-full", RECIPE, folder=tmp_path)
    again = fit_all(
        base,
        lessons("one", "two"),
        "affine-full",
        RECIPE,
        folder=tmp_path,
        resume=True,
        listener=Watch(),
    )
    assert not seen
    assert again.histories == first.histories
    for name in ("one", "two"):
        loaded = pm.load_domain(tmp_path / f"{name}.safetensors", base)
        assert torch.equal(logits(base, loaded), logits(base, first.domains[name]))


def test_what_was_learned_otherwise_is_not_taken_for_done(tmp_path):
    base = tiny_base()
    fit_all(base, lessons("one"), "affine-full", RECIPE, folder=tmp_path)
    with pytest.raises(TrainingError, match="another method, recipe, seed"):
        fit_all(base, lessons("one"), "affine-full", RECIPE, folder=tmp_path, resume=True, seed=1)
    with pytest.raises(TrainingError, match="with other options"):
        fit_all(base, lessons("one"), "affine-full", RECIPE, folder=tmp_path, resume=True, per="channel")


def test_what_was_learned_from_other_images_is_not_taken_for_done(tmp_path):
    base, method = tiny_base(), "bn-only"
    for number, root in enumerate((tmp_path / "these", tmp_path / "those")):
        folder = make_folder(root, train=8 + 4 * number)
        data = pm.load_data(folder)
        loaders = pm.make_loaders(data, base.input, pm.get_recipe(RECIPE, side=16))
        lesson = {"one": Lesson(data.classes, loaders.train, loaders.val)}
        if number == 0:
            fit_all(base, lesson, method, RECIPE, folder=tmp_path / "packs")
            fit_all(base, lesson, method, RECIPE, folder=tmp_path / "packs", resume=True)
    with pytest.raises(TrainingError, match="was learned from other images"):
        fit_all(base, lesson, method, RECIPE, folder=tmp_path / "packs", resume=True)


def test_what_has_settled_is_measured_by_images_of_the_last_size(tmp_path, monkeypatch):
    base, data = tiny_base(), pm.load_data(make_folder(tmp_path))
    loaders = pm.make_loaders(data, base.input, pm.get_recipe(RECIPE, side=24, first_side=12))
    domain, sides, placed = pm.new_domain(base, "bn-only", data.classes), [], base.placed
    monkeypatch.setattr(base, "placed", lambda images: sides.append(images.shape[-1]) or placed(images))
    _measured(base, Lesson(data.classes, loaders.train), domain)
    assert len(sides) == 2 * len(loaders.train)  # for statistics, then for the result, as there is no val
    assert set(sides) == {24}


def test_a_pack_says_with_which_seed_its_images_were_cut(tmp_path):
    here = lessons("one", "two")
    here["two"] = dataclasses.replace(here["two"], split_seed=5)
    for _ in range(2):  # what is done says so again
        fitted = fit_all(tiny_base(), here, "bn-only", RECIPE, seed=3, folder=tmp_path, resume=True)
        noted = [inspect(tmp_path / f"{name}.safetensors").manifest.recipe for name in here]
        assert [split_seed(note) for note in noted] == [3, 5]
        assert [domain.recipe["seed"] for domain in fitted.domains.values()] == [3, 3]


CUTS = [
    ("affine-full", 14),  # the second domain
    ("pa-svd", 13),  # the factors of the first
    ("packnet", 10),  # the first, pruned
    ("series-adapter-joint", 9),
    ("progressive", 14),
    ("ewc", 14),
]
LIKE_THESE = [("affine-full", 3), ("packnet", 15), ("mtan", 5), ("spottune", 5), ("lwf", 14), ("ba2-50", 5)]


@pytest.mark.parametrize(
    ("method", "steps"), [*CUTS, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in LIKE_THESE)]
)
def test_a_sequence_that_was_cut_ends_as_one_that_was_not(method, steps, tmp_path):
    base = block_base()
    whole = fit_all(base, lessons("one", "two"), method, RECIPE)
    arguments = {"folder": tmp_path, "resume": True}
    with pytest.raises(InterruptedTraining):
        fit_all(base, lessons("one", "two"), method, RECIPE, listener=Interrupt(steps), **arguments)
    resumed = fit_all(base, lessons("one", "two"), method, RECIPE, **arguments)
    for name, domain in whole.domains.items():
        assert same(domain, resumed.domains[name])


def test_what_a_method_does_to_the_base_is_measured():
    base = tiny_base()
    quick = dataclasses.replace(RECIPE, weight_rate=1e-2)
    fitted = fit_all(base, lessons("one", "two"), "lwf", quick, own=lessons("own")["own"])
    assert fitted.base.change > 0
    assert 0 <= fitted.base.agreement <= 100
    assert fitted.base.accuracy_before is not None
    base.verify()
