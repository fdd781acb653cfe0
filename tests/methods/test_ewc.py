"""EWC: the Fisher information, the penalty, how both go on, and that it holds what mattered."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net, train
from polymask.errors import MethodError
from polymask.methods import ewc
from polymask.methods.ewc import Penalty, fisher, held_fisher, hold_fisher, of_mean_one
from polymask.methods.shared_weights import trained_tensors
from polymask.train.fit import fit
from polymask.train.fit_all import fit_all
from polymask.train.recipe import Recipe
from sequences import RECIPE, Patterns, learned_base, lesson, moved_at_random, new, sequence

EWC = pm.create_method("ewc", fisher_batches=2)
SHORT = Recipe(epochs=2, rate=1e-3, weight_rate=1e-3, drops=(), selection="last")


def linear_base() -> pm.Base:
    """Features h = W x + b of 6 numbers x, and logits V h + c: all that is learned is W and b."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 5)).double()
    return pm.load_base(net, input=pm.InputSpec((6, 1, 1), (0.5,) * 6, (0.5,) * 6))


def numbers(count: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, 1, 1, dtype=torch.float64, generator=generator)


def double_base() -> pm.Base:
    return pm.load_base(tiny_net().double(), input=SPEC)


def by_hand(base, x, labels):
    """(dW, db) of log p(label | x) for each row of x: V^T (e - p) x^T and V^T (e - p)."""
    W, b = base.tensor("1.weight"), base.tensor("1.bias")
    V, c = base.head.weight, base.head.bias
    p = torch.softmax((x @ W.T + b) @ V.T + c, 1)
    at_features = (F.one_hot(labels, 5) - p) @ V
    return at_features[:, :, None] * x[:, None, :], at_features


def test_the_fisher_information_is_the_mean_of_squared_gradients_of_single_images():
    base, images = linear_base(), numbers()
    domain = new(base, EWC)
    x = images.flatten(1)
    with torch.no_grad():
        p = torch.softmax(base.head(base.net(images)), 1)
    torch.manual_seed(3)
    labels = torch.cat([torch.multinomial(row, 1) for row in p])

    torch.manual_seed(3)
    found = fisher(base, domain, base.head, [images[:10], images[10:]])

    dW, db = by_hand(base, x, labels)
    assert found.keys() == {"1.weight", "1.bias"}
    torch.testing.assert_close(found["1.weight"], dW.square().mean(0), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found["1.bias"], db.square().mean(0), rtol=1e-10, atol=1e-14)
    assert not torch.allclose(found["1.weight"], dW.mean(0).square())


def test_labels_are_drawn_from_what_the_network_says():
    base = linear_base()
    image = numbers(1)
    with torch.no_grad():
        p = torch.softmax(base.head(base.net(image)), 1)[0]
    exact = sum(p[y] * by_hand(base, image.flatten(1), torch.tensor([y]))[0][0].square() for y in range(5))
    torch.manual_seed(0)
    found = fisher(base, new(base, EWC), base.head, [image.expand(1500, -1, -1, -1)])
    torch.testing.assert_close(found["1.weight"], exact, rtol=0.1, atol=0)


def test_the_fisher_information_is_of_all_that_the_domain_moves_in_eval_mode():
    """Against the gradients of D, d and the norms themselves, on a domain that has moved."""
    base = double_base()
    domain = new(base, EWC)
    moved_at_random(domain)
    images = batch(3)[0].double()
    torch.manual_seed(5)
    found = fisher(base, domain, domain.head, [images])
    assert domain.training

    torch.manual_seed(5)
    domain.eval()
    expected = {name: torch.zeros_like(t) for name, t in trained_tensors(domain).items()}
    for image in images:
        domain.zero_grad()
        log_p = F.log_softmax(domain(base, image[None]), 1)
        label = torch.multinomial(log_p[0].detach().exp(), 1).item()
        log_p[0, label].backward()
        for name, t in trained_tensors(domain).items():
            expected[name] += t.grad.square() / 3
    assert {"stem_bn.weight", "stem_bn.bias", "plain.bias", "stem.weight"} <= expected.keys()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-16)
    base.verify()


