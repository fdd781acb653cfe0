"""The affine transform: its gradients, its special cases, its presets."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net, trained
from polymask.core.bits import Bits, binarize
from polymask.methods.affine import formula
from polymask.methods.affine.formula import AffineMask, affine
from polymask.methods.affine.method import ABLATION, PRESETS, Affine

LEARNED = dict.fromkeys(("k0", "k1", "k2", "k3"), "learned")


def double_transform(shape=(4, 3, 3, 3), seed=0, **options):
    """A transform of one site in float64 with scalars that are not zero, its W, and a G."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(shape[1], shape[0], shape[2], padding=1, bias=False).double()
    base = pm.load_base(conv, input=pm.InputSpec((shape[1], 6, 6), (0.5,) * 3, (0.5,) * 3))
    method = Affine(**(LEARNED | {"scores": (-1.0, 1.0)} | options))
    transform = method.transform(base.sites["weight"])
    for k in ("k0", "k1", "k2", "k3"):
        if isinstance(getattr(transform, k, None), nn.Parameter):
            nn.init.normal_(getattr(transform, k))
    return transform, base.tensor("weight"), torch.randn(shape, dtype=torch.float64)


def worn(dtype=torch.float32, **options):
    """The tiny base, and a domain with scores and scalars on both sides of everything."""
    base = pm.load_base(tiny_net().to(dtype), input=SPEC)
    domain = pm.new_domain(base, "affine-full", ["a", "b"], **options).eval()
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            parameter.normal_(0, 0.1)
    return base, domain


@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize("name", ["k0", "k1", "k2", "k3"])
def test_gradients_of_the_scalars_match_finite_differences(name, per):
    transform, W, G = double_transform(per=per)
    (transform.weight(W) * G).sum().backward()
    k = getattr(transform, name)
    gradient = k.grad.clone()
    step = 1e-4  # the map is linear in every k: differences are exact up to rounding
    with torch.no_grad():
        for i in range(k.numel()):
            values = []
            for sign in (1, -1):
                k.view(-1)[i] += sign * step
                values.append((transform.weight(W) * G).sum())
                k.view(-1)[i] -= sign * step
            assert abs((values[0] - values[1]) / (2 * step) - gradient.view(-1)[i]) < 1e-8


@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
def test_the_gradient_of_the_scores_is_that_of_the_formula_times_the_surrogates(surrogate):
    transform, W, G = double_transform(surrogate=surrogate, threshold=0.1)
    (transform.weight(W) * G).sum().backward()
    ks = [k.detach() for k in transform.coefficients()]
    mask, step = transform.mask().double(), 1e-4
    slope = torch.sigmoid(transform.scores.detach() - 0.1)
    slope = slope * (1 - slope) if surrogate == "sigmoid" else torch.ones_like(slope)
    for i in range(mask.numel()):
        shift = torch.zeros_like(mask)
        shift.view(-1)[i] = step
        more, less = ((affine(W, mask + s, *ks) * G).sum() for s in (shift, -shift))
        expected = (more - less) / (2 * step) * slope.view(-1)[i]
        assert abs(transform.scores.grad.view(-1)[i] - expected) < 1e-8


