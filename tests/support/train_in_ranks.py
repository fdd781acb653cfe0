"""python train_in_ranks.py OUT [options]: train a small domain, alone or in the ranks of torchrun.

OUT gets the checkpoint of the last epoch and result.json. Not a test: tests start it by torchrun.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch

import polymask as pm
from nets import batch, block_base, tiny_base
from polymask.train.fit import Listener
from polymask.train.ranks import join_ranks
from polymask.train.recipe import Recipe

torch.set_num_threads(1)


class Noisy:
    """Batches of patterns in noise; the last one of an epoch is of `tail` images."""

    def __init__(self, steps: int, size: int, tail: int, offset: int = 0) -> None:
        self.steps, self.size, self.tail, self.offset = steps, size, tail, offset

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0):
        for step in range(start, self.steps):
            size = self.tail if step == self.steps - 1 else self.size
            images, labels = batch(size, seed=0)
            noise = torch.Generator().manual_seed(1000 * (epoch + self.offset) + step)
            yield images + torch.randn(images.shape, generator=noise), labels


class Signals(Listener):
    """Sends its own process a signal after so many steps."""

    def __init__(self, name: signal.Signals, after: int) -> None:
        self.name, self.left = name, after

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="blocks")
    parser.add_argument("--method", default="affine-full")
    parser.add_argument("--norms", default="own")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=12)
    parser.add_argument("--tail", type=int, default=3)
    parser.add_argument("--sync-norms", action="store_true")
    parser.add_argument("--compress", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die", nargs=2, type=int, metavar=("RANK", "STEP"))
    parser.add_argument("--stop", nargs=2, type=int, metavar=("RANK", "STEP"))
    parser.add_argument("--other", type=int, metavar="RANK", help="a rank with other data")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    listener = None
    for name, when in ((signal.SIGKILL, given.die), (signal.SIGTERM, given.stop)):
        if when is not None and rank == when[0]:
            listener = Signals(name, when[1])
    offset = 7 if given.other == rank else 0
    base = {"blocks": block_base, "tiny": tiny_base}[given.net]()
    torch.manual_seed(0)
    domain = pm.new_domain(base, given.method, ["a", "b", "c"], norms=given.norms)
    recipe = Recipe(epochs=given.epochs, rate=1e-3, head_rate=1e-2, drops=(), selection="last")
    train = Noisy(given.steps, given.size, given.tail, offset)
    with join_ranks(sync_norms=given.sync_norms, compress=given.compress) as ranks:
        history = pm.fit(
            base,
            domain,
            train,
            Noisy(2, 9, 1, offset=99),
            recipe,
            checkpoint=given.out / "checkpoint",
            resume=given.resume,
            listener=listener,
            ranks=ranks,
        )
        if ranks is None or ranks.first:
            found = {
                "history": [[r.loss, r.train_accuracy, r.val_accuracy] for r in history],
                "bytes": {} if ranks is None else ranks.bytes_sent,
                "learned": sum(p.numel() for p in domain.parameters()),
            }
            (given.out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
