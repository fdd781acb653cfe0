""".venv/bin/python examples/hf_trainer.py: a domain in the Hugging Face transformers Trainer.

The Trainer calls a model with a batch's entries by name, and reads "loss" and "logits" from what it
returns. `pm.DomainModel` supports this with `images` and `labels`, so it can be used unmodified, with an
optimiser made from `domain.param_groups()`. pip install 'polymask[examples]'.
"""

import tempfile

import torch
from torch import Tensor

import polymask as pm

pm.import_torchvision()  # transformers imports it, which with a CPU-only torch needs help
from transformers import EvalPrediction, Trainer, TrainingArguments  # noqa: E402


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch, keyed by the argument names of the model's `forward`."""
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The metric that the Trainer reports for test images in addition to the loss."""
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def main() -> None:
    """Train on digits, evaluate, save and load."""
    torch.manual_seed(0)
    base = pm.load_base("efficientnet-lite0")
    data = pm.load_data("digits", limit=200)
    loaders = pm.make_loaders(data, base.input, pm.get_recipe("quick", side=48))
    domain = pm.new_domain(base, "affine-full", data.classes, norms="affine")
    parts = domain.param_groups()
    optimiser = torch.optim.Adam(
        [
            {"params": parts["transforms"] + parts["norms"], "lr": 5e-4},
            {"params": parts["head"], "lr": 1e-2},
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=pm.DomainModel(base, domain),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=4,
                per_device_train_batch_size=16,
                per_device_eval_batch_size=64,
                logging_steps=5,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            data_collator=collate,
            train_dataset=loaders.train.samples(),
            eval_dataset=loaders.test.samples(),
            compute_metrics=accuracy,
            optimizers=(optimiser, None),  # None: the Trainer's own schedule
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        for title, found in (("before", before), ("after", after)):
            print(f"{title}: loss {found['eval_loss']:.3f}, {found['eval_accuracy']:.0%} right")
        assert after["eval_loss"] < before["eval_loss"]

        pack = f"{folder}/digits.safetensors"
        domain.save(pack)
        images, _ = next(loaders.test.batches())
        with torch.no_grad():
            again = pm.load_domain(pack, base)(base, images)
            assert torch.equal(again, domain.eval()(base, images))
    base.verify()
    print("the pack gives the same logits, and the base is byte for byte what it was")


if __name__ == "__main__":
    main()
