"""What a trained domain says of images, and what a domain's images look like to the base.

A likeness is the direction of the mean feature of a domain's images:

    likeness = m / |m|,  m = mean over training images of the base's features

The cosine between an image's own feature and a likeness tells how well the image fits the domain.
It travels in a pack as the note `likeness` of `recipe`: float16 in base64. See docs/serve.md.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from polymask.core.base import Base
from polymask.core.domain import LIKENESS, Domain
from polymask.core.input import InputSpec
from polymask.core.network import copy_with, put_module, structural_copy, tensor_of
from polymask.core.target import CLASSES, Target
from polymask.core.unknown import Judgement, split_score
from polymask.data.batches import Batches, as_batches, parts_of
from polymask.data.preprocess import Preprocess
from polymask.data.split import Split
from polymask.errors import BaseError, DomainError, InputError
from polymask.train.evaluation import Answer, Evaluation, NamedResults, from_answers

Network = Callable[[Tensor], Tensor]


class Described(Protocol):
    """What must be known of a domain to feed it images and to say what its outputs mean."""

    @property
    def classes(self) -> list[str] | None: ...
    @property
    def input(self) -> InputSpec: ...
    @property
    def target(self) -> Target: ...
    @property
    def judgement(self) -> Judgement | None: ...
    @property
    def likeness(self) -> Any: ...


def all_labels(batches: Batches) -> Tensor:
    """The labels of all images; their pixels are read only where the batches do not say."""
    known = getattr(batches, "labels", None)
    return known if isinstance(known, Tensor) else torch.cat([labels for _, labels in batches.batches()])


def evaluate(base: Base, domain: Domain, data: Any) -> float:
    """What the domain's target is measured by: accuracy in percent, for classes.

    `data` gives (image, label): batches of `make_loaders`, a DataLoader, a Dataset, a Hugging Face dataset, or a dict
    or tuple of these, whose test (else val, else train) counts.
    """
    found = outputs(network(base, domain), measured_batches(domain, data).batches(), base.placed, domain.target)
    return domain.target.measure(*found)


def measured_batches(domain: Domain, data: Any) -> Batches:
    """What a domain is measured on: see `evaluate`."""
    parts = parts_of(data)
    chosen = next(parts[role] for role in ("test", "val", "train") if role in parts)
    return as_batches(chosen, domain.input, domain.classes)


def evaluate_in_detail(base: Base, domain: Domain, data: Any, *, hardest: int = 12) -> Evaluation:
    """Accuracy with its interval, top-5, every class, the confusion matrix, and the `hardest` images.

    `hardest` are those whose own class has the lowest probability. `data` is as for `evaluate`.
    """
    return examine(base, domain, measured_batches(domain, data).batches(), hardest)


def evaluate_by_name(base: Base, domain: Domain, batches: Batches) -> NamedResults:
    """What `evaluate` gives, and the same for each label or value of the domain."""
    target = domain.target
    found = outputs(network(base, domain), batches.batches(), base.placed, target)
    by_name = dict(zip(domain.classes or [], target.by_name(*found), strict=True))
    return NamedResults(target.metric, target.measure(*found), len(found[1]), by_name)


def examine(base: Base, domain: Domain, pairs: Iterable[tuple[Tensor, Tensor]], hardest: int) -> Evaluation:
    """The same of (images, labels)."""
    net, names = network(base, domain), domain.classes or []
    truths: list[int] = []
    guesses: list[int] = []
    answers: list[Answer] = []
    in_top5 = 0
    for images, labels in pairs:
        found = logits(net, base.placed(images)).float().cpu()
        names = names or [str(i) for i in range(found.shape[1])]
        shares, places = found.softmax(1), found.topk(min(5, found.shape[1])).indices
        own = shares.gather(1, labels[:, None])[:, 0]
        for i in own.argsort(stable=True)[:hardest].tolist():
            top = tuple((names[place], float(shares[i, place])) for place in places[i].tolist())
            answers.append(Answer(len(truths) + i, names[int(labels[i])], float(own[i]), top))
        answers = sorted(answers, key=lambda answer: answer.probability)[:hardest]
        in_top5 += int((places == labels[:, None]).any(1).sum())
        guesses += found.argmax(1).tolist()
        truths += labels.tolist()
    return from_answers(names, truths, guesses, in_top5, answers)


def accuracy(net: Network, batches: Batches, placed: Network) -> float:
    """Accuracy of a network in percent; `placed` puts images on its device, in its type."""
    return CLASSES.measure(*outputs(net, batches.batches(), placed, CLASSES))


def outputs(
    net: Network, batches: Iterable[tuple[Tensor, Tensor]], placed: Network, target: Target
) -> tuple[Tensor, Tensor]:
    """What must be kept of a network's outputs to measure them by a target, and what is true of the images."""
    kept, truth = [], []
    for images, labels in batches:
        kept.append(target.kept(logits(net, placed(images))).cpu())
        truth.append(labels.cpu())
    return torch.cat(kept), torch.cat(truth)


