"""The demo: one network learns three domains, forgets nothing, and a report shows it."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polymask import __version__
from polymask.benchmarks.jobs import layer_statistics
from polymask.benchmarks.records import EpochPoint
from polymask.core.accounting import bits_per_weight, component_bits
from polymask.core.base import Base, fingerprint
from polymask.core.network import named_tensors
from polymask.core.target import likeliest
from polymask.data.load import load_data
from polymask.data.loader import Loader, loader_at
from polymask.files import write_atomically
from polymask.library.model import MultiDomainModel
from polymask.nets.zoo import load_base
from polymask.report.demo_page import DemoResult, DomainResult, ExampleImage, MethodResult, write_demo_report
from polymask.train.fit import Listener
from polymask.train.learn import Learned, learn, make_loaders
from polymask.train.predict import logits
from polymask.train.recipe import get_recipe

if TYPE_CHECKING:
    from rich.console import Console

METHOD = "affine-centred"
HEAD_ALONE = "classifier-only"  # one epoch: its features do not learn, and its head is fitted to all of them in the end
RIVALS = (HEAD_ALONE, "finetune")
_EXAMPLES = 6  # images of a domain that the report shows


@dataclass(frozen=True)
class DemoDomain:
    """One domain of the demo, and how much of it is shown."""

    source: str
    title: str
    images: int
    epochs: int
    side: int


DOMAINS = (
    DemoDomain("digits", "handwritten digits", 600, 6, 48),
    DemoDomain("letters", "letters in unseen typefaces", 700, 5, 64),
    DemoDomain("solar-cells", "defects of solar cells", 600, 12, 96),
)


def run_demo(
    out: Path, seed: int, console: "Console", listener_of: Callable[[str], Listener], command: str
) -> DemoResult:
    """Learn the domains one after another, prove that nothing is forgotten, write the report."""
    began = time.perf_counter()
    base = load_base("efficientnet-lite0")
    before = fingerprint(base.net)
    parameters = sum(p.numel() for p in base.net.parameters())
    console.print(
        f"EfficientNet-Lite0 with its ImageNet weights: {parameters:,} parameters, frozen.\n"
        f"It learns {len(DOMAINS)} domains, one after another."
    )
    learned = [_learn(base, domain, out, seed, console, listener_of) for domain in DOMAINS]

    model = MultiDomainModel(base, library=out)
    results = []
    for result, probe, before_others in learned:
        again = model(probe, domain=result.name)
        same = isinstance(again, Tensor) and torch.equal(again, before_others)
        results.append(replace(result, unchanged=same))
    recipe = (
        f"standard; for finetune all at its rate for whole weights; for {HEAD_ALONE}, whose head is fitted, one epoch"
    )
    settings = {"seed": str(seed), "recipe": recipe}
    for domain in DOMAINS:
        budget = f"{domain.images} training images at most, {domain.epochs} epochs at {domain.side} px"
        settings[domain.source] = budget
    demo = DemoResult(
        base="EfficientNet-Lite0",
        base_parameters=parameters,
        base_bytes=sum(t.numel() * t.element_size() for _, t in named_tensors(base.net)),
        fingerprint_before=before,
        fingerprint_after=fingerprint(base.net),
        domains=tuple(results),
        seconds=time.perf_counter() - began,
        settings=settings,
        environment={
            "polymask": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": str(torch.get_num_threads()),
        },
        method=METHOD,
        command=command,
    )
    write_atomically(out / "result.json", json.dumps(demo.to_json(), indent=1).encode())
    write_demo_report(out / "report.html", demo)
    return demo


def _learn(
    base: Base, shown: DemoDomain, out: Path, seed: int, console: "Console", listener_of: Callable[[str], Listener]
) -> tuple[DomainResult, Tensor, Tensor]:
    """Train the domain and its rivals with the same budget; some test images, and the domain's logits for them."""
    data = load_data(shown.source, seed=seed, limit=shown.images)
    recipe = get_recipe("standard", epochs=shown.epochs, side=shown.side)
    loaders = make_loaders(data, base.input, recipe, seed=seed)
    assert loaders.test is not None
    console.print(
        f"\n{shown.title} · {len(data.classes)} classes · {len(data.train):,} images to learn from, "
        f"{len(loaders.test.cache):,} to test"
    )
    results: list[MethodResult] = []
    for method in (*RIVALS, METHOD):
        began = time.perf_counter()
        changes: dict[str, dict[str, Any]] = {HEAD_ALONE: {"epochs": 1}, "finetune": {"rate": recipe.weight_rate}}
        how = recipe.changed(changes.get(method, {}))
        learned = learn(base, data, method, how, loaders=loaders, seed=seed, listener=listener_of(method))
        measured = _measured(base, method, learned, out, data.name, time.perf_counter() - began)
        results.append(measured)
        console.print(
            f"  {method:16s} {measured.test_accuracy:6.2f} % right   {measured.bytes / 1e6:6.2f} MB   "
            f"{measured.bits_per_weight:5.2f} bits a weight   {measured.seconds:4.0f} s",
            style="bold" if method == METHOD else "dim",
        )
    domain = learned.domain  # of METHOD, which comes last
    assert data.test is not None
    test = loader_at(data.test, domain.input)  # val may have chosen another size than that of training
    probe, _ = next(test.batches())
    with torch.no_grad():
        answer = domain(base, probe)
    result = DomainResult(
        name=data.name,
        title=shown.title,
        classes=len(data.classes),
        train_images=len(data.train),
        test_images=len(loaders.test.cache),
        methods=tuple(results),
        predictions=tuple(_examples(base, learned, data.classes, test)),
        layers=layer_statistics(domain),
        unchanged=False,
        components=component_bits(domain),
    )
    return result, probe, answer