@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_gradients_match_autograd_through_the_formula(per, surrogate):
    transform, W, G = double_transform(per=per, surrogate=surrogate)
    (transform.weight(W) * G).sum().backward()
    found = {name: p.grad.clone() for name, p in transform.named_parameters()}
    transform.zero_grad()
    M = binarize(transform.scores, surrogate=surrogate)
    (affine(W, M, *transform.coefficients()) * G).sum().backward()
    for name, p in transform.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(
    r=st.floats(-3, 3),
    w=st.floats(-2, 2),
    g=st.floats(-2, 2),
    k2=st.floats(-2, 2),
    k3=st.floats(-2, 2),
    surrogate=st.sampled_from(["identity", "sigmoid"]),
)
def test_the_scores_gradient_has_the_sign_of_the_masks(r, w, g, k2, k3, surrogate):
    """Section 3.3 of the paper: sign((E∘h)'(r)) = sign(E'(m)), since h~' > 0."""
    scores = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    W = torch.tensor([w], dtype=torch.float64)
    out = AffineMask.apply(W, scores, 1.0, 0.0, k2, k3, 0.0, surrogate)
    (out * g).sum().backward()
    # The same products in the same order: k3 (g w) + k2 g is E'(m).
    of_mask = (g * W) * k3 + g * k2
    assert torch.sign(scores.grad) == torch.sign(of_mask) or of_mask.abs() < 1e-300


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31))
def test_the_formula_is_the_papers_equation(seed):
    generator = torch.Generator().manual_seed(seed)
    W, *k = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(4, 3), *[()] * 4])
    M = torch.rand(4, 3, generator=generator) < 0.5
    expected = k[0] * W + k[1] * torch.ones_like(W) + k[2] * M + k[3] * (W * M)
    torch.testing.assert_close(affine(W, M, *k), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_every_form_gives_what_the_formula_gives_bit_for_bit(per, dtype):
    base, domain = worn(per=per, dtype=dtype)
    for form in (domain, domain.frozen()):
        weights = form.weights(base)
        for name, transform in form.named_transforms():
            W, shape = base.tensor(name), transform.view_shape
            expected = affine(W.view(shape), transform.mask().view(shape), *transform.coefficients())
            assert torch.equal(weights[name], expected.view(W.shape))


def test_fused_kernels_give_what_the_formula_gives_bit_for_bit(fused):
    base, domain = worn()
    fused()
    for form in (domain, domain.frozen()):
        for name, weight in form.method.together(base, form).items():
            transform = dict(form.named_transforms())[name]
            expected = affine(base.tensor(name), transform.mask(), *transform.coefficients())
            assert torch.equal(weight, expected)


def test_full_with_k_0_0_0_1_is_piggyback_bit_for_bit():
    base = tiny_base()
    options = {"scores": (-1.0, 1.0), "threshold": 5e-3, "norms": "shared"}
    domains = []
    for method in ("affine-full", "piggyback"):
        fixed = {"k0": 0.0, "k1": 0.0, "k2": 0.0, "k3": 1.0} if method == "affine-full" else {}
        torch.manual_seed(0)
        domains.append(pm.new_domain(base, method, ["a", "b"], **options, **fixed).eval())
    for site, transform in domains[0].named_transforms():
        W = base.tensor(site)
        assert torch.equal(transform.weight(W), W * transform.mask())
    images, _ = batch()
    assert torch.equal(domains[0](base, images), domains[1](base, images))


def test_full_with_k3_0_is_simple_bit_for_bit():
    base = tiny_base()
    images, _ = batch()
    full = trained(base, "affine-full", k3=0.0)
    simple = trained(base, "affine-simple")
    assert torch.equal(full(base, images), simple(base, images))
    assert all("k3" in transform.fixed for _, transform in simple.named_transforms())


@pytest.mark.parametrize("method", [n for n, p in PRESETS.items() if p.k0 == "auto"])
def test_a_fresh_domain_reproduces_the_bases_features_bit_for_bit(method):
    base = tiny_base()
    images, _ = batch()
    domain = pm.new_domain(base, method, ["a", "b"]).eval()
    with torch.no_grad():
        assert torch.equal(domain.features(base, images), base.net(images))


@pytest.mark.parametrize("method", ["piggyback", "piggyback-star-bn"])
def test_a_fresh_piggyback_domain_reproduces_the_bases_features_too(method):
    base = tiny_base()
    images, _ = batch()
    domain = pm.new_domain(base, method, ["a", "b"]).eval()
    with torch.no_grad():
        assert torch.equal(domain.features(base, images), base.net(images))


@pytest.mark.parametrize("norms", ["own", "shared", "affine", "stats"])
def test_where_k0_is_fixed_hangs_on_the_network_alone_so_that_packs_stay_readable(norms):
    base = tiny_base()
    for k0, fixed in (("auto", {"stem", "depthwise", "grouped"}), ("learned", set())):
        domain = pm.new_domain(base, "affine-full", ["a"], norms=norms, k0=k0)
        found = {name.split(".")[0] for name, t in domain.named_transforms() if "k0" in t.fixed}
        assert found == fixed


def test_k0_is_fixed_where_a_batch_norm_follows_and_learned_elsewhere():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    learned = {site for site, t in domain.named_transforms() if "k0" in dict(t.named_parameters())}
    assert learned == {"plain.weight", "hidden.weight"}


def test_channel_scalars_have_one_value_per_output_channel():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full-channel", ["a", "b"])
    for site, transform in domain.named_transforms():
        assert transform.scalars()["k1"].shape == (base.sites[site].shape[0],)


@pytest.mark.parametrize("groups", [1, 2])
def test_channel_scalars_of_a_transposed_convolution_scale_its_output_channels(groups):
    torch.manual_seed(0)
    net = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False).double()
    base = pm.load_base(net, input=pm.InputSpec((4, 5, 5), (0.5,) * 4, (0.5,) * 4))
    domain = pm.new_domain(base, "affine-full-channel", None).eval()
    transform = dict(domain.named_transforms())["weight"]
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    scale = torch.randn(6, dtype=torch.float64)
    with torch.no_grad():
        transform.k0.copy_(scale.view(transform.k0.shape))
        expected = net(images) * scale.view(1, 6, 1, 1)
        torch.testing.assert_close(domain(base, images), expected, rtol=0, atol=1e-12)