def network(base: Base, domain: Domain) -> Network:
    """What runs a domain at inference: its merged network, or itself if it cannot be merged."""
    return domain.merged(base) if domain.method.mergeable else partial(domain.frozen(), base)


def feature_network(base: Base, domain: Domain) -> Network:
    """What the head sees of images, at inference."""
    if not domain.method.mergeable:
        return partial(domain.frozen().features, base)
    headless = structural_copy(domain)
    headless.head = None
    net = headless.merged(base).eval()
    return lambda images: tensor_of(net(images))


def own_network(base: Base, moved: Mapping[str, Tensor] | None = None) -> nn.Module:
    """The base with its own classifier back in its place, and some of its tensors moved."""
    if base.head is None or base.classifier is None:
        raise BaseError(f"base {base.name} has no classifier of its own")
    net = copy_with(base.net, moved or {})
    put_module(net, base.classifier, base.head)
    return net.eval()


def images_last(images: Tensor) -> Tensor:
    """Images (N, C, H, W) whose channels lie last in memory, which is faster on CPUs; others as they are."""
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images


@torch.no_grad()
def logits(net: Network, images: Tensor) -> Tensor:
    """(N, classes) of images (N, C, H, W), or of (N, crops, C, H, W), averaged over the crops."""
    crops = images.flatten(0, 1) if images.ndim == 5 else images
    found: Tensor = net(images_last(crops))
    return found.view(*images.shape[:2], -1).mean(1) if images.ndim == 5 else found


@dataclass(frozen=True, repr=False)
class Prediction:
    """What a domain sees on one image: its likeliest classes with their probabilities, the likeliest first.

    `labels` are those that are likelier than not, where images have several. `values` are the numbers of a domain that
    learned numbers, by their names; `top` is empty then. `unknown` says, where it was asked for, that the image shows
    nothing that the domain learned: its `score` is below the domain's threshold.
    """

    image: str  # its path, or which one it was
    domain: str
    top: tuple[tuple[str, float], ...]
    labels: tuple[str, ...] | None = None
    values: Mapping[str, float] | None = None
    unknown: bool | None = None
    score: float | None = None

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self._first()[0]

    @property
    def probability(self) -> float:
        """How likely that class is, from 0 to 1."""
        return self._first()[1]

    def _first(self) -> tuple[str, float]:
        if not self.top:
            raise DomainError(f"domain {self.domain} gives numbers, not classes; look at `values`")
        return self.top[0]

    def __repr__(self) -> str:
        shares = ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in self.top)
        shares = shares or ", ".join(f"{name} {value:.4g}" for name, value in (self.values or {}).items())
        return f"Prediction({self.image}: {'unknown; ' if self.unknown else ''}{shares})"


