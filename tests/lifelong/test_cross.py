"""Domains that draw on the masks of others: what they compute, what they need, what is refused."""

import pytest
import torch
from starlette.testclient import TestClient

import polymask as pm
from forged_packs import read_parts, write_forged
from made_images import images
from nets import logits, tiny_base, trained
from polymask.core.bits import Bits
from polymask.errors import DomainError, HubError, MethodError, PackError, PackUnavailable
from polymask.library.versions import keep_version
from polymask.lifelong.cross import nearest_sources, open_sources
from polymask.methods.affine.cross import CrossTransform, masks_of
from polymask.pack.sources import dependents, drawing_on
from serving import BASE, BYTES, LOCAL, make_app, picture, text

RECIPE = pm.get_recipe("quick", epochs=1, batch_size=8, side=16)
METHODS = ("affine-cross", "affine-mix")
FORMS = {"plain": {"form": "plain", "k0": "auto"}, "centred": {}}


@pytest.fixture
def library(tmp_path):
    """Two domains with different masks, and one of each cross method that draws on both."""
    folder = tmp_path / "library"
    folder.mkdir()
    sources = {}
    for seed, name in enumerate(("first", "second")):
        domain = trained(BASE, seed=seed).frozen()
        for _, transform in domain.named_transforms():  # trained for longer, they would differ more
            mask = torch.rand(transform.shape, generator=torch.Generator().manual_seed(seed)) > 0.4
            transform.words = Bits.of(mask).words
        domain.save(folder / f"{name}.safetensors")
        sources[name] = pm.load_domain(folder / f"{name}.safetensors", BASE)
    for method in METHODS:
        learned = pm.learn(BASE, images(), method, RECIPE, sources=sources, progress=False)
        learned.domain.save(folder / f"{method}.safetensors")
    return folder


