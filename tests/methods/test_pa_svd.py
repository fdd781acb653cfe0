"""PA-SVD: factors over all domains."""

import pytest
import torch

import polymask as pm
from nets import block_base, logits, tiny_base, trained
from polymask.errors import MethodError
from polymask.methods.parallel_adapter import CentreTap
from polymask.pack.format import read_pack, write_pack
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe
from short_training import Fixed

ADAPTERS = "parallel-adapter"
RECIPE = Recipe(epochs=2, rate=1e-3, head_rate=1e-2, drops=(), batch_size=8)


def adapters(domains):
    return [{name: t.adapter.detach() for name, t in domain.named_transforms()} for domain in domains]


def learned(base, count=3):
    """Domains with full adapters, as they are before the factors are found."""
    torch.manual_seed(0)
    method = pm.create_method("pa-svd", start="he").after([])
    return method, [pm.new_domain(base, method, ["a", "b"]).frozen() for _ in range(count)]


def test_the_factors_are_the_best_of_their_rank_for_all_adapters_together():
    base = block_base()
    method, domains = learned(base)
    full = adapters(domains)
    settled = method.settle(base, domains)
    for name in full[0]:
        taps = [dict(d.named_transforms())[name] for d in settled]
        stacked = torch.cat([a[name] for a in full], 1).double()
        found = torch.cat([(t.shared @ t.own).detach() for t in taps], 1).double()
        rank = taps[0].shared.shape[1]
        lost = torch.linalg.svdvals(stacked)[rank:].square().sum()
        torch.testing.assert_close((stacked - found).square().sum(), lost, rtol=1e-4, atol=1e-8)
        assert all(torch.equal(t.shared, taps[0].shared) for t in taps)
        assert rank == max(1, round(0.5 * stacked.shape[0]))


def test_at_full_rank_the_factors_are_the_adapters():
    base = block_base()
    _, domains = learned(base)
    settled = pm.create_method("pa-svd", keep=1.0).settle(base, domains)
    for before, after in zip(domains, settled, strict=True):
        for name, tensor in before.weights(base).items():
            torch.testing.assert_close(after.weights(base)[name], tensor, rtol=1e-4, atol=1e-5)


def test_domains_learn_full_adapters_and_then_factors_on_a_common_space():
    base = block_base()
    lessons = {
        name: Lesson(["a", "b", "c"], Fixed(4, offset), Fixed(1, offset + 50))
        for name, offset in (("one", 0), ("two", 7))
    }
    fitted = fit_all(base, lessons, "pa-svd", RECIPE)
    assert [len(history) for history in fitted.histories.values()] == [2, 2]  # one, then one
    one, two = (dict(d.named_transforms()) for d in fitted.domains.values())
    assert all(torch.equal(one[name].shared, two[name].shared) for name in one)
    assert not all(torch.equal(one[name].own, two[name].own) for name in one)
    assert all(d.method.factored for d in fitted.domains.values())
    base.verify()


def test_half_the_rank_costs_half_of_what_parallel_adapters_cost():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    full = pm.account(base, "parallel-adapter", domains=10)
    half = pm.account(base, "pa-svd", domains=10)
    stem = 32 * 32 * 3  # bits; its adapter, of 3 channels, stays whole
    assert (half.components["weights"] - stem) * 2 == full.components["weights"] - stem
    assert half.params_paper == pytest.approx(1.5706, abs=1e-4)  # the paper prints 1.5


@pytest.mark.parametrize("name", ["efficientnet-lite0", "torchvision:resnet50", "decathlon-wrn28"])
@pytest.mark.parametrize("domains", [3, 10])
def test_factors_never_cost_more_than_the_adapters_that_they_replace(name, domains):
    base = pm.load_base(name, pretrained=False, device="meta")
    costs = [pm.account(base, m, domains=domains).params_paper for m in ("pa-svd", ADAPTERS)]
    assert costs[0] <= costs[1]


def test_beside_a_depthwise_convolution_each_domain_keeps_the_adapter_that_it_learned():
    base = tiny_base()
    method, domains = learned(base)
    settled = method.settle(base, domains)
    for before, after in zip(domains, settled, strict=True):
        then, now = (dict(d.named_transforms()) for d in (before, after))
        kept = {name for name, tap in now.items() if isinstance(tap, CentreTap)}
        assert kept == {"stem.weight", "depthwise.weight", "grouped.weight"}
        for name in kept:
            assert torch.equal(now[name].adapter, then[name].adapter)
            assert now[name].adapter.requires_grad


def test_a_pack_from_when_every_site_was_factored_loads(tmp_path):
    base = tiny_base()
    domain = trained(base, "pa-svd", everywhere=True).eval()
    domain.save(tmp_path / "d.safetensors")
    manifest, tensors = read_pack(tmp_path / "d.safetensors")
    del manifest.options["everywhere"]
    write_pack(tmp_path / "old.safetensors", manifest, tensors)
    loaded = pm.load_domain(tmp_path / "old.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))
    assert "transform/depthwise.weight/shared" in loaded.stored()


def test_a_share_out_of_range_is_refused():
    with pytest.raises(MethodError, match=r"keep=1\.5"):
        pm.create_method("pa-svd", keep=1.5)
