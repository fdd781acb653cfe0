"""WSN: what a domain selects and trains, what it leaves alone, what is kept, and that nobody forgets."""

import os
import signal
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymask as pm
from nets import batch, logits, tiny_base, train, trained
from polymask.core.survey import Site
from polymask.errors import InterruptedTraining
from polymask.methods.wsn import WSN, largest
from polymask.train.fit import Listener
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe

RECIPE = Recipe(epochs=3, rate=1e-2, weight_rate=1e-2, head_rate=3e-2, weight_decay=1e-2, drops=(), batch_size=12)
CLASSES = ["a", "b", "c"]


class Patterns:
    """Images of three patterns, others for every seed; two steps an epoch."""

    def __init__(self, seed, steps=2):
        self.seed, self.steps = seed, steps

    def __len__(self):
        return self.steps

    def batches(self, epoch=0, start=0):
        for step in range(start, self.steps):
            images, labels = batch(12, 3, seed=self.seed)
            noise = torch.Generator().manual_seed(100 * epoch + step)
            yield images + torch.randn(images.shape, generator=noise), labels


def lessons():
    return {
        name: Lesson(CLASSES, Patterns(seed), Patterns(seed, 1), Patterns(seed, 1))
        for seed, name in enumerate(("one", "two", "three"), start=1)
    }


def fresh_transform(share=0.5, dtype=torch.float64, shape=(6, 4, 3, 3)):
    torch.manual_seed(0)
    W = torch.randn(shape, dtype=torch.float64).to(dtype)
    transform = WSN(share=share).transform(Site("w", shape, "conv2d", 1, "b", False, None, False, dtype))
    transform.begin(W)
    return transform, W


def following(base, earlier, method=None):
    """A new domain after these."""
    domain = pm.new_domain(base, method or WSN(name="wsn"), CLASSES)
    domain.method.follow(domain, earlier)
    return domain


def three_in_turn(base):
    """Three domains, each after all before it, in their stored form."""
    domains = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        domain = following(base, domains)
        train(base, domain, steps=6, rate=1e-2, seed=seed)
        domains.append(domain.frozen())
    return domains


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domains(base):
    return three_in_turn(base)


def parts(domain):
    return dict(domain.named_transforms())


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1), st.floats(0.001, 1))
def test_selected_is_what_is_not_below_the_kth_largest_score(sizes, share):
    cut = sorted(sizes, reverse=True)[max(1, round(share * len(sizes))) - 1]
    assert largest(torch.tensor(sizes), share).tolist() == [size >= cut for size in sizes]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 1.0])
def test_a_fresh_domain_has_the_largest_weights_of_the_base(share):
    transform, W = fresh_transform(share)
    expected = torch.zeros_like(W).flatten()
    kept = W.flatten().abs().argsort(descending=True)[: round(share * W.numel())]
    expected[kept] = W.flatten()[kept]
    assert torch.equal(transform.weight(W), expected.view(W.shape))
    assert int(transform.mask().sum()) == round(share * W.numel())


def test_gradients_are_those_of_the_equations():
    transform, W = fresh_transform(0.4)
    V, R, F = torch.randn_like(W), torch.randn_like(W), torch.rand_like(W) < 0.3
    transform.hold(V, F)
    with torch.no_grad():
        transform.scores.copy_(R)
    G = torch.randn_like(W)
    made = transform.weight(W)
    (made * G).sum().backward()

    M = torch.zeros(W.numel(), dtype=torch.float64)
    M[R.flatten().abs().argsort(descending=True)[: round(0.4 * W.numel())]] = 1
    M = M.view(W.shape)
    assert torch.equal(made, V * M)
    assert torch.equal(transform.learned.grad, G * M * ~F)
    assert torch.equal(transform.scores.grad, R.sign() * V * G)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_no_optimiser_moves_a_weight_that_is_taken(optimiser):
    transform, W = fresh_transform(1.0)
    taken = torch.rand_like(W) < 0.5
    transform.hold(W, taken)
    kwargs = {"momentum": 0.9} if optimiser is torch.optim.SGD else {}
    step = optimiser(transform.parameters(), 0.1, weight_decay=0.5, **kwargs)
    for _ in range(5):
        step.zero_grad()
        transform.weight(W).square().sum().backward()
        step.step()
    after = transform.current().detach()
    assert torch.equal(after[taken], W[taken])
    assert (after != W)[~taken].all()


def test_what_earlier_domains_selected_is_taken_and_all_of_it_may_be_used(base, domains):
    fourth = following(base, domains)
    for name, mine in parts(fourth).items():
        before = [parts(domain)[name] for domain in domains]
        union = before[0].mask() | before[1].mask() | before[2].mask()
        assert torch.equal(mine.taken, union)
        assert torch.equal(mine.values, before[-1].values)
        assert mine.values.data_ptr() != before[-1].values.data_ptr()
        assert (mine.mask() & union).any()


def test_a_domain_trains_only_what_no_earlier_one_selected_and_earlier_ones_stay_bit_identical(base, domains):
    names = list(parts(domains[0]))
    trains = [False] * len(domains)
    for name in names:
        taken = torch.zeros(base.tensor(name).shape, dtype=torch.bool)
        V = base.tensor(name)
        for place, domain in enumerate(domains):
            its = parts(domain)[name]
            assert torch.equal(its.values[taken], V[taken])
            trains[place] |= bool((its.values != V)[its.mask() & ~taken].any())
            taken, V = taken | its.mask(), its.values
        for domain in domains:  # by the weight that the last left
            its = parts(domain)[name]
            assert torch.equal(V * its.mask(), domain.weights(base)[name])
    assert all(trains)
    base.verify()


