"""Domains that begin as another one: what they are then, what stays as it was, what is refused."""

import numpy as np
import pytest
import torch

import polymask as pm
from made_images import images
from nets import batch, logits, tiny_base, trained
from polymask.core.bits import Bits
from polymask.core.starting import begin_as, start_note
from polymask.data.images import DomainData
from polymask.data.split import ArraySplit
from polymask.errors import DomainError, MethodError, TrainingError
from polymask.lifelong.start import choose_start, open_start
from polymask.train.fit import Listener
from polymask.train.state import CheckpointError

RECIPE = pm.get_recipe("quick", epochs=1, batch_size=8, side=16)


@pytest.fixture(scope="module")
def base():
    return tiny_base()


def moved(base, method="affine-centred", seed=0, **options):
    """A domain whose scalars, mask and norms are all unlike those of a fresh one."""
    domain = trained(base, method, seed=seed, **options).frozen()
    draw = torch.Generator().manual_seed(seed)
    for _, transform in domain.named_transforms():
        transform.words = Bits.of(torch.rand(transform.shape, generator=draw) > 0.4).words
        for scalar in transform.scalar_parameters():
            scalar.data += 0.02 * torch.randn(scalar.shape, generator=draw)
    for _, norm in domain.named_norms():
        for tensor in norm.tensors().values():
            tensor.data.copy_(1.1 * tensor)
    return domain


def features(base, domain):
    with torch.no_grad(), domain.in_mode(training=False):
        return domain.features(base, batch()[0])


def near(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize(
    ("method", "source"),
    [
        ("affine-centred", "affine-centred"),
        ("affine-centred", "affine-full"),
        ("affine-centred", "piggyback-bn"),
        ("affine-full", "affine-simple"),
    ],
)
def test_a_mask_begins_as_another_whatever_numbers_it_learns_by(base, method, source, per):
    start, domain = moved(base, source), pm.new_domain(base, method, ["a", "b"], per=per)
    assert not torch.allclose(features(base, domain), features(base, start))
    begin_as(domain, start, 1e-3)
    near(features(base, domain), features(base, start))
    theirs = dict(start.named_transforms())
    assert all(torch.equal(t.mask(), theirs[name].mask()) for name, t in domain.named_transforms())
    assert all(t.flipped() is None for _, t in domain.named_transforms())


@pytest.mark.parametrize("form", ["plain", "centred"])
@pytest.mark.parametrize("name", ["affine-cross", "affine-mix"])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_domain_that_draws_on_others_begins_as_one_of_them(base, name, form, per):
    start, other = moved(base), moved(base, seed=1)
    method = pm.create_method(name, per=per, form=form).drawing_on({"other": other, "start": start})
    domain = pm.new_domain(base, method, ["a", "b"])
    method.draw_on(domain, [other, start])
    begin_as(domain, start, 1e-3)
    near(features(base, domain), features(base, start))
    with pytest.raises(MethodError, match="its masks are not those of a source; draw on it too"):
        begin_as(domain, moved(base, seed=2), 1e-3)


def test_learning_begins_there_and_leaves_the_other_as_it_was(base, tmp_path):
    start = moved(base, norms="affine")
    before = logits(base, start)
    learned = pm.learn(base, images(), recipe=RECIPE, start=start, progress=False)
    fresh = pm.learn(base, images(), recipe=RECIPE, progress=False)
    own, theirs, others = (dict(d.named_transforms()) for d in (learned.domain, start, fresh.domain))

    def differ(one, two):
        return sum(int((one[name].mask() != two[name].mask()).sum()) for name in one)

    assert differ(own, theirs) < differ(others, theirs) / 2
    assert torch.equal(logits(base, start), before)
    note = learned.domain.recipe["start"]
    assert (note["data"], note["method"]) == (None, "affine-centred")
    assert note["digest"] == start_note(start)["digest"] != start_note(moved(base, seed=1))["digest"]
    assert "start" not in fresh.domain.recipe
    learned.domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, learned.domain))
    assert loaded.recipe["start"] == learned.domain.recipe["start"]
    base.verify()