def test_there_is_one_preset_for_each_row_of_the_ablation_tables():
    k = {name: (PRESETS[name].k0, PRESETS[name].k1, PRESETS[name].k2, PRESETS[name].k3) for name in ABLATION}
    learned = "learned"
    assert list(k.values()) == [
        (0, 0, 0, 1),
        (0, 0, 0, 1),
        (0, 0, 0, 1),
        (0, learned, 0, 1),
        ("auto", 0, learned, 0),
        ("auto", learned, learned, 0),
        ("auto", learned, learned, 0),
        ("auto", 0, learned, learned),
        ("auto", learned, 0, learned),
        ("auto", learned, learned, learned),
        ("auto", learned, learned, learned),
        ("auto", learned, learned, learned),
    ]
    assert len({dataclasses.replace(PRESETS[n], name="") for n in ABLATION}) == 12


def test_the_stored_form_holds_one_bit_per_weight_and_no_scores():
    base = tiny_base()
    frozen = trained(base).frozen()
    for _, transform in frozen.named_transforms():
        assert transform.scores is None
        assert isinstance(transform.stored()["mask"], Bits)
        assert transform.words.dtype == torch.int32
        assert transform.words.numel() == -(-transform.mask().numel() // 32)


def test_backward_keeps_nothing_but_its_inputs():
    """Two tensors of the weights' size at most: W and the scores, both alive anyway."""
    transform, W, _ = double_transform()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        transform.weight(W)
    large = [t for t in saved if t.numel() == W.numel()]
    own = {W.data_ptr(), transform.scores.data_ptr()}
    assert {t.data_ptr() for t in large} <= own


def test_half_precision_weights_stay_half_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).bfloat16()
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "affine-full", None)
    weights = domain.weights(base)
    assert weights["0.weight"].dtype == torch.bfloat16
    weights["0.weight"].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in domain.transforms.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": "leraned"}, "k1='leraned' must be a number"),
        ({"k2": "auto"}, "k2='auto' must be a number or learned"),
        ({"per": "row"}, "per='row' is not one of layer, channel"),
        ({"surrogate": "relu"}, "surrogate='relu' is not one of identity, sigmoid"),
        ({"scores": (2.0, 1.0)}, "must be a range"),
        ({"norms": "mine"}, "norms='mine' is not one of own, shared, affine, stats"),
        ({"norm_momentum": 2.0}, "norm_momentum=2.0 must be in"),
        ({"form": "centred"}, "both must be 'learned'"),
        ({"treshold": 1.0}, "no option 'treshold'; did you mean threshold"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("affine-full", **options)


def test_an_unknown_method_is_refused_with_a_near_match():
    with pytest.raises(pm.MethodError, match=r"'afine-full' is not known; did you mean affine-full"):
        pm.create_method("afine-full")


def test_affine_chooses_between_two_maps():
    W = torch.tensor([1.0, -2.0])
    M = torch.tensor([True, False])
    assert affine(W, M, 2.0, 0.5, 0.25, 3.0).tolist() == [5.75, -3.5]


CENTRED = {"form": "centred", "k0": "learned", "scores": (-1.0, 1.0)}


@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize("together", [False, True])
def test_the_centred_form_is_the_same_transform_around_the_masks_middle(fused, together, per):
    if together:
        fused()
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b", "c"], per=per, **CENTRED).eval()
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = domain.weights(base)
    for name, transform in domain.named_transforms():
        W, view, G = base.tensor(name).double(), base.sites[name].channel_view, torch.randn(base.tensor(name).shape)
        spread, n, V, M = (
            float(W.std(correction=0)),
            W[0].numel(),
            W.view(view),
            transform.mask().view(view).double() - 0.5,
        )
        learned = [getattr(transform, k) for k in ("k0", "k1", "k2", "k3")]
        a = [k.detach().double().requires_grad_() for k in learned]
        expected = 10 * (a[0] * V + spread / n**0.5 * a[1] + spread * a[2] * M + a[3] * V * M)
        torch.testing.assert_close(weights[name].double(), expected.detach().view(W.shape), rtol=1e-4, atol=1e-6)
        (expected * G.view(view)).sum().backward()
        (transform.weight(base.tensor(name)) * G).sum().backward()
        for ours, theirs in zip(learned, a, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)


def test_a_fresh_centred_domain_is_the_base_and_its_pack_gives_the_same_logits(tmp_path):
    base, (images, _) = tiny_base(), batch()
    domain = pm.new_domain(base, "affine-centred", ["a", "b", "c"]).eval()
    for name, weight in domain.weights(base).items():
        assert torch.equal(weight, base.tensor(name))
    with torch.no_grad():
        for parameter in domain.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    domain.save(tmp_path / "centred.safetensors")
    assert torch.equal(
        pm.load_domain(tmp_path / "centred.safetensors", base)(base, images), domain.frozen()(base, images)
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_plain_scalars_do_not_bear_is_borne_by_centred_ones(seed):
    """One large step of all scalars moves what a layer gives by about its own size; plain ones by many times it."""
    torch.manual_seed(seed)
    layer = nn.Conv2d(256, 64, 3, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    base = pm.load_base(layer, input=pm.InputSpec((256, 4, 4), (0.5,) * 256, (0.5,) * 256))
    images = torch.rand(8, 256, 4, 4)
    moved = {}
    for form in ("plain", "centred"):
        transform = Affine(**(LEARNED | {"form": form, "scores": (-1e-4, 1e-4)})).transform(base.sites["weight"])
        transform.begin(base.tensor("weight"))
        with torch.no_grad():
            for k in transform.scalar_parameters():
                k.add_(0.03)
            weight = transform.weight(base.tensor("weight"))
            outputs = [F.conv2d(images, w, padding=1) for w in (base.tensor("weight"), weight)]
        moved[form] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    assert moved["centred"] < 2
    assert moved["plain"] > 5 * moved["centred"]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 33, 1000, 4099])
def test_weights_by_tables_are_those_of_the_formula_to_the_bit(count, monkeypatch):
    monkeypatch.setattr(formula, "BLOCK", 512)
    generator = torch.Generator().manual_seed(count)
    W, ks = torch.randn(count, generator=generator), [[1.0, 0.0, 0.0, 0.0], [0.7, -0.01, 0.3, -1.1]]
    mask = torch.rand(count, generator=generator) < 0.6
    tables = formula.Tables(ks)
    for site, scalars in enumerate(ks):
        out = torch.full((count,), torch.nan)
        tables.write(site, W, Bits.of(mask).words, out)
        assert torch.equal(out, formula.affine(W, mask, *map(torch.tensor, scalars)))
