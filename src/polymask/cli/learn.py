"""The verb learn: from images to a pack."""

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from polymask.cli.training import TrainingVerb
from polymask.cli.verb import (
    BaseVerb,
    given_fields,
    measured_text,
    recipe_overrides,
    size_text,
    table,
)
from polymask.errors import MethodError, TrainingError
from polymask.files import exemplars_path, write_atomically
from polymask.train.recipe import RATES, RECIPES, Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.method import Method
    from polymask.data.images import DomainData
    from polymask.lifelong.start import Start
    from polymask.train.ranks import Ranks


Overrides: Any = recipe_overrides("Overrides", without=("name",))


@dataclass(kw_only=True)
class LearnVerb(TrainingVerb, BaseVerb):
    """Teach the base a domain from a folder of images, and write its pack."""

    name: tyro.conf.Positional[str]
    """The domain's name: its pack becomes LIBRARY/NAME.safetensors."""
    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME, torchvision:NAME, or a base's file."""
    method: str = "affine-centred"
    """See `polymask methods`; options after colons: lora:rank=4:rate=3e-3."""
    bits: float | None = None
    """Store at most so many bits of mask a weight, below 1: as --method affine-coarse:bits=BITS."""
    target: Literal["classes", "labels", "values"] | None = None
    """What the labels of a .csv file are: one class for each image, several labels, or numbers to learn.
    The default is labels where the file has several for an image, else classes."""
    recipe: str = "standard"
    """standard, quick (smaller rates, a plain head, the size at test that of training), imagenet-to-sketch,
    decathlon, residual-adapters, or a .toml file."""
    minutes: float | None = None
    """Choose sizes and epochs so that all of it takes about so many minutes on this machine; val decides on the size
    at test, and whether a head of frozen features is the better one."""
    out: Path = Path("library")
    """The library's folder."""
    sync_norms: bool = False
    """With several processes (torchrun): batch norms see the batch of all, as one process would."""
    compress_gradients: bool = False
    """With several processes: send gradients in 16 bits."""
    kernels: Literal["eager", "compiled"] | None = None
    """What computes masks; compiled is faster on large networks and needs a C++ compiler.
    The default is what POLYMASK_KERNELS says, or eager."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """For affine-cross and affine-mix: domains of the library whose masks are drawn on, NAME,NAME, or auto:3 for the
    three whose images look most alike."""
    start: str | None = None
    """Begin as a domain of the library, in place of as the base: NAME, or auto for the best of the three whose images
    look most alike; auto learns from the base too, in twice the time, and keeps what is better on val."""
    keep_exemplars: int = 0
    """Keep so many images of each class beside the pack, for a later `extend`."""
    report: bool = False
    """Write NAME.run/report.html beside the pack: curves, confusions, the hardest images, sizes."""
    overrides: Overrides = field(default_factory=Overrides)

    in_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.ranks: Ranks | None = None  # the processes that do this together, if several do
        self.trained_by: Recipe = RECIPES["standard"]  # what was chosen in the end

    @property
    def leads(self) -> bool:
        return self.ranks is None or self.ranks.first

    def execute(self) -> int:
        from polymask.train.ranks import join_ranks

        with join_ranks(device=self.device, sync_norms=self.sync_norms, compress=self.compress_gradients) as self.ranks:
            if self.leads:
                return super().execute()
            self.run()
        return 0

    def needs(self) -> list[str]:
        return super().needs() + (["matplotlib"] if self.report else [])

    def out_file(self) -> Path:
        from polymask.files import check_name

        check_name(self.name)
        return self.out / f"{self.name}.safetensors"

    def warn_of(self, target: Path) -> None:
        from polymask.pack.sources import dependents

        if target.exists() and (users := dependents(target)):
            self.say(f"{', '.join(users)} draw on the masks that {target} has now, and will lack them", style="yellow")

    def chosen_recipe(self) -> Recipe:
        from polymask.train.recipe import read_method

        if self.bits is not None:
            if self.method not in (LearnVerb.method, "affine-coarse"):
                raise MethodError(f"--bits is for affine-coarse, and {self.method} is another method; leave one out")
            self.method, self.bits = f"affine-coarse:bits={self.bits:g}", None
        text = read_method(self.method)
        recipe = get_recipe(text.recipe_name or self.recipe, **given_fields(self.overrides))
        recipe = recipe.changed(text.recipe_fields)
        if self.minutes is not None:
            given = {**given_fields(self.overrides), **text.recipe_fields}
            if taken := sorted(_PLANNED & given.keys()):
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in taken)
                raise TrainingError(f"--minutes chooses what {flags} would set; give one or the other")
            if self.ranks is not None:
                raise TrainingError("--minutes times one process; with torchrun give --side and --epochs")
        if self.start == "auto" and (self.ranks is not None or self.minutes is not None):
            raise TrainingError("--start auto is for one process, and without --minutes; name the domain")
        self.chosen_method(recipe)  # one that the recipe does not go with is found before images are
        return recipe

    def chosen_method(self, recipe: Recipe) -> "Method":
        """The method, with what the options and the recipe say of it."""
        from polymask.train.recipe import method_by, read_method

        text = read_method(self.method)
        method = method_by(recipe, text.name, **text.options)
        method.check_own(False)  # these are one domain's images
        method.check_alone()
        if method.takes_sources != (self.from_ is not None):
            how = "needs --from NAME,… or --from auto:3" if method.takes_sources else "takes no --from"
            raise MethodError(f"{text.name} {how}: affine-cross and affine-mix draw on masks of other domains")
        return method

    def load_images(self) -> "DomainData":
        from polymask.data.load import load_data

        return load_data(self.data, seed=self.seed, limit=self.limit, target=self.target)

    def train(self, recipe: Recipe, data: "DomainData") -> None:
        from polymask.core.registry import skeleton
        from polymask.methods.affine.formula import set_kernels
        from polymask.report.learn_page import record_learning
        from polymask.train.learn import images_of_epoch, learn
        from polymask.train.state import settings_identity

        if self.keep_exemplars:
            from polymask.lifelong.exemplars import check_each

            check_each(self.keep_exemplars, data)
        if self.kernels is not None:
            set_kernels(self.kernels)
        base, method = self.open_base(self.base), self.chosen_method(recipe)
        sources: Mapping[str, Domain] = {}
        if self.from_ is not None:
            from polymask.lifelong.cross import open_sources

            sources = open_sources(self.from_, self.out, base, data, without=self.name)
            self.say(f"drawing on the masks of {', '.join(sources)}")
        begins: Start | None = None
        if self.start is not None:
            from polymask.lifelong.start import open_start

            spec = recipe.input(base.input, squash=data.squash)
            begins = open_start(self.start, self.out, base, data, method, spec, sources, without=self.name)
            self.say(begins.text)
        skeleton(base, method.first_stage(), data.classes)  # a base that the method finds no sites in is refused here
        until = None  # an interrupted run has been interrupted for nobody knows how long
        if self.minutes is not None:
            until = None if self.goes_on else time.perf_counter() + 60 * self.minutes
            recipe = self.planned(base, data, method, recipe)
            method = self.chosen_method(recipe)  # for the rate that was found
        usual, recipe = recipe.epochs, recipe.for_images(images_of_epoch(data, recipe))
        how = f"{recipe.epochs} epochs" if recipe.epochs else "a head alone"
        how += f" instead of {usual}, since images are few," if recipe.epochs > usual else ""
        chosen = f"recipe {recipe.name} ({how} at {recipe.input(base.input).side} px)"
        choices = f"base {base.name}, method {self.method}, seed {self.seed}, library {self.out}\n{chosen}"
        self.announce(self.name, data, choices)
        self.say_device(base.device)
        if self.ranks is not None:
            self.say(f"{self.ranks.title}; a step has {recipe.batch_size} images in all")
        first = method.first_stage()
        self.trained_by = recipe
        start, or_base = None if begins is None else begins.domain, self.start == "auto"
        begun = None if begins is None or or_base else begins.note
        self.check_run(recipe, settings_identity(first, base.fingerprint, data.classes, recipe, self.seed, begun))
        options = self.prepare(data, base.input, recipe, name=self.name, method=self.method)
        if self.minutes is not None:
            plan = {"asked": self.asked(), "recipe": recipe.to_json()}
            write_atomically(self.plan_file, json.dumps(plan, indent=1).encode())
        helps: dict[str, Any] = {"sources": sources, "start": start, "or_base": or_base}
        learned = learn(base, data, method, recipe, ranks=self.ranks, until=until, **helps, **options)
        if self.leads:
            learned.domain.save(self.out_file())
            if self.keep_exemplars:
                from polymask.lifelong.exemplars import choose_exemplars, write_exemplars

                kept = choose_exemplars(base, learned.domain, data, self.keep_exemplars)
                write_exemplars(self.out_file(), learned.domain, *kept)
            else:  # those of a pack that was here before
                exemplars_path(self.out_file()).unlink(missing_ok=True)
            made = self.out_file(), self.method, self.command()
            record_learning(learned, base, data, options["loaders"], *made).write(self.checkpoint.parent)
        if begins is not None and or_base:
            self.say(begins.kept_text(learned.domain))
        if recipe.epochs and learned.domain.method.name != method.name:
            self.say("a head of frozen features is better on val, so that is what is kept", style="yellow")
        if learned.at_chance:
            self.say(f"what was learned is no better than guessing: {advice(data, recipe)}", style="yellow")

    @property
    def plan_file(self) -> Path:
        """What --minutes chose, for an interrupted run that goes on."""
        return self.checkpoint.with_name("plan.json")

    def planned(self, base: "Base", data: "DomainData", method: "Method", recipe: Recipe) -> Recipe:
        """The recipe for the minutes that are given; that of an interrupted run, where it is gone on with."""
        from polymask.train.minutes import plan_minutes

        assert self.minutes is not None
        if self.goes_on and self.plan_file.exists():
            asked, planned = read_plan(self.plan_file)
            now = json.loads(json.dumps(self.asked()))
            names = [*now, *(name for name in asked if name not in now)]  # a plan may be of another version
            other = [f"{n} {asked.get(n)} → {now.get(n)}" for n in names if asked.get(n) != now.get(n)]
            if other:
                raise TrainingError(
                    f"{self.plan_file} is of a run with other settings: {', '.join(other)}; give those again to go on, "
                    "or --fresh to start over"
                )
            return planned
        plan = plan_minutes(base, data, method, recipe, self.minutes, self.say)
        self.say(f"{self.minutes:g} minutes: {plan.text}")
        return plan.recipe

    def asked(self) -> dict[str, Any]:
        """What --minutes chooses by: an interrupted run goes on where it is the same."""
        return asdict(self.chosen_recipe()) | {"minutes": self.minutes}

    def result(self, target: Path) -> dict[str, Any]:
        from polymask.pack.format import inspect
        from polymask.report.learn_page import write_learn_report

        info = inspect(target)
        named = {"pack": str(target), "method": info.manifest.method, "base": info.manifest.base}
        if self.report:
            named["report"] = str(write_learn_report(self.checkpoint.parent)[1])
        named["test_side"] = info.manifest.input["shape"][-1]
        return named | {"bytes": info.bytes} | info.manifest.metrics

    def command(self) -> str:
        """What to type for the same training."""
        words = ["polymask", "learn", self.name, "--data", self.data, "--base", self.base, "--method", self.method]
        words += ["--recipe", self.recipe, "--seed", str(self.seed)]
        words += [] if self.limit is None else ["--limit", str(self.limit)]
        words += [] if self.target is None else ["--target", self.target]
        words += [] if self.from_ is None else ["--from", self.from_]
        words += [] if self.start is None else ["--start", self.start]
        for name, value in (given_fields(self.overrides) | self.found_fields()).items():
            given = value if isinstance(value, tuple | list) else [value]
            words += [
                f"--{name.replace('_', '-')}",
                *(str(one).lower() if isinstance(one, bool | None) else str(one) for one in given),
            ]
        return shlex.join(words)

    def found_fields(self) -> dict[str, Any]:
        """What --minutes decided: its plan, and where they are not the recipe's rates and how the head is fitted."""
        if self.minutes is None:
            return {}
        asked, found = self.chosen_recipe(), self.trained_by
        planned = [name for name in sorted(_PLANNED) if getattr(found, name) is not None]
        others = (*sorted(_PLANNED - {"least_steps"}), *RATES, "refit")  # epochs say all of it
        names = [*planned, *(n for n in others if getattr(found, n) != getattr(asked, n))]
        return {name: getattr(found, name) for name in names}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        val = next((name for name in result if name.startswith("val_")), "val_accuracy")
        kept = f"{result.get('kept_epoch', '–')}, {val.replace('_', ' ')} {measured_text(val, result[val])}"
        rows = [
            ["pack", result["pack"]],
            ["kept epoch", kept],
            *(
                [name.replace("_", " "), measured_text(name, result[name])]
                for name in result
                if name.startswith("test_")
            ),
            *([["fed at", f"{result['test_side']} px, the best on val"]] if "val_by_test_side" in result else []),
            *([["head", "learned from val too, after it was measured"]] if "learned_from_val" in result else []),
            ["size", size_text(result["bytes"])],
            ["bits per weight", f"{result['bits_per_weight']:.3f}"],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"try: polymask predict {self.name} IMAGE --library {self.out}", style="dim")
        if self.report:
            console.print(f"look at {result['report']}", soft_wrap=True, markup=False)
        else:
            folder = self.checkpoint.parent
            console.print(f"see its curves and mistakes: polymask report {folder}", style="dim", soft_wrap=True)


