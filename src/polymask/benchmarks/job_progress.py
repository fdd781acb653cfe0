"""From a training's steps to the share of its epochs that is done."""

from collections.abc import Callable

from polymask.train.fit import Listener
from polymask.train.recipe import Recipe


class JobProgress(Listener):
    """Tells after every step how much is done, 0 … 1, and a note for a person."""

    def __init__(self, tell: Callable[[float, str], None]) -> None:
        self.tell = tell

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.total = max(1, recipe.epochs * steps)
        self.steps = steps

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        share = (epoch * self.steps + step) / self.total
        self.tell(share, f"epoch {epoch + 1} · loss {loss:.3f}")