def penalty_of(base, strength=3.0):
    """A domain, the penalty that holds it, and F: random numbers, none of them 0."""
    domain = new(base, EWC)
    moved_at_random(domain)
    torch.manual_seed(1)
    F_ = {name: torch.rand_like(t) for name, t in trained_tensors(domain).items()}
    return domain, Penalty(domain, F_, strength), F_


def test_the_penalty_and_its_gradient_are_zero_where_training_begins():
    base = double_base()
    domain, penalty, _ = penalty_of(base)
    loss = penalty(*[torch.zeros(1, dtype=torch.float64)] * 2)
    assert loss.item() == 0
    loss.backward()
    assert all(not t.grad.any() for t in trained_tensors(domain).values())


def test_the_penalty_is_half_the_strength_times_the_weighted_squares_of_moves():
    base = double_base()
    domain, penalty, F_ = penalty_of(base, strength=3.0)
    start = {name: t.detach().clone() for name, t in trained_tensors(domain).items()}
    moved_at_random(domain, seed=7)
    loss = penalty(*[torch.zeros(1, dtype=torch.float64)] * 2)
    loss.backward()
    moves = {name: t.detach() - start[name] for name, t in trained_tensors(domain).items()}
    expected = sum(1.5 * (F_[name] * move**2).sum() for name, move in moves.items())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, t in trained_tensors(domain).items():
        torch.testing.assert_close(t.grad, 3.0 * F_[name] * moves[name], rtol=1e-10, atol=1e-15)
    assert not list(penalty.parameters())


def entries(tensors):
    return torch.cat([t.flatten() for t in tensors.values()])


def test_what_each_of_those_before_holds_has_a_mean_of_one():
    base = tiny_base()
    domain = new(base, EWC, 4)
    fit(base, domain, Patterns(1, 2), None, SHORT)
    assert entries(held_fisher(domain)).mean().item() == pytest.approx(2, rel=1e-4)  # base, domain
    nothing = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    assert not entries(of_mean_one(nothing)).any()


@pytest.mark.parametrize("factor", [1e-3, 0.1, 30.0])
def test_the_scale_of_the_fisher_information_changes_nothing(factor, monkeypatch):
    """F of gradients `factor` times as large: two domains in turn end in the same place."""
    base, ends = tiny_base(), []
    plain = ewc.fisher
    for scale in (1.0, factor**2):

        def scaled(*arguments, scale=scale):
            return {name: scale * f for name, f in plain(*arguments).items()}

        monkeypatch.setattr(ewc, "fisher", scaled)
        earlier = []
        for place in (1, 2):
            domain = new(base, EWC, 4)
            EWC.follow(domain, earlier)
            fit(base, domain, Patterns(place, 2), None, SHORT)
            earlier.append(domain)
        ends.append((entries(trained_tensors(domain)), entries(held_fisher(domain))))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_domain_from_before_f_was_divided_by_its_mean_holds_the_next_as_one_from_now():
    base = tiny_base()
    first, second = new(base, EWC, 4), new(base, EWC, 4)
    now = of_mean_one({name: torch.rand_like(f) for name, f in held_fisher(first).items()})
    for held in (now, {name: 1e-4 * f for name, f in now.items()}):
        hold_fisher(first, held)
        EWC.follow(second, [first])
        torch.testing.assert_close(entries(held_fisher(second)), entries(now))


