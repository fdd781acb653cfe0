""".venv/bin/python examples/lightning_trainer.py: a domain in the PyTorch Lightning Trainer.

The LightningModule holds a `pm.DomainModel`. Its checkpoints hold only the domain, since nothing
else learns. pip install 'polymask[examples]'.
"""

import logging
import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import polymask as pm

pm.import_torchvision()  # Lightning's metrics import it, which with a CPU-only torch needs help
import pytorch_lightning as lightning  # noqa: E402


class LearnDomain(lightning.LightningModule):
    """Cross-entropy, and Adam with a separate rate for the head."""

    def __init__(self, base: pm.Base, domain: pm.Domain) -> None:
        super().__init__()
        self.model = pm.DomainModel(base, domain)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Loss and accuracy of a validation batch."""
        images, labels = batch
        logits = self.model(images)
        self.log("loss", F.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two rates in one optimiser."""
        parts = self.model.domain.param_groups()
        body = {"params": parts["transforms"] + parts["norms"], "lr": 5e-4}
        return torch.optim.Adam([body, {"params": parts["head"], "lr": 1e-2}])


def main() -> None:
    """Train on digits, evaluate, save and load."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
    lightning.seed_everything(0, verbose=False)
    base = pm.load_base("efficientnet-lite0")
    data = pm.load_data("digits", limit=200)
    loaders = pm.make_loaders(data, base.input, pm.get_recipe("quick", side=48))
    train = DataLoader(loaders.train.samples(), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(loaders.test.samples(), batch_size=64)

    domain = pm.new_domain(base, "affine-full", data.classes, norms="affine")
    module = LearnDomain(base, domain)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    [before] = trainer.validate(module, test, verbose=False)
    trainer.fit(module, train, test)
    [after] = trainer.validate(module, test, verbose=False)
    for title, found in (("before", before), ("after", after)):
        print(f"{title}: loss {found['loss']:.3f}, {found['accuracy']:.0%} right")
    assert after["loss"] < before["loss"]
    assert len(module.state_dict()) == len(domain.state_dict())

    images, _ = next(iter(test))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        domain.save(f"{folder}/digits.safetensors")
        again = pm.load_domain(f"{folder}/digits.safetensors", base)(base, images)
        assert torch.equal(again, domain.eval()(base, images))
    base.verify()
    print("the pack gives the same logits, and the base is byte for byte what it was")


if __name__ == "__main__":
    main()
