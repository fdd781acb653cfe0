"""#Params as the paper prints it, and as stored."""

import pytest

import polymask as pm
from nets import tiny_base, trained
from polymask.core.accounting import account_fitted, component_bits

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


def test_a_fitted_domain_is_charged_for_what_it_stores_and_not_for_its_prototype():
    base = tiny_base()
    prototype = pm.account(base, "covnorm", domains=4)
    ranks = {name: (1, 1) for name, _ in pm.new_domain(base, "covnorm", None).named_transforms()}
    small = pm.new_domain(base, "covnorm", None, ranks=ranks)
    fitted = account_fitted(base, [small.frozen()], domains=4)
    assert fitted.params_paper < prototype.params_paper
    stored = sum(bits for name, bits in component_bits(small).items() if name != "norm_statistics")
    size = sum(p.numel() for p in base.net.parameters())
    assert fitted.params_paper == pytest.approx(1 + 3 * stored / (32 * size))


def test_fitted_domains_of_different_sizes_count_as_their_mean():
    base = tiny_base()
    one, two = (pm.new_domain(base, "lora-conv", None, rank=rank) for rank in (1, 3))
    each = [account_fitted(base, [d], domains=3).params_paper for d in (one, two)]
    both = account_fitted(base, [one, two], domains=3).params_paper
    assert both == pytest.approx(sum(each) / 2)
