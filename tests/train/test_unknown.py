"""Unknown images: what a domain keeps to tell them, and what it then says."""

import dataclasses

import pytest
import torch

import polymask as pm
from forged_packs import read_parts, write_forged
from nets import SPEC, tiny_base, trained
from polymask.core.domain import LIKENESS
from polymask.core.unknown import RULES
from polymask.errors import DataError, DomainError, PackError
from polymask.train.predict import write_likeness
from polymask.train.unknown import Observed, calibration_error, extend_unknown, fit_temperature, fit_unknown, observe


def pictures(count: int = 60, classes: int = 3, seed: int = 0, shift: float = 0.0):
    """Images of classes that differ in brightness, as (image, label) pairs."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = torch.randn(count, *SPEC.shape, generator=draw) * 0.2 + labels[:, None, None, None] - 1 + shift
    return torch.utils.data.TensorDataset(images, labels)


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module", params=["cosine", "mahalanobis"])
def domain(base, request):
    made = trained(base)
    pm.calibrate(base, made, {"train": pictures(), "val": pictures(seed=1)}, rule=request.param)
    return made.frozen()


def outputs(base, domain, data):
    images = torch.stack([image for image, _ in data])
    with torch.no_grad():
        return domain.scored().merged(base)(images)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_accepts_its_share_of_validation_images(base, rule):
    domain, val = trained(base), pictures(100, seed=1)
    report = pm.calibrate(base, domain, (pictures(), val), rule=rule, accepted=0.9)
    assert 90 <= report.accepted <= 95  # equal scores stay together
    assert report.images == 100
    threshold = domain.unknown.judgement.threshold
    scores = outputs(base, domain, val)[:, -1].sort().values
    torch.testing.assert_close(
        float(scores[10]), threshold, rtol=1e-3, atol=1e-4
    )  # batches of other sizes round otherwise


def test_the_cosine_rule_is_the_mean_cosine_to_class_means_by_probability():
    torch.manual_seed(0)
    labels = torch.arange(90) % 3
    features = torch.randn(90, 10) + 4 * torch.randn(3, 10)[labels]
    seen = Observed(features, features[:, :3], labels)
    unknown = fit_unknown("cosine", seen, seen)
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    kept = unknown.class_means()
    assert torch.nn.functional.cosine_similarity(kept, means).min() > 0.9  # two bits a feature
    new, logits = torch.randn(7, 10), torch.randn(7, 3)
    shares = (logits / unknown.judgement.temperature).softmax(1)
    cosines = torch.nn.functional.cosine_similarity(new[:, None], kept[None], dim=2)
    torch.testing.assert_close(unknown.score(new, logits), (shares * cosines).sum(1))
    torch.testing.assert_close(unknown.score(9 * new, logits), unknown.score(new, logits))  # its length says nothing
    assert unknown.score(torch.zeros(1, 10), logits[:1]) == 0


def test_class_means_are_kept_at_four_levels_each_four_in_a_byte():
    features = torch.tensor([[9.0, 1, -1, -9, 9], [-9, -1, 1, 9, -9]]).repeat(20, 1)
    seen = Observed(features, features[:, :2], torch.arange(40) % 2)
    unknown = fit_unknown("cosine", seen, seen)
    assert unknown.codes.tolist() == [[3 | 2 << 2 | 1 << 4 | 0 << 6, 3], [0 | 1 << 2 | 2 << 4 | 3 << 6, 0]]
    size = features[0].square().mean().sqrt().item()
    torch.testing.assert_close(unknown.sizes, torch.full((2,), size))
    torch.testing.assert_close(unknown.class_means()[0], size * torch.tensor([1.51, 0.4528, -0.4528, -1.51, 1.51]))


def test_features_are_imagined_around_the_classes_that_they_are_of():
    torch.manual_seed(0)
    labels, spread = torch.arange(400) % 4, torch.tensor([3.0, 1, 0.1, 0.1, 0.1, 0.1])
    features = 5 * torch.randn(4, 6)[labels] + spread * torch.randn(400, 6)
    seen = Observed(features, torch.randn(400, 4), labels)
    unknown = fit_unknown("softmax", seen, seen, rank=2)
    drawn = unknown.imagined(2000, torch.Generator().manual_seed(0))
    assert drawn.shape == (4, 2000, 6)
    torch.testing.assert_close(drawn.mean(1), unknown.class_means(), atol=0.3, rtol=0)
    torch.testing.assert_close(drawn.std(1).mean(0)[:2], spread[:2], rtol=0.2, atol=0)


def test_without_training_images_the_rule_looks_at_logits_alone(base):
    domain = trained(base)
    assert pm.calibrate(base, domain, {"val": pictures(seed=1)}).rule == "softmax"
    assert pm.calibrate(base, domain, {"train": pictures(), "val": pictures(seed=1)}).rule == "cosine"


@pytest.mark.parametrize("rule", ["cosine", "softmax", "energy", "mahalanobis"])
def test_new_classes_are_known_by_the_rule_too(rule):
    torch.manual_seed(0)
    labels = torch.arange(200) % 5
    features = 6 * torch.randn(5, 12)[labels] + torch.randn(200, 12)
    logits = features @ torch.randn(12, 5)
    old, new = labels < 3, labels >= 3
    first = Observed(features[old], logits[old][:, :3], labels[old])
    more = Observed(features[new], logits[new], labels[new])
    unknown = fit_unknown(rule, first, first)
    wider = extend_unknown(unknown, more, more, 3)
    assert (wider.score(more.features, more.logits) >= wider.judgement.threshold).float().mean() >= 0.94
    if rule != "mahalanobis":
        assert torch.equal(wider.class_means()[:3], unknown.class_means())
        expected = torch.stack([features[labels == c].mean(0) for c in (3, 4)])
        assert torch.nn.functional.cosine_similarity(wider.class_means()[3:], expected).min() > 0.8


@pytest.mark.parametrize("rule", ["mahalanobis", "neighbours"])
def test_images_that_look_like_nothing_in_training_are_unknown(base, rule):
    domain = trained(base)
    pm.calibrate(base, domain, (pictures(), pictures(seed=1)), rule=rule)
    far = outputs(base, domain, pictures(30, seed=2, shift=40.0))[:, -1]
    assert all(map(domain.unknown.judgement.is_unknown, far.tolist()))


def test_a_rule_leaves_logits_as_they_were_to_the_bit(base, domain):
    data = pictures(9, seed=3)
    images = torch.stack([image for image, _ in data])
    with torch.no_grad():
        plain = domain.merged(base)(images)
        routed = domain.scored()(base, images)
    assert torch.equal(outputs(base, domain, data)[:, :3], plain)
    assert routed.shape == (9, 4)
    model = pm.MultiDomainModel(base)
    model.add("shapes", domain)
    assert torch.equal(model(images, domain="shapes"), plain)
    small = pm.MultiDomainModel(base, cache_bytes=0)
    small.add("shapes", domain)
    assert torch.equal(small(images, domain="shapes"), plain)


def test_a_domain_that_cannot_be_merged_tells_unknown_images_too(base):
    from nets import block_base

    blocks = block_base()
    domain = trained(blocks, "spottune")
    pm.calibrate(blocks, domain, (pictures(), pictures(seed=1)), rule="mahalanobis")
    model = pm.MultiDomainModel(blocks)
    model.add("shapes", domain)
    found = model.predict(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), domain="shapes", reject=True)
    assert all(isinstance(one.unknown, bool) for one in found)


def test_a_pack_keeps_the_rule_and_says_how_large_it_is(base, domain, tmp_path):
    domain.save(tmp_path / "shapes.safetensors")
    loaded = pm.load_domain(tmp_path / "shapes.safetensors", base)
    assert loaded.unknown.judgement == domain.unknown.judgement
    assert "unknown" not in loaded.recipe
    data = pictures(7, seed=4)
    assert torch.equal(outputs(base, loaded, data), outputs(base, domain, data))
    sizes = pm.inspect(tmp_path / "shapes.safetensors").tensors
    assert sum(size for name, size in sizes.items() if name.startswith("unknown/")) == domain.unknown.bytes
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "shapes.safetensors").read_bytes()


def test_predictions_say_unknown_only_where_it_is_asked_for(base, domain):
    model = pm.MultiDomainModel(base)
    model.add("shapes", domain)
    images = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)
    plain, asked = (model.predict(images, domain="shapes", reject=reject) for reject in (False, True))
    assert plain[0].unknown is None
    assert asked[0].top == plain[0].top
    assert asked[0].unknown == domain.unknown.judgement.is_unknown(asked[0].score)
    assert ("unknown" in repr(asked[0])) == asked[0].unknown


def test_probabilities_are_those_at_the_temperature(base, domain):
    model = pm.MultiDomainModel(base)
    model.add("shapes", domain)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    (found,) = model.predict(image, domain="shapes", top=3)
    fed = (image[None] / 255 - 0.5) / 0.5
    expected = (model(fed, domain="shapes") / domain.unknown.judgement.temperature).softmax(1)
    assert found.probability == pytest.approx(float(expected.max()), abs=1e-4)


def test_a_domain_without_a_rule_works_as_before_and_reject_says_what_is_missing(base):
    model = pm.MultiDomainModel(base)
    model.add("plain", trained(base))
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    assert model.predict(image, domain="plain")[0].unknown is None
    with pytest.raises(DomainError, match="polymask calibrate plain --data DIR"):
        model.predict(image, domain="plain", reject=True)


def test_without_a_domains_name_the_nearest_answers_and_says_unknown_in_one_call(base, domain):
    model = pm.MultiDomainModel(base)
    for name, shade in (("dark", 0), ("light", 255)):
        image = torch.full((1, *SPEC.shape), shade / 127.5 - 1)
        made = domain.frozen()
        made.recipe = {LIKENESS: write_likeness(base.run({}, image)[0])}
        model.add(name, made)
    images = torch.stack([torch.full((3, 16, 16), shade, dtype=torch.uint8) for shade in (255, 0)])
    found = model.predict(images, reject=True)
    assert [one.domain for one in found] == ["light", "dark"]
    assert all(isinstance(one.unknown, bool) for one in found)
    model.add("unlike", trained(base))
    with pytest.raises(DomainError, match="unlike does not tell what its images look like"):
        model.predict(images)


def test_learn_keeps_a_rule_where_val_can_set_a_threshold(base):
    data = {"train": pictures(), "val": pictures(40, seed=1)}
    recipe = pm.get_recipe("quick", epochs=1)
    learned = pm.learn(base, data, recipe=recipe, classes=["a", "b", "c"])
    assert learned.domain.unknown.judgement.rule == "cosine"
    few = pm.learn(base, {"train": pictures(), "val": pictures(9)}, recipe=recipe, classes=["a", "b", "c"])
    assert few.domain.unknown is None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"train": pictures()}, "no val to set a threshold by"),
        ({"train": pictures(), "val": pictures(9)}, "9 validation images are too few"),
        ({"val": pictures(seed=1)}, "mahalanobis needs training images"),
    ],
)
def test_images_that_cannot_calibrate_are_refused_and_nothing_changes(base, data, problem):
    domain = trained(base)
    with pytest.raises(DataError, match=problem):
        pm.calibrate(base, domain, data, rule="mahalanobis")
    assert domain.unknown is None


def test_images_of_other_classes_and_other_targets_are_refused(base, tmp_path):
    from image_folders import make_folder

    make_folder(tmp_path / "pictures", classes=3)
    with pytest.raises(DomainError, match="give images of the same classes"):
        pm.calibrate(base, trained(base), tmp_path / "pictures")
    labels = pm.new_domain(base, "affine-full", ["a", "b"], target="labels")
    with pytest.raises(DomainError, match="no class that could be unknown"):
        pm.calibrate(base, labels, (pictures(), pictures()))


def test_the_temperature_undoes_logits_that_are_too_large():
    torch.manual_seed(0)
    logits = torch.randn(4000, 5)
    labels = logits.softmax(1).multinomial(1)[:, 0]
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.1)
    before, after = (calibration_error((3 * logits / t).softmax(1), labels) for t in (1, 3))
    assert before > 10 > 4 > after


def test_a_class_without_spread_gives_finite_scores():
    same = Observed(torch.ones(30, 4), torch.randn(30, 2), torch.arange(30) % 2)
    unknown = fit_unknown("mahalanobis", same, same)
    assert torch.isfinite(unknown.score(torch.randn(5, 4), torch.randn(5, 2))).all()


GOOD = {"rule": "softmax", "temperature": 1.0, "threshold": 0.5, "accepted": 0.95}
OLD = GOOD | {"rule": "cosine", "means": True}
NASTY = [
    OLD,
    3,
    "a",
    [],
    {},
    {"rule": "mahalanobis"},
    GOOD | {"means": 1},
    GOOD | {"rule": "mahalanobis", "means": True},
]
FIELDS = ("rule", "temperature", "threshold", "accepted")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "x", -1, 0, True, [], 1e300, "\x00"])
def test_a_forged_note_on_unknown_images_is_refused_or_harmless(base, domain, tmp_path, field, value):
    path = tmp_path / "shapes.safetensors"
    domain.save(path)
    manifest, header, data = read_parts(path)
    manifest["recipe"]["unknown"][field] = value
    write_forged(path, manifest, header, data)
    if field == "threshold" and type(value) in (int, float):
        assert pm.load_domain(path, base).unknown.judgement.threshold == value
        return
    with pytest.raises(PackError, match="unknown images"):
        pm.load_domain(path, base)


@pytest.mark.parametrize("note", NASTY)
def test_a_note_that_is_no_note_is_refused(base, domain, tmp_path, note):
    path = tmp_path / "shapes.safetensors"
    domain.save(path)
    manifest, header, data = read_parts(path)
    manifest["recipe"]["unknown"] = note
    write_forged(path, manifest, header, data)
    with pytest.raises(PackError, match="unknown images"):
        pm.load_domain(path, base)


@pytest.mark.parametrize("change", ["basis", "rows", "codes", "sizes", "mean", "note"])
def test_tensors_of_a_rule_that_do_not_fit_are_refused(base, domain, tmp_path, change):
    forged, path = domain.frozen(), tmp_path / "forged.safetensors"
    if change != "note" and not hasattr(forged.unknown, change):
        change = "rest" if change in ("codes", "sizes") else "scale"
    if change != "note":
        old = getattr(forged.unknown, change)
        setattr(forged.unknown, change, torch.cat([old, old]))
    forged.save(path)
    if change == "note":
        manifest, header, data = read_parts(path)
        del manifest["recipe"]["unknown"]
        write_forged(path, manifest, header, data)
    with pytest.raises(PackError):
        pm.load_domain(path, base)


def test_what_is_observed_is_what_the_head_sees(base, domain):
    seen = observe(base, domain, _Batches(8))
    with torch.no_grad():
        torch.testing.assert_close(seen.logits, domain.merged(base)(_Batches(8).images))


class _Batches:
    def __init__(self, count: int) -> None:
        data = pictures(count)
        self.images, self.labels = data.tensors

    def __len__(self) -> int:
        return 1

    def batches(self, epoch: int = 0, start: int = 0):
        yield self.images, self.labels


def test_class_means_as_an_earlier_version_kept_them_are_read(base, tmp_path):
    made, path = trained(base), tmp_path / "earlier.safetensors"
    pm.calibrate(base, made, (pictures(), pictures(seed=1)), rule="mahalanobis")
    made.unknown.judgement = dataclasses.replace(made.unknown.judgement, rule="softmax", means=True)
    made.save(path)
    loaded = pm.load_domain(path, base)
    assert sorted(dict(loaded.unknown.named_buffers())) == ["basis", "mean", "rest", "rows", "scale", "whiten"]
    assert loaded.unknown.imagined(5, torch.Generator().manual_seed(0)).shape == (3, 5, base.feature_dim)


def test_classes_at_the_end_of_a_sorted_set_have_means_too(base):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat_interleave(900)
    images = torch.randn(len(labels), *SPEC.shape, generator=draw) * 0.2 + labels[:, None, None, None] - 1
    made = trained(base)
    pm.calibrate(base, made, (torch.utils.data.TensorDataset(images, labels), pictures(seed=1)))
    assert all(size > 0 for size in made.unknown.sizes.flatten().tolist())
