"""Three domains learned in turn, and what moved; heads of different widths."""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from beside_peft.setting import FIRST, SOURCES, WIDEST, DomainSample, train
from beside_peft.systems import Peft
from torch import Tensor, nn


def measure(make: Callable[[nn.Module], Any], net: nn.Module, data: dict) -> dict[str, Any]:
    """Learn the domains in turn and measure what moved."""
    torch.manual_seed(0)
    system, images, labels = make(net), data[FIRST].images, data[FIRST].labels
    base_before = system.base_outputs(images)
    with tempfile.TemporaryDirectory() as folder:
        system.learn(FIRST, data[FIRST])
        before = system.outputs(FIRST, images)
        size = {FIRST: system.save(FIRST, Path(folder))}
        loaded = system.loaded_outputs(FIRST, Path(folder), images)
        for name in list(data)[1:]:
            system.learn(name, data[name])
            size[name] = system.save(name, Path(folder))
        after, base_after = system.outputs(FIRST, images), system.base_outputs(images)
        widths = {name: system.outputs(name, images[:1]).shape[1] for name in data}
        mixed = try_mixed(system, data)  # last: if it raises, PEFT's hooks stay on the model
    accuracy = [percent(out.argmax(1) == labels) for out in (before, after)]
    return {
        "first_domain_largest_output": largest(before),
        "first_domain_difference_after_two_more": largest(after - before),
        "first_domain_predictions_changed_percent": percent(after.argmax(1) != before.argmax(1)),
        "first_domain_accuracy_before_after_percent": accuracy,
        "difference_after_save_and_load": largest(loaded - before),
        "base_largest_output": largest(base_before),
        "base_difference": largest(base_after - base_before),
        "mixed_batch": mixed,
        "head_widths": widths,
        "file_bytes": size,
    }


def try_mixed(system: Any, data: dict[str, DomainSample]) -> dict[str, Any]:
    """Compare one batch with images of all domains with the same images domain by domain."""
    names = [name for name in data for _ in range(4)]
    random.Random(0).shuffle(names)
    images = torch.cat([data[name].images[i : i + 1] for i, name in enumerate(names)])
    try:
        rows = system.mixed(names, images)
    except Exception as error:  # noqa: BLE001 - what it raises is the finding
        afterwards = attempt(lambda: system.outputs(FIRST, images[:1]))
        return failure(error) | {"a plain call afterwards": afterwards}
    alone = [system.outputs(name, images[i : i + 1])[0] for i, name in enumerate(names)]
    return {
        "works": True,
        "difference": max(largest(a - b) for a, b in zip(rows, alone, strict=True)),
    }


def try_class_counts(net: nn.Module, data: dict[str, DomainSample]) -> dict[str, Any]:
    """Heads of 10 and 26 classes in PEFT: with its interface, then by replacing a module."""
    narrow = copy.deepcopy(net)
    narrow.fc = nn.Linear(512, SOURCES[FIRST])
    images = data[FIRST].images[:4]
    found: dict[str, Any] = {}
    system = Peft(narrow, "held")
    system.trainable(FIRST)
    try:
        train(system.trainable(WIDEST), data[WIDEST].train[:1], system.rate)
        found["by its interface"] = {"works": True}
    except Exception as error:  # noqa: BLE001
        found["by its interface"] = failure(error)

    heads = system.model.base_model.model.fc.modules_to_save
    heads[WIDEST] = nn.Linear(512, SOURCES[WIDEST])
    found["head exchanged by hand: forward"] = {"works": True} | {
        "widths": [system.outputs(name, images).shape[1] for name in (FIRST, WIDEST)]
    }
    with tempfile.TemporaryDirectory() as folder:
        system.save(WIDEST, Path(folder))
        found["head exchanged by hand: load"] = attempt(lambda: system.loaded_outputs(WIDEST, Path(folder), images))
    found["head exchanged by hand: mixed batch"] = attempt(lambda: system.mixed([FIRST, WIDEST] * 2, images))
    return found


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return failure(error)
    return {"works": True}


def failure(error: Exception) -> dict[str, Any]:
    text = " ".join(str(error).split())
    return {"works": False, "raises": type(error).__name__, "message": text[:200]}


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def percent(flags: Tensor) -> float:
    return round(100 * flags.float().mean().item(), 2)