def test_what_is_learned_moves_as_one_over_the_strength():
    """At the minimum strength F (theta - theta*) = -dCE/dtheta: ten times it, a tenth of the way.

    By L-BFGS to the minimum. Adam's steps are as long however strong the pull back is, so a few
    of its steps prove nothing.
    """
    base, images = linear_base(), numbers()
    labels = torch.arange(16) % 3
    moves = {}
    for strength in (1e3, 1e4, 1e5):
        method = dataclasses.replace(EWC, strength=strength)
        domain = new(base, method)
        torch.manual_seed(0)
        penalty = method.objective(base, domain, lambda: iter([(images, labels)]))
        optimiser = torch.optim.LBFGS(
            domain.transforms.parameters(),
            max_iter=200,
            tolerance_grad=1e-14,
            tolerance_change=1e-18,
            line_search_fn="strong_wolfe",
        )

        def loss(domain=domain, penalty=penalty, optimiser=optimiser):
            optimiser.zero_grad()
            features = domain.features(base, images)
            total = F.cross_entropy(domain.classify(features), labels) + penalty(images, features)
            total.backward()
            return total

        optimiser.step(loss)
        moves[strength] = torch.cat([t.detach().flatten() for t in domain.transforms.parameters()])
    assert moves[1e3].norm() > 1e-5
    torch.testing.assert_close(moves[1e3] / 10, moves[1e4], rtol=0.05, atol=1e-7)
    torch.testing.assert_close(moves[1e4] / 10, moves[1e5], rtol=0.05, atol=1e-8)


def test_a_strong_pull_leaves_the_network_and_its_classifier_where_they_were():
    """By `fit`: Adam, whose rate goes to 0, so that it ends at the minimum and not around it."""
    base = learned_base()
    images = next(Patterns(1, 1, 77).batches())[0]
    with torch.no_grad():
        before = base.head(base.net(images))
    away = {}
    for strength in (0.0, 1e6):
        domain = new(base, dataclasses.replace(EWC, strength=strength, norms="affine"), 4)
        fit(base, domain, Patterns(1), None, dataclasses.replace(RECIPE, epochs=4))
        with torch.no_grad():
            logits = base.head(domain.features(base, images))
        deltas = torch.cat([t.delta.flatten() for _, t in domain.named_transforms()])
        away[strength] = ((logits - before).norm().item(), deltas.norm().item())
    assert away[1e6][0] < 0.05 * away[0.0][0]
    assert away[1e6][1] < 0.2 * away[0.0][1]  # what F does not see may move


def test_the_first_domain_is_held_by_the_bases_own_classifier_on_its_images():
    base = double_base()
    domain = new(base, EWC)
    data = [(batch(4, seed=i)[0].double(), batch(4)[1]) for i in range(3)]
    torch.manual_seed(2)
    penalty = EWC.objective(base, domain, lambda: iter(data))
    fresh = new(base, EWC)
    torch.manual_seed(2)
    expected = of_mean_one(fisher(base, fresh, base.head, [images for images, _ in data[:2]]))
    for name, value in expected.items():
        assert torch.equal(held_fisher(domain)[name], value)
        assert torch.equal(penalty.fisher.tensors()[name], value)
        assert value.any()


def test_a_domain_that_has_learned_adds_its_own_fisher_information():
    base = tiny_base()
    domain = new(base, EWC, 4)
    fit(base, domain, Patterns(1, 3), None, SHORT, seed=6)
    images = [batch for batch, _ in Patterns(1, 2).batches()]
    fresh = new(base, EWC, 4)
    torch.manual_seed(6)
    of_base = of_mean_one(fisher(base, fresh, base.head, images))
    torch.manual_seed(6)
    own = of_mean_one(fisher(base, domain, domain.head, images))
    for name, value in held_fisher(domain).items():
        torch.testing.assert_close(value, of_base[name] + own[name], rtol=1e-4, atol=1e-9)
    assert all(f.any() for f in own.values())


def test_the_next_domain_is_held_by_all_before_it_around_where_they_ended():
    base = tiny_base()
    first = new(base, EWC, 4)
    fit(base, first, Patterns(1, 2), None, SHORT)
    second = new(base, EWC, 3)
    EWC.follow(second, [first])
    held = {name: f.clone() for name, f in held_fisher(first).items()}
    penalty = EWC.objective(base, second, lambda: pytest.fail("there is nothing to estimate"))
    assert penalty.fisher.tensors().keys() == trained_tensors(second).keys()
    for name, value in held.items():
        assert torch.equal(penalty.fisher.tensors()[name], value)
        assert torch.equal(penalty.start.tensors()[name], trained_tensors(first)[name])
    fit(base, second, Patterns(2, 2, classes=3), None, SHORT)
    assert all(torch.equal(f, held[name]) for name, f in held_fisher(first).items())
    more = held_fisher(second)
    assert all((more[name] >= f).all() for name, f in held.items())


