""".venv/bin/python examples/detection_backbone.py: a domain as the backbone of torchvision's FCOS detector.

The method is not only for classifiers. The base here returns three feature maps of EfficientNet-Lite0 with its
ImageNet weights. `pm.DomainModel` is the body of the detector, followed by torchvision's feature pyramid and
FCOS head. The domain, the pyramid and the head learn; the base is shared and does not change. The scenes are
scikit-learn's digits on noise, one per scene, so the best box is the answer and no suppression of others
(a compiled operator) is needed.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import polymask as pm

pm.import_torchvision()  # with a CPU-only torch it needs help
import timm  # noqa: E402
from torchvision.models.detection import FCOS  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator  # noqa: E402
from torchvision.ops import FeaturePyramidNetwork, box_iou  # noqa: E402

SIDE, STEPS, BATCH = 96, 50, 8


class Pyramid(nn.Module):
    """The feature maps of a body, all with the same number of channels."""

    out_channels = 64  # FCOS asks its backbone

    def __init__(self, body: nn.Module, channels: list[int]) -> None:
        super().__init__()
        self.body, self.fpn = body, FeaturePyramidNetwork(channels, self.out_channels)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps by name, finest first."""
        return self.fpn({str(i): maps for i, maps in enumerate(self.body(images))})


def make_scenes(count: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Digits of 32 to 48 pixels somewhere on noise: images (N, 3, SIDE, SIDE), boxes and labels."""
    pixels, digits = load_digits(return_X_y=True)
    images, targets = 0.3 * torch.rand(count, 3, SIDE, SIDE), []
    for image, row in zip(images, torch.randint(len(digits), (count,)).tolist(), strict=True):
        size = int(torch.randint(32, 49, ()))
        left, top = torch.randint(SIDE - size + 1, (2,)).tolist()
        glyph = torch.tensor(pixels[row], dtype=torch.float32).view(1, 1, 8, 8) / 16
        glyph = nn.functional.interpolate(glyph, (size, size), mode="bilinear")[0]
        image[:, top : top + size, left : left + size] += 0.7 * glyph
        box = torch.tensor([[left, top, left + size, top + size]], dtype=torch.float32)
        targets.append({"boxes": box, "labels": torch.tensor([int(digits[row])])})
    return images, targets


@torch.no_grad()
def best_boxes(detector: FCOS, images: Tensor) -> Tensor:
    """The box at the most confident position of each image, (N, 4)."""
    batch, _ = detector.transform(list(images))
    maps = list(detector.backbone(batch.tensors).values())
    found = detector.head(maps)
    certainty = found["cls_logits"].sigmoid().amax(2) * found["bbox_ctrness"][..., 0].sigmoid()
    place = certainty.argmax(1)
    rows = torch.arange(len(images))
    anchors = torch.stack(detector.anchor_generator(batch, maps))
    return detector.box_coder.decode(found["bbox_regression"][rows, place], anchors[rows, place])


def main() -> None:
    """Train the detector, look at its boxes, save and load the domain."""
    torch.manual_seed(0)
    network = pm.load_base("efficientnet-lite0")
    spec = pm.InputSpec(shape=(3, SIDE, SIDE), mean=network.input.mean, std=network.input.std)
    maps = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(2, 3, 4))
    maps.load_state_dict(network.net.state_dict(), strict=False)  # it has no last convolution
    base = pm.load_base(maps, name="efficientnet-lite0-maps", input=spec)
    domain = pm.new_domain(base, "affine-full", norms="affine")  # no classes: no linear head

    detector = FCOS(
        Pyramid(pm.DomainModel(base, domain), maps.feature_info.channels()),
        num_classes=10,
        anchor_generator=AnchorGenerator(((16,), (32,), (64,)), ((1.0,),) * 3),
        min_size=SIDE,
        max_size=SIDE,
        image_mean=spec.mean,
        image_std=spec.std,
    )
    own = {id(parameter) for parameter in domain.parameters()}
    rest = [p for p in detector.parameters() if id(p) not in own]
    optimiser = torch.optim.Adam([{"params": list(domain.parameters()), "lr": 2e-4}, {"params": rest}], 2e-3)
    losses = []
    for step in range(STEPS):
        images, targets = make_scenes(BATCH)
        loss = sum(detector.train()(list(images), targets).values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1}: loss {sum(losses[-10:]) / 10:.3f}", flush=True)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])

    detector.eval()
    images, targets = make_scenes(32)
    truth = torch.cat([target["boxes"] for target in targets])
    overlap = box_iou(best_boxes(detector, images), truth).diagonal().mean().item()
    print(f"the best boxes cover the digits with a mean IoU of {overlap:.2f}")
    assert overlap > 0.4

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        domain.save(f"{folder}/scenes.safetensors")
        again = pm.load_domain(f"{folder}/scenes.safetensors", base)
        for now, then in zip(domain(base, images), again(base, images), strict=True):
            assert torch.equal(now, then)
    base.verify()
    print("the pack gives the same feature maps; the base is byte for byte what it was")


if __name__ == "__main__":
    main()
