"""LwF and EWC alike: a domain goes on where the last one ended, and that is all domains' then."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, logits, tiny_base
from polymask.core.network import copy_with
from polymask.core.parts import Part
from polymask.errors import InterruptedTraining, MethodError
from polymask.methods.shared_weights import Snapshot, own_classifier
from polymask.train.fit import fit
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe
from sequences import (
    RECIPE,
    Interrupt,
    Patterns,
    learned_base,
    lesson,
    moved_at_random,
    new,
    sequence,
)

METHODS = ["lwf", "ewc"]
POLICIES = ["own", "affine", "shared", "stats"]
FEW = {"lwf": {}, "ewc": {"fisher_batches": 1}}  # options that save time
SHORT = Recipe(epochs=4, rate=1e-3, weight_rate=1e-3, head_rate=1e-2, drops=(), selection="last")


@pytest.fixture(scope="module")
def base() -> pm.Base:
    return tiny_base()


def features(base, domain):
    with torch.no_grad():
        return domain.eval().features(base, batch()[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_fresh_domain_is_the_base_bit_for_bit(base, method):
    domain = new(base, pm.create_method(method))
    with torch.no_grad():
        assert torch.equal(features(base, domain), base.net(batch()[0]))


@pytest.mark.parametrize("norms", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_domain_starts_where_the_last_one_ended(base, method, norms):
    earlier = sequence(base, pm.create_method(method, norms=norms), (3, 5))
    following = pm.create_method(method, norms=norms).after(earlier)
    domain = new(base, following, 2)
    following.follow(domain, earlier)
    assert torch.equal(features(base, domain), features(base, earlier[1]))
    assert not torch.equal(features(base, domain), features(base, earlier[0]))
    assert all(p.requires_grad for p in domain.parameters())
    before = features(base, earlier[1])
    moved_at_random(domain)
    assert torch.equal(features(base, earlier[1]), before)


@pytest.mark.parametrize("norms", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_in_the_end_all_domains_have_the_last_ones_network_and_their_own_heads(base, method, norms):
    domains = sequence(base, pm.create_method(method, norms=norms), (3, 5, 2))
    before = [logits(base, domain) for domain in domains]

    settled = pm.create_method(method).settle(base, domains)

    last = features(base, domains[-1])
    assert all(torch.equal(features(base, domain), last) for domain in settled)
    assert [domain.head.out_features for domain in settled] == [3, 5, 2]
    assert torch.equal(logits(base, settled[2]), before[2])
    assert not any(p.requires_grad for domain in settled for p in domain.parameters())
    for domain, kept in zip(domains, before, strict=True):
        assert torch.equal(logits(base, domain), kept)
    assert not torch.equal(logits(base, settled[0]), before[0])


@pytest.mark.parametrize("method", METHODS)
def test_settled_domains_share_one_network_in_memory(base, method):
    settled = pm.create_method(method).settle(base, sequence(base, pm.create_method(method), (3, 5)))
    first, second = ({place: tensor.data_ptr() for place, tensor in domain.stored().items()} for domain in settled)
    assert {place for place in first if first[place] != second[place]} == {
        "head/weight",
        "head/bias",
    }


@pytest.mark.parametrize("method", METHODS)
def test_settled_domains_can_be_followed_and_settled_again(base, method):
    made = pm.create_method(method)
    settled = list(made.settle(base, sequence(base, made, (3, 5))))
    following = made.after(settled)
    domain = new(base, following, 2)
    following.follow(domain, settled)
    assert torch.equal(features(base, domain), features(base, settled[0]))
    again = made.settle(base, [*settled, moved_at_random(domain)])
    assert torch.equal(features(base, again[0]), features(base, again[2]))


@pytest.mark.parametrize("method", METHODS)
def test_domains_of_a_sequence_load_bit_exactly_before_and_after_they_are_settled(base, method, tmp_path):
    made = pm.create_method(method)
    domains = sequence(base, made, (3, 5))
    for domain in (*domains, *made.settle(base, domains)):
        domain.save(tmp_path / "d.safetensors")
        loaded = pm.load_domain(tmp_path / "d.safetensors", base)
        assert torch.equal(logits(base, loaded), logits(base, domain))
        assert loaded.method == domain.method
        assert loaded.stored().keys() == domain.stored().keys()
        assert torch.equal(domain.merged(base)(batch()[0]), logits(base, domain))


@pytest.mark.parametrize("norms", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_moved_base_is_the_network_of_the_last_domain(base, method, norms):
    made = pm.create_method(method, norms=norms)
    domains = sequence(base, made, (3, 5))
    moved = made.moved(base, domains)
    assert all(t.shape == base.tensor(name).shape for name, t in moved.items())
    assert not any(t.requires_grad for t in moved.values())
    with torch.no_grad():
        network = copy_with(base.net, moved)
        assert torch.equal(network(batch()[0]), features(base, domains[-1]))
    settled = made.settle(base, domains)
    assert all(torch.equal(t, moved[n]) for n, t in made.moved(base, settled).items())
    assert made.moved(base, []) == {}


@pytest.mark.parametrize("method", METHODS)
def test_no_domain_settles_to_no_domain(base, method):
    assert list(pm.create_method(method).settle(base, [])) == []


@pytest.mark.parametrize("method", METHODS)
def test_only_domains_of_one_method_and_norm_policy_follow_each_other(base, method):
    made = pm.create_method(method, norms="own")
    for other in (
        pm.create_method("finetune"),
        pm.create_method(method, norms="affine"),
    ):
        earlier = [new(base, other).frozen()]
        domain = new(base, made.after(earlier))
        with pytest.raises(MethodError, match=f"a domain by {method} with norms='own' cannot"):
            made.follow(domain, earlier)


@pytest.mark.parametrize("norms", ["own", "affine"])
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_is_learned_and_ends_as_one_network(method, norms):
    base = learned_base()
    fitted = fit_all(
        base,
        {"one": lesson(1), "three": lesson(3)},
        method,
        Recipe(**RECIPE.to_json() | {"epochs": 4}),
        norms=norms,
        own=lesson(100, 8),
        **FEW[method],
    )
    one, three = fitted.domains.values()
    assert torch.equal(features(base, one), features(base, three))
    assert min(fitted.learned.values()) > 50  # chance is 25
    assert fitted.learned["three"] == fitted.final["three"]
    assert fitted.base.accuracy_before > 90
    assert fitted.base.change > 0
    base.verify()


@pytest.mark.parametrize("steps", [1, 5, 11])  # 8 for each domain
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_was_cut_ends_as_one_that_was_not(base, method, steps, tmp_path):
    lessons = {
        name: Lesson(["a", "b", "c", "d"], Patterns(i, 2), Patterns(i, 1, 99)) for i, name in enumerate(("one", "two"))
    }
    made = pm.create_method(method, **FEW[method])
    whole = fit_all(base, lessons, made, SHORT)
    with pytest.raises(InterruptedTraining):
        fit_all(base, lessons, made, SHORT, folder=tmp_path, listener=Interrupt(steps))
    resumed = fit_all(base, lessons, made, SHORT, folder=tmp_path, resume=True)
    for name, domain in whole.domains.items():
        for place, tensor in domain.stored().items():
            assert torch.equal(tensor, resumed.domains[name].stored()[place]), place


class NoNorms(nn.Module):
    """A transposed, a grouped and a plain convolution and a linear layer; no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(3, 6, 3, stride=4, groups=3)
        self.transposed = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2)
        self.linear = nn.Linear(4, 6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.transposed(F.relu(self.grouped(x))))
        return self.fc(torch.tanh(self.linear(x.mean((2, 3)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_networks_without_norms_and_other_types_learn_a_sequence(method, dtype):
    torch.manual_seed(0)
    base = pm.load_base(NoNorms().to(dtype), input=SPEC)

    class Typed(Patterns):
        def batches(self, epoch=0, start=0):
            for images, labels in super().batches(epoch, start):
                yield images.to(dtype), labels

    lessons = {n: Lesson(list("abcd"), Typed(i, 2)) for i, n in enumerate(("one", "two"))}
    fitted = fit_all(base, lessons, method, SHORT, **FEW[method])
    kept = fitted.domains["two"].stored()
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())
    assert kept["transform/transposed.weight/weight"].any()
    assert kept["transform/transposed.weight/bias"].shape == (4,)
    base.verify()


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_is_learned_in_bfloat16_autocast(base, method):
    recipe = Recipe(**SHORT.to_json() | {"autocast": True})
    lessons = {n: Lesson(list("abcd"), Patterns(i, 2)) for i, n in enumerate(("one", "two"))}
    fitted = fit_all(base, lessons, method, recipe, **FEW[method])
    assert fitted.histories["two"][-1].loss < fitted.histories["two"][0].loss


@pytest.mark.parametrize("method", METHODS)
def test_a_base_without_a_classifier_is_simply_fine_tuned_at_first(method):
    net = tiny_base().net  # its classifier is taken out
    base = pm.load_base(net, input=SPEC, classifier=None)
    assert own_classifier(base) is None
    made = pm.create_method(method)
    domain, plain = new(base, made), new(base, pm.create_method("finetune", norms=made.norms))
    images = Patterns(0, 2, classes=3)
    objective = made.objective(base, domain, images.images)
    moved_at_random(domain)
    if objective is not None:
        assert objective(*[torch.zeros(1)] * 2) == 0
    if method == "lwf":
        assert objective is None
        return  # its first quarter is the head's alone
    domain = new(base, made)
    for each in (domain, plain):
        fit(base, each, images, None, SHORT)
    assert torch.equal(logits(base, domain), logits(base, plain))


def test_a_classifier_that_is_a_convolution_of_one_pixel_is_a_linear_map():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 6, 1), nn.Flatten())
    base = pm.load_base(net, input=SPEC, classifier="2")
    images = batch()[0]
    with torch.no_grad():
        torch.testing.assert_close(own_classifier(base)(base.net(images)), net(images))


def test_a_classifier_with_a_larger_kernel_is_not_taken_for_a_linear_map():
    net = nn.Sequential(nn.Conv2d(3, 4, 15), nn.Conv2d(4, 6, 2), nn.Flatten())
    assert own_classifier(pm.load_base(net, input=SPEC, classifier="1")) is None


def test_what_is_carried_for_the_next_domain_does_not_change_what_the_head_sees(base):
    domain = new(base, pm.create_method("finetune")).eval()
    expected = features(base, domain)
    domain.route = Part()
    assert torch.equal(features(base, domain), expected)


def test_a_snapshot_keeps_tensors_as_they_were():
    tensor = torch.zeros(3)
    kept = Snapshot({"a.weight": tensor, "a.bias": tensor})
    tensor.add_(1)
    assert {name: t.sum().item() for name, t in kept.tensors().items()} == {
        "a.weight": 0,
        "a.bias": 0,
    }
    assert not list(kept.parameters())
    assert len(kept.state_dict()) == 2