def test_after_a_base_without_a_classifier_the_second_domain_is_held():
    base = pm.load_base(tiny_base().net, input=SPEC, classifier=None)
    first = new(base, EWC, 4)
    assert not any(f.any() for f in held_fisher(first).values())
    fit(base, first, Patterns(1, 2), None, SHORT)
    assert all(f.any() for f in held_fisher(first).values())


def test_less_is_forgotten_than_by_fine_tuning():
    base, own = learned_base(), lesson(100, 8)
    lessons = {"three": lesson(3), "four": lesson(4)}
    lost = {}
    for strength in (0.0, 100.0):
        method = dataclasses.replace(EWC, strength=strength, norms="affine")
        fitted = fit_all(base, lessons, method, RECIPE, own=own)
        of_base = fitted.base.accuracy_before - fitted.base.accuracy_after
        lost[strength] = fitted.forgotten["three"] + of_base
        assert fitted.learned["four"] > 80
    assert lost[0.0] > 20
    assert lost[100.0] < lost[0.0] / 2


def test_it_learns():
    base = tiny_base()
    losses = train(base, new(base, EWC), steps=40, rate=1e-2)
    assert losses[-1] < losses[0] / 2


def test_without_strength_nothing_is_estimated():
    base = tiny_base()
    method = dataclasses.replace(EWC, strength=0.0)
    domain = new(base, method)

    def none():
        pytest.fail("images are not needed")

    assert method.objective(base, domain, none) is None
    assert method.next_stage(base, domain.frozen(), none) is None


def test_a_domain_that_keeps_no_fisher_information_is_held_all_the_same_but_not_followed():
    base = tiny_base()
    method = dataclasses.replace(EWC, keep_fisher=False)
    domain = new(base, method, 4)
    penalty = method.objective(base, domain, Patterns(1, 2).images)
    assert all(f.any() for f in penalty.fisher.tensors().values())
    fit(base, domain, Patterns(1, 2), None, SHORT)
    assert not any("fisher" in name or "route" in name for name in domain.stored())
    for earlier, following in ((domain, method), (domain, EWC), (new(base, EWC), method)):
        with pytest.raises(MethodError, match="make all of them with keep_fisher=True"):
            following.follow(new(base, following), [earlier])


@pytest.mark.parametrize("norms", ["own", "affine", "shared", "stats"])
def test_the_fisher_information_travels_in_the_pack(norms, tmp_path):
    base = tiny_base()
    method = dataclasses.replace(EWC, norms=norms)
    domain = sequence(base, method, (3,))[0]
    for i, kept in enumerate(held_fisher(domain).values()):
        kept.fill_(i + 1)
    domain.save(tmp_path / "d.safetensors")
    loaded = held_fisher(pm.load_domain(tmp_path / "d.safetensors", base))
    assert loaded.keys() == trained_tensors(domain).keys()
    assert [f.flatten()[0].item() for f in loaded.values()] == [*range(1, len(loaded) + 1)]


def test_the_network_is_moved_and_the_fisher_information_shared_in_accounting():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    account = pm.account(base, "ewc", domains=10)
    assert account.components["moved"] == 32 * 5_814_688  # with the norms' scales and shifts
    assert account.components["shared"] == 32 * 5_814_688
    assert account.params_paper == 2.0  # F once, and no more
    without = pm.account(base, dataclasses.replace(EWC, keep_fisher=False), domains=10)
    assert without.components["shared"] == 0
    assert without.params_paper == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1}, "strength=-1 must be a number from 0 to"),
        ({"fisher_batches": 0}, "fisher_batches=0 must be a whole number from 1 to"),
        ({"fisher_batches": 1.5}, "fisher_batches=1.5 must be a whole number"),
        ({"keep_fisher": 1}, "keep_fisher=1 must be true or false"),
        ({"lambda_": 1}, "no option 'lambda_'"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(MethodError, match=message):
        pm.create_method("ewc", **options)
