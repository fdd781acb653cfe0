"""PackNet: who owns a weight, what pruning takes, what order does, and that nobody forgets."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import polymask as pm
from nets import batch, logits, tiny_base, trained
from polymask.core.bits import Bits
from polymask.core.survey import Site
from polymask.errors import InterruptedTraining
from polymask.methods.packnet import BASE, FREE, PackNet, smallest
from polymask.pack.format import read_pack, write_pack
from polymask.train.fit import Listener, fit
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe

RECIPE = Recipe(epochs=4, weight_rate=3e-3, head_rate=3e-2, drops=(), batch_size=12)
CLASSES = ["a", "b", "c"]


class Patterns:
    """Images of three patterns, others for every seed; two steps an epoch."""

    def __init__(self, seed, steps=2, classes=3):
        self.seed, self.steps, self.classes = seed, steps, classes

    def __len__(self):
        return self.steps

    def batches(self, epoch=0, start=0):
        for step in range(start, self.steps):
            images, labels = batch(12, self.classes, seed=self.seed)
            noise = torch.Generator().manual_seed(100 * epoch + step)
            yield images + torch.randn(images.shape, generator=noise), labels


def learn(base, method, earlier, seed, recipe=RECIPE):
    """One more domain, as `fit_all` learns it."""
    method = method.after(earlier)
    torch.manual_seed(0)
    domain = pm.new_domain(base, method, CLASSES)
    method.follow(domain, earlier)
    fit(base, domain, Patterns(seed), Patterns(seed, 1), recipe)
    return domain


def packed(domain):
    return dict(domain.named_transforms())


def fresh_transform(method, shape=(6, 4, 3, 3), dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    W = torch.randn(shape, dtype=torch.float64).to(dtype)
    transform = method.transform(Site("w", shape, "conv2d", 1, "b", False, None, False, dtype))
    transform.begin(W)
    return transform, W


def learned_sequence(base):
    """Three domains in a row, the last unpruned; of each its weights right after it learned."""
    method, domains, weights = PackNet(name="packnet", capacity=4), [], []
    for seed in (1, 2, 3):
        domains.append(learn(base, method, list(domains), seed))
        weights.append({name: w.clone() for name, w in domains[-1].weights(base).items()})
    return domains, weights


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def sequence(base):
    return learned_sequence(base)


@given(
    st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1),
    st.floats(0, 1),
    st.integers(0, 2**20),
)
def test_pruning_takes_what_is_not_above_the_kth_smallest_size(weights, share, seed):
    weight = torch.tensor(weights, dtype=torch.float64)
    among = torch.rand(len(weights), generator=torch.Generator().manual_seed(seed)) < 0.7
    sizes = sorted(abs(w) for w, chosen in zip(weights, among, strict=True) if chosen)
    k = round(share * len(sizes))
    cut = sizes[k - 1] if k else -1.0
    expected = [bool(c) and abs(w) <= cut for w, c in zip(weights, among, strict=True)]
    assert smallest(weight, among, share).tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_a_fresh_domain_sees_the_pruned_base_and_owns_the_rest(share):
    transform, W = fresh_transform(PackNet(prune_base=share))
    order = W.abs().flatten().argsort()
    expected = W.clone()
    expected.view(-1)[order[: round(share * W.numel())]] = 0
    assert torch.equal(transform.weight(W), expected)
    assert torch.equal(transform.owner == BASE, expected != 0)
    assert torch.equal(transform.owner == 2, expected == 0)


def test_the_bases_own_domain_trains_what_pruning_left_of_it_and_nothing_else():
    transform, W = fresh_transform(PackNet().for_base())
    kept = transform.owner == BASE
    G = torch.randn_like(W)
    (transform.weight(W) * G).sum().backward()
    assert torch.equal(transform.learned.grad, G * kept)
    assert torch.equal(transform.weight(W), W * kept)
    assert 2 * int(kept.sum()) == W.numel()


def test_gradients_reach_own_weights_alone():
    transform, W = fresh_transform(PackNet())
    G = torch.randn_like(W)
    (transform.weight(W) * G).sum().backward()
    assert torch.equal(transform.learned.grad, G * (transform.owner == 2))


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_no_optimiser_moves_a_weight_of_somebody_else(optimiser):
    transform, W = fresh_transform(PackNet())
    with torch.no_grad():
        transform.learned.normal_()  # decay then pulls at every entry
    kwargs = {"momentum": 0.9} if optimiser is torch.optim.SGD else {}
    step = optimiser(transform.parameters(), 0.1, weight_decay=0.5, **kwargs)
    before = transform.weight(W).detach().clone()
    for _ in range(5):
        step.zero_grad()
        transform.weight(W).square().sum().backward()
        step.step()
    after, base_own = transform.weight(W).detach(), transform.owner == BASE
    assert torch.equal(after[base_own], W[base_own])
    assert (after != before)[~base_own].all()


def test_a_stage_prunes_the_domains_own_weights_layer_by_layer(base):
    method = PackNet(name="packnet", capacity=3, prune=0.6)
    domain = trained(base, "packnet", capacity=3, prune=0.6).frozen()
    following = method.next_stage(base, domain, lambda: iter(()))
    assert following.method == replace(method, pruned=True)
    assert torch.equal(following.head.weight, domain.head.weight)
    for site, now in following.named_transforms():
        before, W = packed(domain)[site], base.tensor(site)
        own = before.owner == 2
        sizes = before.values[own].abs().sort().values
        cut = sizes[round(0.6 * len(sizes)) - 1] if len(sizes) else 0.0  # depthwise: none
        kept = own & (before.values.abs() > cut)
        base_own = before.owner == BASE
        expected = torch.where(kept | base_own, before.weight(W), torch.zeros_like(W))
        assert torch.equal(now.weight(W), expected)
        assert torch.equal(now.owner == 2, kept)
        assert torch.equal(now.owner == BASE, base_own)
        assert torch.equal(now.weight(W)[base_own], W[base_own])
        assert now.learned.requires_grad


@pytest.mark.parametrize("method", [PackNet(pruned=True), PackNet(place=0), PackNet(capacity=2)])
def test_training_ends_after_pruning_and_for_the_base_and_the_last_domain(base, method):
    domain = pm.new_domain(base, method, CLASSES).frozen()
    assert method.next_stage(base, domain, lambda: iter(())) is None


def test_a_pruned_domain_trains_once_more_for_a_third_of_the_epochs(base):
    domain = pm.new_domain(base, "packnet", CLASSES, capacity=3)
    history = fit(base, domain, Patterns(1), Patterns(1, 1), RECIPE)
    assert len(history) == RECIPE.epochs  # three, and one after pruning
    assert domain.method.pruned
    for site, transform in packed(domain).items():
        free = transform.owner == FREE
        if base.sites[site].depthwise:
            assert (transform.owner == BASE).all()
            continue
        assert (transform.values[free] == 0).all()
        share = free.sum() / (free.sum() + (transform.owner == 2).sum())
        # In a small layer more than the share goes: weights that never left 0 are ties.
        assert 0.7 < share <= 1


def test_later_domains_leave_earlier_ones_bit_identical(base, sequence):
    domains, weights = sequence
    for domain, before in zip(domains, weights, strict=True):
        now = domain.weights(base)
        assert now.keys() == before.keys()
        assert all(torch.equal(now[name], before[name]) for name in now)
    base.verify()


def test_a_domain_that_follows_learns_on_copies(base, sequence):
    first = sequence[0][0]
    second = pm.new_domain(base, PackNet(capacity=4).after([first]), CLASSES)
    second.method.follow(second, [first])
    for site, transform in second.named_transforms():
        its = packed(first)[site]
        assert torch.equal(transform.values, its.values)
        assert transform.values.data_ptr() != its.values.data_ptr()
        assert torch.equal(transform.owner == transform.own, its.owner == FREE)


def test_a_domain_sees_the_shared_weight_where_its_owner_came_no_later(base, sequence):
    domains, weights = sequence
    for site, last in domains[-1].named_transforms():
        for place, seen in enumerate(weights, start=1):
            expected = last.values * ((last.owner > 0) & (last.owner <= place + 1))
            assert torch.equal(seen[site], expected)


def test_owners_are_disjoint_and_every_domain_has_some(sequence):
    domains, _ = sequence
    owned = [0] * 4
    for site in packed(domains[0]):
        maps = [packed(domain)[site] for domain in domains]
        own = [maps[0].owner == BASE, *(m.owner == m.own for m in maps)]
        assert (torch.stack(own).sum(0) == 1).all()  # all are taken once the last has learned
        owned = [n + int(o.sum()) for n, o in zip(owned, own, strict=True)]
    assert all(owned)


@pytest.mark.parametrize("capacity", [2, 3, 4, 5, 6, 7, 8, 9, 128])
def test_owners_are_stored_in_binary_for_every_place(capacity):
    for place in {0, 1, capacity // 2, capacity - 1}:
        method = PackNet(capacity=capacity, place=place)
        transform, W = fresh_transform(method)
        with torch.no_grad():
            others = torch.arange(W.numel()).view(W.shape) % (place + 1) + (place == capacity - 1)
            transform.hold(W, others.clamp(max=place + 1).to(torch.uint8))
        expected, owner = transform.weight(W).detach(), transform.owner
        stored = transform.stored()
        planes = stored["owner"].unpack()
        assert isinstance(stored["owner"], Bits)
        assert 2 ** len(planes) >= capacity > 2 ** (len(planes) - 1)
        code = sum(plane.long() << i for i, plane in enumerate(planes))
        assert torch.equal(code, owner.long() % 2 ** len(planes))

        transform.restore(stored)
        assert torch.equal(transform.weight(W), expected)
        assert torch.equal(transform.owner, owner)


def test_an_owner_that_has_no_room_in_an_earlier_domains_map_is_nobody_to_it():
    transform, W = fresh_transform(PackNet(capacity=3))  # two bits: owners 0 to 3
    later = torch.arange(W.numel()).view(W.shape) % 7
    transform.hold(W, later.to(torch.uint8))
    expected = W * ((later == 1) | (later == 2))
    assert torch.equal(transform.weight(W), expected)
    transform.restore(transform.stored())
    assert torch.equal(transform.weight(W), expected)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("torchvision:resnet50", 1.0935),
        ("torchvision:densenet121", 1.0926),
        ("torchvision:vgg16", 1.0937),
    ],
)
def test_six_domains_cost_three_bits_a_weight_for_all_of_them(name, printed):
    base = pm.load_base(name, pretrained=False, device="meta")
    account = pm.account(base, "packnet", domains=6)
    assert account.components["index"] == 3 * account.masked_weights
    assert round(account.params_paper, 4) == printed
    assert account.params_stored == account.params_paper


@pytest.mark.parametrize(("domains", "planes"), [(2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (10, 4)])
def test_the_owners_have_room_for_the_domains_there_are_and_no_more(base, domains, planes):
    account = pm.account(base, "packnet", domains=domains)
    assert account.components["index"] == planes * account.masked_weights
    method = pm.create_method("packnet").for_domains(domains)
    last = pm.new_domain(base, replace(method, place=domains - 1), CLASSES)
    assert last.method.next_stage(base, last.frozen(), lambda: iter(())) is None
    assert pm.create_method("packnet", capacity=12).for_domains(domains).capacity == 12


def test_a_domain_that_is_made_alone_is_the_last_and_the_next_is_told_what_to_do(base):
    alone = pm.new_domain(base, "packnet", CLASSES).frozen()
    assert alone.method.next_stage(base, alone, lambda: iter(())) is None
    second = pm.new_domain(base, alone.method.after([alone]), CLASSES)
    with pytest.raises(pm.MethodError, match=r"place 1, of capacity=2 .*or all of them by fit_all"):
        second.method.follow(second, [alone])


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_pack_from_before_the_rule_for_depthwise_kernels_loads(base, place, tmp_path):
    """Its manifest names capacity=6 and prune_base=0.5, and knows no prune_depthwise."""
    options = {"capacity": 6, "prune_base": 0.5, "place": place}
    domain = trained(base, "packnet", **options, prune_depthwise=True).eval()
    domain.save(tmp_path / "d.safetensors")
    manifest, tensors = read_pack(tmp_path / "d.safetensors")
    del manifest.options["prune_depthwise"]
    write_pack(tmp_path / "old.safetensors", manifest, tensors)
    loaded = pm.load_domain(tmp_path / "old.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))


@pytest.mark.parametrize(
    ("options", "share", "depthwise"),
    [
        ({}, 0.25, 0.0),
        ({"place": 0}, 0.5, 0.0),
        ({"prune_base": 0.4}, 0.4, 0.0),
        ({"place": 0, "prune_base": 0.4, "prune_depthwise": True}, 0.4, 0.4),
    ],
)
def test_depthwise_kernels_stay_and_a_base_that_is_not_retrained_loses_less(base, options, share, depthwise):
    domain = pm.new_domain(base, "packnet", CLASSES, **options)
    assert any(site.depthwise for site in base.sites.values())
    for name, transform in packed(domain).items():
        site = base.sites[name]
        gone = round((depthwise if site.depthwise else share) * site.numel)
        assert int((transform.owner != BASE).sum()) == gone
        if not gone:
            assert torch.equal(transform.weight(base.tensor(name)), base.tensor(name))


def test_more_domains_take_more_bits():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    ten = pm.account(base, PackNet(capacity=10), domains=10)
    assert ten.components["index"] == 4 * 5_806_944
    assert ten.params_paper == 1 + 4 * 5_806_944 / (32 * 5_814_688)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_the_bases_type_and_bits_in_both_forms(dtype):
    transform, W = fresh_transform(PackNet(), dtype=dtype)
    with torch.no_grad():
        transform.learned.add_(torch.randn_like(transform.learned))
    learning = transform.weight(W)
    learning.float().sum().backward()
    transform.restore(transform.stored())
    assert transform.weight(W).dtype == learning.dtype == dtype
    assert torch.equal(transform.weight(W), learning)
    assert torch.equal(learning[transform.owner == BASE], W[transform.owner == BASE])


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.ConvTranspose2d(3, 4, 3, groups=1), nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Flatten()).double(),
    ],
)
def test_transposed_and_grouped_convolutions_without_norms_are_packed_too(net, tmp_path):
    base = pm.load_base(net, input=pm.InputSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3))
    domain = pm.new_domain(base, "packnet", CLASSES, prune_depthwise=True)
    images = torch.randn(4, 3, 8, 8, dtype=base.tensor("0.weight").dtype)
    domain(base, images).square().sum().backward()
    assert packed(domain)["0.weight"].learned.grad.any()
    domain.eval().save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    assert torch.equal(loaded(base, images), domain(base, images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 1}, "capacity=1 must be a whole number from 2 to 128"),
        ({"capacity": 6.0}, r"capacity=6\.0 must be a whole number"),
        ({"place": 6, "capacity": 6}, "place=6 must be a whole number from 0 to 5"),
        ({"place": 128}, "place=128 must be a whole number from 0 to 127"),
        ({"place": True}, "place=True must be a whole number"),
        ({"prune": 1.5}, r"prune=1\.5 must be a number from 0 to 1"),
        ({"prune_base": "half"}, "prune_base='half' must be a number from 0 to 1"),
        ({"pruned": 1}, "pruned=1 must be true or false"),
        ({"prune_depthwise": 0}, "prune_depthwise=0 must be true or false"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("packnet", **options)


def test_places_are_given_in_turn_until_none_is_left(base):
    method = PackNet(capacity=3)
    own, first = (pm.new_domain(base, m, CLASSES) for m in (method.for_base(), method.after([])))
    assert own.method.place == 0
    assert method.after([own]).place == first.method.place == 1
    second = pm.new_domain(base, replace(method.after([first]), pruned=True), CLASSES)
    assert second.method.place == 2
    with pytest.raises(pm.MethodError, match=r"capacity=3 is .* and 2 more; .* capacity=4"):
        method.after([first, second])
    assert not replace(second.method, capacity=4).after([first, second]).pruned


def test_a_domain_that_cannot_follow_is_told_why(base):
    first = pm.new_domain(base, PackNet(), CLASSES).frozen()
    again = pm.new_domain(base, PackNet(), CLASSES)
    with pytest.raises(pm.MethodError, match="place=1 is taken"):
        again.method.follow(again, [first])
    second = pm.new_domain(base, PackNet().after([first]), CLASSES)
    with pytest.raises(pm.MethodError, match="no weight is free any more"):
        second.method.follow(second, [first])  # which was never pruned
    with pytest.raises(pm.MethodError, match="a domain by bn-only has no packed weights"):
        PackNet().after([pm.new_domain(base, "bn-only", CLASSES)])


class StopAt(Listener):
    def __init__(self, epoch, step):
        self.place = (epoch, step)

    def step(self, epoch, step, loss, images, density):
        if (epoch, step) == self.place:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_stopped_after_pruning_resumes_to_the_bit(base, sequence, tmp_path):
    first, method = sequence[0][0], PackNet(name="packnet", capacity=4)
    whole, file = sequence[0][1], tmp_path / "c"
    for listener in (StopAt(3, 1), None):  # epoch 3 is the first after pruning
        torch.manual_seed(0)
        domain = pm.new_domain(base, method.after([first]), CLASSES)
        method.follow(domain, [first])
        data = (base, domain, Patterns(2), Patterns(2, 1), RECIPE)
        if listener is None:
            fit(*data, checkpoint=file, resume=True)
        else:
            with pytest.raises(InterruptedTraining):
                fit(*data, checkpoint=file, listener=listener)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(domain.state_dict()[name], tensor)


def lessons():
    return {
        name: Lesson(CLASSES, Patterns(seed), Patterns(seed, 1), Patterns(seed, 1))
        for seed, name in enumerate(("one", "two", "three"), start=1)
    }


@pytest.mark.parametrize("order", [["one", "two", "three"], ["three", "two", "one"]])
def test_domains_learn_in_either_order_and_nobody_forgets(base, order, tmp_path):
    recipe = replace(RECIPE, epochs=16, weight_rate=1e-2)
    method = PackNet(name="packnet", prune_base=0.5)
    fitted = fit_all(base, lessons(), method, recipe, order=order, folder=tmp_path)
    assert [fitted.domains[name].method.place for name in order] == [1, 2, 3]
    assert all(accuracy > 60 for accuracy in fitted.final.values())  # 33 is chance
    assert set(fitted.forgotten.values()) == {0.0}
    one = packed(fitted.domains["one"]).values()
    two = packed(fitted.domains["two"]).values()
    assert all(a.values is b.values for a, b in zip(one, two, strict=True))
    for name, domain in fitted.domains.items():
        learned = pm.load_domain(tmp_path / "learned" / f"{name}.safetensors", base)
        settled = pm.load_domain(tmp_path / f"{name}.safetensors", base)
        expected = logits(base, domain)
        assert torch.equal(logits(base, learned), expected)
        assert torch.equal(logits(base, settled), expected)


def test_the_order_decides_who_owns_what(base, sequence):
    method, domains = PackNet(name="packnet", capacity=4), []
    for seed in (3, 2, 1):
        domains.append(learn(base, method, list(domains), seed))
    forth, back = packed(sequence[0][-1]), packed(domains[-1])
    assert any(not torch.equal(forth[site].owner, back[site].owner) for site in forth)
    assert all(torch.equal(forth[s].owner == BASE, back[s].owner == BASE) for s in forth)


def test_the_bases_own_images_train_it_first_and_what_it_became_is_told(base):
    own = Lesson([f"class {i}" for i in range(10)], Patterns(9, classes=10), Patterns(9, 1, 10))
    method = PackNet(name="packnet", capacity=3)
    one = {"one": lessons()["one"]}
    recipe = replace(RECIPE, epochs=2)
    without, with_own = (fit_all(base, one, method, recipe, own=o) for o in (None, own))
    for fitted, is_trained in ((without, False), (with_own, True)):
        domain = fitted.domains["one"]
        moved = method.moved(base, [domain])
        assert moved.keys() == packed(domain).keys()
        for site, transform in domain.named_transforms():
            W, kept = base.tensor(site), transform.owner == BASE
            share = 0.0 if base.sites[site].depthwise else 0.5 if is_trained else 0.25
            assert torch.equal(kept, ~smallest(W, torch.ones_like(kept), share))
            assert (moved[site][~kept] == 0).all()
            assert torch.equal(moved[site], W * kept) != is_trained
    assert 0 < without.base.change < 1
    assert with_own.base.accuracy_after is not None
    base.verify()
