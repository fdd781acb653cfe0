"""A job of a benchmark: one method on one domain, or on all where it cannot treat them alone."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from polymask.benchmarks.records import RESULT, DomainOutcome, LayerStatistics, Outcome, read_outcome
from polymask.benchmarks.submission import DOMAIN_IDS, read_labels, write_submission
from polymask.benchmarks.suites import DECATHLON, Protocol
from polymask.core.accounting import account_fitted, bits_per_weight, component_bits
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.data.cache import cache_splits
from polymask.data.images import DomainData, limited, require_classes
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.preprocess import eval_transform, train_transform
from polymask.data.split import Split
from polymask.errors import BenchmarkError, NotFinite
from polymask.files import SUFFIX
from polymask.nets.zoo import load_base
from polymask.pack.storing import load_domain
from polymask.train.fit import EpochLog, Listener, Together
from polymask.train.fit_all import Fitted, Lesson, fit_all
from polymask.train.learn import Loaders, last_stage, make_loaders
from polymask.train.predict import logits, network, own_network
from polymask.train.recipe import Recipe, read_method
from polymask.train.state import plain

CUT_SEED = 0  # every seed of a benchmark sees the same images
_FEEDING = ("batch_size", "side", "resized", "square", "crop_scale", "mirror")  # for loaders


@dataclass(frozen=True)
class BaseName:
    """How a job gets its base."""

    name: str
    weights: Path | None = None
    device: str = "auto"

    @property
    def file(self) -> Path | None:
        """The file that its weights come from; None where its name alone says which."""
        return Path(self.name) if self.name.endswith(SUFFIX) else self.weights

    def at(self, file: Path) -> "BaseName":
        """The same base from another file."""
        return replace(self, name=str(file)) if self.name.endswith(SUFFIX) else replace(self, weights=file)


@dataclass(frozen=True)
class Job:
    """All that one job needs to know; plain data, so that it can be sent to another process."""

    base: BaseName
    method: str  # as in the plan: a name, with options and fields of its recipe or without
    trained_as: str  # the same, with what a search has chosen
    domains: tuple[tuple[str, str], ...]  # name, source; in the order in which they are learned
    seed: int
    direction: str  # "" for one domain alone, else down or up
    protocol: Protocol
    total: int  # domains of the plan and the base's own
    folder: Path
    own: tuple[str, str] | None = None  # the base's own domain, for methods that use it
    cache: Path | None = None

    @property
    def title(self) -> str:
        what = f"together {self.direction}" if self.direction else self.domains[0][0]
        shown = self.trained_as if self.protocol.searching else self.method
        return f"{shown} · {what} · seed {self.seed}"

    def outcome(self) -> Outcome | None:
        """What it found, if it is done."""
        if not (self.folder / RESULT).exists():
            return None
        found = read_outcome(self.folder / RESULT)
        if differing := self._differing(found):
            raise BenchmarkError(
                f"{self.folder} was trained with other settings: {', '.join(differing)}; delete it, or give another "
                "--out"
            )
        return found

    def _differing(self, found: Outcome) -> list[str]:
        """In which fields of recipe and method a result is of another training, as far as it tells them."""
        text = read_method(self.trained_as)
        recipe, method = text.recipe(self.protocol.training), text.method(self.protocol.training)
        then, now = plain(dict(found.recipe)), plain(recipe.to_json())
        pairs = {name: (then.get(name), now.get(name)) for name in {*then, *now} if then}
        options, asked = plain(dict(found.options)), plain(method.options())
        pairs |= {name: (options[name], asked[name]) for name in asked if name in options}
        return sorted(f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new)


def run_job(job: Job, listener: Listener | None = None) -> Outcome:
    """Do a job, from where it was cut if it was; what is done is not done again."""
    done = job.outcome()
    if done is not None:
        return done
    began = time.perf_counter()
    base = load_base_of(job.base)
    text = read_method(job.trained_as)
    recipe, method = text.recipe(job.protocol.training), text.method(job.protocol.training)
    lessons = {name: _lesson(base, name, source, job, recipe) for name, source in job.domains}
    own = None
    if job.own is not None and (method.moves_base or method.base_stage):
        whole = replace(job.protocol, classes=())  # the base's classifier knows all of its own
        own = _lesson(base, *job.own, replace(job, protocol=whole), recipe)
    job.folder.mkdir(parents=True, exist_ok=True)
    log = EpochLog(job.folder / "log.jsonl", {"method": job.method, "seed": job.seed})
    packs, listeners = job.folder / "packs", Together(log, listener or Listener())
    fitted = None
    try:
        fitted = fit_all(
            base, lessons, method, recipe, own=own, seed=job.seed, folder=packs, resume=True, listener=listeners
        )
    except NotFinite:
        if not job.protocol.searching:
            raise  # a trial that ends so has found nothing, which is a result
    size = None if fitted is None else account_fitted(base, list(fitted.domains.values()), domains=job.total)
    outcome = Outcome(
        method=job.method,
        registered=method.name,
        options=method.options(),
        seed=job.seed,
        direction=job.direction,
        domains={} if fitted is None else _outcomes(base, job, recipe, lessons, fitted, packs),
        base_after=None if fitted is None or fitted.base is None else asdict(fitted.base),
        params_paper=0.0 if size is None else size.params_paper,
        params_stored=0.0 if size is None else size.params_stored,
        recipe=plain(recipe.to_json()),
        seconds=time.perf_counter() - began,
    )
    outcome.write(job.folder)
    shutil.rmtree(packs / "learned", ignore_errors=True)
    return outcome


def _outcomes(
    base: Base, job: Job, recipe: Recipe, lessons: Mapping[str, Lesson], fitted: Fitted, packs: Path
) -> dict[str, DomainOutcome]:
    """What was reached on each domain, and what is kept for it."""
    held_out = job.protocol.selection == "val"
    found = {}
    for name, domain in fitted.domains.items():
        history = fitted.histories[name]
        kept = last_stage(domain.method, recipe, history, domain.target)
        best = max((value or 0.0 for value in kept), default=0.0) if held_out else None
        tested = lessons[name].test is not None  # else the two are of val
        flipped, masked = _bits_moved(domain)
        found[name] = DomainOutcome(
            test_accuracy=fitted.final[name] if tested else None,
            learned=fitted.learned[name] if tested else None,
            val_accuracy=best,
            epochs=tuple(asdict(record) for record in history),
            pack_bytes=(packs / f"{name}{SUFFIX}").stat().st_size,
            bits_per_weight=bits_per_weight(base, domain, sharing=len(fitted.domains)),
            components=component_bits(domain),
            layers=layer_statistics(domain),
            flipped=flipped,
            masked=masked,
        )
    return found


def _bits_moved(domain: Domain) -> tuple[int, int] | tuple[None, None]:
    """How many bits of a domain's learned masks are not as they started, and of how many."""
    known = [
        (flipped, mask.numel())
        for _, transform in domain.named_transforms()
        if (flipped := transform.flipped()) is not None and (mask := transform.mask()) is not None
    ]
    return (sum(f for f, _ in known), sum(n for _, n in known)) if known else (None, None)


