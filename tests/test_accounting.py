"""#Params as the paper prints it, and as stored."""

import pytest

import polymask as pm
from nets import tiny_base, trained
from polymask.accounting import component_bits

PAPER = [  # base, domains, affine-full, piggyback
    ("torchvision:resnet50", 6, 1.17, 1.16),
    ("torchvision:densenet121", 6, 1.21, 1.15),
    ("torchvision:vgg16", 6, 1.16, 1.16),
    ("decathlon-resnet26", 10, 1.29, 1.28),
    ("decathlon-wrn28", 10, 1.29, 1.28),
]


@pytest.mark.parametrize(("name", "domains", "full", "piggyback"), PAPER)
def test_params_round_to_the_papers_numbers(name, domains, full, piggyback):
    base = pm.load_base(name, pretrained=False, device="meta")
    for method, printed in (
        ("affine-full", full),
        ("affine-simple", full),
        ("piggyback", piggyback),
    ):
        assert round(pm.account(base, method, domains=domains).params_paper, 2) == printed


def test_stored_statistics_are_counted_as_stored_and_not_in_the_papers_way():
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    account = pm.account(base, "affine-full", domains=6)
    assert account.components["norm_statistics"] == 2 * 26_560 * 32
    assert account.components["norm_affine"] == 2 * 26_560 * 32
    assert account.components["mask"] == account.masked_weights == 23_454_912
    assert account.components["scalars"] == 53 * 3 * 32
    assert account.base_parameters == 23_508_032
    assert round(account.params_stored, 4) == 1.1785
    assert round(account.bits_per_weight, 2) == 1.14


def test_a_head_is_reported_and_never_counted():
    base = tiny_base()
    without, with_head = (pm.account(base, "affine-full", domains=3, classes=n) for n in (0, 7))
    assert with_head.components["head"] == (12 * 7 + 7) * 32
    assert with_head.params_stored == without.params_stored


def test_one_domain_alone_is_the_base():
    assert pm.account(tiny_base(), "affine-full", domains=1).params_paper == 1


def test_the_bits_counted_are_the_bits_in_the_file(tmp_path):
    base = tiny_base()
    domain = trained(base, scores=(-1.0, 1.0))
    domain.save(tmp_path / "d.safetensors")
    sizes = pm.inspect(tmp_path / "d.safetensors").tensors
    bits = component_bits(domain)
    heads = sum(size for name, size in sizes.items() if name.startswith("head/"))
    norms = sum(size for name, size in sizes.items() if name.startswith("norm/"))
    assert heads * 8 == bits["head"]
    assert norms * 8 == bits["norm_affine"] + bits["norm_statistics"]
    masks = sum(size for name, size in sizes.items() if name.endswith("/mask"))
    assert masks == bits["mask"] / 8  # every site of the small network is a whole number of bytes


@pytest.mark.parametrize(("option", "value"), [("domains", 0), ("classes", -1)])
def test_senseless_counts_are_refused(option, value):
    with pytest.raises(pm.PolymaskError, match=f"{option}={value}"):
        pm.account(tiny_base(), "affine-full", **{option: value})
