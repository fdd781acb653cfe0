"""From a network that was fine-tuned elsewhere to a one-bit domain.

    Δ = W' - W,        W~ = W + α (2M - 1),        M = 1[Δ > 0],        α = mean |Δ|

at every site, with an α a layer, a row or a column (see `methods.bitdelta`); norms, biases and head are the fine-tuned
network's. Images, where there are some, then bring the domain nearer to what that network says: the statistics of the
norms are gathered again, and the α's are refined by distillation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from polymask.conversion.finetuned import (
    ConvertError,
    Finetuned,
    OutputDistance,
    WeightDistance,
    output_distance,
    weight_distance,
)
from polymask.conversion.refine import refine_scales, started_at, train_on
from polymask.core.accounting import bits_per_weight
from polymask.core.base import Base
from polymask.core.bits import Bits
from polymask.core.domain import Domain, check_classes
from polymask.core.input import InputSpec
from polymask.core.method import Method
from polymask.core.parts import Stored
from polymask.core.registry import create_method, skeleton
from polymask.data.images import DomainData, require_classes
from polymask.data.load import load_data
from polymask.methods.bitdelta import BitDelta, SignsTransform, nearest
from polymask.methods.shared_update import SharedUpdate
from polymask.train.fit import Listener
from polymask.train.learn import Loaders, make_loaders
from polymask.train.predict import likeness_note
from polymask.train.recipe import Recipe, get_recipe, seeds_note

Statistics = Literal["auto", "checkpoint", "images"]
STEPS, RATE = 200, 3e-2  # of the scales' refinement; the rate is one of log α
_BATCHES = 100  # at most, for the statistics of norms
_STRANGER = 1.0  # ‖W' - W‖ / ‖W‖; networks that have nothing in common are at 1.41


@dataclass(frozen=True)
class Converted:
    """A domain in its stored form, and how far it is from the network that it was made from."""

    domain: Domain
    weights: WeightDistance
    outputs: OutputDistance | None  # None without images
    unrefined: OutputDistance | None  # the same before anything was learned from images
    left: dict[str, float]  # changed tensors that the domain cannot hold, with the largest change
    notes: tuple[str, ...]  # what a reader should know, one sentence each


def convert(
    base: Base,
    state: Finetuned | Mapping[str, Any] | str | Path,
    *,
    method: str | Method = "bitdelta",
    classes: Sequence[str] | None = None,
    data: DomainData | str | Path | None = None,
    side: int | None = None,
    recipe: str | Recipe = "quick",
    statistics: Statistics = "auto",
    steps: int = STEPS,
    rate: float = RATE,
    train_masks: bool = False,
    update: Mapping[str, Tensor] | None = None,
    loaders: Loaders | None = None,
    seed: int = 0,
    listener: Listener | None = None,
) -> Converted:
    """Turn a network that was fine-tuned from `base` into a domain of about one bit a weight.

    `state` is its state dict, or the file of one (.safetensors, or a .pth that holds tensors only). `method` is
    `bitdelta`, or with more sizes `bitdelta-row` or `bitdelta-column`. `classes` names its outputs in order; without it
    the names are those of `data`, or numbers. `side` is the size in pixels that it was trained at, if not the base's.
    With `data`, its norms' `statistics` are gathered from the images ("auto": where that brings the outputs nearer on
    val), and `steps` steps at `rate` refine the scales; no label is used. With `train_masks` the domain then learns on
    as `affine-full`, by the labels and the recipe.

    `tall-mask` and `emr` are for several networks (`convert_all`): `update` is what they make of all changes. With
    `data`, the c of a TALL mask is the one that brings the outputs nearest on val; nothing else is learned.
    """
    recipe = recipe_at(base, recipe, side)
    if statistics not in get_args(Statistics):
        raise ConvertError(f"statistics={statistics!r} is not one of {get_args(Statistics)}")
    if steps < 0 or not rate > 0:
        raise ConvertError(f"steps={steps} and rate={rate}: give steps from 0 and a positive rate")
    chosen = convertible(method, masks=train_masks)
    if isinstance(chosen, SharedUpdate) and update is None:
        raise ConvertError(f"{chosen.name} shares one update among several networks; convert them together")
    tuned = state if isinstance(state, Finetuned) else Finetuned.read(base, state)
    if isinstance(data, str | Path):
        data = load_data(data, seed=seed)
    if data is not None:
        require_classes(data, "converting a checkpoint")
    tuned, names, labelled, notes = name_outputs(tuned, classes, data)
    if train_masks and not labelled:
        raise ConvertError("training masks needs images of the checkpoint's classes; give data")

    if isinstance(chosen, SharedUpdate):
        assert update is not None
        candidates = [
            masked_domain(base, tuned, names, one, update) for one in (chosen.strengths() if data else [chosen])
        ]
    else:
        candidates = [one_bit_domain(base, tuned, names, chosen)]
    domain = candidates[0]
    domain.input = recipe.input(base.input, squash=None if data is None else data.squash)
    about: dict[str, Any] = {"checkpoint": Path(tuned.source).name}
    about |= seeds_note(seed, None if data is None else data.seed)
    val_accuracy = unrefined = outputs = None
    if data is not None:
        loaders = loaders or make_loaders(data, base.input, recipe, seed=seed)
        teacher = tuned.network(base)
        parts = {"test": loaders.test, "val": loaders.val, "train": loaders.train}
        split, held_out = next((name, batches) for name, batches in parts.items() if batches is not None)
        unrefined = output_distance(base, domain, teacher, held_out, split, labelled=labelled)
        whole = replace(loaders, train=loaders.train.as_later())
        domain, whose = _nearest(base, candidates, domain.input, teacher, whole, statistics)
        about |= {"data": data.name, "statistics": whose}
        about |= likeness_note(base, data.train)
        if steps and isinstance(chosen, BitDelta):
            about |= {"scale_steps": steps, "scale_rate": rate}
            refine_scales(
                base, domain, teacher, loaders.train, recipe=recipe, steps=steps, rate=rate, listener=listener
            )
        if train_masks:
            torch.manual_seed(seed)
            start = started_at(base, domain, tuned, recipe)
            domain, val_accuracy = train_on(base, start, loaders, recipe, seed=seed, listener=listener)
            about |= recipe.to_json()
        outputs = output_distance(base, domain, teacher, held_out, split, labelled=labelled)

    with torch.no_grad():
        weights = domain.weights(base)
    distance = weight_distance(base, weights, tuned)
    if distance.change > _STRANGER:
        notes.append(
            f"the weights are {distance.change:.2f} times their size away from the base's: make "
            "sure that the network was fine-tuned from this base, with these weights"
        )
    domain.recipe = about
    domain.metrics = _metrics(base, domain, distance, outputs, val_accuracy)
    left = left_behind(base, weights, tuned)
    return Converted(domain, distance, outputs, unrefined, left, tuple(notes))


def recipe_at(base: Base, recipe: str | Recipe, side: int | None) -> Recipe:
    """A recipe whose images have the size that a checkpoint was trained at, not its own."""
    if side is not None and side < 1:
        raise ConvertError(f"side={side} must be a number of pixels")
    return replace(get_recipe(recipe), side=side or base.input.side, resized=None)


def convertible(method: str | Method, *, masks: bool = False) -> BitDelta | SharedUpdate:
    """The method of a converted domain, which `masks` are to go on from; raise where that cannot be."""
    chosen = create_method(method) if isinstance(method, str) else method
    if not isinstance(chosen, BitDelta | SharedUpdate):
        raise ConvertError(
            f"a checkpoint is not converted to {chosen.name}; take bitdelta, bitdelta-row, bitdelta-column, or for "
            "several checkpoints tall-mask or emr"
        )
    if masks and isinstance(chosen, SharedUpdate):
        raise ConvertError(f"{chosen.name} has nothing that masks could learn on from; take bitdelta")
    if masks and isinstance(chosen, BitDelta) and chosen.per == "column":
        raise ConvertError(
            f"{chosen.name} has a size for each column, and the masks that learn on have none; take bitdelta or "
            "bitdelta-row, or leave the masks as they are"
        )
    return chosen


@torch.no_grad()
def one_bit_domain(base: Base, tuned: Finetuned, classes: Sequence[str], method: str | Method = "bitdelta") -> Domain:
    """The nearest `bitdelta` domain in its stored form; norms, biases and head are copies."""
    domain = skeleton(base, convertible(method), classes)
    bits: dict[str, Stored] = {}
    for name, transform in domain.named_transforms():
        mask, alpha = nearest(tuned.delta(base, name), cast(SignsTransform, transform).shapes)
        bits |= {f"transform/{name}/mask": Bits.of(mask), f"transform/{name}/alpha": alpha}
    return _with_rest(base, domain, tuned, bits)


@torch.no_grad()
def masked_domain(
    base: Base, tuned: Finetuned, classes: Sequence[str], method: SharedUpdate, update: Mapping[str, Tensor]
) -> Domain:
    """The domain's masks over an update that it shares; norms, biases and head are copies."""
    domain = skeleton(base, method, classes)
    changes = {name: tuned.delta(base, name) for name, _ in domain.named_transforms()}
    bits: dict[str, Stored] = {}
    for name, (mask, size) in method.masks(changes, update).items():
        bits |= {f"transform/{name}/mask": Bits.of(mask), f"transform/{name}/size": size}
        bits[f"transform/{name}/update"] = update[name]
    return _with_rest(base, domain, tuned, bits)