@pytest.mark.parametrize(
    ("start", "options", "problem"),
    [
        ({"method": "affine-centred"}, {"norms": "affine"}, r"norms=affine has no stem_bn.running_mean .* norms=own"),
        ({"method": "affine-full"}, {"k3": 0.0}, "k3 is fixed at 0 here"),
        (
            {"method": "affine-full", "per": "channel"},
            {},
            "k0 are per channel, .* take per=channel",
        ),
        ({"method": "finetune"}, {}, "affine-centred cannot begin as a domain by finetune .*: it has no affine mask"),
        ({"method": "bitdelta"}, {}, "bitdelta learns in stages or with other domains"),
        ({"method": "bn-only"}, {}, "affine-centred changes other layers than bn-only"),
    ],
)
def test_what_it_cannot_begin_as_is_refused_by_name(base, start, options, problem):
    other = moved(base, **start) if start["method"].startswith("affine") else trained(base, **start).frozen()
    domain = pm.new_domain(base, "affine-centred", ["a", "b"], **options)
    with pytest.raises(MethodError, match=problem):
        begin_as(domain, other, 1e-3)


def test_other_options_and_other_bases_are_refused(base):
    domain = pm.new_domain(base, "lora", ["a", "b"], rank=2)
    with pytest.raises(MethodError, match="by other options of it; take the same"):
        begin_as(domain, trained(base, "lora", rank=2, alpha=1.0).frozen(), 1e-3)
    with pytest.raises(DomainError, match="take a domain of the same base"):
        begin_as(domain, trained(tiny_base(seed=3), "lora", rank=2).frozen(), 1e-3)
    with pytest.raises(DomainError, match="'flowers' is no domain to begin as"):
        pm.learn(base, images(), recipe=RECIPE, start="flowers", progress=False)


def test_a_run_that_began_as_another_domain_is_not_gone_on_with(base, tmp_path):
    how = {"recipe": RECIPE.changed({"epochs": 2}), "checkpoint": tmp_path / "c.safetensors", "progress": False}

    class InTheSecondEpoch(Listener):
        def step(self, epoch, *facts):
            if epoch:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pm.learn(base, images(), start=moved(base, norms="affine"), listener=InTheSecondEpoch(), **how)
    assert how["checkpoint"].exists()
    with pytest.raises(CheckpointError, match="start"):
        pm.learn(base, images(), start=moved(base, seed=1, norms="affine"), resume=True, **how)
    assert pm.learn(base, images(), start=moved(base, norms="affine"), resume=True, **how).history


def shaded(hues, seed=0):
    """Classes of one grey each, and noise."""
    draw = np.random.default_rng(seed)
    labels = np.arange(90) % len(hues)
    noise = draw.integers(-4, 5, (3, 90, 20, 20, 3))
    splits = [
        ArraySplit("made", (np.array(hues)[labels][:, None, None, None] + n).astype(np.uint8), labels) for n in noise
    ]
    return DomainData("made", tuple(f"grey {hue}" for hue in hues), *splits)


def blinded(domain):
    """The domain, with features that say nothing."""
    for _, norm in domain.named_norms():
        for name, tensor in norm.tensors().items():
            tensor.data.zero_() if name in ("weight", "bias") else None
    return domain


def test_of_several_the_one_is_tried_whose_features_are_best_on_val(base):
    greys = shaded([100, 104, 108, 112, 116, 120, 124, 128, 132])
    sees = pm.new_domain(base, "affine-centred", ["a", "b"]).frozen()
    found = choose_start({"blind": blinded(moved(base)), "sees": sees}, base, greys, base.input)
    assert found.name == "sees"
    assert found.domain is sees
    assert found.reached["sees"] > 2 * found.reached["blind"]
    assert found.text.startswith("begins as the base and as sees, and what is better on val is kept")


