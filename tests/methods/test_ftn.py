"""FTN: sums of products of vectors."""

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, tiny_base
from polymask.core.survey import Site
from polymask.methods.ftn import Ftn


def factors(shape, kind="conv2d", groups=1, **options):
    torch.manual_seed(0)
    transform = Ftn(**options).transform(Site("weight", shape, kind, groups, "bias", False, None, False, torch.float64))
    nn.init.normal_(transform.a)
    return transform


@pytest.mark.parametrize(
    ("shape", "kind", "groups"),
    [((6, 4, 3, 3), "conv2d", 1), ((6, 2, 3), "conv1d", 2), ((4, 3, 3, 3), "conv_transpose2d", 2)],
)
def test_the_update_is_a_sum_of_products_of_three_vectors(shape, kind, groups):
    transform = factors(shape, kind, groups, rank=3)
    W = torch.randn(shape, dtype=torch.float64)
    a, b, c = transform.a.detach(), transform.b.detach(), transform.c.detach()
    expected = W.clone()
    for r in range(3):
        expected += torch.outer(torch.outer(a[:, r], b[:, r]).flatten(), c[:, r]).view(shape)
    torch.testing.assert_close(transform.weight(W).detach(), expected)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1, 1)])
def test_a_matrix_has_no_third_vector(shape):
    transform = factors(shape, "linear" if len(shape) == 2 else "conv2d", rank=2)
    W = torch.randn(shape, dtype=torch.float64)
    assert transform.c is None
    torch.testing.assert_close(transform.weight(W), W + (transform.a @ transform.b.T).view(shape))


@pytest.mark.parametrize(
    ("shape", "rank"), [((8, 1, 3, 3), 8), ((64, 1, 3, 3), 9), ((6, 4), 4), ((2, 3, 3, 3), 6), ((64, 32, 3, 3), 100)]
)
def test_a_site_has_no_more_terms_than_its_shape_can_need(shape, rank):
    transform = factors(shape, "linear" if len(shape) == 2 else "conv2d", shape[0] if shape[1] == 1 else 1, rank=100)
    assert transform.a.shape[1] == rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_domain_is_the_base_bit_for_bit(dtype):
    base = pm.load_base(tiny_base().net.to(dtype), input=SPEC)
    domain = pm.new_domain(base, "ftn", None).eval()
    with torch.no_grad():
        assert all(torch.equal(t, base.tensor(n)) for n, t in domain.weights(base).items())


def test_a_domain_of_resnet50_takes_two_to_six_percent_of_it():
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    account = pm.account(base, "ftn")
    sizes = [(s.shape[0], s.shape[1], s.numel // s.shape[0] // s.shape[1]) for s in base.sites.values()]
    ranks = [min(16, x * y, x * k, y * k) for x, y, k in sizes]
    numbers = sum(r * (x + y + (k if k > 1 else 0)) for r, (x, y, k) in zip(ranks, sizes, strict=True))
    assert account.components["weights"] == 32 * numbers
    assert 0.02 < account.params_paper - 1 < 0.06


def test_a_senseless_rank_is_refused_by_name():
    with pytest.raises(pm.MethodError, match="rank=0"):
        pm.create_method("ftn", rank=0)
