"""VeRA: two vectors between random matrices that come from a seed, the same everywhere."""

import math

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, logits, tiny_base, trained
from polymask.core.survey import Site
from polymask.methods.vera import A_TABLE, B_TABLE, Vera, uniform_table

CPU = torch.device("cpu")
WORD = (1 << 64) - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Four words of 64 bits of Philox 4x64-10, by its definition."""
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 1 << 64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & WORD, (key[1] + 0xBB67AE8584CAA73B) & WORD]
    return counter


def expected(seed: int, table: int, rows: int, columns: int) -> torch.Tensor:
    made = []
    for row in range(rows):
        # The counter goes up by one before each block of four words.
        blocks = (philox([block + 1, row, 0, 0], [seed, table]) for block in range(-(-columns // 4)))
        words = [word for block in blocks for word in block][:columns]
        made.append([(2 * (word >> 40) + 1) / (1 << 24) - 1 for word in words])
    return torch.tensor(made, dtype=torch.float64)


def vectors(shape=(6, 5), kind="linear", groups=1, dtype=torch.float64, **options):
    torch.manual_seed(0)
    transform = Vera(**options).transform(Site("weight", shape, kind, groups, "bias", False, None, False, dtype))
    nn.init.normal_(transform.b)
    nn.init.normal_(transform.d)
    return transform


@pytest.mark.parametrize("seed", [0, 7, 10**9])
@pytest.mark.parametrize("table", [A_TABLE, B_TABLE])
def test_the_tables_are_those_of_the_generators_definition(seed, table):
    found = uniform_table(seed, table, 5, 11, CPU)
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), expected(seed, table, 5, 11))  # exact in single precision


def test_the_first_numbers_never_change():
    words = [213000021201967259, 4455796210202625458, 2055444239878205049]
    assert philox([1, 0, 0, 0], [0, 0])[:3] == words
    numbers = uniform_table(0, A_TABLE, 1, 3, CPU) * (1 << 24)
    assert numbers.tolist() == [[2 * (word >> 40) + 1 - (1 << 24) for word in words]]


def test_a_larger_table_begins_with_a_smaller_one_and_tables_differ():
    small, large = uniform_table(3, A_TABLE, 4, 6, CPU), uniform_table(3, A_TABLE, 40, 70, CPU)
    assert torch.equal(large[:4, :6], small)
    assert not torch.equal(uniform_table(3, B_TABLE, 4, 6, CPU), small)
    assert not torch.equal(uniform_table(4, A_TABLE, 4, 6, CPU), small)
    wide = uniform_table(3, A_TABLE, 200, 500, CPU)
    assert wide.abs().max() < 1
    assert abs(wide.mean()) < 0.01
    assert abs(wide.var() - 1 / 3) < 0.01


@pytest.mark.parametrize(("shape", "kind", "groups"), [((6, 5), "linear", 1), ((6, 2, 3, 3), "conv2d", 2)])
def test_the_update_is_two_vectors_between_the_scaled_tables(shape, kind, groups):
    transform = vectors(shape, kind, groups, rank=4, table_seed=5)
    columns = math.prod(shape[1:])
    A = math.sqrt(6 / columns) * expected(5, 0, 4, columns)
    B = math.sqrt(6 / 4) * expected(5, 1, 6, 4)
    W = torch.randn(shape, dtype=torch.float64)
    update = torch.diag(transform.b) @ B @ torch.diag(transform.d) @ A
    torch.testing.assert_close(transform.weight(W), W + update.view(shape))


def test_the_update_of_a_transposed_convolution_has_a_row_for_each_output_channel():
    transform = vectors((4, 3, 3, 3), "conv_transpose2d", 2, rank=2)
    W = torch.zeros(4, 3, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        transform.b.zero_()[4] = 1.0  # output channel 1 of the second group
    changed = transform.weight(W).detach().abs().sum((2, 3)) > 0
    assert changed.nonzero().tolist() == [[2, 1], [3, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_domain_is_the_base_bit_for_bit_and_only_the_vectors_learn(dtype):
    base = pm.load_base(tiny_base().net.to(dtype), input=SPEC)
    domain = pm.new_domain(base, "vera", None).eval()
    with torch.no_grad():
        assert all(torch.equal(t, base.tensor(n)) for n, t in domain.weights(base).items())
    assert {name.rpartition(".")[2] for name, _ in domain.transforms.named_parameters()} == {"b", "d"}
    assert not list(domain.transforms.buffers())


def test_a_pack_keeps_the_seed_and_the_vectors_alone(tmp_path):
    base = tiny_base()
    domain = trained(base, "vera", table_seed=3)
    domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert loaded.method.table_seed == 3
    stored = {name for name in loaded.stored() if name.startswith("transform/stem.weight/")}
    assert stored == {"transform/stem.weight/b", "transform/stem.weight/d"}
    assert torch.equal(logits(base, loaded), logits(base, domain))


def test_a_site_takes_32_bits_for_each_row_and_each_of_its_rank():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    bits = pm.account(base, pm.create_method("vera", rank=40)).components["weights"]
    assert bits == 32 * sum(s.channels + min(40, s.channels, s.numel // s.channels) for s in base.sites.values())


def test_what_inference_made_can_be_learned_with():
    base = tiny_base()
    with torch.inference_mode():
        pm.new_domain(base, "vera", None, table_seed=11).weights(base)
    domain = pm.new_domain(base, "vera", None, table_seed=11)
    domain.weights(base)["stem.weight"].sum().backward()
    assert dict(domain.named_transforms())["stem.weight"].b.grad.any()


@pytest.mark.parametrize(("option", "value"), [("rank", 0), ("rank", 5000), ("table_seed", -1), ("start", -0.5)])
def test_senseless_options_are_refused_by_name(option, value):
    with pytest.raises(pm.MethodError, match=option):
        pm.create_method("vera", **{option: value})
