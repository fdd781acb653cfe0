"""Recipes: how a domain is trained; and methods as a person writes them, with fields of the recipe.

A method is written as its name, and after colons its options and fields of the recipe:

    lora:rank=4:rate=3e-3                       an option of the method, a field of the recipe
    series-adapter:recipe=residual-adapters     another recipe to start from
    ba2:norms=own                               where both have the name, the method's option

Values are true, false, none, numbers, words, or several of these with commas between.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from polymask.core.input import InputSpec
from polymask.errors import MethodError, PolymaskError, near_matches

if TYPE_CHECKING:
    from polymask.core.method import Method

Optimiser = Literal["adam", "sgd"]
Schedule = Literal["step", "cosine"]
Selection = Literal["best", "last"]
Norms = Literal["own", "shared", "affine", "stats", "bias", "shift"]
Balance = Literal["weights", "sampler"]
_NEWER = (
    "head_start",
    "balance",
    "patience",
    "first_side",
    "test_side",
    "frozen_side",
    "refit",
    "refit_on_val",
    "precision",
    "least_steps",
)  # fields that older packs and checkpoints lack
RATES = ("rate", "weight_rate", "scalar_rate", "head_rate")
DECAYS = ("transform_decay", "weight_decay", "head_decay")
ALSO_CALLED = {  # elsewhere; for errors that say what a field is called here
    "lr": "rate",
    "learning_rate": "rate",
    "optimizer": "optimiser",
    "optim": "optimiser",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "bs": "batch_size",
    "wd": "weight_decay",
    "image_size": "side",
    "img_size": "side",
    "size": "side",
    "resolution": "side",
    "scheduler": "schedule",
    "amp": "autocast",
}
MOST_EPOCHS = 30  # that few images get; more bring little
LARGEST_SIDE = 2048  # pixels: a batch of larger images fills any memory


class RecipeError(PolymaskError):
    """A recipe is unknown, or a field of it makes no sense."""


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; whole numbers are numbers, and truth values are not."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _described(kind: Any) -> str:
    """What a field takes, as the end of an error."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return _described(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"{_described(get_args(kind)[0])}, or several with commas between"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a domain is trained.

    Masks, scalars, adapters and norms learn at `rate`, whole weights (fine-tuning) at `weight_rate`, both by
    `optimiser`; the head at `head_rate`. Scalars of a site may have a `scalar_rate` of their own. Decay (an L2
    penalty, through the gradient) has a number for each group: `transform_decay` for adapters and scalars,
    `weight_decay` for whole weights (W~, not its change), `head_decay` for the head; scores of masks and norms never
    decay. All rates are multiplied by `drop_factor` at the start of each epoch in `drops` (counted from 0), or follow
    half a cosine; they rise linearly over the first `warmup` epochs, at most half of all. A crop covers a share in
    `crop_scale` of the image's area; (1, 1) gives crops of the network's size at random places.

    A whole network (`pretrain`) learns by one optimiser: `optimiser`, `momentum` and `rate`, with
    `weight_decay` on everything. The other rates and all that says head or norms is for domains.
    """

    name: str = "custom"
    """The recipe's name."""
    epochs: int = 30
    """How many times training goes through the images; 0 for a head alone, with frozen_side."""
    least_steps: int | None = None
    """Of few images learn makes more epochs, 30 at most, for so many steps; as many as epochs says unless given."""
    batch_size: int = 32
    """Images in a step."""
    optimiser: Optimiser = "adam"
    """What turns gradients into steps."""
    momentum: float = 0.9
    """Momentum of SGD."""
    rate: float = 1e-4
    """Learning rate of masks, scalars, adapters and norms; of a whole network, of everything."""
    weight_rate: float = 1e-4
    """Learning rate of whole weights (fine-tuning)."""
    scalar_rate: float | None = None
    """Learning rate of the scalars of a site; as rate unless given."""
    head_optimiser: Optimiser = "sgd"
    """The optimiser of the head."""
    head_rate: float = 1e-3
    """Learning rate of the head."""
    head_momentum: float = 0.9
    """Momentum of the head's SGD."""
    head_start: Literal["drawn", "centred"] | None = None
    """How the head begins: at random numbers (drawn, as it does unless given), or at 0 on centred features."""
    transform_decay: float = 0.0
    """Weight decay (L2) of adapters and scalars."""
    weight_decay: float = 0.0
    """Weight decay (L2) of whole weights, and of all that a whole network learns."""
    head_decay: float = 0.0
    """Weight decay (L2) of the head."""
    label_smoothing: float = 0.0
    """The share of each label that is spread over all classes."""
    schedule: Schedule = "step"
    """How rates fall: in steps at the drops, or along half a cosine."""
    drops: tuple[int, ...] = (15,)
    """Epochs, counted from 0, at whose start the rates drop."""
    drop_factor: float = 0.1
    """What a drop multiplies the rates by."""
    warmup: float = 0.0
    """Epochs over which the rates rise from 0, at most half of all."""
    side: int | None = None
    """Side of the images in pixels; what the base was made for unless given."""
    first_side: int | None = None
    """Side of the images in the first half of the epochs, which a smaller one makes faster; as side unless given."""
    resized: int | None = None
    """Short side in pixels before the centre crop; as the base has it unless given."""
    square: bool | None = None
    """Resize to a square before a crop; as the base has it unless given."""
    test_side: int | Literal["auto"] | None = None
    """Side of the images after training: pixels, or auto, the best on val where there is one; else as in training."""
    frozen_side: int | None = None
    """Side of the images for a head of frozen features, which is fitted too and kept where it is better on val."""
    refit: float | Literal["auto"] | None = None
    """Fit the head again after training, by a logistic regression with this penalty; auto takes the best on val."""
    refit_on_val: bool | None = None
    """Fit the head to val too, in the end, when val has chosen and measured; with refit."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """The least and the largest share of an image's area that a training crop covers."""
    mirror: bool | None = None
    """Mirror training images at random; as the domain says unless given."""
    norms: Norms | None = None
    """What becomes of a method's own norm layers; they stay its own unless given."""
    norm_momentum: float | None = None
    """Momentum of the norms' statistics; as the method says unless given."""
    norm_reestimate: bool | None = None
    """Measure the norms' statistics again after training; as the method says unless given."""
    balance: Balance | None = None
    """How rare classes are made up for: they count more in the loss (weights), or are drawn more often (sampler)."""
    patience: int | None = None
    """Stop after so many epochs without a better result on val; train for all epochs unless given."""
    selection: Selection = "best"
    """Which epoch is kept: the best on val, or the last."""
    train_on_val: bool = False
    """Train on train and val together; goes with selection last."""
    precision: Literal[16, 32] | None = None
    """Bits of norms, scalars and head once a domain has learned: 16 unless given, where val allows it."""
    autocast: bool = False
    """Compute in bfloat16."""
    channels_last: bool = True
    """Lay images out channels last; which layout is faster depends on the network and the device."""

    def __post_init__(self) -> None:
        for name in ("drops", "crop_scale"):  # lists in TOML and JSON; a number alone on a command line
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else (value,))
        for one in fields(self):
            if not _fits(value := getattr(self, one.name), one.type):
                raise RecipeError(f"{one.name}={value!r} is not {_described(one.type)}")
        least = {"epochs": 1 if self.frozen_side is None else 0, "batch_size": 1, "patience": 1, "least_steps": 1}
        for name, smallest in least.items():
            if getattr(self, name) is not None and getattr(self, name) < smallest:
                raise RecipeError(f"{name}={getattr(self, name)} must be at least {smallest}")
        for name in ("side", "first_side", "resized", "test_side", "frozen_side"):
            if isinstance(pixels := getattr(self, name), int) and not 1 <= pixels <= LARGEST_SIDE:
                raise RecipeError(f"{name}={pixels} must be from 1 to {LARGEST_SIDE:,} pixels")
        for name in (*RATES, *DECAYS, "momentum", "head_momentum", "warmup", "refit"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise RecipeError(f"{name}={value} cannot be negative or infinite")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise RecipeError(f"crop_scale={self.crop_scale} must be a range within (0, 1]")
        if not 0 <= self.label_smoothing < 1:
            raise RecipeError(f"label_smoothing={self.label_smoothing} must be in [0, 1)")
        if self.train_on_val and self.selection == "best":
            raise RecipeError("train_on_val leaves no val to select on; set selection='last'")
        if self.train_on_val and self.patience is not None:
            raise RecipeError("train_on_val leaves no val to be patient with; leave patience out")

    def factor(self, epoch: float) -> float:
        """What the rates are multiplied by, `epoch` epochs (and a fraction) into training."""
        warmup = min(self.warmup, self.epochs / 2)
        if epoch < warmup:
            return epoch / warmup
        if self.schedule == "cosine":
            progress = (epoch - warmup) / (self.epochs - warmup)
            return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return float(self.drop_factor ** sum(epoch >= drop for drop in self.drops))

    def stage(self, before: float, share: float, rate: float = 1.0) -> "Recipe":
        """The recipe of a stage that has a share of the epochs, after the share `before`.

        Stages add up to `epochs`, as far as each can have at least one. Drops keep their place
        within the stage, rates are multiplied by `rate`, and only the first stage warms up and begins the head.
        """
        if share == 1 and rate == 1:
            return self
        begin, end = round(before * self.epochs), round((before + share) * self.epochs)
        rates: dict[str, Any] = {n: value * rate for n in RATES if (value := getattr(self, n)) is not None}
        drops = tuple(round(drop * share) for drop in self.drops)
        if before:  # the head has begun
            rates |= {"warmup": 0.0, "head_start": None}
        return replace(self, epochs=max(1, end - begin), drops=drops, **rates)

    def for_images(self, images: int | None) -> "Recipe":
        """The recipe for so many training images, with more epochs where `least_steps` asks for them; None: unknown."""
        epochs = self.epochs
        if self.least_steps is not None and epochs and images:
            wanted = math.ceil(self.least_steps / math.ceil(images / self.batch_size))
            epochs = max(epochs, min(wanted, MOST_EPOCHS))
        return replace(self, epochs=epochs, least_steps=None)

    def input(self, base: InputSpec, *, squash: bool | None = None) -> InputSpec:
        """How a domain's images are fed: the base's way, at the recipe's size; `squash` is the domain's own."""
        side = self.side or base.side
        crop = base.crop if self.resized is None else side / self.resized
        square = base.square if self.square is None else self.square
        shape, squash = (base.shape[0], side, side), base.squash if squash is None else squash
        return replace(base, shape=shape, crop=min(crop, 1.0), square=square, squash=squash)

    @property
    def random_scale(self) -> tuple[float, float] | None:
        """The share of the area that a random crop covers; None for crops of the network's size."""
        return None if self.crop_scale == (1.0, 1.0) else self.crop_scale

    def changed(self, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe with some fields changed; a `rate` alone is that of whole weights too."""
        rates = {"weight_rate": fields["rate"]} if "rate" in fields else {}
        return _with(self, rates | dict(fields))

    def method_options(self, norms: str) -> dict[str, Any]:
        """The options that this recipe decides for a method with this policy for norms.

        Methods that share the base's norms by definition (Piggyback, say) go on doing so. One that learns their shifts
        alone takes on own statistics beside them, where the recipe has own norms.
        """
        names = ["norm_momentum", "norm_reestimate"] + (["norms"] if norms == "own" else [])
        shift = {"norms": "shift"} if norms == "bias" and self.norms == "own" else {}
        return shift | {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `Recipe(**object)` reads back. Newer fields are there only where they are given."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _NEWER}


_SLOW: dict[str, Any] = {"epochs": 120, "batch_size": 128, "optimiser": "sgd", "rate": 0.1, "weight_decay": 1e-4}
_SLOW |= {"drops": (80, 100), "crop_scale": (1.0, 1.0)}
_RESIDUAL_ADAPTERS = _SLOW | {"weight_rate": 0.1, "head_rate": 0.1, "transform_decay": 5e-4, "head_decay": 1e-4}
_QUICK = Recipe(
    name="quick",
    epochs=6,
    rate=5e-4,
    weight_rate=3e-4,
    head_optimiser="adam",
    head_rate=2e-3,
    schedule="cosine",
    warmup=1.0,
    side=96,
    crop_scale=(0.35, 1.0),
    norms="affine",
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="imagenet-to-sketch"),
        Recipe(name="decathlon", epochs=60, drops=(45,), side=64, resized=72, square=True, crop_scale=(1.0, 1.0)),
        Recipe(name="residual-adapters", side=64, resized=72, **_RESIDUAL_ADAPTERS),
        Recipe(name="pretrain", **_SLOW),
        _QUICK,
        replace(
            _QUICK,
            name="standard",
            rate=1e-3,
            head_start="centred",
            head_rate=2e-4,
            refit="auto",
            refit_on_val=True,
            test_side="auto",
            least_steps=400,
        ),
    )
}


def get_recipe(recipe: str | Path | Recipe, **changes: Any) -> Recipe:
    """A recipe by its name or from a TOML file, with some fields changed.

    A file's fields are the recipe's; `recipe = "NAME"` in it names the one that it starts from.

        >>> import polymask as pm
        >>> recipe = pm.get_recipe("decathlon", epochs=10, drops=(8,))
        >>> recipe.epochs, recipe.batch_size, recipe.optimiser
        (10, 32, 'adam')
        >>> [round(recipe.factor(epoch), 3) for epoch in (0, 7, 8, 9)]
        [1.0, 1.0, 0.1, 0.1]
    """
    if isinstance(recipe, str | Path):
        recipe = _from_file(Path(recipe)) if str(recipe).endswith(".toml") else _named(str(recipe))
    _check_fields(changes)
    return _with(recipe, changes)


def _with(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed; epochs that are given are as many as there are, whatever the images."""
    as_given = {"least_steps": None} if "epochs" in changes else {}
    return replace(recipe, **(as_given | dict(changes)))


def _named(name: str) -> Recipe:
    if name not in RECIPES:
        raise RecipeError(f"recipe {name!r} is not known; {near_matches(name, RECIPES)} A .toml file works too")
    return RECIPES[name]


def _from_file(path: Path) -> Recipe:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    start = _named(content.pop("recipe")) if "recipe" in content else Recipe()
    _check_fields(content)
    return _with(start, {"name": path.stem} | content)


def _check_fields(changes: dict[str, Any]) -> None:
    known = {f.name for f in fields(Recipe)}
    for name in changes:
        if name not in known:
            meant = near_matches(ALSO_CALLED.get(name, name), known)
            raise RecipeError(f"a recipe has no field {name!r}; {meant}")


_SPLIT_SEED = "split_seed"
_RECIPE = "recipe"
_NOT_A_ROWS = ("name", "selection", "train_on_val")  # fields that are the same for all rows of a table
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class MethodText:
    """What a text says: a method's name, its options, and how its recipe differs."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe_name: str | None = None
    recipe_fields: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that this row is trained by, where the others have `recipe`."""
        if self.recipe_name is not None:
            measured = {"selection": recipe.selection, "train_on_val": recipe.train_on_val}
            recipe = get_recipe(self.recipe_name, **measured)
        return recipe.changed(self.recipe_fields)

    def method(self, recipe: Recipe) -> "Method":
        """The method as the row's own recipe trains it."""
        return method_by(self.recipe(recipe), self.name, **self.options)


def split_seed(note: Mapping[str, Any]) -> int:
    """The seed that cut the images of a domain, by what its pack says of its recipe."""
    found = note.get(_SPLIT_SEED, note.get("seed"))
    return found if isinstance(found, int) else 0


def seeds_note(seed: int, split: int | None) -> dict[str, int]:
    """What a pack says of the seeds of training and of the cuts, for `split_seed`; the latter where it is another."""
    return {"seed": seed} | ({} if split in (None, seed) else {_SPLIT_SEED: split})


def method_by(recipe: Recipe, name: str, **options: Any) -> "Method":
    """The method `name` with what a recipe decides for it, unless the options say otherwise."""
    from polymask.core.registry import create_method

    decided = recipe.method_options(create_method(name).norms)
    return create_method(name, **(decided | options)).at_rate(recipe.rate)


def read_method(text: str) -> MethodText:
    """Read a method's text; raise where it names an unknown option or field, or gives it no value."""
    from polymask.core.registry import create_method

    name, *settings = text.split(":")
    options, recipe_fields, recipe_name = {}, {}, None
    known = {f.name for f in fields(create_method(name))} - {"name"}
    allowed = {f.name for f in fields(Recipe)} - set(_NOT_A_ROWS)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not value:
            raise MethodError(f"{text}: {setting!r} is not OPTION=VALUE")
        if key in known:
            options[key] = read_value(value)
        elif key == _RECIPE:
            recipe_name = value
        elif key in allowed:
            recipe_fields[key] = read_value(value)
        else:
            raise MethodError(
                f"{text}: neither {name} nor a recipe has {key!r}; "
                f"{near_matches(ALSO_CALLED.get(key, key), known | allowed | {_RECIPE})}"
            )
    create_method(name, **options)  # values that make no sense are refused here
    return MethodText(name, options, recipe_name, recipe_fields)


def read_value(text: str) -> Any:
    """A value as it is written after an equals sign."""
    if "," in text:
        return tuple(read_value(part) for part in text.split(",") if part)
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_value(value: Any) -> str:
    """What `read_value` reads as this value."""
    if isinstance(value, tuple | list):
        return ",".join(map(write_value, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
