"""A library made of fine-tuned networks, by every method of `polymask convert`, with and without images.

    python benchmarks/convert_library.py --run results/decathlon-mini-32-standard --data ../shared/data/decathlon-mini \
        --weights ../shared/weights/resnet18-tinyimagenet-64.safetensors --out results/convert-library.json
    python benchmarks/convert_library.py --table --out results/convert-library.json                # print it again
    python benchmarks/convert_library.py --table --out results/convert-library.json \
        --figure docs/assets/convert-library.svg

The fine-tuned networks are those of the `finetune` rows of a benchmark's run (its packs must still be there), merged to
plain state dicts. Each is converted beside the others. Accuracy is on the domain's test images; "kept" is that of the
converted network as a share of the checkpoint's. Beside them stand a copy in 8 bits (one scale an output channel), and
the best low-rank factors of the change, at the bytes of `bitdelta`; norms, biases and head are whole in all of them. A
row is kept as soon as it is done, and skipped when the script is started again; one with images takes two minutes a
network on one core.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from kept import read, write
from safetensors.torch import save_file
from torch import Tensor, nn

import polymask as pm
from polymask.conversion.finetuned import Finetuned
from polymask.conversion.library import Checkpoint, ConvertOptions, convert_all
from polymask.data.images import DomainData
from polymask.train.learn import Loaders, make_loaders
from polymask.train.predict import accuracy

METHODS = ("bitdelta", "bitdelta-row", "bitdelta-column", "tall-mask", "emr")
MASKS = "affine-full"  # learned on from bitdelta's signs, by the labels: only with images
Approximation = Callable[[Tensor, Tensor], tuple[Tensor, int]]  # (W, W') -> what stands for W', its bytes
COLOURS = {"with images": "#0066aa", "without images": "#c05a1f", "beside": "#777777"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="the folder of a benchmark's run with `finetune` in it")
    parser.add_argument("--data", type=Path, help="the decathlon's images")
    parser.add_argument("--base", default="resnet18-64")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--limit", type=int, default=1000, help="training images a domain")
    parser.add_argument("--out", type=Path, required=True, help="where to write what is measured")
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    parser.add_argument("--figure", type=Path, help="draw it")
    options = parser.parse_args()
    results = read(options.out) if options.table else measure(options)
    if options.figure is not None:
        draw(results, options.figure)
    print(table(results))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows that are not in the file yet, each written as soon as it is done."""
    base = pm.load_base(options.base, weights=options.weights)
    with tempfile.TemporaryDirectory() as room:
        checkpoints, loaders = make_checkpoints(base, options, Path(room))
        given = read(options.out) or about(base, checkpoints, loaders)
        tuned, rows = given["checkpoint_accuracy"], given.setdefault("rows", {})
        if tuned.keys() != checkpoints.keys():
            raise SystemExit(f"{options.out} is of other networks; give another file")
        for name, way in ways(base, checkpoints, loaders, options.side, Path(room) / "library").items():
            if name in rows:
                continue
            rows[name] = row = way()
            row["kept"] = mean(100 * row["accuracy"][one] / tuned[one] for one in checkpoints)
            row["mean_accuracy"] = mean(row["accuracy"].values())
            write(options.out, given)
            print(f"{name}: {row['kept']:.1f} % kept", flush=True)
    return given


def make_checkpoints(
    base: pm.Base, options: argparse.Namespace, room: Path
) -> tuple[dict[str, Checkpoint], dict[str, Loaders]]:
    """The fine-tuned networks as plain state dicts, and the batches of their domains."""
    recipe = pm.get_recipe("quick", side=options.side)
    data: dict[str, DomainData] = {}
    checkpoints, loaders = {}, {}
    for seed in options.seeds:
        for folder in sorted((options.run / "finetune").iterdir()):
            title, name = folder.name, f"{folder.name}-{seed}"
            domain = pm.load_domain(folder / f"seed-{seed}" / "packs" / f"{title}.safetensors", base)
            if title not in data:
                data[title] = pm.load_data(f"decathlon:{options.data}/{title}", limit=options.limit)
                loaders[title] = make_loaders(data[title], domain.input, recipe)
            path = room / f"{name}.safetensors"
            save_file({n: t.contiguous().clone() for n, t in domain.merged(base).state_dict().items()}, path)
            checkpoints[name] = Checkpoint(path, domain.classes, data[title])
    return checkpoints, loaders