def load_domain_data(name: str, source: str, protocol: Protocol) -> DomainData:
    """A domain's images as a protocol uses them: unless val is held out, train has them too."""
    data = load_data(source, seed=CUT_SEED, classes=protocol.classes_of(name))
    require_classes(data, "a benchmark")
    if data.test is None and data.submission is not None and protocol.labels is not None:
        data = _labelled(data, protocol.labels)
    if protocol.searching:
        data = replace(data, test=data.val)
    elif protocol.selection != "val":
        notes = tuple(note for note in data.notes if not note.startswith("val is"))
        data = replace(data, train=data.train_val, notes=notes)
    if protocol.limit is not None and protocol.limit < len(data.train):
        data = replace(data, train=limited(data.train, protocol.limit, CUT_SEED, data.name))
    return data


@lru_cache(maxsize=1)
def load_base_of(name: BaseName) -> Base:
    """The base, kept for the next job."""
    return load_base(name.name, weights=name.weights, device=name.device)


def layer_statistics(domain: Domain) -> tuple[LayerStatistics, ...]:
    """Mask density and mean scalars of every site with a mask, in the base's order."""
    layers: list[LayerStatistics] = []
    for name, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is None:
            continue
        means = {k: values.double().mean().item() for k, values in transform.scalars().items()}
        layers.append(
            LayerStatistics(
                site=name,
                kind=_kind(domain.sites[name].shape, is_first=not layers),
                depth=len(layers),
                weights=mask.numel(),
                density=mask.double().mean().item(),
                **{k: means.get(k, 0.0) for k in ("k1", "k2", "k3")},
            )
        )
    return tuple(layers)


def _kind(shape: tuple[int, ...], *, is_first: bool) -> str:
    """What a weight of shape (out, in / groups, kernel…) is, as far as its shape shows."""
    _, inputs, *kernel = shape
    if not kernel:
        return "linear"
    # One input channel means a group for each, except in a first layer that reads grey images.
    if inputs == 1 and not is_first:
        return "depthwise"
    return "pointwise" if all(side == 1 for side in kernel) else "conv"


