"""Verbs that look at packs, which need no torch, and that count bits."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import NamedPack, Verb, table

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.pack.format import PackInfo


@dataclass(kw_only=True)
class Show(NamedPack):
    """Show what a pack holds."""

    def run(self) -> dict[str, Any]:
        from polymask.pack.format import inspect

        info = inspect(self.pack_path())
        return summary(info) | asdict(info.manifest)

    def present(self, result: dict[str, Any], console: "Console") -> None:
        classes = result["classes"] or []
        names = ", ".join(classes[:8]) + (" …" if len(classes) > 8 else "")
        shape = " × ".join(map(str, result["input"].get("shape", [])))
        rows = [
            ["pack", result["pack"]],
            ["method", result["method"]],
            ["base", f"{result['base']} (fingerprint {result['fingerprint'][:12]}…)"],
            ["classes", f"{len(classes)}: {names}"],
            ["input", shape],
            ["size", f"{result['bytes']:,} bytes"],
            ["bits per masked weight", f"{result['mask_bits_per_weight']:.3f}"],
            ["sha256", result["sha256"]],
        ]
        rows += [[name.replace("_", " "), str(value)] for name, value in result["metrics"].items()]
        console.print(table("", "", rows=rows))
        parts = [[name, f"{size:,}"] for name, size in result["bytes_by_part"].items()]
        console.print(table("part", "bytes", rows=parts))


@dataclass(kw_only=True)
class List(Verb):
    """List the domains of a library."""

    library: tyro.conf.Positional[Path] = Path("library")
    """A folder of packs."""

    def run(self) -> list[dict[str, Any]]:
        from polymask.pack.format import inspect, packs_in

        return [summary(inspect(path)) for path in packs_in(self.library)]

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        rows = [
            [
                row["name"],
                row["method"],
                row["base"],
                str(row["class_count"]),
                _percent(row["test_accuracy"]),
                f"{row['bytes']:,}",
            ]
            for row in result
        ]
        headings = ("domain", "method", "base", "classes", "test accuracy", "bytes")
        console.print(table(*headings, rows=rows))


@dataclass(kw_only=True)
class Account(Verb):
    """Count the bits of a domain, and #Params for several, as the paper does and as stored."""

    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME, torchvision:NAME or a base's file. Weights are not needed."""
    method: str = "affine-full"
    """The method's name."""
    domains: int = 2
    """Domains in all, the base's own among them."""
    classes: int = 0
    """Classes of a new domain; the head is reported, never counted in #Params."""

    def run(self) -> dict[str, Any]:
        from polymask.core.accounting import account
        from polymask.nets.zoo import load_base

        base = load_base(self.base, pretrained=False, device="meta")
        counted = account(base, self.method, domains=self.domains, classes=self.classes)
        return counted.to_json()

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["#Params, the paper's convention", f"{result['params_paper']:.4f}"],
            ["#Params, as stored", f"{result['params_stored']:.4f}"],
            ["bits per weight of the base", f"{result['bits_per_weight']:.4f}"],
            ["parameters of the base", f"{result['base_parameters']:,}"],
            ["weights masked", f"{result['masked_weights']:,}"],
        ]
        rows += [
            [f"bits: {name.replace('_', ' ')}", f"{bits:,}"] for name, bits in result["components"].items() if bits
        ]
        title = f"{result['method']} on {result['base']}, {result['domains']} domains"
        console.print(table(title, "", rows=rows))


@dataclass(kw_only=True)
class Methods(Verb):
    """List the methods, with what each stores."""

    pattern: tyro.conf.Positional[str] = "*"
    """Names to list (* and ?)."""

    def run(self) -> list[dict[str, Any]]:
        from polymask.core.accounting import account
        from polymask.core.registry import create_method, list_methods
        from polymask.nets.zoo import load_base

        base = load_base("torchvision:resnet50", pretrained=False, device="meta")
        rows = []
        for name in list_methods(self.pattern):
            method = create_method(name)
            rows.append(
                {
                    "name": name,
                    "mergeable": method.mergeable,
                    "moves_base": method.moves_base,
                    "ordered": method.ordered,
                    "joint": method.joint,
                    "norms": method.norms,
                    "bits_per_weight": account(base, method, domains=6).bits_per_weight,
                    "reference": method.reference,
                }
            )
        return rows

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        rows = []
        for row in result:
            first, *_ = row["reference"].removeprefix("arXiv ").split(", ")
            bits = f"{row['bits_per_weight']:.2f}"
            rows.append([row["name"], bits, row["norms"], _remarks(row), first])
        console.print(table("method", "bits/weight*", "norms", "", "paper", rows=rows))
        console.print("* what each of five domains adds to ResNet-50, heads aside", style="dim")


def _remarks(row: dict[str, Any]) -> str:
    """What is not so with most methods."""
    found = {
        "learned jointly": row["joint"],
        "order matters": row["ordered"],
        "moves the base": row["moves_base"],
        "not mergeable": not row["mergeable"],
    }
    return ", ".join(remark for remark, holds in found.items() if holds)


def summary(info: "PackInfo") -> dict[str, Any]:
    """A pack in a few numbers."""
    manifest = info.manifest
    masked = sum(_product(how["shape"]) for how in manifest.bits.values())
    mask_bytes = sum(info.tensors.get(name, 0) for name in manifest.bits)
    parts: dict[str, int] = {}
    for name, size in info.tensors.items():
        part = "mask" if name in manifest.bits else name.partition("/")[0]
        parts[part] = parts.get(part, 0) + size
    return {
        "pack": info.path,
        "name": Path(info.path).name.removesuffix(".safetensors"),
        "method": manifest.method,
        "base": manifest.base,
        "class_count": len(manifest.classes or []),
        "test_accuracy": manifest.metrics.get("test_accuracy"),
        "bytes": info.bytes,
        "masked_weights": masked,
        "mask_bits_per_weight": 8 * mask_bytes / masked if masked else 0.0,
        "bytes_by_part": parts,
    }


def _percent(value: Any) -> str:
    return f"{value:.2f} %" if isinstance(value, int | float) else "–"


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
