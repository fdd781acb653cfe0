"""Many domains on one base."""

import threading

import pytest
import torch

import polymask as pm
from nets import batch, tiny_base, train, trained


@pytest.fixture
def model():
    base = tiny_base()
    model = pm.MultiDomainModel(base)
    model.add("a", trained(base, seed=1))
    model.add("b", trained(base, "piggyback", classes=5, seed=2))
    return model


def test_a_domain_that_trains_on_does_not_change_the_one_that_was_added():
    base = tiny_base()
    domain = trained(base)
    model = pm.MultiDomainModel(base)
    model.add("a", domain)
    before = model(batch()[0], domain="a")
    train(base, domain, steps=5, rate=1e-2)
    assert torch.equal(model(batch()[0], domain="a"), before)
    model.verify()


def test_one_name_gives_a_tensor_and_one_per_image_a_list(model):
    images, _ = batch(3)
    assert model(images, domain="b").shape == (3, 5)
    assert [v.shape for v in model(images, domain=["b", "a", "b"])] == [(5,), (3,), (5,)]


def test_a_library_is_loaded_by_file_name(model, tmp_path):
    for name in model.domains:
        model.domain(name).save(tmp_path / f"{name}.safetensors")
    (tmp_path / "notes.txt").write_text("not a pack")
    (tmp_path / "._a.safetensors").write_text("what some file systems leave behind")
    again = pm.MultiDomainModel(model.base, library=tmp_path)
    assert again.domains == ["a", "b"]
    images, _ = batch()
    for name in again.domains:
        assert torch.equal(again(images, domain=name), model(images, domain=name))


def test_a_library_with_one_bad_pack_is_not_loaded_in_part(model, tmp_path):
    model.domain("a").save(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").write_bytes(b"nonsense")
    with pytest.raises(pm.PackError, match=r"d\.safetensors"):
        model.load_library(tmp_path)
    assert model.domains == ["a", "b"]


def test_a_pack_can_be_loaded_under_another_name(model, tmp_path):
    model.domain("a").save(tmp_path / "x.safetensors")
    assert model.load(tmp_path / "x.safetensors") == "x"
    assert model.load(tmp_path / "x.safetensors", "y") == "y"
    assert model.domains == ["a", "b", "x", "y"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "a\\b", "a b", ".hidden", "-x", "a\0", "ä", "x" * 101, 3]
)
def test_a_name_that_cannot_be_a_files_is_refused(model, name):
    domain = model.domain("a")
    with pytest.raises(pm.DomainError, match="cannot name a domain; use up to 100 letters"):
        model.add(name, domain)
    with pytest.raises(pm.DomainError, match="cannot name a domain"):
        model.rename("a", name)
    assert model.domains == ["a", "b"]


def test_a_taken_name_and_an_unknown_one_are_refused(model):
    with pytest.raises(pm.DomainError, match="a domain is named 'b' already"):
        model.add("b", model.domain("a"))
    with pytest.raises(pm.DomainError, match="a domain is named 'b' already"):
        model.rename("a", "b")
    for act in (model.remove, model.merge, lambda n: model(batch()[0], domain=n)):
        with pytest.raises(pm.DomainError, match="no domain is named 'c'; near matches: a, b"):
            act("c")
    with pytest.raises(pm.DomainError, match="no domain is named 'c'"):
        model(batch(2)[0], domain=["a", "c"])
    assert model.domains == ["a", "b"]


def test_a_domain_of_another_base_is_refused(model):
    with pytest.raises(pm.DomainError, match="made for base tiny"):
        model.add("z", trained(tiny_base(seed=9)))


def test_one_name_too_few_is_refused(model):
    with pytest.raises(pm.InputError, match="2 domain names for 3 images"):
        model(batch(3)[0], domain=["a", "b"])


def test_verify_notices_a_changed_domain(model):
    model.verify()
    with torch.no_grad():
        model.domain("a").head.bias[0] += 1
    with pytest.raises(pm.DomainError, match="domain a has changed since it was added"):
        model.verify()


def test_threads_that_share_a_model_get_their_own_domains_answers(model):
    images, _ = batch()
    expected = {name: model(images, domain=name) for name in model.domains}
    wrong = []

    def ask(name):
        for _ in range(30):
            if not torch.equal(model(images, domain=name), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ["a", "b", "a", "b"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_merged_networks_of_two_domains_are_independent(model):
    images, _ = batch()
    first, second = model.merge("a"), model.merge("b")
    with torch.no_grad():
        assert torch.equal(first(images), model(images, domain="a"))
        assert torch.equal(second(images), model(images, domain="b"))


def test_adding_the_hundredth_domain_does_the_work_of_the_first(monkeypatch):
    """Counted, not timed: tensors hashed, packed and copied per `add` stay the same."""
    base = tiny_base()
    domain = trained(base)
    model = pm.MultiDomainModel(base)
    calls = []
    frozen = pm.Domain.frozen
    stored = pm.Domain.stored
    monkeypatch.setattr(pm.Domain, "frozen", lambda d: calls.append("frozen") or frozen(d))
    monkeypatch.setattr(pm.Domain, "stored", lambda d: calls.append("stored") or stored(d))
    work = []
    for i in range(100):
        calls.clear()
        model.add(f"d{i}", domain)
        work.append(tuple(calls))
    assert len(set(work)) == 1
