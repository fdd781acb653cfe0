"""Several domains by any method: one after another, or all together, from one call.

Methods that treat domains alone (masks, adapters) give here what `fit` gives for each. Others
depend on the order, hand weights on, or train what domains share; what they forget is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.core.method import Method
from polymask.core.registry import new_domain
from polymask.core.target import CLASSES, Target, get_target
from polymask.data.batches import Batches, as_batches, parts_of
from polymask.errors import DomainError, MethodError, TrainingError, near_matches
from polymask.files import SUFFIX, check_name
from polymask.pack.storing import load_domain
from polymask.train.fit import Listener, fit, fit_joint, training_batches
from polymask.train.learner import EpochRecord, as_later
from polymask.train.predict import accuracy, evaluate, own_network
from polymask.train.recipe import Recipe, get_recipe, method_by, seeds_note
from polymask.train.state import images_identity, plain

_BATCHES = 4  # of each domain, for the agreement
_MOST = 100  # batches at most, for the statistics of norms
_OWN = "own"  # the base's own domain, among files


@dataclass(frozen=True)
class BaseAfter:
    """How far a base was moved, and what its own classifier still knows, in percent.

    `change` is |W' - W| / |W| over all tensors that were moved. `agreement` is the share of the
    domains' images that the base's own classifier still puts in the same class; the accuracies are
    on the base's own images, where those were given.
    """

    change: float
    agreement: float | None
    accuracy_before: float | None
    accuracy_after: float | None


@torch.no_grad()
def measure_base(base: Base, moved: Mapping[str, Tensor], images: Sequence[Batches], own: Batches | None) -> BaseAfter:
    """Compare the base with what it was, by its weights and by its classifier."""
    if not moved:
        raise MethodError("the method moves the base, but its `moved` gives no tensors")
    before = torch.stack([base.tensor(name).double().norm() for name in moved]).norm()
    gap = torch.stack([(tensor.double() - base.tensor(name).double()).norm() for name, tensor in moved.items()]).norm()
    change = float(gap / before)
    if base.head is None:
        return BaseAfter(change, None, None, None)
    then, now = own_network(base), own_network(base, moved)
    same = total = 0
    for batches in images:
        for batch, _ in islice(batches.batches(0), _BATCHES):
            batch = base.placed(batch)
            same += int((then(batch).argmax(1) == now(batch).argmax(1)).sum())
            total += len(batch)
    accuracies = [None if own is None else accuracy(net, own, base.placed) for net in (then, now)]
    return BaseAfter(change, 100 * same / total, *accuracies)


@dataclass(frozen=True)
class Lesson:
    """A domain to learn: its classes, what gives its images, how they were fed, and what its labels are.

    Images are batches of `make_loaders`, a DataLoader, a Dataset or a Hugging Face dataset of (image, label); `train`
    may also be a dict or tuple of train, val and test. `split_seed` is the seed that cut them, where it is another than
    that of training: the domain's pack keeps it, so that `evaluate` and `calibrate` cut a folder alike.
    """

    classes: Sequence[str]
    train: Any
    val: Any = None
    test: Any = None
    input: InputSpec | None = None  # None: as the training images have it, or the base
    target: str | Target = CLASSES
    split_seed: int | None = None

    def opened(self, base: Base, recipe: Recipe, seed: int, *, resume: bool) -> Self:
        """The same with batches in place of loaders and sets."""
        parts = {"val": self.val, "test": self.test} | parts_of(self.train)
        known = self.input or base.input
        train, spec = training_batches(parts["train"], known, self.classes, recipe, seed, resume=resume)
        spec = self.input or spec
        others: dict[str, Any] = {
            n: None if parts[n] is None else as_batches(parts[n], spec, self.classes) for n in ("val", "test")
        }
        return replace(self, train=train, input=spec, **others)


@dataclass(frozen=True)
class Fitted:
    """Domains in their stored form, with accuracies in percent: on test, else on val, else None."""

    domains: dict[str, Domain]
    histories: dict[str, list[EpochRecord]]
    learned: dict[str, float | None]  # right after a domain's own training
    final: dict[str, float | None]  # when all domains are learned
    base: BaseAfter | None  # what became of the base, where the method moves it

    @property
    def forgotten(self) -> dict[str, float]:
        """Points that each domain lost between its own training and the end."""
        pairs = {name: (before, self.final[name]) for name, before in self.learned.items()}
        return {name: a - b for name, (a, b) in pairs.items() if a is not None and b is not None}


def fit_all(
    base: Base,
    lessons: Mapping[str, Lesson],
    method: str | Method = "affine-full",
    recipe: str | Recipe = "quick",
    *,
    order: Sequence[str] | None = None,
    own: Lesson | None = None,
    seed: int = 0,
    folder: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **options: Any,
) -> Fitted:
    """Teach `base` several domains, in `order` (that of `lessons` if none is given).

    `own` is the base's own domain (ImageNet, say): methods that train the base's weights first
    (PackNet) learn on it, and what is left of the base is measured on it. With `folder`
    the packs are written there in the end, and what is needed to go on in its folder `learned`:
    `resume` skips what is done and goes on with what was cut. `options` are the method's.
    """
    recipe = get_recipe(recipe)
    if isinstance(method, str):
        method = method_by(recipe, method, **options)
    elif options:
        raise DomainError(f"options {sorted(options)} go with a method's name, not an instance")
    method.check_own(own is not None)
    for field in ("test_side", "frozen_side"):
        if getattr(recipe, field) not in (None, "auto"):  # auto: where it can be
            raise TrainingError(f"{field} is for one domain (learn); several are measured as they learned")
    names = _checked_order(lessons, order)
    method = method.for_domains(len(names) + 1)
    chosen = {name: lessons[name].opened(base, recipe, seed, resume=resume) for name in names}
    own = None if own is None else own.opened(base, recipe, seed, resume=resume)
    teacher = _Teacher(base, recipe, seed, folder, resume, listener)
    domains = teacher.together(method, chosen) if method.joint else teacher.in_turn(method, chosen, own)
    learned = {name: lesson_accuracy(base, domains[name], chosen[name]) for name in names}

    final = dict(learned)
    settled = method.settle(base, list(domains.values()))
    for name, domain in zip(names, settled, strict=True):
        if domain is not domains[name]:
            domain.input = domains[name].input
            domain = method.finish(base, domains[name], domain, partial(_measured, base, chosen[name]))
            domains[name] = teacher.refine(name, domain, chosen[name])
            final[name] = lesson_accuracy(base, domain, chosen[name])
    for name, domain in domains.items():
        domain.recipe = domain.recipe | seeds_note(seed, chosen[name].split_seed)
    if folder is not None:
        for name, domain in domains.items():
            on = "val" if chosen[name].test is None else "test"
            domain.metrics = {f"{on}_{domain.target.metric}": final[name]}
            domain.save(folder / f"{name}{SUFFIX}")
    after = None
    if method.moves_base:
        moved = method.moved(base, list(domains.values()))
        images = [as_later(lesson.train) for lesson in chosen.values()]
        after = measure_base(base, moved, images, None if own is None else own.test or own.val)
        if own is not None and teacher.own is not None:  # with the head that it learned there
            after = replace(after, accuracy_after=lesson_accuracy(base, teacher.own, own))
    return Fitted(domains, teacher.histories, learned, final, after)


def _measured(base: Base, lesson: Lesson, domain: Domain) -> float:
    """Gather the statistics of a domain's norms again, from its training images; its result on val, or on those."""
    train = as_later(lesson.train)
    domain.reestimate_norms(base, (base.placed(images) for images, _ in islice(train.batches(0), _MOST)))
    found = evaluate(base, domain, train if lesson.val is None else lesson.val)
    return -found if domain.target.lower_is_better else found


