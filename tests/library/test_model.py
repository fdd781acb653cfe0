"""Many domains on one base."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

import polymask as pm
from nets import batch, tiny_base, train, trained
from polymask.pack import storing


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


@pytest.fixture
def library(model, tmp_path):
    """A good pack, a damaged one, and one of another base."""
    model.domain("a").save(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").write_bytes(b"nonsense")
    trained(tiny_base(seed=9)).save(tmp_path / "e.safetensors")
    return tmp_path


def test_a_strict_library_with_one_bad_pack_is_not_loaded_in_part(model, library):
    with pytest.raises(pm.PackError, match=r"d\.safetensors"):
        model.load_library(library, strict=True)
    assert model.domains == ["a", "b"]
    with pytest.raises(pm.PackError, match=r"d\.safetensors"):
        pm.MultiDomainModel(model.base, library=library, strict=True)


def test_a_damaged_and_a_foreign_pack_are_skipped_with_a_warning_that_says_why(model, library):
    with pytest.warns(UserWarning, match="is skipped: ") as warned:
        again = pm.MultiDomainModel(model.base, library=library)
    assert again.domains == ["c"]
    damaged, foreign = sorted(str(warning.message) for warning in warned)
    assert damaged.startswith("pack d is skipped: ")
    assert "not a pack" in damaged
    assert foreign.startswith("pack e is skipped: ")
    assert "made for base tiny" in foreign


def test_a_library_with_the_name_of_a_domain_that_is_there_is_refused(model, tmp_path):
    model.domain("a").save(tmp_path / "a.safetensors")
    with pytest.raises(pm.DomainError, match="a domain is named 'a' already"):
        model.load_library(tmp_path)


@pytest.fixture
def photos(tmp_path):
    draw = np.random.default_rng(0)
    for number in range(3):
        pixels = draw.integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return sorted(tmp_path.glob("*.png"))


def test_predict_names_classes_of_paths_and_images_in_their_order(model, photos):
    mixed = [str(photos[0]), photos[1], Image.open(photos[2]), photos[0].read_bytes()]
    found = model.predict(mixed, domain="b", top=2, batch_size=3)
    assert [p.image for p in found] == [*map(str, photos), "image 3"]
    transform = model.domain("b").input.transform()
    shares = model(torch.stack([transform(photo) for photo in photos]), domain="b").softmax(1)
    for prediction, row in zip(found, shares, strict=False):
        assert prediction.domain == "b"
        assert prediction.label == f"class {int(row.argmax())}"
        assert prediction.probability == pytest.approx(float(row.max()), rel=1e-4)
        assert len(prediction.top) == 2
    assert found[3].label == found[0].label


def test_predict_takes_one_image_or_one_domain_for_each(model, photos):
    (one,) = model.predict(photos[0], domain="a")
    assert len(one.top) == 3
    pixels = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    assert [p.domain for p in model.predict(pixels, domain=["b", "a"])] == ["b", "a"]
    assert model.predict([], domain="a") == []


def test_a_prediction_shows_its_classes_in_percent():
    shown = repr(pm.Prediction("photo.jpg", "pets", (("cat", 0.931), ("dog", 0.069))))
    assert shown == "Prediction(photo.jpg: cat 93.1 %, dog 6.9 %)"


def test_predict_names_a_file_that_it_cannot_read(model, photos, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not an image")
    for wrong in (bad, tmp_path / "missing.png", tmp_path):
        with pytest.raises(pm.DataError, match=wrong.name):
            model.predict([photos[0], wrong], domain="a")
    with pytest.raises(pm.DataError, match=r"image 1: pixels are float32; give uint8"):
        model.predict([photos[0], np.zeros((8, 8, 3), np.float32)], domain="a")
    with pytest.raises(pm.DataError, match=r"image 0: a dict is not an image"):
        model.predict([{}], domain="a")
    with pytest.raises(pm.InputError, match="top 0"):
        model.predict(photos, domain="a", top=0)
    with pytest.raises(pm.InputError, match="2 domain names for 3 images"):
        model.predict(photos, domain=["a", "b"])


def test_images_of_another_size_or_scale_are_refused_with_the_domains_size(model):
    with pytest.raises(pm.InputError, match=r"images are 3 × 20 × 20, but domain a takes 3 × 16 × 16; .*transform"):
        model(torch.zeros(1, 3, 20, 20), domain="a")
    with pytest.raises(pm.InputError, match=r"values from 0 to 255, but domain a \(3 × 16 × 16\) takes .*transform"):
        model(torch.linspace(0, 255, 768).view(1, 3, 16, 16), domain="a")
    with pytest.raises(pm.InputError, match=r"images are torch\.uint8.*transform"):
        model(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), domain="a")


def test_a_model_and_its_parts_show_themselves_in_a_line(model):
    assert repr(model) == "MultiDomainModel(2 domains on tiny: a, b)"
    assert repr(pm.MultiDomainModel(model.base)) == "MultiDomainModel(0 domains on tiny)"
    assert repr(model.base).startswith("Base(tiny: 5 sites with ")
    assert "input 3 × 16 × 16, 12 features, on cpu, fingerprint " in repr(model.base)
    assert repr(model.domain("b")) == (
        "Domain(piggyback on tiny: 5 classes (class 0, class 1, class 2, …), input 3 × 16 × 16)"
    )


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
        with pytest.raises(pm.DomainError, match="no domain is named 'c'; there is a, b"):
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


@pytest.fixture
def shelved(model, tmp_path):
    """A library of the model's domains and some more of one kind, and the same domains in memory."""
    for seed in range(3, 7):
        model.add(f"c{seed}", trained(model.base, seed=seed))
    for name in model.domains:
        model.domain(name).save(tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("cache_bytes", [1 << 20, 12_000, 1])
def test_domains_of_a_library_answer_as_those_in_memory_whatever_is_kept(model, shelved, cache_bytes):
    again = pm.MultiDomainModel(model.base, library=shelved, cache_bytes=cache_bytes)
    images, _ = batch()
    for name in [*again.domains, *reversed(again.domains), *again.domains]:
        assert torch.equal(again(images, domain=name), model(images, domain=name))
    again.verify()


def test_a_library_of_many_domains_reads_only_those_that_are_used(model, shelved, monkeypatch):
    read = []
    real = storing.read_pack
    monkeypatch.setattr(storing, "read_pack", lambda path: read.append(path.stem) or real(path))
    again = pm.MultiDomainModel(model.base, library=shelved)
    assert len(again.domains) == 6
    assert read == []
    again(batch(4)[0], domain=["c4", "a", "c4", "a"])
    assert sorted(read) == ["a", "c4"]
    assert again.domain("b").classes == [f"class {i}" for i in range(5)]
    assert again.domain("b") is again.domain("b")
    assert sorted(read) == ["a", "b", "c4"]


@pytest.mark.parametrize("cache_bytes", [1 << 20, 1])
def test_a_pack_that_is_replaced_or_damaged_after_loading_is_refused_and_others_stay(model, shelved, cache_bytes):
    again = pm.MultiDomainModel(model.base, library=shelved, cache_bytes=cache_bytes)
    images, _ = batch()
    before = again(images, domain="a")
    trained(model.base, seed=9).save(shelved / "c3.safetensors")
    content = bytearray((shelved / "c4.safetensors").read_bytes())
    content[-1] ^= 1
    (shelved / "c4.safetensors").write_bytes(content)
    (shelved / "c5.safetensors").unlink()
    for name, problem in (("c3", "was replaced"), ("c4", "is damaged"), ("c5", "cannot be read")):
        with pytest.raises(pm.PackError, match=rf"{name}\.safetensors {problem}"):
            again(images, domain=name)
        with pytest.raises(pm.PackError, match=problem):
            again.domain(name)
    with pytest.raises(pm.PackError):
        again.verify()
    assert torch.equal(again(images, domain="a"), before)
    with pytest.raises(pm.PackError, match="is damaged"):
        pm.MultiDomainModel(model.base, library=shelved, strict=True)


def test_domains_of_a_library_are_renamed_removed_and_predicted_with_like_others(model, shelved, photos):
    again = pm.MultiDomainModel(model.base, library=shelved)
    again.rename("a", "first")
    again.remove("c3")
    assert again.domains == ["b", "c4", "c5", "c6", "first"]
    (one,), (other,) = again.predict(photos[0], domain="first"), model.predict(photos[0], domain="a")
    assert one.top == other.top
    with pytest.raises(pm.DomainError, match="no domain is named 'c3'"):
        again.domain("c3")


def test_a_name_that_comes_to_another_domain_never_gets_the_network_of_the_first(model, shelved):
    """A thread may be about to merge a domain while another removes it."""
    name = model.domains[0]
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    first = model._known(name)
    other = trained(model.base, seed=77)
    expected = other.merged(model.base)(images)
    key = model._key(first)
    model.remove(name)
    with model._cache.use(key, first.scored):
        pass  # the thread comes too late
    model.add(name, other)
    assert torch.allclose(model(images, domain=name), expected, atol=1e-5)
