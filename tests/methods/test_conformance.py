"""The promises that every registered method keeps.

The quick tests take one preset of each kind: most of one class differ in the values of options alone. That a domain is
stored and merged to the bit is tested quickly for every preset; all else when the slow tests run.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import batch, block_base, logits, tiny_base, train, trained
from polymask.core.base import fingerprint
from polymask.core.network import named_tensors
from polymask.core.starting import begin_as
from presets import EVERY, MERGEABLE, ONE_OF_A_KIND, ROUTED, quickly

COMPILED = ("affine-full", "finetune", "series-adapter", "mtan")  # masks, weights, outputs, routes
METHODS = quickly(ONE_OF_A_KIND)


def base_for(method: str) -> pm.Base:
    """Methods that route images need blocks; all others get every kind of layer."""
    return block_base() if method in ROUTED else tiny_base()


@pytest.fixture
def base(method) -> pm.Base:
    return base_for(method)


@pytest.mark.parametrize("method", METHODS)
def test_training_leaves_the_base_byte_identical_and_in_eval_mode(base, method):
    before = {name: tensor.clone() for name, tensor in named_tensors(base.net)}
    print_before = fingerprint(base.net)

    trained(base, method)

    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(base.net))
    assert fingerprint(base.net) == print_before
    assert not any(module.training for module in base.net.modules())
    base.verify()


@pytest.mark.parametrize("method", METHODS)
def test_training_a_second_domain_leaves_the_first_bit_identical(base, method):
    first = trained(base, method, seed=1)
    before = logits(base, first)
    trained(base, method, classes=5, seed=2)
    assert torch.equal(logits(base, first), before)


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss(base, method):
    falls = []
    for seed in range(3):  # one training alone may end badly, by rounding
        torch.manual_seed(seed)
        domain = pm.new_domain(base, method, ["a", "b", "c"])
        losses = train(base, domain, steps=40, rate=1e-2)
        falls.append(losses[0] - min(losses[-5:]))
    assert sum(falls) / len(falls) > 0.05, falls


@pytest.mark.parametrize("method", EVERY)
def test_a_saved_domain_loads_bit_exactly_and_is_saved_to_the_same_file(base, method, tmp_path):
    domain = trained(base, method)
    domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))
    assert loaded.classes == domain.classes
    assert loaded.method == domain.method
    assert not any(p.requires_grad for p in loaded.parameters())
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("method", EVERY)
def test_a_pack_loads_where_torch_has_a_default_device(base, method, tmp_path):
    domain = trained(base, method)
    domain.save(tmp_path / "a.safetensors")
    with torch.device("cpu"):  # as torch.set_default_device
        loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))


# These cannot learn on from what they store.
NO_START = {"taps", "vera", "affine-cross", "affine-mix", *(name for name in EVERY if name.startswith("ba2"))}


@pytest.mark.parametrize("method", METHODS)
def test_a_domain_begins_where_another_is_and_leaves_it_as_it_was(base, method):
    first = trained(base, method).frozen()
    before = logits(base, first)
    second = pm.new_domain(base, method, ["a", "b"])
    if method in NO_START or not first.method.learns_on:
        with pytest.raises(pm.MethodError, match=r"cannot begin as|learns in stages or with other domains"):
            begin_as(second, first, 1e-3)
        return
    begin_as(second, first, 1e-3)
    images = batch()[0]
    with torch.no_grad(), second.in_mode(training=False):
        torch.testing.assert_close(second.features(base, images), first.features(base, images), atol=1e-6, rtol=1e-5)
    begun = [p.detach().clone() for p in second.parameters()]
    train(base, second, steps=5, rate=1e-2)
    assert any(not torch.equal(p, was) for p, was in zip(second.parameters(), begun, strict=True))
    assert torch.equal(logits(base, first), before)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_copy_gives_the_same_logits_and_does_not_learn_on(base, method):
    domain = trained(base, method)
    frozen = domain.frozen()
    before = logits(base, domain)
    assert torch.equal(logits(base, frozen), before)
    train(base, domain, steps=5, rate=1e-2)
    assert torch.equal(logits(base, frozen), before)
    assert not torch.equal(logits(base, domain), before)


@pytest.mark.parametrize("method", MERGEABLE)
def test_a_merged_network_gives_the_same_logits_bit_for_bit(base, method):
    domain = trained(base, method)
    merged = domain.merged(base)
    with torch.no_grad():
        assert torch.equal(merged(batch()[0]), logits(base, domain))
    assert not any(p.requires_grad for p in merged.parameters())


@pytest.mark.parametrize("method", quickly(ONE_OF_A_KIND, MERGEABLE))
def test_merging_leaves_a_domain_able_to_learn_and_the_merged_network_as_it_was(base, method):
    domain = trained(base, method)
    learning = [p.requires_grad for p in domain.parameters()]
    merged = domain.merged(base)
    with torch.no_grad():
        before = merged(batch()[0])
    assert [p.requires_grad for p in domain.parameters()] == learning
    train(base, domain, steps=5, rate=1e-2)
    with torch.no_grad():
        assert torch.equal(merged(batch()[0]), before)
        assert not torch.equal(domain(base, batch()[0]), before)


@pytest.mark.parametrize("method", quickly(ONE_OF_A_KIND, MERGEABLE))
def test_a_merged_network_shares_what_the_domain_does_not_change(base, method):
    domain = trained(base, method)
    merged = dict(named_tensors(domain.merged(base)))
    changed = domain.weights(base).keys()
    for name, tensor in named_tensors(base.net):
        shares = merged[name].data_ptr() == tensor.data_ptr()
        assert shares != (name in changed), name


@pytest.mark.parametrize("method", ROUTED)
def test_what_cannot_be_merged_says_so(base, method):
    with pytest.raises(pm.DomainError, match="cannot be merged"):
        trained(base, method).merged(base)


@pytest.mark.parametrize("method", METHODS)
def test_a_mixed_batch_equals_separate_calls(base, method):
    model = pm.MultiDomainModel(base)
    model.add("three", trained(base, method, classes=3, seed=1))
    model.add("five", trained(base, method, classes=5, seed=2))
    images, _ = batch(6)
    names = ["three", "five", "five", "three", "five", "three"]
    mixed = model(images, domain=names)
    for name in model.domains:
        rows = [i for i, n in enumerate(names) if n == name]
        for row, expected in zip(rows, model(images[rows], domain=name), strict=True):
            assert torch.equal(mixed[row], expected)
    assert [len(vector) for vector in mixed] == [3, 5, 5, 3, 5, 3]


@pytest.mark.parametrize("method", METHODS)
def test_rename_and_remove_leave_the_others_alone(base, method):
    model = pm.MultiDomainModel(base)
    for seed, name in enumerate(("a", "b", "c")):
        model.add(name, trained(base, method, seed=seed))
    images, _ = batch()
    before = {name: model(images, domain=name) for name in model.domains}
    model.rename("a", "z")
    model.remove("b")
    assert sorted(model.domains) == ["c", "z"]
    assert torch.equal(model(images, domain="z"), before["a"])
    assert torch.equal(model(images, domain="c"), before["c"])
    model.verify()


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_autocast_trains_and_stays_close(base, method):
    domain = trained(base, method)
    exact = logits(base, domain)
    with torch.autocast("cpu", torch.bfloat16):
        cast = logits(base, domain)
    domain.train()
    # Again: torch 2.6 keeps what it cast without gradients until the context ends.
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(domain(base, batch()[0]), batch()[1])
    loss.backward()
    assert (cast.float() - exact).abs().max() < 0.05
    grads = [p.grad for p in domain.parameters() if p.requires_grad]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)
    assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("method", METHODS)
def test_a_deep_copy_is_independent(base, method):
    domain = trained(base, method)
    twin = copy.deepcopy(domain)
    before = logits(base, domain)
    assert torch.equal(logits(base, twin), before)
    train(base, twin, steps=5, rate=1e-2)
    assert torch.equal(logits(base, domain), before)


@pytest.mark.parametrize("method", quickly(COMPILED))
def test_compiling_gives_equal_results_in_both_modes(base, method):
    domain = trained(base, method)
    _compare_with_compiled(base, domain, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["affine-full", "piggyback"])
def test_compiling_with_inductor_gives_equal_results_in_both_modes(base, method):
    _compare_with_compiled(base, trained(base, method), backend="inductor")


def _compare_with_compiled(base, domain, backend):
    torch._dynamo.reset()
    images, labels = batch()
    model = pm.DomainModel(base, domain).eval()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-5)
    gradients = []
    dropout = getattr(base.net, "dropout", None)
    for run in (model, compiled):
        torch.manual_seed(3)
        before = copy.deepcopy(domain.state_dict())  # both runs start from the same statistics
        model.train()
        model.zero_grad()
        with torch.random.fork_rng():
            if dropout is not None:
                dropout.p = 0.0  # a compiled graph draws other random numbers
            F.cross_entropy(run(images), labels).backward()
        if dropout is not None:
            dropout.p = 0.1
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        domain.load_state_dict(before)
    model.eval()
    for eager, other in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-3, atol=1e-5)
    base.verify()
    assert not any(module.training for module in base.net.modules())