def _with_rest(base: Base, domain: Domain, tuned: Finetuned, bits: Mapping[str, Stored]) -> Domain:
    """A skeleton with these bits, and the norms, biases and head of a fine-tuned network."""
    stored = {"head/weight": tuned.weight.clone(), "head/bias": tuned.bias.clone(), **bits}
    for name, _ in domain.named_transforms():
        site = domain.sites[name]
        if site.has_bias:
            stored[f"transform/{name}/bias"] = tuned.delta(base, site.bias)
    for norm, own in domain.named_norms():
        for leaf in own.stored():
            stored[f"norm/{norm}/{leaf}"] = tuned.tensors[f"{norm}.{leaf}".lstrip(".")].clone()
    wanted = {n: t.dtype for n, t in domain.stored().items() if isinstance(t, Tensor)}
    wide = {n: t.to(wanted[n]) if isinstance(t, Tensor) else t for n, t in stored.items()}
    return domain.restore(wide).to(base.device)


def left_behind(base: Base, weights: Mapping[str, Tensor], tuned: Finetuned) -> dict[str, float]:
    """The tensors that fine-tuning changed and `weights` lack, each with its largest change."""
    changes = {
        name: (tensor.double() - base.tensor(name).double()).abs().max().item()
        for name, tensor in tuned.tensors.items()
        if name not in weights and tensor.numel()
    }
    return {name: change for name, change in changes.items() if change}


