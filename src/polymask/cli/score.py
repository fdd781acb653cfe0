"""The verb that scores: accuracies, or a submission of the decathlon. It needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polymask.cli.verb import Verb, table
from polymask.errors import BenchmarkError

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.benchmarks.score import Score


@dataclass(kw_only=True)
class ScoreVerb(Verb):
    """Score accuracies on a benchmark, or a submission of the decathlon against its test labels."""

    benchmark: Literal["decathlon", "imagenet-to-sketch"]
    """Whose score."""
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
        from polymask.benchmarks import score
        from polymask.benchmarks.accuracies import read_accuracies

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
        from polymask.benchmarks.labels import read_labels
        from polymask.benchmarks.numbering import NUMBERINGS
        from polymask.benchmarks.submission import score_submission

        if self.benchmark != "decathlon":
            raise BenchmarkError(f"{self.benchmark} has no submissions; give --accuracies")
        if self.labels is None:
            raise BenchmarkError(f"{file} is scored by labels; give --labels labels_test.zip")
        if self.decimals is not None:
            raise BenchmarkError("--decimals goes with --accuracies; those of a submission are exact")
        labels = read_labels(self.labels)
        images = sum(len(part) for part in labels.values())
        official = sum(numbering.test for numbering in NUMBERINGS.values())
        if images != official:
            self.say(
                f"{self.labels} has {images:,} test images, the challenge {official:,}: the score "
                "cannot be compared with published ones"
            )
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