def lesson_accuracy(base: Base, domain: Domain, lesson: Lesson) -> float | None:
    """In percent, on a lesson's test images, or on val, or None where it has neither."""
    batches = lesson.test or lesson.val
    return None if batches is None else evaluate(base, domain, batches)


class _Teacher:
    """What learning in turn and learning together share: seeds, files, histories."""

    def __init__(
        self, base: Base, recipe: Recipe, seed: int, folder: Path | None, resume: bool, listener: Listener | None
    ) -> None:
        self.base, self.recipe, self.seed, self.resume = base, recipe, seed, resume
        self.how: dict[str, Any] = {"seed": seed, "resume": resume, "listener": listener}
        self.work = None if folder is None else folder / "learned"
        self.histories: dict[str, list[EpochRecord]] = {}
        self.own: Domain | None = None  # the base's own domain, where it was learned first
        if self.work is not None:
            self.work.mkdir(parents=True, exist_ok=True)

    def in_turn(self, method: Method, lessons: Mapping[str, Lesson], own: Lesson | None) -> dict[str, Domain]:
        """Learn one domain after another; each may build on those before it."""
        earlier: list[Domain] = []
        if own is not None and method.base_stage:
            self.own = self._learn_one(_OWN, method.for_base(), own, earlier)
            earlier.append(self.own)
        domains = {}
        for name, lesson in lessons.items():
            domains[name] = self._learn_one(name, method.after(earlier), lesson, earlier)
            earlier.append(domains[name])
        return domains

    def together(self, method: Method, lessons: Mapping[str, Lesson]) -> dict[str, Domain]:
        """Learn all domains at once, with what they share."""
        domains = {name: self._new(method, lesson) for name, lesson in lessons.items()}
        method.tie(list(domains.values()))
        trains, vals = [lesson.train for lesson in lessons.values()], [lesson.val for lesson in lessons.values()]
        file = self._file("joint.checkpoint")
        histories = fit_joint(self.base, list(domains.values()), trains, vals, self.recipe, checkpoint=file, **self.how)
        self.histories |= dict(zip(lessons, histories, strict=True))
        return domains

    def refine(self, name: str, domain: Domain, lesson: Lesson) -> Domain:
        """Train a domain further that the method made of one that had learned."""
        refines = domain.method.refines
        if refines is not None and any(p.requires_grad for p in domain.parameters()):
            recipe = self.recipe.stage(1 - refines.share, *refines)
            self.histories[name] = self.histories[name] + self._fit(domain, lesson, recipe, f"{name}.refined")
        domain.recipe = self._recipe_note()
        return domain

    def _learn_one(self, name: str, method: Method, lesson: Lesson, earlier: Sequence[Domain]) -> Domain:
        pack = self._file(f"{name}{SUFFIX}")
        if pack is not None and self.resume and pack.exists():
            return self._finished(pack, name, method, lesson)
        domain = self._new(method, lesson)
        if name == _OWN and isinstance(self.base.head, nn.Linear) and domain.head is not None:
            domain.head.load_state_dict(self.base.head.state_dict())
        method.follow(domain, earlier)
        later = 0.0 if method.refines is None else method.refines.share
        recipe = self.recipe.stage(0.0, 1 - later)
        if name == _OWN:
            recipe = replace(recipe, head_start=None)
        self.histories[name] = self._fit(domain, lesson, recipe, name)
        domain.recipe = self._recipe_note()
        history = [asdict(record) for record in self.histories[name]]
        about = {"options": plain(method.options()), "images": images_identity(lesson.train)}
        domain.metrics = {"history": history} | about
        if pack is not None:
            domain.save(pack)
        return domain

    def _new(self, method: Method, lesson: Lesson) -> Domain:
        torch.manual_seed(self.seed)
        domain = new_domain(self.base, method, lesson.classes, target=lesson.target).to(self.base.device)
        domain.input = lesson.input or domain.input
        return domain

    def _fit(self, domain: Domain, lesson: Lesson, recipe: Recipe, name: str) -> list[EpochRecord]:
        file = self._file(f"{name}.checkpoint")
        return fit(self.base, domain, lesson.train, lesson.val, recipe, checkpoint=file, **self.how)

    def _file(self, name: str) -> Path | None:
        return None if self.work is None else self.work / name

    def _finished(self, pack: Path, name: str, method: Method, lesson: Lesson) -> Domain:
        domain = load_domain(pack, self.base)
        found = (domain.method.name, plain(domain.recipe), domain.classes, domain.target.kind)
        wanted = (method.name, plain(self._recipe_note()), list(lesson.classes), get_target(lesson.target).kind)
        options = plain(method.options())  # a method that learns in stages ends with others than it began with
        images = images_identity(lesson.train)
        if found != wanted or domain.metrics.get("options", options) != options:
            raise TrainingError(
                f"{pack} was learned by another method, recipe, seed or classes, or with other options; resume with "
                "the same ones, or take another folder"
            )
        if domain.metrics.get("images", images) != images:
            raise TrainingError(f"{pack} was learned from other images; resume with the same ones, or another folder")
        self.histories[name] = [EpochRecord(**record) for record in domain.metrics["history"]]
        return domain

    def _recipe_note(self) -> dict[str, Any]:
        return self.recipe.to_json() | {"seed": self.seed}


def _checked_order(lessons: Mapping[str, Lesson], order: Sequence[str] | None) -> list[str]:
    names = list(lessons if order is None else order)
    if not names:
        raise TrainingError("no domain to learn; give at least one lesson")
    for name in names:
        check_name(name)
        if name not in lessons:
            raise TrainingError(f"no lesson is named {name!r}; {near_matches(name, lessons)}")
    if sorted(names) != sorted(lessons):
        raise TrainingError(f"order={names} must name each of {sorted(lessons)} once")
    return names
