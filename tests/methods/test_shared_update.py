"""TALL masks and EMR: one update for all domains, kept once beside their packs."""

import shutil
from dataclasses import replace

import pytest
import torch

import polymask as pm
from nets import tiny_base
from polymask.errors import MethodError, PackError
from polymask.methods.shared_update import united
from polymask.pack.format import inspect, read_pack, write_pack
from polymask.train.fit_all import fit_all
from sequences import RECIPE, Patterns, learned_base, lesson, moved_at_random, new

RULES = ["tall-mask", "emr"]


def fine_tuned(base, count=3):
    """Domains as they are when fine-tuning has ended."""
    method = pm.create_method("tall-mask").first_stage()
    return [moved_at_random(new(base, method, seed=i), seed=i) for i in range(count)]


def changes(domains):
    return [{name: t.delta.double() for name, t in domain.named_transforms()} for domain in domains]


def images(seed=5):
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strength", [0.2, 0.4, 1.0])
def test_tall_masks_keep_what_is_mostly_a_domains_own(strength):
    base = tiny_base()
    domains = fine_tuned(base)
    settled = pm.create_method("tall-mask", strength=strength).settle(base, domains)
    parts = changes(domains)
    for own, domain in zip(parts, settled, strict=True):
        weights = domain.weights(base)
        for name, change in own.items():
            whole = sum(part[name] for part in parts)
            margin = change.abs() - strength * (whole - change).abs()
            sure = margin.abs() > 1e-6  # elsewhere rounding decides
            wanted = base.tensor(name).double() + torch.where(margin >= 0, whole, 0)
            torch.testing.assert_close(weights[name].double()[sure], wanted[sure], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per", ["network", "layer"])
def test_emr_elects_signs_takes_the_largest_and_sets_the_size_right(per):
    base = tiny_base()
    domains = fine_tuned(base)
    settled = pm.create_method("emr", per=per).settle(base, domains)
    parts = changes(domains)
    update = {}
    for name in parts[0]:
        stacked = torch.stack([part[name] for part in parts])
        sign = stacked.sum(0).sign()
        update[name] = sign * torch.where(stacked.sign() == sign, stacked.abs(), 0).max(0).values
    for own, domain in zip(parts, settled, strict=True):
        weights = domain.weights(base)
        masks = {name: change * update[name] > 0 for name, change in own.items()}
        shares = {n: (own[n].abs().sum(), (masks[n] * update[n]).abs().sum()) for n in own}
        whole = [sum(pair[i] for pair in shares.values()) for i in range(2)]
        for name in own:
            above, below = shares[name] if per == "layer" else whole
            wanted = base.tensor(name).double() + above / below * masks[name] * update[name]
            torch.testing.assert_close(weights[name].double(), wanted, rtol=1e-4, atol=1e-6)


def test_an_update_needs_one_change_at_a_time_in_memory():
    alive = []

    class OneByOne:
        def __iter__(self):
            for seed in range(3):
                assert not alive
                alive.append(seed)
                yield {"a": torch.randn(5, generator=torch.Generator().manual_seed(seed))}
                alive.pop()

    for rule in ("tall", "emr"):
        assert torch.isfinite(united(rule, OneByOne())["a"]).all()


@pytest.mark.parametrize("name", RULES)
def test_domains_that_learned_alike_become_themselves(name):
    base = tiny_base()
    one = fine_tuned(base, 1)[0]
    (settled,) = pm.create_method(name).settle(base, [one])
    torch.testing.assert_close(settled(base, images()), one(base, images()), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=RULES)
def taught(request, tmp_path_factory):
    """(method, base, folder, fitted): two domains learned by a method, their packs in a folder."""
    base, folder = learned_base(), tmp_path_factory.mktemp(request.param)
    lessons = {"one": lesson(1), "two": lesson(2)}
    return request.param, base, folder, fit_all(base, lessons, request.param, RECIPE, folder=folder)


def test_domains_learn_and_settle_on_one_update(taught):
    name, base, folder, fitted = taught
    assert all(accuracy > 60 for accuracy in fitted.final.values())  # chance is 25
    one, two = (dict(domain.named_transforms()) for domain in fitted.domains.values())
    assert all(one[site].update is two[site].update for site in one)
    assert not all(torch.equal(one[site].words, two[site].words) for site in one)
    assert [file.name.startswith(f"{name}-") for file in folder.glob("*.shared")] == [True]
    base.verify()


def test_packs_hold_a_bit_a_weight_and_load_to_the_bit(taught):
    _, base, folder, fitted = taught
    (shared,) = folder.glob("*.shared")
    for name, domain in fitted.domains.items():
        loaded = pm.load_domain(folder / f"{name}.safetensors", base)
        assert torch.equal(loaded(base, images()), domain(base, images()))
        assert torch.equal(loaded.merged(base)(images()), loaded(base, images()))
        info = inspect(folder / f"{name}.safetensors")
        assert info.manifest.format == 4
        assert info.manifest.beside == shared.name
        assert not any(tensor.endswith("/update") for tensor in info.tensors)
        sites = sum(site.numel for site in base.sites.values())
        assert sum(size for n, size in info.tensors.items() if n.endswith("/mask")) <= sites / 8 + len(base.sites)


def test_what_is_shared_is_in_memory_once(taught):
    _, base, folder, _ = taught
    model = pm.MultiDomainModel(base, library=folder, strict=True)
    one, two = (dict(model.domain(name).named_transforms()) for name in ("one", "two"))
    assert all(one[site].update.data_ptr() == two[site].update.data_ptr() for site in one)


def test_a_pack_without_what_it_shares_is_refused_by_name(taught, tmp_path):
    _, base, folder, _ = taught
    shutil.copy(folder / "one.safetensors", tmp_path)
    (shared,) = folder.glob("*.shared")
    there = pm.load_domain(folder / "two.safetensors", base)  # what it shares is in memory, and still not here
    with pytest.raises(PackError, match=f"{shared.name} is missing"):
        pm.load_domain(tmp_path / "one.safetensors", base)
    del there
    with pytest.warns(UserWarning, match="pack one is skipped"):
        assert pm.MultiDomainModel(base, library=tmp_path).domains == []


def test_a_damaged_shared_file_is_refused(taught, tmp_path):
    _, base, folder, _ = taught
    (shared,) = folder.glob("*.shared")
    shutil.copy(folder / "one.safetensors", tmp_path)
    data = bytearray(shared.read_bytes())
    for cut in (data[: len(data) // 2], data[:-4] + b"\0\0\x80\x3f"):
        (tmp_path / shared.name).write_bytes(bytes(cut))
        with pytest.raises(PackError, match="copy it again"):
            pm.load_domain(tmp_path / "one.safetensors", base)


def test_domains_that_come_later_change_nothing_that_is_there(taught, tmp_path):
    name, base, folder, _ = taught
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.shared")]:
        shutil.copy(file, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said = pm.load_domain(tmp_path / "one.safetensors", base)(base, images())
    fit_all(base, {"three": lesson(3), "four": lesson(4)}, name, RECIPE, folder=tmp_path)
    assert all((tmp_path / file).read_bytes() == data for file, data in before.items())
    assert len(list(tmp_path.glob("*.shared"))) == 2
    assert torch.equal(pm.load_domain(tmp_path / "one.safetensors", base)(base, images()), said)


def test_the_strength_of_tall_masks_is_chosen_on_val(monkeypatch):
    base, measured_on = learned_base(), set()
    with_val, without_val = replace(lesson(1), val=Patterns(1, 2, 5000)), lesson(2)

    def best_at_last(base, domain, batches):
        measured_on.add(batches)
        return float(domain.method.strength == 0.6)

    with monkeypatch.context() as patched:
        patched.setattr("polymask.train.fit_all.evaluate", best_at_last)
        patched.setattr("polymask.train.fit_all.lesson_accuracy", lambda *_: None)
        lessons = {"one": with_val, "two": without_val}
        fitted = fit_all(base, lessons, "tall-mask", replace(RECIPE, epochs=1))
    method = pm.create_method("tall-mask").first_stage()
    tried = []

    def measure(domain):
        tried.append(domain.method.strength)
        return float(domain.method.strength == 0.6)

    learned = fine_tuned(base, 2)
    settled = method.settle(base, learned)
    assert method.finish(base, learned[0], settled[0], measure).method.strength == 0.6
    assert sorted(tried) == [0.2, 0.3, 0.4, 0.5, 0.6]
    assert [domain.method.strength for domain in fitted.domains.values()] == [0.6, 0.6]
    assert measured_on == {with_val.val, without_val.train}  # where there is no val, on training images


@pytest.mark.parametrize("name", RULES)
def test_one_domain_alone_is_refused(name):
    base = tiny_base()
    with pytest.raises(MethodError, match="this is one domain"):
        pm.learn(base, Patterns(1), name, classes=["a", "b", "c", "d"])


@pytest.mark.parametrize("name", RULES)
def test_the_update_is_counted_once_for_all_domains(name):
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    few, many = (pm.account(base, name, domains=count) for count in (3, 11))
    sites = sum(site.numel for site in base.sites.values())
    assert few.components["shared"] == 32 * sites
    assert few.components["mask"] == sites
    once = 32 * sites / (32 * few.base_parameters)
    each = (many.params_paper - few.params_paper) / 8
    assert few.params_paper == pytest.approx(1 + once + 2 * each)
    assert each < 1.2 / 32


@pytest.mark.parametrize(
    "note",
    [
        None,
        {},
        {"file": "a-0000000000000000.shared", "sha256": 5},
        {"file": "../emr-0000000000000000.shared", "sha256": "0" * 64},
        {"file": "/etc/passwd", "sha256": "0" * 64},
        {"file": "emr-0000000000000000.shared", "sha256": "1" * 64},
        {"file": "emr-0000000000000000.shared", "sha256": "0" * 64, "more": 1},
    ],
)
def test_a_note_on_what_is_shared_that_makes_no_sense_is_refused(taught, tmp_path, note):
    _, base, folder, _ = taught
    manifest, tensors = read_pack(folder / "one.safetensors")
    write_pack(tmp_path / "one.safetensors", replace(manifest, recipe=manifest.recipe | {"shared": note}), tensors)
    with pytest.raises(PackError, match="makes no sense"):
        pm.load_domain(tmp_path / "one.safetensors", base)