def _lesson(base: Base, name: str, source: str, job: Job, recipe: Recipe) -> Lesson:
    fed = {field: getattr(recipe, field) for field in _FEEDING}
    # Rows that differ in their rates only share the decoded images.
    protocol = replace(job.protocol, recipe=Recipe(selection="best", **fed))
    data, loaders = _loaders(base, name, source, protocol, job.cache)
    shared = loaders.train
    spec, early = recipe.input(base.input, squash=data.squash), None
    if recipe.first_side is not None:
        early = train_transform(data, spec.at(recipe.first_side), scale=recipe.random_scale), recipe.epochs // 2
    train = Loader(
        shared.cache,
        shared.transform,
        batch_size=shared.batch_size,
        seed=job.seed,
        shuffle=True,
        balanced=recipe.balance == "sampler",
        early=early,
    )
    selection = "last" if job.protocol.searching else job.protocol.selection
    chosen = {"last": None, "val": loaders.val, "test": loaders.test}[selection]
    return Lesson(data.classes, train, chosen, loaders.test, spec, split_seed=data.seed)


@lru_cache(maxsize=12)
def _loaders(base: Base, name: str, source: str, protocol: Protocol, cache: Path | None) -> tuple[DomainData, Loaders]:
    """Decoded images of a domain, kept for the next jobs on it."""
    data = load_domain_data(name, source, protocol)
    crops = protocol.crops_of(data.mirror)
    return data, make_loaders(data, base.input, protocol.recipe, cache=cache, crops=crops)


_read_labels = lru_cache(maxsize=1)(read_labels)


def _labelled(data: DomainData, file: Path) -> DomainData:
    """The domain with labels for its test images from the organisers' archive."""
    assert data.submission is not None
    labels = _read_labels(file)[DECATHLON.find(data.name)]
    number = {c: place for place, c in enumerate(data.submission.category_ids.tolist())}
    answers = [number.get(labels.get(i, -1), -1) for i in data.submission.image_ids.tolist()]
    if -1 in answers:
        raise BenchmarkError(f"{file} does not have the labels of {data.name}'s test images; leave out --labels")
    return replace(data, test=data.submission.images.relabelled(answers), notes=())


def eval_loader(
    base: Base, data: DomainData, split: Split, protocol: Protocol, cache: Path | None, spec: InputSpec | None = None
) -> Loader:
    """A domain's images as they are measured, in order."""
    spec = spec or protocol.recipe.input(base.input, squash=data.squash)
    preprocess = eval_transform(data, spec, crops=protocol.crops_of(data.mirror))
    (cached,) = cache_splits([split], preprocess.shrink, folder=cache)
    return Loader(cached, preprocess, batch_size=64)


def write_submissions(jobs: Sequence[Job]) -> list[Path]:
    """Predict every test image with the jobs' packs and write METHOD/results….json.

    A file is for the challenge's server only if the run has all ten domains in full; with fewer it holds the answers
    for those, and is good for offline comparison.
    """
    groups: dict[Path, list[Job]] = {}
    for job in jobs:
        order = f"-{job.direction}" if job.direction else ""
        path = job.folder.parent.parent / f"results{order}-seed-{job.seed}.json"
        groups.setdefault(path, []).append(job)
    for path, group in groups.items():
        answers: dict[str, dict[str | int, int]] = {}
        for job in group:
            base = load_base_of(job.base)
            for name, source in job.domains:
                domain = load_domain(job.folder / "packs" / f"{name}{SUFFIX}", base)
                answers[name] = _answers(base, network(base, domain), job, name, source, domain.input)
            # A method that changes the base answers for its own domain by what that is then, which no pack holds.
            if job.own is not None and "imagenet12" not in answers and not domain.method.moves_base:
                answers["imagenet12"] = _answers(base, own_network(base), job, *job.own, None)
        write_submission(path, answers, complete=set(answers) == set(DOMAIN_IDS))
    return list(groups)


def _answers(
    base: Base, net: Callable[[Tensor], Tensor], job: Job, name: str, source: str, spec: InputSpec | None
) -> dict[str | int, int]:
    """A network's answers; `spec` says how its images are fed where that is not as the base's."""
    data = load_domain_data(name, source, job.protocol)
    if data.submission is None:
        raise BenchmarkError(f"{source} has nothing to submit; run without --classes")
    loader = eval_loader(base, data, data.submission.images, job.protocol, job.cache, spec)
    labels = [label for images, _ in loader.batches() for label in logits(net, base.placed(images)).argmax(1).tolist()]
    return dict(zip(data.submission.image_ids.tolist(), labels, strict=True))