def listed_images(images: Any) -> list[Any]:
    """One image or several, as a list."""
    one = isinstance(images, str | bytes | Path) or not isinstance(images, Iterable)
    if isinstance(images, Tensor | np.ndarray):
        one = images.ndim < 4
    return [images] if one else list(images)


def predict_images(
    net: Network,
    base: Base,
    domain: Described,
    images: Mapping[int, Any],
    *,
    name: str,
    top: int,
    batch_size: int,
    reject: bool,
) -> Iterator[Prediction]:
    """What `net`, the network of `domain.scored()`, sees on each of some numbered images."""
    if domain.classes is None:
        raise DomainError(f"domain {name} has no classes: it gives features, not predictions")
    judgement = judgement_of(domain, name, needed=reject)
    if top < 1 or batch_size < 1:
        raise InputError(f"top {top} and batch_size {batch_size} must be at least 1")
    preprocess = Preprocess(domain.input)
    origins = [_origin(number, image) for number, image in images.items()]
    contents = list(images.values())
    for start in range(0, len(contents), batch_size):
        some = range(start, min(start + batch_size, len(contents)))
        crops = [preprocess.read(contents[i], origins[i]) for i in some]
        found = logits(net, base.placed(preprocess.batch(crops))).cpu()
        for i, row in zip(some, found, strict=True):
            said = said_of(domain.target, judgement, row, domain.classes, top)
            yield _prediction(origins[i], name, said if reject else without_verdict(said))


def judgement_of(domain: Described, name: str, *, needed: bool) -> Judgement | None:
    """How a domain tells unknown images; where it is needed and not there, raise and say how to get it."""
    if domain.judgement is None and needed:
        raise DomainError(
            f"domain {name} keeps nothing to tell unknown images by; polymask calibrate {name} --data DIR (or "
            "polymask.calibrate) adds it from images of its classes, without training again"
        )
    return domain.judgement


def said_of(
    target: Target, judgement: Judgement | None, outputs: Tensor, classes: Sequence[str], top: int
) -> dict[str, Any]:
    """What one image's outputs mean, in words, as JSON: probabilities at the temperature that fits, unknown or not."""
    found, score = split_score(outputs, len(classes))
    if judgement is None:
        return target.said(target.answers(found), classes, top)
    said = target.said(target.answers(found / judgement.temperature), classes, top)
    if score is None:
        return said
    return said | {"unknown": judgement.is_unknown(float(score)), "score": float(score)}


