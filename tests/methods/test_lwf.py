"""LwF: the distillation's value, whom it is from, what learns when, and that it forgets less."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import SPEC, batch, logits, tiny_base, tiny_net, train
from polymask.errors import MethodError
from polymask.methods.lwf import divergence
from polymask.train.fit import Listener, fit
from polymask.train.fit_all import fit_all
from polymask.train.recipe import Recipe
from sequences import RECIPE, Patterns, learned_base, lesson, moved_at_random, new, sequence

LWF = pm.create_method("lwf")


def double_base() -> pm.Base:
    return pm.load_base(tiny_net().double(), input=SPEC)


def images() -> torch.Tensor:
    return batch()[0].double()


def third(base, **options):
    """A domain that follows two others, of 3 and 5 classes, and the objective of its training."""
    earlier = sequence(base, dataclasses.replace(LWF, **options), (3, 5))
    following = dataclasses.replace(LWF, **options).after(earlier)
    domain = new(base, following, 2)
    following.follow(domain, earlier)
    objective = following.objective(base, domain, Patterns(0).images)
    return earlier, domain.eval(), objective


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_divergence_is_that_of_the_softened_outputs_averaged_over_images(temperature):
    torch.manual_seed(0)
    now, then = torch.randn(2, 6, 7, dtype=torch.float64) * 3
    expected = 0.0
    for z, old in zip(now, then, strict=True):
        p, q = (torch.exp(t / temperature) for t in (old, z))
        p, q = p / p.sum(), q / q.sum()
        expected += float((p * torch.log(p / q)).sum()) / 6
    assert abs(divergence(now, then, temperature).item() - expected) < 1e-12


def test_the_divergence_is_the_original_codes_mean_times_the_number_of_classes():
    torch.manual_seed(0)
    now, then = torch.randn(2, 6, 7, dtype=torch.float64)
    q, p = F.log_softmax(now / 2, 1), F.softmax(then / 2, 1)
    mean_over_elements = (p * (p.log() - q)).mean()
    torch.testing.assert_close(divergence(now, then, 2.0), 7 * mean_over_elements)


def test_the_divergence_has_the_gradient_of_the_papers_cross_entropy():
    """Which has no constant term: the entropy of what was said before."""
    torch.manual_seed(0)
    now, then = torch.randn(2, 6, 7, dtype=torch.float64)
    gradients = []
    for loss in (
        lambda z: divergence(z, then, 2.0),
        lambda z: F.cross_entropy(z / 2, F.softmax(then / 2, 1)),
    ):
        z = now.clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss(z), z)[0])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_nothing_is_added_as_long_as_the_same_is_said():
    base = double_base()
    _, domain, objective = third(base)
    loss = objective(images(), domain.features(base, images()))
    learned = [p for p in domain.parameters() if p is not domain.head.weight]
    gradients = torch.autograd.grad(loss, learned, allow_unused=True)
    assert abs(loss.item()) < 1e-14
    assert len([g for g in gradients if g is not None]) > 10
    assert all(g is None or g.abs().max() < 1e-14 for g in gradients)


def test_what_is_added_is_the_divergence_of_every_old_head_from_what_it_said_at_the_start():
    base = double_base()
    earlier, domain, objective = third(base, temperature=3.0, weight=0.7)
    moved_at_random(domain, 0.1, seed=9)
    with torch.no_grad():
        before = earlier[-1].features(base, images())
        now = domain.features(base, images())
        # The first domain's head learned on with the second domain.
        old = [base.head, earlier[1].route.heads[0], earlier[1].head]
        new_heads = [base.head, *domain.route.heads]
        expected = sum(
            F.kl_div(
                F.log_softmax(head(now) / 3, 1),
                F.softmax(then(before) / 3, 1),
                reduction="batchmean",
            )
            for head, then in zip(new_heads, old, strict=True)
        )
        loss = objective(images(), now)
    assert [head.out_features for head in old] == [10, 3, 5]
    assert expected > 1e-3
    torch.testing.assert_close(loss, 0.7 * expected, rtol=1e-12, atol=0)


def test_the_teacher_is_not_taught():
    base = double_base()
    earlier, domain, objective = third(base)
    kept = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    before = earlier[-1].features(base, images())
    features = domain.train().features(base, images())
    objective(images(), features).backward()
    with torch.no_grad():
        for parameter in domain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    assert not list(objective.parameters())
    assert all(torch.equal(kept[n], t) for n, t in objective.state_dict().items())
    assert torch.equal(earlier[-1].features(base, images()), before)
    base.verify()


def test_the_gradient_reaches_weights_norms_and_the_old_heads_but_not_the_bases_classifier():
    base = double_base()
    _, domain, objective = third(base)
    objective(images(), domain.train().features(base, images())).backward()
    missing = {name for name, p in domain.named_parameters() if p.grad is None}
    assert missing == {"head.weight", "head.bias"}  # of the new domain, which it does not concern
    assert all(p.grad is None for p in base.head.parameters())


def test_only_the_new_head_learns_in_the_first_quarter_of_the_epochs():
    base, seen = tiny_base(), []
    earlier = sequence(base, LWF, (3,))
    method = LWF.after(earlier)
    domain = new(base, method, 4)
    method.follow(domain, earlier)
    start = {name: p.detach().clone() for name, p in domain.named_parameters()}

    class Watch(Listener):
        def epoch(self, record, seconds):
            seen.append({n for n, p in domain.named_parameters() if not torch.equal(start[n], p)})

    recipe = Recipe(epochs=4, rate=1e-3, weight_rate=1e-3, drops=(), selection="last")
    fit(base, domain, Patterns(1, 2), None, recipe, listener=Watch())
    assert seen[0] == {"head.weight", "head.bias"}
    assert seen[1] == seen[3] == start.keys()


def test_the_heads_of_earlier_domains_become_what_the_last_one_made_of_them():
    base = tiny_base()
    domains = sequence(base, LWF, (3, 5, 2))
    last = domains[-1]
    assert [head.out_features for head in last.route.heads] == [3, 5]
    settled = LWF.settle(base, domains)
    with torch.no_grad():
        features = last.features(base, batch()[0])
        for domain, head in zip(settled, [*last.route.heads, last.head], strict=True):
            assert torch.equal(logits(base, domain), head(features))
            assert domain.route is None
            assert domain.method == LWF
    assert not torch.equal(settled[0].head.weight, domains[0].head.weight)


def test_distillation_trains_the_old_heads_with_the_network():
    base = learned_base()
    fitted = fit_all(base, {"one": lesson(1), "two": lesson(2)}, "lwf", RECIPE)
    alone = fit_all(base, {"one": lesson(1)}, "lwf", RECIPE)
    assert not torch.equal(fitted.domains["one"].head.weight, alone.domains["one"].head.weight)


def test_less_is_forgotten_than_by_fine_tuning():
    base, own = learned_base(), lesson(100, 8)
    lessons = {"three": lesson(3), "four": lesson(4)}
    lost = {}
    for weight in (0.0, 1.0):
        fitted = fit_all(base, lessons, "lwf", RECIPE, own=own, norms="affine", weight=weight)
        of_base = fitted.base.accuracy_before - fitted.base.accuracy_after
        lost[weight] = fitted.forgotten["three"] + of_base
        assert fitted.learned["four"] > 80
    assert lost[0.0] > 20
    assert lost[1.0] < lost[0.0] / 2


def test_without_a_weight_there_is_nothing_to_distil():
    base = tiny_base()
    method = dataclasses.replace(LWF, weight=0.0)
    assert method.objective(base, new(base, method), Patterns(0).images) is None


def test_a_single_domain_learns_from_the_bases_own_classifier():
    base = double_base()
    domain = new(base, LWF).eval()
    objective = LWF.objective(base, domain, Patterns(0).images)
    assert objective(images(), domain.features(base, images())).abs() < 1e-14
    moved_at_random(domain, 0.1)
    with torch.no_grad():
        then, now = (base.head(f) for f in (base.net(images()), domain.features(base, images())))
        loss = objective(images(), domain.features(base, images()))
    torch.testing.assert_close(loss, divergence(now, then, 2.0), rtol=1e-12, atol=0)


def test_a_domain_not_made_for_its_place_is_refused():
    base = tiny_base()
    earlier = sequence(base, LWF, (3, 5))
    with pytest.raises(MethodError, match=r"old heads for \(\) classes.*make it by method.after"):
        LWF.follow(new(base, LWF), earlier)


def test_old_heads_draw_no_random_numbers():
    base = tiny_base()
    plain, following = (new(base, m) for m in (LWF, dataclasses.replace(LWF, old_classes=(7,))))
    assert torch.equal(plain.head.weight, following.head.weight)


def test_it_learns():
    base = tiny_base()
    losses = train(base, new(base, LWF), steps=40, rate=1e-2)
    assert losses[-1] < losses[0] / 2


def test_the_network_stands_in_place_of_the_bases_own_in_accounting():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    account = pm.account(base, "lwf", domains=10)
    assert account.components["moved"] == 32 * 5_814_688  # with the norms' scales and shifts
    assert account.components["weights"] == account.components["bias"] == 0
    assert account.params_paper == account.params_stored == 1.0
    with_heads = pm.account(base, dataclasses.replace(LWF, old_classes=(100, 47)), domains=10)
    assert with_heads.params_paper == account.params_paper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0 must be a number from 0.01 to 1000"),
        ({"weight": -1.0}, "weight=-1.0 must be a number from 0 to"),
        ({"old_classes": (3, 0)}, r"old_classes=\(3, 0\) must be numbers of classes"),
        ({"old_classes": 3}, "old_classes=3 must be numbers of classes"),
        ({"temprature": 2.0}, "no option 'temprature'; did you mean temperature"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(MethodError, match=message):
        pm.create_method("lwf", **options)


def test_options_from_a_file_are_those_that_were_written():
    assert pm.create_method("lwf", old_classes=[3, 5]).old_classes == (3, 5)


class Shifted:
    """Brighter images: batch norms that follow them have other statistics."""

    def __init__(self, plain):
        self.plain = plain

    def __len__(self):
        return len(self.plain)

    def batches(self, epoch=0, start=0):
        for images, labels in self.plain.batches(epoch, start):
            yield images + 2, labels


def test_norms_keep_the_bases_statistics_which_no_term_of_the_loss_holds():
    """With all rates but the head's at 0, nothing but the statistics can move."""
    still = dataclasses.replace(RECIPE, epochs=3, rate=0.0, weight_rate=0.0)
    bright = dataclasses.replace(lesson(4), train=Shifted(lesson(4).train))
    lost = {}
    for method in (LWF, dataclasses.replace(LWF, norms="own")):
        fitted = fit_all(learned_base(), {"three": lesson(3), "bright": bright}, method, still)
        assert fitted.learned["three"] > 60  # 25 is chance
        lost[method.norms] = fitted.forgotten["three"]
    assert lost["affine"] == 0
    assert lost["own"] > 20  # 55 is seen