def test_learning_from_both_beginnings_keeps_what_is_better_on_val(base, tmp_path):
    greys = shaded([100, 112, 124, 136])
    recipe = RECIPE.changed({"epochs": 6, "rate": 3e-3})
    seeing = pm.learn(base, greys, recipe=recipe, progress=False).domain
    alone = pm.learn(base, greys, recipe=recipe, seed=1, progress=False)
    for start, better in ((blinded(moved(base, norms="affine")), "base"), (seeing, None)):
        told = Told()
        how = {"recipe": recipe, "seed": 1, "checkpoint": tmp_path / "c.safetensors", "listener": told}
        both = pm.learn(base, greys, start=start, or_base=True, **how)
        one = pm.learn(base, greys, start=start, recipe=recipe, seed=1, progress=False)
        reached = both.domain.metrics["val_by_start"]
        assert reached == {"base": alone.domain.metrics["val_accuracy"], "start": one.domain.metrics["val_accuracy"]}
        kept = one if reached["start"] > reached["base"] else alone
        assert torch.equal(logits(base, both.domain), logits(base, kept.domain))
        assert ("start" in both.domain.recipe) == (kept is one)
        assert better is None or reached["base"] > reached["start"]
        assert told.epochs == 2 * [*range(6)]
        again = pm.learn(base, greys, start=start, or_base=True, resume=True, **how)  # from what both have saved
        assert torch.equal(logits(base, again.domain), logits(base, both.domain))
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()


class Told(Listener):
    def __init__(self):
        self.epochs = []

    def epoch(self, record, seconds):
        self.epochs.append(record.epoch)


def test_both_beginnings_need_val_to_be_compared(base):
    for given in (
        {},
        {"start": moved(base, norms="affine"), "recipe": RECIPE.changed({"train_on_val": True, "selection": "last"})},
    ):
        with pytest.raises(TrainingError, match="it needs start and val"):
            pm.learn(base, images(), or_base=True, progress=False, **({"recipe": RECIPE} | given))


def test_a_start_is_found_by_name_or_among_the_likest_that_the_method_can_begin_as(base, tmp_path):
    for name, shade, method in (("dark", 10, "affine-centred"), ("light", 250, "affine-full"), ("pale", 245, "lora")):
        learned = pm.learn(base, images(shade=shade), method, RECIPE, progress=False)
        learned.domain.save(tmp_path / f"{name}.safetensors")

    def found(text, method="affine-centred", without="new", sources=()):
        sources = {name: pm.load_domain(tmp_path / f"{name}.safetensors", base) for name in sources}
        method = pm.create_method(method, norms=RECIPE.norms or "own")
        return open_start(text, tmp_path, base, images(), method, base.input, sources, without=without)

    assert found("auto").reached.keys() == {"dark", "light"}
    assert found("auto", without="light").reached.keys() == {"dark"}
    assert found("auto", method="lora").reached.keys() == {"pale"}
    assert found("auto", sources=["light"]).reached.keys() == {"light"}
    assert found("dark", sources=["dark", "light"]).name == "dark"
    assert found("light", without="light").name == "light"  # it may learn on
    for text, how, problem in [
        ("ligth", {}, "did you mean light"),
        ("light,dark", {}, "no domain is named 'light,dark'"),
        ("pale", {"sources": ["dark"]}, "name pale among --from too"),
        ("auto", {"method": "finetune"}, "is one that finetune can begin as; name one"),
    ]:
        with pytest.raises(DomainError, match=problem):
            found(text, **how)


def test_a_head_alone_begins_as_nothing(base):
    recipe = RECIPE.changed({"frozen_side": 16, "epochs": 0})
    with pytest.raises(TrainingError, match="a head alone begins as nothing; give epochs"):
        pm.learn(base, images(), recipe=recipe, start=moved(base, norms="affine"), progress=False)