def without_verdict(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of an image but whether it is unknown."""
    return {name: value for name, value in said.items() if name not in ("unknown", "score")}


def _prediction(image: str, domain: str, said: Mapping[str, Any]) -> Prediction:
    top = tuple((guess["class"], guess["probability"]) for guess in said.get("top", ()))
    labels = tuple(said["labels"]) if "labels" in said else None
    return Prediction(image, domain, top, labels, said.get("values"), said.get("unknown"), said.get("score"))


def _origin(number: int, image: Any) -> str:
    """What to call an image: its path where it has one."""
    path = image if isinstance(image, str | Path) else getattr(image, "filename", "")
    return str(path) or f"image {number}"


class Classifier:
    """A domain ready for image files: its network, and how they are fed to it.

    Where the domain can be merged, any number of threads may call it.
    """

    def __init__(self, base: Base, domain: Domain) -> None:
        self.net, self.placed, self.classes = network(base, domain.scored()), base.placed, domain.classes or []
        self.preprocess, self.target = Preprocess(domain.input), domain.target
        self.judgement = domain.judgement

    def __call__(self, files: Sequence[Path | bytes]) -> Tensor:
        """The probabilities (N, classes), or values, of N image files, given by path or as their bytes."""
        found, _ = split_score(self.outputs(files), len(self.classes))
        return self.target.answers(found if self.judgement is None else found / self.judgement.temperature)

    def say(self, files: Sequence[Path | bytes], top: int) -> list[dict[str, Any]]:
        """What is on each image file, in words, as JSON."""
        return [said_of(self.target, self.judgement, row, self.classes, top) for row in self.outputs(files)]

    def outputs(self, files: Sequence[Path | bytes]) -> Tensor:
        """What the network gives for image files: logits, and scores where the domain has a rule for them."""
        images = self.placed(self.preprocess.batch([self.preprocess.read(file) for file in files]))
        return logits(self.net, images).cpu()


_IMAGES = 64  # of a domain; half as many do nearly as well
_BATCH = 32
_known: WeakKeyDictionary[Split, dict[str, str | None]] = WeakKeyDictionary()


def likeness_note(base: Base, images: Split) -> dict[str, str]:
    """What a pack's `recipe` says of a domain's training images, if anything.

    Several methods may learn from the same images: it is computed once for them.
    """
    known = _known.setdefault(images, {})
    if base.fingerprint not in known:
        known[base.fingerprint] = likeness(base, images)
    found = known[base.fingerprint]
    return {} if found is None else {LIKENESS: found}


@torch.no_grad()
def likeness(base: Base, images: Split) -> str | None:
    """The likeness of a domain's training images; None if the base gives no feature vectors."""
    if base.feature_dim is None:
        return None
    preprocess = Preprocess(base.input)
    total = torch.zeros(base.feature_dim, device=base.device)
    places = np.linspace(0, len(images) - 1, min(len(images), _IMAGES)).round().astype(int)
    for start in range(0, len(places), _BATCH):
        some = places[start : start + _BATCH]
        crops = [preprocess.piece(images.image(int(i), preprocess.shrink.side)) for i in some]
        total += base.run({}, base.placed(preprocess.batch(crops))).float().sum(0)
    return write_likeness(total)


def write_likeness(feature: Tensor) -> str:
    """A feature's direction, as it stands in a pack."""
    direction = normalize(feature.detach().float().cpu(), dim=0).numpy()
    return base64.b64encode(direction.astype("<f2").tobytes()).decode()


def read_likeness(note: Any, size: int | None) -> Tensor | None:
    """The unit vector (size,) of a note; None where it is not one for a base of this size."""
    if not isinstance(note, str) or size is None:
        return None
    try:
        data = base64.b64decode(note.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    if len(data) != 2 * size:
        return None
    direction = torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))
    return normalize(direction, dim=0) if 0.5 < float(direction.norm()) < 2 else None  # not so with NaN or infinity


@torch.no_grad()
def best_domains(
    base: Base, domains: Mapping[str, Described], images: Sequence[Any], *, batch_size: int = _BATCH
) -> list[str]:
    """For each image the name of the domain whose likeness it fits best; every domain must have one."""
    found = {name: read_likeness(domain.likeness, base.feature_dim) for name, domain in domains.items()}
    if not found:
        raise DomainError("there is no domain to compare; add some, or load a library")
    if without := [name for name, one in found.items() if one is None]:
        raise DomainError(
            f"domain {without[0]} does not tell what its images look like, so it cannot be compared; name a domain, or "
            "learn it again from a folder of images"
        )
    likenesses = torch.stack([one for one in found.values() if one is not None]).to(base.device)
    preprocess, names, chosen = Preprocess(base.input), list(found), []
    for start in range(0, len(images), batch_size):
        some = range(start, min(start + batch_size, len(images)))
        crops = [preprocess.read(images[i], _origin(i, images[i])) for i in some]
        features = base.run({}, base.placed(preprocess.batch(crops)))
        chosen += [names[place] for place in likeness_cosines(features, likenesses).argmax(1).tolist()]
    return chosen


def likeness_cosines(features: Tensor, likenesses: Tensor) -> Tensor:
    """Cosines (N, domains) between features (N, size) and likenesses (domains, size)."""
    return normalize(features.float(), dim=1) @ likenesses.T