def load(library, name):
    return pm.load_domain(library / f"{name}.safetensors", BASE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize("method", METHODS)
def test_the_weights_are_those_of_the_formula(method, per, form):
    sources = {f"s{i}": trained(BASE, seed=i).frozen() for i in range(2)}
    made = pm.create_method(method, per=per, **FORMS[form]).drawing_on(sources)
    domain = pm.new_domain(BASE, made, ["a", "b"])
    made.draw_on(domain, list(sources.values()))
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            if parameter.ndim < 2 or parameter.shape[0] == 2:
                parameter.copy_(torch.randn(parameter.shape))
    for name, transform in domain.named_transforms():
        assert isinstance(transform, CrossTransform)
        W, scalars = BASE.tensor(name), transform.scalars()
        shape = transform.scalar_shape
        k = {n: v.view(shape) if v.numel() > 1 else v.view([1] * len(shape)) for n, v in scalars.items()}
        own = transform.mask()
        W = W.view(transform.view_shape)
        wanted = k["k0"] * W + k["k1"]
        if own is not None:
            M = own.view(transform.view_shape).to(W)
            wanted = wanted + k["k2"] * M + k["k3"] * W * M
        for place, source in enumerate(sources.values()):
            M = dict(source.named_transforms())[name].mask().view(transform.view_shape).to(W)
            wanted = wanted + k[f"a{place}"] * M + k[f"b{place}"] * W * M
        learned = transform.weight(BASE.tensor(name))
        torch.testing.assert_close(learned, wanted.view(transform.shape), atol=1e-5, rtol=1e-4)
        transform.restore(transform.stored())
        assert torch.equal(transform.weight(BASE.tensor(name)), learned)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_fresh_domain_is_the_base_and_learns_by_its_sources(method, form):
    source = trained(BASE, seed=1).frozen()
    made = pm.create_method(method, **FORMS[form]).drawing_on({"source": source})
    domain = pm.new_domain(BASE, made, ["a", "b"])
    made.draw_on(domain, [source])
    domain.train(False)
    for name, transform in domain.named_transforms():
        assert torch.equal(transform.weight(BASE.tensor(name)), BASE.tensor(name))
    domain(BASE, torch.randn(4, 3, 16, 16)).sum().backward()
    assert all(t.a.grad is not None and t.b.grad is not None for _, t in domain.named_transforms())


def test_a_step_of_a_source_shifts_a_layers_output_less_around_the_middle_of_its_mask():
    """The coherent part of a step: what the layer adds to all inputs of 1, for one step of the same size."""
    source = trained(BASE, seed=1).frozen()
    for _, transform in source.named_transforms():  # half of each row
        transform.words = Bits.of(
            torch.arange(torch.Size(transform.shape).numel()).view(transform.shape) % 2 == 0
        ).words
    shifts = {}
    for form, options in FORMS.items():
        made = pm.create_method("affine-mix", **options).drawing_on({"source": source})
        domain = pm.new_domain(BASE, made, ["a", "b"])
        made.draw_on(domain, [source])
        name, transform = max(domain.named_transforms(), key=lambda pair: BASE.tensor(pair[0]).numel())
        W = BASE.tensor(name)
        with torch.no_grad():
            transform.a.fill_(0.1 / transform.units["a"])
            change = (transform.weight(W) - W).flatten(1)
        shifts[form] = float(change.sum(1).abs().mean() / change.norm())
    assert shifts["centred"] < 0.2 * shifts["plain"]


@pytest.mark.parametrize("method", METHODS)
def test_packs_find_their_sources_and_earlier_domains_stay_bit_identical(library, method):
    before = {path.name: path.read_bytes() for path in library.iterdir() if path.stem in ("first", "second")}
    alone = logits(BASE, load(library, "first"))
    loaded = load(library, method)
    model = pm.MultiDomainModel(BASE, library=library, strict=True)
    assert model.domains == ["affine-cross", "affine-mix", "first", "second"]
    with torch.no_grad():
        merged = loaded.merged(BASE)(torch.zeros(2, 3, 16, 16))
    assert torch.equal(merged, model(torch.zeros(2, 3, 16, 16), domain=method))
    model.verify()
    BASE.verify()
    assert torch.equal(logits(BASE, load(library, "first")), alone)
    assert all((library / name).read_bytes() == data for name, data in before.items())
    loaded.save(library / "again.safetensors")
    assert (library / "again.safetensors").read_bytes() == (library / f"{method}.safetensors").read_bytes()


def test_a_mixed_domain_is_a_few_scalars_a_layer(library):
    tensors = pm.inspect(library / "affine-mix.safetensors").tensors
    assert "masks" not in tensors
    components = pm.account(BASE, load(library, "affine-mix").method).components
    assert components["mask"] == 0
    assert components["sources"] == 2 * sum(site.numel for site in BASE.sites.values())
    assert (
        load(library, "affine-mix").metrics["bits_per_weight"]
        < load(library, "affine-cross").metrics["bits_per_weight"]
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_baked_pack_stands_alone_to_the_bit(library, method, tmp_path):
    domain = load(library, method)
    baked = pm.bake(domain)
    (tmp_path / "alone").mkdir()
    baked.save(tmp_path / "alone" / "baked.safetensors")
    loaded = pm.load_domain(tmp_path / "alone" / "baked.safetensors", BASE)
    assert torch.equal(logits(BASE, loaded), logits(BASE, domain))
    with pytest.raises(MethodError, match="stands alone already"):
        pm.bake(loaded)
    with pytest.raises(HubError, match=r"draws on the masks of first, second.*bake it"):
        pm.push(domain, "me/domain")


def test_a_missing_source_is_named_with_the_remedy(library, tmp_path):
    (library / "first.safetensors").rename(tmp_path / "first.safetensors")
    with pytest.raises(PackError, match=r"draws on the masks of first \(digest .*there is no first.safetensors.*bake"):
        load(library, "affine-mix")
    trained(BASE, seed=7).save(library / "first.safetensors")
    with pytest.raises(PackError, match=r"first.safetensors there has other masks"):
        load(library, "affine-mix")
    (tmp_path / "first.safetensors").replace(library / "first.safetensors")
    domain = load(library, "affine-mix")
    with pytest.raises(PackError, match="is not written: it draws on the masks of first"):
        domain.save(tmp_path / "elsewhere.safetensors")
    with pytest.raises(PackError, match="cannot draw on the one that it replaces"):
        domain.save(library / "first.safetensors")


def test_a_source_that_is_calibrated_or_kept_as_a_version_is_still_found(library):
    before = logits(BASE, load(library, "affine-cross"))
    first = load(library, "first")
    pm.calibrate(BASE, first, {"train": labelled(), "val": labelled()}, rule="energy")
    first.save(library / "first.safetensors")
    assert torch.equal(logits(BASE, load(library, "affine-cross")), before)
    keep_version(library / "first.safetensors")
    trained(BASE, seed=9).save(library / "first.safetensors")
    assert torch.equal(logits(BASE, load(library, "affine-cross")), before)


def labelled():
    return torch.utils.data.TensorDataset(torch.randn(30, 3, 16, 16), torch.arange(30) % 3)


def test_an_upload_whose_source_is_deleted_meanwhile_is_refused(library, monkeypatch):
    content = (library / "affine-mix.safetensors").read_bytes()
    for name in METHODS:
        (library / f"{name}.safetensors").unlink()
    with TestClient(make_app(library), base_url=LOCAL) as client:

        def deleted(_):  # when the upload has been read
            assert client.delete("/v1/domains/first").status_code == 204

        with monkeypatch.context() as patched:
            patched.setattr("polymask.serve.library.os.fsync", deleted)
            reply = client.put("/v1/domains/late", content=content, headers=BYTES)
    assert reply.status_code == 422
    assert "it draws on the masks of first" in reply.json()["error"]
    assert not (library / "late.safetensors").exists()


def test_what_others_draw_on_is_known(library):
    assert dependents(library / "first.safetensors") == ["affine-cross", "affine-mix"]
    assert dependents(library / "affine-cross.safetensors") == []
    pm.bake(load(library, "affine-cross")).save(library / "affine-cross.safetensors")
    assert dependents(library / "first.safetensors") == ["affine-mix"]
    keep_version(library / "first.safetensors")
    assert dependents(library / "first.safetensors") == []


def test_who_draws_on_a_version_is_known_when_the_pack_with_its_versions_is_to_go(library):
    path = library / "first.safetensors"
    assert drawing_on(path) == ["affine-cross", "affine-mix"]
    keep_version(path)
    trained(BASE, seed=9).save(path)
    assert (dependents(path), drawing_on(path)) == ([], ["affine-cross", "affine-mix"])
    assert drawing_on(library / "affine-cross.safetensors") == drawing_on(library / "nobody.safetensors") == []
    with TestClient(make_app(library), base_url=LOCAL) as client:
        reply = client.delete("/v1/domains/first")
    assert reply.status_code == 409
    assert "affine-cross, affine-mix draw on the masks of first" in reply.json()["error"]
    assert load(library, "affine-mix").classes == ["a", "b"]


def test_sources_are_chosen_by_name_or_by_likeness(library):
    base = tiny_base()
    for method in METHODS:
        (library / f"{method}.safetensors").unlink()
    shades = {"dark": 10, "light": 250}
    recipe = pm.get_recipe("quick", epochs=1, batch_size=8, side=16)
    for name, shade in shades.items():
        pm.learn(base, images(shade=shade), "piggyback", recipe, progress=False).domain.save(
            library / f"{name}.safetensors"
        )
    found = open_sources("auto:1", library, base, images(shade=240), without="new")
    assert list(found) == ["light"]
    assert list(open_sources("auto:1", library, base, images(shade=240), without="light")) == ["dark"]
    assert list(open_sources("second, first", library, base, images(), without="new")) == ["second", "first"]
    for given, problem in [
        ("firt", "did you mean first"),
        ("new", "cannot draw on itself"),
        (",", "must be different"),
    ]:
        with pytest.raises(DomainError, match=problem):
            open_sources(given, library, base, images(), without="new")
    with pytest.raises(DomainError, match="name the sources"):
        nearest_sources({}, base, images(), 3)


def test_what_cannot_be_drawn_on_is_refused():
    with pytest.raises(MethodError, match="has no masks of weights"):
        masks_of("tuned", trained(BASE, "finetune"))
    with pytest.raises(MethodError, match="affine-mix draws on masks of other domains; give sources"):
        pm.learn(BASE, images(), "affine-mix", RECIPE, progress=False)
    with pytest.raises(MethodError, match="draws on no other domains"):
        pm.learn(BASE, images(), "affine-full", RECIPE, sources={"a": trained(BASE)}, progress=False)


@pytest.mark.parametrize(
    "sources", ["first", ["first"], ["a:" + "0" * 63], [1], ["../x:" + "0" * 64], ["a:" + "0" * 64] * 2]
)
def test_forged_sources_are_refused(library, sources):
    path = library / "affine-mix.safetensors"
    manifest, header, data = read_parts(path)
    manifest["options"]["sources"] = sources
    write_forged(path, manifest, header, data)
    with pytest.raises(PackError):
        pm.load_domain(path, BASE)


def test_the_server_answers_by_sources_and_refuses_to_delete_them(library):
    with TestClient(make_app(library), base_url=LOCAL) as client:
        body = {"domain": "affine-mix", "images": [text(picture())]}
        assert client.get("/v1/domains/affine-mix").json()["sources"] == ["first", "second"]
        reply = client.delete("/v1/domains/first")
        assert reply.status_code == 409
        assert "affine-cross, affine-mix draw on the masks of first" in reply.json()["error"]
        other = trained(BASE, seed=9)
        other.save(library.parent / "other.safetensors")
        content = (library.parent / "other.safetensors").read_bytes()
        assert client.put("/v1/domains/first", content=content, headers=BYTES).status_code == 409
        kept = (library / "first.safetensors").read_bytes()
        assert client.delete("/v1/domains/first", params={"force": True}).status_code == 204
        reply = client.post("/v1/predict", json=body)
        assert reply.status_code == 409
        assert "draws on the masks of first" in reply.json()["error"]
        (library / "first.safetensors").write_bytes(kept)
        assert client.post("/v1/predict", json=body).status_code == 200


def test_masks_are_found_in_a_kept_version_when_the_pack_itself_is_damaged(library):
    expected = load(library, "affine-mix")
    path = library / "first.safetensors"
    keep_version(path)
    path.write_bytes(path.read_bytes()[:-9])
    found = load(library, "affine-mix")
    assert torch.equal(logits(BASE, found), logits(BASE, expected))
    assert dependents(path) == []


def test_a_damaged_version_does_not_hide_who_draws_on_a_pack(library):
    (library / "first@1.version").write_bytes(b"nothing")
    assert dependents(library / "first.safetensors") == ["affine-cross", "affine-mix"]


def test_near_packs_that_cannot_be_read_are_passed_over(tmp_path):
    packs = {}
    for name in ("dark", "light"):
        packs[name] = tmp_path / f"{name}.safetensors"
        pm.learn(BASE, images(shade=10 if name == "dark" else 240), "affine-full", RECIPE, progress=False).domain.save(
            packs[name]
        )
    data = bytearray(packs["dark"].read_bytes())
    data[-9] ^= 255
    packs["dark"].write_bytes(data)
    assert list(nearest_sources(packs, BASE, images(shade=10), 1)) == ["light"]


def test_a_pack_whose_users_cannot_be_known_for_now_is_not_deleted(library, monkeypatch):
    def busy(path):
        raise PackUnavailable(f"{path} cannot be read: Too many open files")

    with TestClient(make_app(library), base_url=LOCAL) as client:
        monkeypatch.setattr("polymask.pack.sources.masks_digest", busy)
        assert client.delete("/v1/domains/first").status_code == 503
    assert (library / "first.safetensors").is_file()


def test_a_source_of_another_base_is_refused():
    with pytest.raises(DomainError, match="use the base that it was trained on"):
        pm.learn(BASE, images(), "affine-mix", RECIPE, sources={"a": trained(tiny_base(seed=5))}, progress=False)
