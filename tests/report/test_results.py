import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import polymask as pm
from polymask.benchmarks.jobs import layer_statistics
from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.core.parts import Stored, Transform
from polymask.errors import PolymaskError
from polymask.report.demo_page import DemoResult, DomainResult, ExampleImage, MethodResult

number = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 10**12)
word = st.text(max_size=8)
table = st.dictionaries(word, word, max_size=2)


def few(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=2).map(tuple)


points = st.builds(EpochPoint, whole, number, number)
methods = st.builds(MethodResult, word, number, whole, number, number, few(points))
kept = methods.map(lambda result: replace(result, method="affine-full"))
predictions = st.builds(ExampleImage, st.binary(max_size=8), word, few(st.tuples(word, number)))
layers = st.builds(LayerStatistics, word, word, whole, whole, number, number, number, number)
domains = st.builds(
    DomainResult,
    *(word, word, whole, whole, whole),
    st.tuples(kept, methods),
    few(predictions),
    few(layers),
    st.booleans(),
    st.dictionaries(word, whole, max_size=2),
)
results = st.builds(
    DemoResult,
    *(word, whole, whole, word, word),
    st.lists(domains, min_size=1, max_size=2).map(tuple),
    *(number, table, table),
)


@given(results)
def test_a_result_survives_its_way_through_json(result: DemoResult) -> None:
    text = json.dumps(result.to_json(), allow_nan=False)
    assert DemoResult.from_json(json.loads(text)) == result


@pytest.mark.parametrize(
    "damage",
    [
        {"domains": None},
        {"domains": [{}]},
        {"unknown": 1},
        {"domains": []},
    ],
)
def test_json_that_is_no_result_is_refused_with_a_remedy(result: DemoResult, damage: Mapping[str, Any]) -> None:
    with pytest.raises(PolymaskError, match=r"run the demo again|at least one domain"):
        DemoResult.from_json({**result.to_json(), **damage})


def test_a_picture_that_is_not_base64_is_refused(result: DemoResult) -> None:
    values = result.to_json()
    values["domains"][0]["predictions"][0]["image_png"] = "no*picture"
    with pytest.raises(PolymaskError, match="run the demo again"):
        DemoResult.from_json(values)


def test_every_domain_needs_a_result_of_the_kept_method(result: DemoResult) -> None:
    with pytest.raises(PolymaskError, match="digits has no result of piggyback"):
        replace(result, method="piggyback")


def test_something_is_forgotten_when_the_base_or_any_domain_moved(result: DemoResult, broken: DemoResult) -> None:
    assert result.nothing_forgotten
    assert not broken.nothing_forgotten
    assert not replace(result, fingerprint_after="cd" * 32).nothing_forgotten


class Doubled(Transform):
    """A transform without mask or scalars."""

    def weight(self, base_weight: Tensor) -> Tensor:
        return 2 * base_weight

    def stored(self) -> dict[str, Stored]:
        return {}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        pass


def small_domain(**options: Any) -> pm.Domain:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.Tanh(),
    )
    base = pm.load_base(net, input=pm.InputSpec(shape=(3, 16, 16)))
    return pm.new_domain(base, "affine-full", classes=["a", "b"], **options)


def test_layer_statistics_are_those_of_the_stored_masks_and_scalars() -> None:
    torch.manual_seed(0)
    domain = small_domain(per="channel")
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            parameter.normal_()
    found = layer_statistics(domain)

    assert [layer.kind for layer in found] == ["conv", "depthwise", "pointwise", "linear"]
    assert [layer.depth for layer in found] == [0, 1, 2, 3]
    assert [layer.weights for layer in found] == [216, 72, 48, 30]
    for layer in found:
        stored = {
            name.rpartition("/")[2]: tensor
            for name, tensor in domain.stored().items()
            if name.startswith(f"transform/{layer.site}/")
        }
        bits = np.unpackbits(np.frombuffer(stored["mask"].to_bytes(), np.uint8))
        assert layer.density == pytest.approx(bits.sum() / layer.weights)
        for name in ("k1", "k2", "k3"):
            mean = stored[name].numpy().mean()
            assert getattr(layer, name) == pytest.approx(mean, abs=1e-6)


def test_layer_statistics_do_not_change_when_a_domain_is_stored() -> None:
    domain = small_domain()
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            parameter.normal_()
    assert layer_statistics(domain.frozen()) == layer_statistics(domain)


def test_layer_statistics_skip_transforms_without_masks() -> None:
    domain = small_domain()
    first = next(iter(domain.transforms))
    domain.transforms[first] = Doubled()
    assert [layer.site for layer in layer_statistics(domain)] == [
        "1.weight",
        "2.weight",
        "5.weight",
    ]
