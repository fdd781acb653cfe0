"""Norms, scalars and head in 16 bits once a domain has learned: what is rounded, what is not, and who decides."""

import pytest
import torch
from torch.utils.data import TensorDataset

import polymask as pm
from brightness import made_base, made_data
from nets import batch, logits, tiny_base, trained
from polymask.core.accounting import in_halves
from polymask.train import rounding
from polymask.train.recipe import RecipeError
from short_training import VAL


@pytest.fixture(scope="module")
def base():
    return tiny_base()


def by_part(domain: pm.Domain) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in domain.stored().items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(name.partition("/")[0], []).append(tensor)
    return found


def fits(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.half().float(), tensor)


def test_rounding_moves_no_number_by_more_than_eleven_places_allow(base):
    domain = trained(base, scores=(-1.0, 1.0))
    before, after = domain.stored(), in_halves(domain)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor.words, after[name].words)
            continue
        scale = torch.maximum(tensor.abs(), tensor.square().mean().sqrt())
        assert ((after[name] - tensor).abs() <= 2.0**-11 * scale).all()
    assert all(fits(tensor) for name, tensor in after.items() if name.startswith(("norm/", "head/")))


@pytest.mark.parametrize("value", [7e4, 1e-6, 1e30])
def test_numbers_that_16_bits_cannot_hold_stay_as_they_are(base, value):
    domain = trained(base)
    place, norm = next(iter(domain.named_norms()))
    with torch.no_grad():
        norm.running_var.fill_(value * 1.0001)
    assert torch.equal(in_halves(domain)[f"norm/{place}/running_var"], norm.running_var)


def test_a_variance_that_is_nothing_beside_its_layers_others_does_not_keep_them_in_32_bits(base):
    domain = trained(base)
    place, norm = next(iter(domain.named_norms()))
    with torch.no_grad():
        norm.running_var.fill_(1.0 / 3)
        norm.running_var[0] = 1e-7
    rounded = in_halves(domain)[f"norm/{place}/running_var"]
    assert fits(rounded)
    assert abs(rounded[0].item() - 1e-7) < 3e-8  # far below a norm's eps


def test_whole_weights_are_not_rounded(base):
    domain = trained(base, "finetune")
    after = in_halves(domain)
    for name, tensor in domain.stored().items():
        if name.startswith("transform/") and name.endswith("/weight"):
            assert torch.equal(after[name], tensor)


RECIPE = {"epochs": 1, "batch_size": 8}


def images(count: int) -> TensorDataset:
    return TensorDataset(*batch(count))


@pytest.mark.parametrize("precision", [None, 16, 32])
def test_learning_keeps_16_bits_unless_32_are_asked_for(base, precision, tmp_path):
    recipe = pm.get_recipe("quick", **RECIPE, precision=precision)
    learned = pm.learn(base, (images(24), images(12)), recipe=recipe, classes=["a", "b", "c"], norms="own")
    kept = 32 if precision == 32 else 16
    assert learned.domain.metrics["precision"] == kept
    assert all(map(fits, by_part(learned.domain)["head"])) == (kept == 16)
    learned.domain.save(tmp_path / "d.safetensors")
    again = pm.load_domain(tmp_path / "d.safetensors", base)
    assert torch.equal(logits(base, again), logits(base, learned.domain))
    sizes = pm.inspect(tmp_path / "d.safetensors").tensors
    numbers = sum(t.numel() for t in by_part(learned.domain)["head"])
    assert sum(size for name, size in sizes.items() if name.startswith("head/")) == numbers * kept // 8


def test_numbers_stay_exact_where_rounding_them_costs_accuracy_and_loss(base, monkeypatch):
    def coarse(domain: pm.Domain) -> dict:
        return {n: -100 * t if n.startswith("head/") else t for n, t in domain.stored().items()}

    said = iter([80.0, 60.0])  # as it is; rounded
    monkeypatch.setattr(rounding, "evaluate", lambda *_: next(said))
    monkeypatch.setattr(rounding, "in_halves", coarse)
    domain = trained(base).frozen()
    before = logits(base, domain)
    assert rounding.round_numbers(base, domain, VAL, None, None) == (False, 80.0)
    assert torch.equal(logits(base, domain), before)


def test_images_on_the_border_between_classes_do_not_keep_numbers_exact(base, monkeypatch):
    said = iter([80.0, 60.0])
    monkeypatch.setattr(rounding, "evaluate", lambda *_: next(said))
    domain = trained(base).frozen()
    assert rounding.round_numbers(base, domain, VAL, None, None) == (True, 60.0)
    assert all(map(fits, by_part(domain)["norm"]))


def test_numbers_are_rounded_where_val_says_nothing_else(base, monkeypatch):
    said = iter([80.0, 80.0])
    monkeypatch.setattr(rounding, "evaluate", lambda *_: next(said))
    domain = trained(base).frozen()
    assert rounding.round_numbers(base, domain, VAL, None, None) == (True, 80.0)
    assert all(map(fits, by_part(domain)["norm"]))


def test_another_precision_is_refused():
    with pytest.raises(RecipeError, match="precision=8 is not"):
        pm.get_recipe("quick", precision=8)


def test_accounts_in_16_bits_count_half_of_norms_scalars_and_head():
    base = tiny_base()
    wide, halves = (pm.account(base, "affine-full", classes=3, precision=bits) for bits in (32, 16))
    assert halves.components["mask"] == wide.components["mask"]
    for part in ("scalars", "norm_affine", "norm_statistics", "head"):
        assert 2 * halves.components[part] == wide.components[part]
    assert halves.bits_per_weight < wide.bits_per_weight


def test_what_a_pack_says_of_val_is_what_its_stored_numbers_reach(tmp_path):
    base, data = made_base(), made_data("dark", "light")
    recipe = pm.get_recipe("quick", epochs=2, batch_size=8, side=24, rate=1e-3)
    learned = pm.learn(base, data, "affine-full", recipe, progress=False)
    learned.domain.save(tmp_path / "made.safetensors")
    loaded = pm.load_domain(tmp_path / "made.safetensors", base)
    assert loaded.metrics["precision"] == 16
    val = pm.make_loaders(data, base.input, recipe).val
    assert pm.evaluate(base, loaded, val) == loaded.metrics["val_accuracy"]
