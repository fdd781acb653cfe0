"""New classes for a domain that exists, without its old images.

Three ways, from the one that changes least to the one that can learn most:

    head   the rows of the new classes are learned, nothing else: old logits stay the same to the bit
    norms  the head and the scales and shifts of the domain's own norms
    mask   all that the domain learned: masks, scalars or whatever its method has

`norms` and `mask` have the old network as teacher:

    L = CE(z) + KL(softmax(z'/2) || softmax(z/2)) over the old classes

z' are its logits on the new images. Without old images the CE has no gradient by the logits of old classes: on new
images alone it would only push them down. Statistics of norms stay as they were: the new images are only a part of the
domain's. In the end the rows of new classes are learned again, as in `head`, under the network as it is then. Rates are
a fifth of the recipe's.

What the pack keeps to tell unknown images stands for old images where rows are learned: features drawn around each old
class. Where a few old images were kept, they are learned from as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.accounting import bits_per_weight
from polymask.core.base import Base
from polymask.core.domain import LIKENESS, Domain
from polymask.core.heads import BlockLinear
from polymask.core.network import structural_copy
from polymask.core.parts import Objective
from polymask.core.unknown import Unknown
from polymask.data.cache import cache_splits
from polymask.data.images import DomainData, plain_name, some
from polymask.data.load import load_data
from polymask.data.loader import Loader, loader_at
from polymask.data.preprocess import augmenting
from polymask.data.split import JoinedSplit, Split
from polymask.errors import DataError, DomainError, MethodError
from polymask.train.fit import Listener, fit
from polymask.train.predict import evaluate, likeness, network, read_likeness, write_likeness
from polymask.train.recipe import Recipe, get_recipe
from polymask.train.unknown import Observed, extend_unknown, observe

Way = Literal["head", "norms", "mask"]
WAYS: tuple[Way, ...] = get_args(Way)
_TEMPERATURE = 2.0  # of what the teacher says
_IMAGINED = 20  # features of each old class
_RATE = 0.2  # of a recipe's rates: much is known already
_DECAY = 1e-3  # of new rows, on features of mean 0 and mean square 1


@dataclass(frozen=True)
class Extended:
    """A domain with new classes, in its stored form; accuracies in percent, among all classes."""

    domain: Domain
    old_classes: int
    new_classes: int
    way: Way
    exemplars: int  # old images that were learned from
    new_test_accuracy: float | None  # on test images of the new classes
    exemplar_accuracy: float | None  # on the old images that are there

    @property
    def notes(self) -> dict[str, Any]:
        """What was done, as JSON."""
        names = ("way", "old_classes", "new_classes", "exemplars", "new_test_accuracy", "exemplar_accuracy")
        return {name: getattr(self, name) for name in names}


def extend(
    base: Base,
    domain: Domain,
    data: Any,
    *,
    way: Way = "head",
    recipe: str | Recipe = "standard",
    exemplars: Split | None = None,
    teacher: float = 1.0,
    seed: int = 0,
    listener: Listener | None = None,
) -> Extended:
    """A domain that knows the classes of `data` too; the given one stays as it is.

    `data` is what `load_data` takes or gives, with new classes alone. `exemplars` are old images with their labels.
    `recipe` is for the ways that train the network, and `teacher` the weight of what the old one says; with 0 it says
    nothing: plain training on the new images.
    """
    recipe = get_recipe(recipe)
    if isinstance(data, str | Path):
        data = load_data(data, seed=seed, fewest=1)
    check_extends(base, domain, data, way)
    old = domain.frozen().to(base.device)
    first = len(old.classes or [])
    train, val = (_shifted(split, first) for split in (data.train, data.val))
    seen = observe(base, old, loader_at(train, old.input))
    kept = None if exemplars is None else observe(base, old, loader_at(exemplars, old.input))
    wider = _widened(old, data.classes, _new_rows(old, seen, kept, len(data.classes), seed, old.unknown))
    if way != "head":
        images = train if exemplars is None else JoinedSplit(train, exemplars)
        lesson = Teacher(base, old, wider, teacher) if teacher else None
        assert isinstance(wider.head, BlockLinear)
        wider.head.held = len(wider.head.blocks) - 1 if teacher and exemplars is None else 0
        _train(base, wider, data, images, way, recipe, seed=seed, listener=listener, also=lesson)
        if teacher:
            seen = observe(base, wider, loader_at(train, old.input))
            kept = None if exemplars is None else observe(base, wider, loader_at(exemplars, old.input))
            _put_rows(wider, _new_rows(wider, seen, kept, len(data.classes), seed, old.unknown))
    if old.unknown is not None:
        held_out = observe(base, wider, loader_at(val, old.input))
        wider.unknown = extend_unknown(old.unknown, seen, held_out, first)
    return _measured(base, old, wider, data, way, exemplars)


def check_extends(base: Base, domain: Domain, data: DomainData, way: Way) -> None:
    """Raise unless a domain can learn the classes of these images in this way."""
    domain.check_base(base)
    if way not in WAYS:
        raise DomainError(f"way {way!r} is not known; take one of {', '.join(WAYS)}")
    if domain.classes is None or domain.target.kind != "classes" or data.target.kind != "classes":
        raise DomainError("only a domain of classes gets new ones, from images with one class each")
    there = {plain_name(name) for name in domain.classes}
    if known := [name for name in data.classes if plain_name(name) in there]:
        raise DomainError(
            f"{some(known, 4)}: the domain has {'this class' if len(known) == 1 else 'these classes'} already; give a "
            "folder of new classes alone, or rename them"
        )
    if base.feature_dim is None:
        raise DomainError(f"base {base.name} does not give one feature vector an image, so there is no head to extend")
    if way == "norms" and not any(True for _, norm in domain.named_norms() for _ in norm.parameters()):
        raise DomainError(f"the domain ({domain.method.name}) has no norms of its own to learn; take head or mask")
    method = domain.method
    if way != "head" and not method.learns_on:
        raise MethodError(f"{method.name} learns in stages or with other domains, so it cannot learn on; take head")


def _shifted(split: Split, first: int) -> Split:
    return split.relabelled(split.labels + first)


def _widened(old: Domain, names: Sequence[str], rows: tuple[Tensor, Tensor]) -> Domain:
    """A copy of a domain with new rows in its head, after the old ones, which are computed by themselves."""
    wider, head = structural_copy(old), old.head
    assert head is not None
    weight, bias = (torch.cat([t.detach(), new.to(t)]) for t, new in zip((head.weight, head.bias), rows, strict=True))
    blocks = head.blocks if isinstance(head, BlockLinear) else (head.out_features,)
    larger = nn.Linear(head.in_features, len(weight), device="meta")
    larger.weight, larger.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
    wider.head = BlockLinear(larger, (*blocks, len(names)))
    wider.classes = [*(old.classes or []), *names]
    wider.unknown, wider.recipe, wider.metrics = None, dict(old.recipe), {}
    return wider


def _new_rows(
    domain: Domain, seen: Observed, kept: Observed | None, count: int, seed: int, known: Unknown | None
) -> tuple[Tensor, Tensor]:
    """The rows that tell new classes from each other and from old ones, whose logits are fixed: a convex problem.

    min over V, c of  mean over classes of mean over their images of CE([z_old, V f + c]) + decay |V|² / 2

    with features f of mean 0 and mean square 1; both are folded into what is given. Where nothing stands for old
    classes, rows are made no longer than those of old classes are on average.
    """
    first = int(seen.labels.min())  # of the new classes; a domain may have them already, to be learned again
    parts = [replace(one, logits=one.logits[:, :first]) for one in (seen, kept) if one is not None]
    drawn = None if known is None else known.imagined(_IMAGINED, torch.Generator().manual_seed(seed))
    if drawn is not None:
        features = drawn.flatten(0, 1)
        with torch.no_grad():
            logits = domain.classify(features.to(_device(domain))).float().cpu()[:, :first]
        # Of kept images nothing says what they show; and what is drawn where another class is nearer would mislead.
        parts.append(Observed(features, logits, logits.argmax(1)))
    features, fixed = (torch.cat([getattr(p, name) for p in parts]).double() for name in ("features", "logits"))
    labels = torch.cat([p.labels for p in parts])
    mean = features.mean(0)
    scale = (features - mean).square().mean().sqrt().clamp_min(1e-12)
    features = (features - mean) / scale
    weights = 1 / torch.bincount(labels, minlength=first + count).clamp_min(1)[labels].double()
    weights /= weights.sum()
    rows = torch.zeros(count, features.shape[1], dtype=torch.float64, requires_grad=True)
    shifts = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([rows, shifts], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = torch.cat([fixed, features @ rows.T + shifts], 1)
        found = (F.cross_entropy(logits, labels, reduction="none") * weights).sum() + _DECAY * rows.square().sum() / 2
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    made, centre = rows.detach() / scale, shifts.detach()
    if len(parts) == 1:
        assert domain.head is not None
        length = domain.head.weight[:first].double().cpu().norm(dim=1).mean()
        factor = (length / made.norm(dim=1).mean().clamp_min(1e-12)).clamp_max(1)
        made, centre = factor * made, factor * centre
    found = made, centre - made @ mean
    if not all(torch.isfinite(part).all() for part in found):
        raise DataError("the features of the new images are not finite; look at the images")
    return found


def _device(domain: Domain) -> torch.device:
    assert domain.head is not None
    return domain.head.weight.device


class Teacher(Objective):
    """weight * KL(softmax(z'/T) || softmax(z/T)) over the old classes; z' are the old network's logits."""

    def __init__(self, base: Base, old: Domain, wider: Domain, weight: float) -> None:
        super().__init__()
        self.weight = weight
        # Not submodules: they do not learn, and no checkpoint needs them.
        self.old, self.wider, self.classes = (network(base, old),), (wider,), len(old.classes or [])

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        with torch.no_grad():
            then = self.old[0](images).float()
        head, first = self.wider[0].head, self.classes
        assert head is not None
        now = F.linear(features.to(head.weight.dtype), head.weight[:first], head.bias[:first]).float()
        p, q = (F.log_softmax(logits / _TEMPERATURE, 1) for logits in (then, now))
        return self.weight * F.kl_div(q, p, reduction="batchmean", log_target=True)


def _train(
    base: Base, wider: Domain, data: DomainData, images: Split, way: Way, recipe: Recipe, *, seed: int, **how: Any
) -> None:
    """Let the network learn too."""
    recipe = recipe.stage(0.0, 1.0, _RATE)
    for name, part in wider.named_parts() if way == "mask" else ():
        if not part.relearn(recipe.rate):
            raise MethodError(f"{wider.method.name} cannot learn on from its stored form ({name}); take head or norms")
    spec = wider.input
    assert wider.head is not None
    wider.head.requires_grad_(True)
    wider.norms.requires_grad_(True)
    wider.gathers_statistics = False
    # Old classes have no images, and a head.
    recipe = replace(recipe, selection="last", patience=None, balance=None, refit=None, head_start=None)
    augment = augmenting(spec, mirror=data.mirror, scale=recipe.random_scale)
    (cache,) = cache_splits([images], augment.shrink)
    batches = Loader(cache, augment, batch_size=recipe.batch_size, seed=seed, shuffle=True)
    fit(base, wider, batches, None, recipe, seed=seed, **how)
    wider.gathers_statistics, wider.input = True, spec
    if isinstance(wider.head, BlockLinear):
        wider.head.held = 0


@torch.no_grad()
def _put_rows(wider: Domain, rows: tuple[Tensor, Tensor]) -> None:
    """Put rows in place of the last ones of a head."""
    assert wider.head is not None
    for tensor, new in zip((wider.head.weight, wider.head.bias), rows, strict=True):
        tensor[-len(new) :] = new.to(tensor)


def _measured(base: Base, old: Domain, wider: Domain, data: DomainData, way: Way, exemplars: Split | None) -> Extended:
    first = len(old.classes or [])
    new = None if data.test is None else evaluate(base, wider, loader_at(_shifted(data.test, first), old.input))
    kept = None if exemplars is None else evaluate(base, wider, loader_at(exemplars, old.input))
    count = 0 if exemplars is None else len(exemplars)
    found = Extended(wider, first, len(data.classes), way, count, new, kept)
    earlier = wider.recipe.get("extended")
    wider.recipe["extended"] = [*(earlier if isinstance(earlier, list) else []), {"data": data.name} | found.notes]
    before = read_likeness(wider.likeness, base.feature_dim)
    if before is not None and (note := likeness(base, data.train)) is not None:
        after = read_likeness(note, base.feature_dim)
        assert after is not None
        wider.recipe[LIKENESS] = write_likeness(first * before + len(data.classes) * after)
    wider.metrics = {"new_test_accuracy": new, "bits_per_weight": bits_per_weight(base, wider)}
    wider.metrics |= {"learned_from_val": True} if old.metrics.get("learned_from_val") else {}
    return replace(found, domain=wider.frozen())