def _measured(base: Base, method: str, learned: Learned, out: Path, name: str, seconds: float) -> MethodResult:
    """The numbers of one training; the domain's pack stays in `out` if it is the demo's own."""
    path = out / (f"{name}.safetensors" if method == METHOD else f".{name}.{method}")
    learned.domain.save(path)
    size = path.stat().st_size
    if method != METHOD:
        path.unlink()
    assert learned.test_accuracy is not None
    return MethodResult(
        method=method,
        test_accuracy=learned.test_accuracy,
        bytes=size,
        bits_per_weight=bits_per_weight(base, learned.domain),
        seconds=seconds,
        curve=tuple(EpochPoint(r.epoch + 1, r.loss, r.val_accuracy or 0.0) for r in learned.history),
    )


def _examples(base: Base, learned: Learned, classes: Sequence[str], test: Loader) -> Iterator[ExampleImage]:
    """What the domain says of test images: as many right as wrong ones, where there are, spread over the split."""
    assert learned.evaluation is not None
    wrong = learned.evaluation.wrong
    right = sorted(set(range(len(test.cache))) - set(wrong))
    few = min(len(wrong), max(_EXAMPLES // 2, _EXAMPLES - len(right)))
    net = learned.domain.merged(base)
    for index in _spread(right, _EXAMPLES - few) + _spread(wrong, few):
        crop = test.transform.crop(test.cache.image(index), np.random.default_rng(0))
        shares = logits(net, base.placed(test.transform.batch([crop]))).softmax(1)[0]
        top = likeliest(shares, classes, 3)
        truth = classes[int(test.cache.labels[index])]
        yield ExampleImage(image_png=test.cache.thumbnail(index), truth=truth, top=tuple(top))


def _spread(places: Sequence[int], count: int) -> list[int]:
    """So many of the places, evenly spaced; all, where there are fewer."""
    chosen = np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(int)
    return [places[i] for i in chosen]


def main_numbers(result: DemoResult, report: Path) -> dict[str, Any]:
    """What --json prints of a demo."""
    shown = ("test_accuracy", "bytes", "bits_per_weight")
    return {
        "report": str(report),
        "nothing_forgotten": result.nothing_forgotten,
        "seconds": round(result.seconds, 1),
        "domains": {
            domain.name: {m.method: {name: getattr(m, name) for name in shown} for m in domain.methods}
            for domain in result.domains
        },
    }
