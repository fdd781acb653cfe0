"""The two libraries behind one interface: learn, outputs, mixed, save, load."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from beside_peft.setting import RANK, RATES, SIDE, SOURCES, DomainSample, train
from torch import Tensor, nn

import polymask as pm

pm.import_torchvision()
import peft  # noqa: E402 - it imports torchvision, which a CPU-only torch must be prepared for


class Peft:
    """LoRA on every convolution, the head in `modules_to_save`.

    Batch norms: "shared" leaves them to PEFT, "saved" lists them in `modules_to_save`, "held" keeps
    them in eval mode while training, which PEFT does not do by itself.
    """

    rate = RATES["lora"]

    def __init__(self, net: nn.Module, norms: str) -> None:
        self.net, self.fresh, self.norms = copy.deepcopy(net), copy.deepcopy(net), norms
        saved = names_of(net, nn.BatchNorm2d) if norms == "saved" else []
        self.config = lora(net, RANK, ["fc", *saved])
        self.model: Any = None

    def trainable(self, name: str) -> nn.Module:
        """The model, ready to learn a new domain."""
        if self.model is None:
            self.model = peft.get_peft_model(self.net, self.config, adapter_name=name)
        else:
            self.model.add_adapter(name, self.config)
            self.model.set_adapter(name)
        return self.model

    def learn(self, name: str, sample: DomainSample) -> None:
        train(self.trainable(name), sample.train, self.rate, hold_norms=self.norms == "held")

    @torch.no_grad()
    def outputs(self, name: str, images: Tensor) -> Tensor:
        self.model.set_adapter(name)
        return self.model.eval()(images)

    @torch.no_grad()
    def base_outputs(self, images: Tensor) -> Tensor:
        if self.model is None:
            return self.net(images)
        with self.model.eval().disable_adapter():
            return self.model(images)

    @torch.no_grad()
    def mixed(self, names: Sequence[str], images: Tensor) -> list[Tensor]:
        return list(self.model.eval()(images, adapter_names=list(names)))

    def save(self, name: str, folder: Path) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a base without a name on the Hub
            self.model.save_pretrained(folder, selected_adapters=[name])
        return (folder / name / "adapter_model.safetensors").stat().st_size

    @torch.no_grad()
    def loaded_outputs(self, name: str, folder: Path, images: Tensor) -> Tensor:
        fresh = peft.PeftModel.from_pretrained(copy.deepcopy(self.fresh), folder / name)
        return fresh.eval()(images)


class Polymask:
    """`affine-full` with own norms and a head as wide as the domain needs."""

    rate = RATES["affine-full"]

    def __init__(self, net: nn.Module) -> None:
        self.net, self.fresh = copy.deepcopy(net), copy.deepcopy(net)
        self.base = self._load(self.net)
        self.many = pm.MultiDomainModel(self.base)

    def _load(self, net: nn.Module) -> pm.Base:
        return pm.load_base(net, name="resnet18", input=pm.InputSpec(shape=(3, SIDE, SIDE)))

    def trainable(self, name: str, classes: Sequence[str] | None = None) -> pm.DomainModel:
        """The model, ready to learn a new domain."""
        names = classes or [f"class {i}" for i in range(SOURCES[name])]
        return pm.DomainModel(self.base, pm.new_domain(self.base, "affine-full", names))

    def learn(self, name: str, sample: DomainSample) -> None:
        model = self.trainable(name, sample.classes)
        train(model, sample.train, self.rate)
        self.many.add(name, model.domain)

    def outputs(self, name: str, images: Tensor) -> Tensor:
        return self.many(images, domain=name)

    @torch.no_grad()
    def base_outputs(self, images: Tensor) -> Tensor:
        self.base.verify()
        return self.net(images)  # the module that was passed in shares the base's memory

    def mixed(self, names: Sequence[str], images: Tensor) -> list[Tensor]:
        return self.many(images, domain=names)

    def save(self, name: str, folder: Path) -> int:
        path = folder / f"{name}.safetensors"
        self.many.domain(name).save(path)
        return path.stat().st_size

    @torch.no_grad()
    def loaded_outputs(self, name: str, folder: Path, images: Tensor) -> Tensor:
        base = self._load(copy.deepcopy(self.fresh))
        return pm.load_domain(folder / f"{name}.safetensors", base)(base, images)


SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "PEFT LoRA": lambda net: Peft(net, "shared"),
    "PEFT LoRA, norms in modules_to_save": lambda net: Peft(net, "saved"),
    "PEFT LoRA, norms held in eval mode": lambda net: Peft(net, "held"),
    "polymask affine-full": Polymask,
}


def lora(net: nn.Module, rank: int, saved: list[str] | None) -> peft.LoraConfig:
    layers = names_of(net, (nn.Conv2d, nn.Linear))
    targets = [name for name in layers if name not in (saved or [])]
    return peft.LoraConfig(r=rank, target_modules=targets, modules_to_save=saved)


def names_of(net: nn.Module, kind: Any) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, kind)]
