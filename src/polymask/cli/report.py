"""Verbs that count: report and score, which import no torch, account and methods."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import Verb, number_text, table
from polymask.errors import BenchmarkError

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.benchmarks.score import Score


@dataclass(kw_only=True)
class ReportVerb(Verb):
    """Write tables and figures of a benchmark's runs, or of one training, as a page of its own."""

    runs: tyro.conf.Positional[list[Path]]
    """The folder that `polymask benchmark --out` wrote, or the NAME.run beside a pack that `polymask learn`
    wrote; several only with --compare."""
    out: Path | None = None
    """Where the report goes: beside the runs, unless given."""
    compare: str | None = None
    """Write nothing, but compare methods: affine-full,finetune. The first is compared with each of the
    others, over the domains of all folders."""

    def needs(self) -> list[str]:
        return ["matplotlib"] if self.compare is None else []

    def run(self) -> dict[str, Any]:
        if self.compare is not None:
            return self._compare(self.compare)
        if len(self.runs) != 1:
            raise BenchmarkError(
                f"a report is of one folder, not of {len(self.runs)}; give one, or --compare A,B "
                "to compare methods over several"
            )
        from polymask.report.learn_page import is_learn_run, write_learn_report
        from polymask.report.pages import write_report

        if is_learn_run(self.runs[0]):
            record, file = write_learn_report(self.runs[0], self.out)
            found = None if record.evaluation is None else record.evaluation.to_json()
            return {"name": record.name, "method": record.method, "evaluation": found, "files": [str(file)]}
        findings, files = write_report(self.runs[0], self.out)
        return findings.to_json() | {"files": [str(file) for file in files]}

    def _compare(self, text: str) -> dict[str, Any]:
        from polymask.benchmarks.compare import compare_pooled

        method, *others = [name.strip() for name in text.split(",")]
        if not self.runs or not others or not all((method, *others)):
            raise BenchmarkError(f"--compare {text}: give a folder of runs and two or more methods, comma-separated")
        return {"comparisons": [compare_pooled(self.runs, method, other).to_json() for other in others]}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        if "comparisons" in result and "rows" not in result:
            for one in result["comparisons"]:
                console.print(one["sentence"], soft_wrap=True)
            return
        if "evaluation" in result:
            console.print(f"wrote {result['files'][0]}", soft_wrap=True, markup=False)
            return
        rows = result["rows"]
        before = {
            "test accuracy, %": [typed(row) for row in rows],
            "#Params": [number_text(row["params"]) for row in rows],
        }
        after = _after(rows)
        accuracies = {name: [_over_seeds(row["accuracy"][name]) for row in rows] for name in rows[0]["accuracy"]}
        others = sum(map(_width, (before | after).items()))
        if others + sum(map(_width, accuracies.items())) > console.width:
            deviations = [(row["mean_by_seed"] or {}).get("sd") for row in rows]
            means = [number_text(row["mean"], sd, places=1) for row, sd in zip(rows, deviations, strict=True)]
            accuracies = {"mean over domains": means}
        columns = before | accuracies | after
        lines = [list(line) for line in zip(*columns.values(), strict=True)]
        console.print(table(*columns, rows=lines))
        for row in rows:
            if row["remark"]:
                console.print(f"{typed(row)}: {row['remark']}")
        console.print(result["remark"], style="dim")
        for text in result["missing"]:
            console.print(f"missing: {text}", style="dim")
        for file in result["files"]:
            console.print(f"wrote {file}", soft_wrap=True)


def typed(row: dict[str, Any]) -> str:
    """A row by the name that its method was asked for by, not the paper's."""
    from polymask.benchmarks.records import ARROWS

    return f"{row['method']}{ARROWS[row['direction']]}"


def _over_seeds(one: dict[str, Any] | None) -> str:
    return "–" if one is None else number_text(one["mean"], one["sd"], places=1)


