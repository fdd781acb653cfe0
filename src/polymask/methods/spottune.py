"""SpotTune: every image chooses, block by block, between the base's block and a fine-tuned copy.

    x_l = (1 - a_l) F_l(x_{l-1}) + a_l F^_l(x_{l-1}),        a_l in {0, 1}

F_l is a block of the base with the base's weights, F^_l the same block with weights that learn; each has norms of the
domain's own. A small network, the policy, looks at the image and gives two logits z a block. The choice is the larger
of z + g, where g is Gumbel noise while training, and its gradient is that of the softmax at temperature t:

    a_l = 1[z_1 + g_1 > z_0 + g_0],        da_l = d softmax((z + g) / t)_1

What is outside the blocks (a stem, say) learns too. The original draws g at test as well, so that
its predictions are random; here the choice is that of z alone unless `sample_at_test`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.blocks import find_blocks
from polymask.core.method import Method
from polymask.core.network import tensor_of
from polymask.core.parts import OwnNorm, Route, own_norms
from polymask.core.survey import Site, learned_type
from polymask.errors import BaseError
from polymask.methods.baselines import FreeWeights

if TYPE_CHECKING:
    from polymask.core.base import Base

_SIDE = 72  # of the images that the policy looks at: larger ones are averaged down


@dataclass(frozen=True, kw_only=True)
class SpotTune(Method):
    """Two copies of every block and a policy whose stem has `policy_width` channels."""

    temperature: float = 5.0
    sample_at_test: bool = False
    policy_width: int = 32

    title: ClassVar[str] = "SpotTune"
    reference: ClassVar[str] = "arXiv 1811.08737"
    differences: ClassVar[str] = (
        "The original draws the choice at test too (`sample_at_test`); trains by SGD at 0.1, the policy at 0.01 with "
        "its own weight decay, where here the recipe decides and the policy learns at the rate of weights; and keeps a "
        "branch in its policy that nothing uses. Its shortcuts have no weights; here a block is copied with the "
        "shortcut that it has. Every layer outside the blocks learns, not the stem alone. Images of more than 72 "
        "pixels are averaged down for the policy."
    )
    mergeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("temperature", 1e-3, 1e3)
        self.check_whole("policy_width")

    def transform(self, site: Site) -> FreeWeights:
        return FreeWeights(site)

    def route(self, base: "Base") -> "SpotRoute":
        return SpotRoute(self, base)


class SpotRoute(Route):
    """The policy, and a second set of norms: those of the blocks with the base's weights."""

    def __init__(self, method: SpotTune, base: "Base") -> None:
        super().__init__()
        if len(base.input.shape) != 3:
            raise BaseError(
                f"base {base.name} takes inputs of shape {base.input.shape}; the policy of {method.name or 'spottune'} "
                "looks at images (channels, height, width): use a base for images, or another method"
            )
        self.temperature, self.sample_at_test = method.temperature, method.sample_at_test
        self.blocks = tuple(block.name for block in find_blocks(base))
        norms = own_norms(base, method.norms).items()
        inside = {name: norm for name, norm in norms if any(_inside(name, block) for block in self.blocks)}
        self.norm_names, self.norms = tuple(inside), nn.ModuleList(inside.values())
        self.policy = Policy(base.input.shape[0], method.policy_width, len(self.blocks))
        self.policy.to(learned_type(base.weight_dtype))

    def component(self, name: str) -> str:
        """The norms of F count as norms, the policy as weights."""
        component = super().component(name)
        is_affine = component == "weights" and name.startswith("norms.")
        return "norm_affine" if is_affine else component

    def weight_parameters(self) -> list[nn.Parameter]:
        """The policy's, which the original too trains at a smaller rate than adapters are."""
        return list(self.policy.parameters())

    def features(self, base: "Base", weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """`weights` are those of F^; at every block F runs beside it, and the choice is made."""
        choices = self.choices(images)
        original = self.original(base, weights)
        hooks = {}
        for block, chosen in zip(self.blocks, choices.unbind(1), strict=True):
            inside = {n.removeprefix(f"{block}."): t for n, t in original.items() if _inside(n, block)}
            hooks[block] = _Choice(inside, chosen)
        with base.hooked(hooks):
            return base.run(weights, images)

    def choices(self, images: Tensor) -> Tensor:
        """What each image chooses (N, blocks): 1 for F^, 0 for F."""
        device = "cpu" if images.is_meta else images.device.type  # meta has no autocast
        # In full precision: no choice should hang on how images are rounded.
        with torch.autocast(device, enabled=False):
            logits = self.policy(images.to(self.policy.stem.weight.dtype))
            if self.training or self.sample_at_test:
                noise = torch.rand_like(logits).clamp_min(torch.finfo(logits.dtype).tiny)
                logits = logits - noise.log().neg().log()
            soft = (logits / self.temperature).softmax(2)[:, :, 1]
            hard = (logits[:, :, 1] > logits[:, :, 0]).to(soft.dtype)
            choices: Tensor = hard + (soft - soft.detach())
            return choices

    def original(self, base: "Base", weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of F, by their names in the network, where F^ has others."""
        # A buffer that is no norm's is a scratch copy: the base's own could be written to.
        tensors = {name: base.tensor(name) for name in weights if isinstance(base.tensor(name), nn.Parameter)}
        for own in self.norms:
            assert isinstance(own, OwnNorm)
            tensors |= own.in_layer(base)
        return tensors


class _Choice:
    """A hook that runs F after F^ and gives each image the one that it chose."""

    def __init__(self, tensors: dict[str, Tensor], chosen: Tensor) -> None:
        self.tensors, self.chosen = tensors, chosen
        self.inside = False

    def __call__(self, block: nn.Module, inputs: tuple[Any, ...], tuned: Tensor) -> Tensor | None:
        if self.inside:  # F is a call of the same module, hooks and all
            return None
        self.inside = True
        try:
            original = tensor_of(torch.func.functional_call(block, self.tensors, inputs))
        finally:
            self.inside = False
        chosen = self.chosen.to(tuned.dtype).view(-1, *(1,) * (tuned.ndim - 1))
        return (1 - chosen) * original + chosen * tuned


class Policy(nn.Module):
    """A residual network of three blocks: images (N, C, H, W) -> logits (N, choices, 2).

    Of widths 2w, 4w and 8w, each block at half the resolution of the one before; its shortcut is
    a 2x2 average with zeros for the new channels.
    """

    def __init__(self, channels: int, width: int, choices: int) -> None:
        super().__init__()
        self.stem = _convolution(channels, width)
        self.stem_norm = nn.BatchNorm2d(width)
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _convolution(inputs, 2 * inputs, stride=2),
                nn.BatchNorm2d(2 * inputs),
                nn.ReLU(),
                _convolution(2 * inputs, 2 * inputs),
                nn.BatchNorm2d(2 * inputs),
            )
            for inputs in widths[:-1]
        )
        self.end_norm = nn.BatchNorm2d(widths[-1])
        self.logits = nn.Linear(widths[-1], 2 * choices)

    def forward(self, images: Tensor) -> Tensor:
        """Two logits a block: index 0 for F, 1 for F^."""
        shrink = math.ceil(max(images.shape[2:]) / _SIDE)
        x = F.avg_pool2d(images, shrink, ceil_mode=True) if shrink > 1 else images
        x = self.stem_norm(self.stem(x))
        for block in self.blocks:
            shortcut = F.avg_pool2d(x, 2, ceil_mode=True)
            shortcut = torch.cat([shortcut, torch.zeros_like(shortcut)], 1)
            x = F.relu(shortcut + block(x))
        x = F.relu(self.end_norm(x)).mean((2, 3))
        return self.logits(x).unflatten(1, (-1, 2))  # type: ignore[no-any-return]


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return layer


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


PRESETS: dict[str, Method] = {"spottune": SpotTune()}