def name_outputs(
    tuned: Finetuned, classes: Sequence[str] | None, data: DomainData | None
) -> tuple[Finetuned, list[str], bool, list[str]]:
    """The network, its outputs' names, whether the data's labels are of them, and notes.

    The outputs are brought into the data's order, which its labels are in.
    """
    count = tuned.classes
    if classes is not None:
        given = check_classes(classes)
        if len(given) != count:
            raise ConvertError(f"{tuned.source} has {count} classes, but {len(given)} are named")
        if data is None:
            return tuned, given, False, []
        if set(given) != set(data.classes):
            note = f"{data.name} has other classes than those named: its labels are not used"
            return tuned, given, False, [note]
        ours = list(data.classes)
        return tuned.reordered([given.index(name) for name in ours]), ours, True, []
    if data is None:
        return tuned, [f"class {i}" for i in range(count)], False, []
    if len(data.classes) != count:
        raise ConvertError(
            f"{tuned.source} has {count} classes, {data.name} has {len(data.classes)}; give images "
            "of its classes, or name its classes and the labels are not used"
        )
    note = f"outputs are taken to be in the order of {data.name}'s classes; name them if not"
    return tuned, list(data.classes), True, [note]


def _nearest(
    base: Base,
    candidates: Sequence[Domain],
    spec: InputSpec,
    teacher: nn.Module,
    loaders: Loaders,
    wanted: Statistics,
) -> tuple[Domain, str]:
    """The candidate that is nearest to the fine-tuned network on val, with its statistics."""
    found = []
    for domain in candidates:
        domain.input = spec
        found.append(_with_statistics(base, domain, teacher, loaders, wanted))
    if len(found) == 1:
        return found[0]
    val = loaders.train if loaders.val is None else loaders.val
    errors = [output_distance(base, domain, teacher, val, "val", labelled=False).relative for domain, _ in found]
    return found[errors.index(min(errors))]


def _with_statistics(
    base: Base, domain: Domain, teacher: nn.Module, loaders: Loaders, wanted: Statistics
) -> tuple[Domain, str]:
    """The domain with the checkpoint's norm statistics, or with those of the images.

    Batch norms undo what one bit a weight does to the scale of activations, if their statistics
    are of those activations; but a checkpoint may rely on statistics that are not of its images.
    """
    if wanted == "checkpoint" or not any(list(own.buffers()) for _, own in domain.named_norms()):
        return domain, "checkpoint"
    again = domain.frozen()
    batches = islice(loaders.train.batches(), _BATCHES)
    again.reestimate_norms(base, (images.to(base.device) for images, _ in batches))
    if wanted == "images":
        return again, "images"
    val = loaders.train if loaders.val is None else loaders.val
    new, old = (output_distance(base, d, teacher, val, "val", labelled=False).relative for d in (again, domain))
    return (again, "images") if new < old else (domain, "checkpoint")


def _metrics(
    base: Base, domain: Domain, weights: WeightDistance, outputs: OutputDistance | None, val_accuracy: float | None
) -> dict[str, Any]:
    """What a pack says of itself; accuracies in percent."""
    tested = outputs.pack_accuracy if outputs is not None and outputs.split == "test" else None
    metrics: dict[str, Any] = {"val_accuracy": val_accuracy, "test_accuracy": tested}
    metrics |= {"bits_per_weight": bits_per_weight(base, domain), "weight_error": weights.error}
    if outputs is None:
        return metrics
    metrics["checkpoint_accuracy"] = outputs.checkpoint_accuracy
    return metrics | {"logit_error": outputs.relative, "agreement": outputs.agreement}