def _after(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Scores, bits that moved and what was chosen; the last two where a row has them."""
    from polymask.benchmarks.tables import settings_text
    from polymask.report.page_parts import moved_text

    shares = [row["share_moved"] for row in rows]
    scored = {
        "Score": [number_text(row["score"], places=0) for row in rows],
        "Score / #Params": [number_text(row["score_per_param"], places=0) for row in rows],
    }
    some = {
        "bits moved": ["–" if share is None else moved_text(share) for share in shares],
        "chosen": [settings_text(row["chosen"]) or "–" for row in rows],
    }
    return scored | {name: cells for name, cells in some.items() if set(cells) != {"–"}}


def _width(column: tuple[str, list[str]]) -> int:
    heading, cells = column
    return 2 + max(map(len, (heading, *cells)))


@dataclass(kw_only=True)
class ScoreVerb(Verb):
    """Score accuracies on a benchmark, or a submission of the decathlon against its test labels."""

    benchmark: Literal["decathlon", "imagenet-to-sketch"]
    """The benchmark to score."""
    accuracies: Path | None = None
    """JSON: {domain: percent}, or {"accuracy": {…}, "reference": {…}, "params": 1.17}."""
    results: Path | None = None
    """A results.json as the decathlon's server takes it. Needs --labels."""
    labels: Path | None = None
    """The organisers' labels_test.zip."""
    decimals: int | None = None
    """To how many decimals the accuracies are rounded, where their text does not show it."""

    def run(self) -> dict[str, Any]:
        if self.accuracies is not None and self.results is None:
            return self.score_accuracies(self.accuracies).to_json()
        if self.results is not None and self.accuracies is None:
            return self.score_results(self.results).to_json()
        raise BenchmarkError("give --accuracies FILE.json, or --results FILE.json and --labels")

    def score_accuracies(self, file: Path) -> "Score":
        """The score of the accuracies in a file."""
        from polymask.benchmarks.score import read_accuracies, score

        if self.labels is not None:
            raise BenchmarkError("--labels goes with --results; accuracies are scored without it")
        read = read_accuracies(file)
        reference, fixed = read.reference, self.decimals
        return score(
            self.benchmark,
            read.accuracy.values,
            reference=None if reference is None else reference.values,
            params=read.params,
            decimals=read.accuracy.decimals if fixed is None else fixed,
            reference_decimals=reference.decimals if reference and fixed is None else fixed,
        )

    def score_results(self, file: Path) -> "Score":
        """The score of a submission."""
        from polymask.benchmarks.submission import DOMAIN_IDS, read_labels, score_submission

        if self.benchmark != "decathlon":
            raise BenchmarkError(f"{self.benchmark} has no submissions; give --accuracies")
        if self.labels is None:
            raise BenchmarkError(f"{file} is scored by labels; give --labels labels_test.zip")
        if self.decimals is not None:
            raise BenchmarkError("--decimals goes with --accuracies; those of a submission are exact")
        labels = read_labels(self.labels)
        images = sum(len(part) for part in labels.values())
        official = sum(ids.test for ids in DOMAIN_IDS.values())
        if images != official:
            counts = f"{self.labels} has {images:,} test images, the challenge {official:,}"
            self.say(f"{counts}: the score cannot be compared with published ones")
        return score_submission(file, labels)

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            [domain, f"{result['accuracy'][domain]:.2f}", f"{points:.1f}"]
            for domain, points in result["per_domain"].items()
        ]
        console.print(table("domain", "accuracy, %", "points", rows=rows))
        total = f"score {result['score']:.1f}"
        if result["low"] < result["high"]:
            total += f", {result['low']:.1f} to {result['high']:.1f} as the accuracies are rounded"
        console.print(total)
        if "score_per_param" in result:
            console.print(f"score per parameter {result['score_per_param']:.1f}")


@dataclass(kw_only=True)
class AccountVerb(Verb):
    """Count the bits of a domain, and #Params for several, as the paper does and as stored."""

    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME, torchvision:NAME or a base's file. Weights are not needed."""
    method: str = "affine-full"
    """The method's name."""
    domains: int = 2
    """Domains in all, the base's own among them."""
    classes: int = 0
    """Classes of a new domain; the head is reported, never counted in #Params."""
    precision: Literal[16, 32] = 32
    """Bits of a number in norms, scalars and head: 32 as the paper counts, 16 as `learn` keeps them."""

    def run(self) -> dict[str, Any]:
        from polymask.core.accounting import account
        from polymask.nets.zoo import load_base

        base = load_base(self.base, pretrained=False, device="meta")
        found = account(base, self.method, domains=self.domains, classes=self.classes, precision=self.precision)
        return found.to_json()

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["#Params, the paper's convention", f"{result['params_paper']:.4f}"],
            ["#Params, as stored", f"{result['params_stored']:.4f}"],
            ["bits per weight of the base", f"{result['bits_per_weight']:.4f}"],
            ["parameters of the base", f"{result['base_parameters']:,}"],
            ["weights masked", f"{result['masked_weights']:,}"],
        ]
        counted = {name.replace("_", " "): bits for name, bits in result["components"].items() if bits}
        rows += [[f"bits: {name}", f"{bits:,}"] for name, bits in counted.items()]
        title = f"{result['method']} on {result['base']}, {result['domains']} domains"
        console.print(table(title, "", rows=rows))


COUNTED = Path(__file__).parent / "bits_per_weight.json"  # of each method on ResNet-50, by tools/method_pages.py
UNUSUAL = {
    "joint": (True, "learned jointly"),
    "ordered": (True, "order matters"),
    "moves_base": (True, "moves the base"),
    "mergeable": (False, "not mergeable"),
}


@dataclass(kw_only=True)
class MethodsVerb(Verb):
    """List the methods, with what each stores."""

    pattern: tyro.conf.Positional[str] = "*"
    """Names to list (* and ?)."""

    def run(self) -> list[dict[str, Any]]:
        from polymask.core.registry import create_method, list_methods

        names = list_methods(self.pattern)
        counted: dict[str, float] = json.loads(COUNTED.read_text())
        counted |= count_bits([name for name in names if name not in counted])
        rows = []
        for name in names:
            method = create_method(name)
            noted = {key: getattr(method, key) for key in ("mergeable", "moves_base", "ordered", "joint", "norms")}
            rows.append({"name": name, **noted, "bits_per_weight": counted[name], "reference": method.reference})
        return rows

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        rows = []
        for row in result:
            first, *_ = row["reference"].removeprefix("arXiv ").split(", ")
            remarks = ", ".join(remark for key, (value, remark) in UNUSUAL.items() if row[key] is value)
            rows.append([row["name"], f"{row['bits_per_weight']:.2f}", row["norms"], remarks, first])
        console.print(table("method", "bits/weight*", "norms", "", "paper", rows=rows))
        console.print("* what each of five domains adds to ResNet-50, heads aside", style="dim")


def count_bits(methods: list[str]) -> dict[str, float]:
    """What each of five domains adds to ResNet-50 by each method, in bits per weight."""
    if not methods:
        return {}
    from polymask.core.accounting import account
    from polymask.nets.zoo import load_base

    base = load_base("torchvision:resnet50", pretrained=False, device="meta")
    return {name: account(base, name, domains=6).bits_per_weight for name in methods}