def advice(data: "DomainData", recipe: Recipe) -> str:
    """What to change where nothing was learned: the images first, then the rate."""
    count, images = len(data.classes), len(data.train)
    if images < _FEW_IMAGES * count:
        return (
            f"there are {images} training images of {count} classes; add images, {_FEW_IMAGES} of each class at least"
        )
    usual = RECIPES.get(recipe.name, RECIPES["standard"]).rate
    if not recipe.epochs:
        return "the base's own features say nothing of these classes; give it more minutes, or --epochs"
    if recipe.epochs * images < 1000:
        return f"{recipe.epochs} epochs of {images} images are few steps; try --epochs {5 * recipe.epochs} --force"
    if recipe.rate < usual / 10:
        return f"the rate of {recipe.rate:g} is very low; try --rate {usual:g} --force, or more epochs"
    lower = usual if recipe.rate > usual else recipe.rate / 5
    return f"the rate of {recipe.rate:g} may be too high for these images; try --rate {lower:g} --force, or more epochs"


def read_plan(file: Path) -> tuple[dict[str, Any], Recipe]:
    """What was asked of --minutes, and the recipe that it chose."""
    try:
        plan = json.loads(file.read_text())
        return dict(plan["asked"]), Recipe(**plan["recipe"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(f"{file} is not a plan ({error}); --fresh makes a new one") from error


_PLANNED = {"epochs", "side", "first_side", "test_side", "frozen_side", "resized", "train_on_val"}  # by --minutes
_PLANNED |= {"autocast", "channels_last", "least_steps"}
_FEW_IMAGES = 5  # of a class: with fewer nothing general can be learned