def about(base: pm.Base, checkpoints: dict[str, Checkpoint], loaders: dict[str, Loaders]) -> dict[str, Any]:
    """What the networks are before they are converted."""
    tested = {
        name: _tested(base, Finetuned.read(base, checkpoint.path).network(base), _of(name, loaders))
        for name, checkpoint in checkpoints.items()
    }
    sizes = [checkpoint.path.stat().st_size for checkpoint in checkpoints.values()]
    found = {"base": base.name, "networks": len(checkpoints), "checkpoint_bytes": mean(sizes)}
    return found | {"checkpoint_accuracy": tested}


def ways(
    base: pm.Base, checkpoints: dict[str, Checkpoint], loaders: dict[str, Loaders], side: int, library: Path
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each row; the quick ones first."""
    made = partial(_converted, base, checkpoints, loaders, side, library)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "8 bits a weight": partial(_approximated, base, checkpoints, loaders, _in_8_bits),
        "LoRA by SVD": partial(_approximated, base, checkpoints, loaders, _by_svd),
    }
    found |= {f"{method}, without images": partial(made, method, images=False) for method in METHODS}
    found |= {f"{method}, with images": partial(made, method, images=True) for method in METHODS}
    return found | {f"{MASKS}, with images": partial(made, "bitdelta", images=True, train_masks=True)}


def _of(name: str, loaders: dict[str, Loaders]) -> Loaders:
    return loaders[name.rpartition("-")[0]]


def _tested(base: pm.Base, net: nn.Module, loaders: Loaders) -> float:
    batches = loaders.test or loaders.val
    assert batches is not None
    return accuracy(net, batches, base.placed)


def _converted(
    base: pm.Base,
    checkpoints: dict[str, Checkpoint],
    loaders: dict[str, Loaders],
    side: int,
    library: Path,
    method: str,
    *,
    images: bool,
    train_masks: bool = False,
) -> dict[str, Any]:
    """All checkpoints by one method: test accuracy, bytes of a pack and of what is shared, seconds."""
    shutil.rmtree(library, ignore_errors=True)
    given = {n: c if images else Checkpoint(c.path, c.classes) for n, c in checkpoints.items()}
    by_data = {id(checkpoints[name].data): _of(name, loaders) for name in checkpoints}
    begin = time.perf_counter()
    found = list(
        convert_all(
            base,
            given,
            library,
            method=method,
            options=ConvertOptions(side=side, train_masks=train_masks),
            loaders=lambda data: by_data[id(data)],
        )
    )
    seconds = time.perf_counter() - begin
    problems = [one.problem for one in found if one.problem]
    if problems:
        raise SystemExit("\n".join(problems))
    tested = {}
    for one in found:
        domain = pm.load_domain(library / f"{one.name}.safetensors", base)
        tested[one.name] = _tested(base, domain.merged(base), _of(one.name, loaders))
    shared = sum(file.stat().st_size for file in library.glob("*.shared"))
    return {
        "accuracy": tested,
        "pack_bytes": mean(one.pack_bytes or 0 for one in found),
        "shared_bytes": shared,
        "weight_error": mean(one.metrics["weight_error"] for one in found),
        "seconds": seconds / len(found),
    }


def _approximated(
    base: pm.Base, checkpoints: dict[str, Checkpoint], loaders: dict[str, Loaders], approximate: Approximation
) -> dict[str, Any]:
    """What people do without masks: a copy in 8 bits, or low-rank factors of the change at the bytes of a pack."""
    tested, sizes, seconds = {}, [], []
    for name, checkpoint in checkpoints.items():
        tuned = Finetuned.read(base, checkpoint.path)
        begin = time.perf_counter()
        size = sum(t.numel() for n, t in tuned.tensors.items() if n not in base.sites) * 4
        size += 4 * (tuned.weight.numel() + tuned.bias.numel())
        for site in base.sites:
            tuned.tensors[site], more = approximate(base.tensor(site), tuned.tensors[site])
            size += more
        seconds.append(time.perf_counter() - begin)
        sizes.append(size)
        tested[name] = _tested(base, tuned.network(base), _of(name, loaders))
    return {"accuracy": tested, "pack_bytes": mean(sizes), "shared_bytes": 0, "seconds": mean(seconds)}


def _in_8_bits(before: Tensor, after: Tensor) -> tuple[Tensor, int]:
    flat = after.reshape(len(after), -1)
    scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return ((flat / scale).round() * scale).view_as(after), after.numel() + 4 * len(after)


def _by_svd(before: Tensor, after: Tensor) -> tuple[Tensor, int]:
    """The nearest factors of the change, of the rank whose bytes are next to one bit a weight."""
    change = (after - before).reshape(len(after), -1)
    rows, columns = change.shape
    rank = min(max(1, round(change.numel() / (32 * (rows + columns)))), rows, columns)
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    near = (left[:, :rank] * values[:rank]) @ right[:rank]
    return before + near.view_as(after), 4 * rank * (rows + columns)


def table(results: dict[str, Any]) -> str:
    """The rows by accuracy kept, as a Markdown table."""
    heads = "| way | accuracy kept | mean accuracy, % | bytes a network | shared, once | seconds a network |"
    lines = [
        f"{results['networks']} fine-tuned networks of {results['base']}, "
        f"{results['checkpoint_bytes'] / 1e6:.1f} MB each, mean accuracy "
        f"{mean(results['checkpoint_accuracy'].values()):.1f} %.",
        "",
        heads,
        "|" + "---|" * 6,
    ]
    for name, row in sorted(results["rows"].items(), key=lambda item: -item[1]["kept"]):
        shared = f"{row['shared_bytes'] / 1e6:.1f} MB" if row["shared_bytes"] else "–"
        size = f"{row['pack_bytes'] / 1e6:.2f} MB"
        cells = [name, f"{row['kept']:.1f} %", f"{row['mean_accuracy']:.1f}", size, shared, f"{row['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Accuracy kept against bytes a network, what is shared divided by all of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    groups: dict[tuple[str, int], list[tuple[str, float, float]]] = {}  # points that lie too close for a label each
    for name, row in results["rows"].items():
        kind = next((kind for kind in ("with images", "without images") if name.endswith(kind)), "beside")
        size = (row["pack_bytes"] + row["shared_bytes"] / results["networks"]) / 1e6
        axes.scatter(size, row["kept"], color=COLOURS[kind], zorder=2)
        group = name.partition(",")[0].partition("-")[0] if name.startswith("bitdelta") else name
        groups.setdefault((group, kind == "with images"), []).append((name.partition(",")[0], size, row["kept"]))
    for points in groups.values():
        ordered = sorted(points, key=lambda point: -point[2])
        _label(axes, ", ".join(name for name, _, _ in ordered), ordered[0][1], mean(p[2] for p in points), (8, -3))
    axes.scatter(results["checkpoint_bytes"] / 1e6, 100, color="black", marker="s")
    _label(axes, "checkpoint", results["checkpoint_bytes"] / 1e6, 100, (-40, -12))
    axes.set_xscale("log")
    axes.set_xticks([1.5, 3, 6, 12, 24, 45], ["1.5", "3", "6", "12", "24", "45"])
    axes.minorticks_off()
    axes.set_xlabel("MB a network, what is shared divided by all (logarithmic)")
    axes.set_ylabel("accuracy kept, %")
    for kind, colour in COLOURS.items():
        axes.scatter([], [], color=colour, label=kind)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(axes: Any, text: str, x: float, y: float, offset: tuple[int, int]) -> None:
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8)


if __name__ == "__main__":
    main()