def test_domains_share_weights_and_differ_in_what_they_select(domains):
    for one, other in combinations(domains, 2):
        pairs = [(parts(one)[name].mask(), parts(other)[name].mask()) for name in parts(one)]
        assert any((a & b).any() for a, b in pairs)
        assert any((a != b).any() for a, b in pairs)


@pytest.mark.parametrize("order", [["one", "two", "three"], ["three", "two", "one"]])
def test_three_domains_in_either_order_forget_exactly_nothing(base, order, tmp_path):
    fitted = fit_all(base, lessons(), "wsn", RECIPE, order=order, folder=tmp_path)
    assert fitted.forgotten == dict.fromkeys(order, 0.0)
    assert fitted.base is None  # nothing of it was moved
    base.verify()
    last = parts(fitted.domains[order[-1]])
    for name, domain in fitted.domains.items():
        assert all(its.values is last[site].values for site, its in parts(domain).items())
        expected = logits(base, domain)
        for pack in (tmp_path / "learned" / f"{name}.safetensors", tmp_path / f"{name}.safetensors"):
            assert torch.equal(logits(base, pm.load_domain(pack, base)), expected)


class StopAt(Listener):
    """Ends the run at a step, counted over all domains."""

    def __init__(self, step):
        self.left = step

    def step(self, epoch, step, loss, images, density):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_stopped_within_the_second_domain_resumes_to_the_bit(base, tmp_path):
    whole = fit_all(base, lessons(), "wsn", RECIPE)
    with pytest.raises(InterruptedTraining):
        fit_all(base, lessons(), "wsn", RECIPE, folder=tmp_path, listener=StopAt(9))  # six steps a domain
    resumed = fit_all(base, lessons(), "wsn", RECIPE, folder=tmp_path, resume=True)
    for name, domain in whole.domains.items():
        expected, found = domain.state_dict(), resumed.domains[name].state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_shared_weight_is_one_file_for_all_packs_of_a_library(base, domains, tmp_path):
    for place, domain in enumerate(WSN().settle(base, domains)):
        domain.save(tmp_path / f"{place}.safetensors")
    assert len(list(tmp_path.glob("wsn-*"))) == 1
    assert len(list(tmp_path.iterdir())) == 4


def test_where_everything_is_taken_a_domain_selects_and_trains_no_weight(base):
    whole = WSN(name="wsn", share=1.0)
    first = pm.new_domain(base, whole, CLASSES)
    train(base, first, steps=4, rate=1e-2)
    second = following(base, [first.frozen()], replace(whole, share=0.5))
    masks = {name: its.mask() for name, its in parts(second).items()}
    train(base, second, steps=10, rate=1e-2)
    assert all(torch.equal(its.current(), parts(first)[name].current()) for name, its in parts(second).items())
    assert any(not torch.equal(its.mask(), masks[name]) for name, its in parts(second).items())


@pytest.mark.parametrize("domains", [2, 6, 10])
def test_a_domain_costs_one_bit_a_weight_and_the_shared_weight_is_counted_once(domains):
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    account = pm.account(base, "wsn", domains=domains)
    n, N = account.masked_weights, account.base_parameters
    assert n == 23_454_912
    assert account.components["mask"] == n
    assert account.components["shared"] == 32 * n
    assert account.components["norm_affine"] == account.components["index"] == account.components["moved"] == 0
    statistics = account.components["norm_statistics"]
    assert account.params_paper == 1 + (32 * n + (domains - 1) * n) / (32 * N)
    assert account.params_stored == 1 + (32 * n + (domains - 1) * (n + statistics)) / (32 * N)


def test_a_pack_has_the_mask_and_not_the_shared_weight(base):
    domain = trained(base, "wsn")
    names = {name.rpartition("/")[2] for name in domain.stored().keys() - domain.beside() if "transform/" in name}
    assert names == {"mask"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_the_bases_type_and_bits_in_both_forms(dtype):
    transform, W = fresh_transform(dtype=dtype)
    assert torch.equal(transform.weight(W), W * transform.mask())
    with torch.no_grad():
        transform.learned.add_(torch.randn_like(transform.learned))
        transform.scores.add_(torch.randn_like(transform.scores))
    learning = transform.weight(W)
    learning.float().sum().backward()
    transform.restore(transform.stored())
    assert transform.weight(W).dtype == learning.dtype == dtype
    assert torch.equal(transform.weight(W), learning)


def test_domains_that_do_not_go_together_are_refused(base, domains):
    first, second, third = domains
    with pytest.raises(pm.MethodError, match=r"domain 1 of 3 selected weights of .* trained over; give the domains in"):
        following(base, [third, second, first])
    stranger = trained(base, "wsn", seed=7).frozen()
    with pytest.raises(pm.MethodError, match="domain 1 of 2 selected weights"):
        WSN().settle(base, [stranger, third])
    with pytest.raises(pm.MethodError, match="a domain by bn-only has selected no weights"):
        following(base, [pm.new_domain(base, "bn-only", CLASSES)])


@pytest.mark.parametrize("share", [0, 1.5, "half", None])
def test_a_senseless_share_is_refused_by_name(share):
    with pytest.raises(pm.MethodError, match=r"share=.* must be a number from 0\.001 to 1"):
        pm.create_method("wsn", share=share)
