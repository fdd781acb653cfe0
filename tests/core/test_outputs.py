"""Networks whose output is not one tensor: objects, and several feature maps."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from nets import SPEC, batch, tiny_base, trained
from polymask.core.network import features_of, tensor_of


class Maps(nn.Module):
    """Two feature maps, as a detector's body gives them."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.fine = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.coarse = nn.Conv2d(4, 6, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> dict[str, Tensor] | list[Tensor] | tuple[Tensor, ...]:
        fine = F.relu(self.norm(self.fine(images)))
        maps = {"fine": fine, "coarse": self.coarse(fine)}
        return maps if self.kind is dict else self.kind(maps.values())


class Pooled(Maps):
    """Pooled features inside an object, as a backbone of transformers gives them."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        last = super().forward(images)["coarse"]
        return {"last_hidden_state": last, "pooler_output": last.mean((2, 3))}


def maps_of(output) -> list[Tensor]:
    return list(output.values() if isinstance(output, dict) else output)


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_a_domain_on_feature_maps_learns_and_its_pack_gives_the_same_maps(kind, tmp_path):
    torch.manual_seed(0)
    base = pm.load_base(Maps(kind), input=SPEC)
    domain = pm.new_domain(base, "affine-full")
    assert set(base.sites) == {"fine.weight", "coarse.weight"}
    model, (images, _) = pm.DomainModel(base, domain).train(), batch()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = sum((maps - 1).square().mean() for maps in maps_of(model(images)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    domain.save(tmp_path / "maps.safetensors")
    many = pm.MultiDomainModel(base, library=tmp_path)
    with torch.no_grad():
        now, then = model(images), many(images, domain="maps")
    assert type(then) is kind
    for one, other in zip(maps_of(now), maps_of(then), strict=True):
        assert torch.equal(one, other)
    base.verify()


def test_feature_maps_take_no_linear_head_and_no_mixed_batch():
    base = pm.load_base(Maps(dict), input=SPEC)
    with pytest.raises(pm.DomainError, match="does not give one feature vector"):
        pm.new_domain(base, "affine-full", ["a", "b"])
    many = pm.MultiDomainModel(base)
    many.add("maps", pm.new_domain(base, "affine-full"))
    with pytest.raises(pm.DomainError, match="one domain at a time"):
        many(batch(2)[0], domain=["maps", "maps"])


def test_pooled_features_take_a_head_and_merge_into_a_network_that_gives_logits():
    torch.manual_seed(0)
    base = pm.load_base(Pooled(dict), input=SPEC)
    assert base.feature_dim == 6
    domain = pm.new_domain(base, "affine-full", ["a", "b", "c"]).eval()
    images, _ = batch(4)
    with torch.no_grad():
        logits = domain(base, images)
        assert logits.shape == (4, 3)
        assert torch.equal(domain.merged(base)(images), logits)


class Outputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor | None


class WithHelp(nn.Module):
    """Logits alone after training, and those of a second classifier beside them while it learns, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor | Outputs:
        pooled = self.stem(images).mean((2, 3))
        return Outputs(self.fc(pooled), self.aux(pooled)) if self.training else self.fc(pooled)


def test_what_a_network_gives_beside_its_logits_in_training_is_left():
    base = pm.load_base(WithHelp(), input=SPEC)
    domain = pm.new_domain(base, "affine-full", ["a", "b", "c"]).train()
    assert base.classifier == "fc"
    logits = domain(base, batch(4)[0])
    assert logits.shape == (4, 3)
    logits.sum().backward()
    assert domain.eval()(base, batch(4)[0]).shape == (4, 3)


@pytest.mark.parametrize("output", [None, {}, [], "logits", [torch.zeros(1), None]])
def test_what_holds_no_features_is_refused_with_a_remedy(output):
    with pytest.raises(TypeError, match="wrap it in a module"):
        features_of(output)


def test_one_tensor_is_not_looked_for_among_several_maps():
    with pytest.raises(TypeError, match="not a tensor of features"):
        tensor_of({"fine": torch.zeros(1), "coarse": torch.zeros(1)})


def test_a_model_that_is_given_labels_gives_loss_and_logits_by_name():
    base = tiny_base()
    model = pm.DomainModel(base, trained(base)).eval()
    images, labels = batch()
    found = model(images=images, labels=labels)
    assert torch.equal(found["logits"], model(images))
    assert torch.equal(found["loss"], F.cross_entropy(found["logits"], labels))


def test_labels_without_classes_are_refused():
    base = tiny_base()
    model = pm.DomainModel(base, pm.new_domain(base, "affine-full"))
    with pytest.raises(pm.DomainError, match="without classes"):
        model(*batch())
