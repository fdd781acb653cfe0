"""Verbs that import no torch: report makes tables and figures of runs, score scores, serve starts a server."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import BaseVerb, Verb, table
from polymask.errors import BenchmarkError

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.benchmarks.score import Score
    from polymask.serve.settings import Settings


@dataclass(kw_only=True)
class Report(Verb):
    """Write tables and figures of a benchmark's runs, as HTML, Markdown and CSV."""

    runs: tyro.conf.Positional[list[Path]]
    """The folder that `polymask benchmark --out` wrote; several only with --compare."""
    out: Path | None = None
    """Where the report goes: beside the runs, unless given."""
    compare: str | None = None
    """Write nothing, but say who is ahead: affine-full,finetune; the first with each of the others,
    over the domains of all folders."""

    def run(self) -> dict[str, Any]:
        if self.compare is not None:
            return self._compare(self.compare)
        if len(self.runs) != 1:
            raise BenchmarkError(
                f"a report is of one folder, not of {len(self.runs)}; give one, or --compare A,B "
                "to compare methods over several"
            )
        from polymask.report.pages import write_report

        findings, files = write_report(self.runs[0], self.out)
        return findings.to_json() | {"files": [str(file) for file in files]}

    def _compare(self, text: str) -> dict[str, Any]:
        from polymask.benchmarks.compare import compare_pooled

        method, *others = [name.strip() for name in text.split(",")]
        if not self.runs or not others or not all((method, *others)):
            raise BenchmarkError(
                f"--compare {text}: give a folder of runs and two methods or more, with commas between"
            )
        found = [compare_pooled(self.runs, method, other) for other in others]
        return {"comparisons": [one.to_json() for one in found]}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        if "comparisons" in result and "rows" not in result:
            for one in result["comparisons"]:
                console.print(one["sentence"], soft_wrap=True, markup=False)
            return
        rows = result["rows"]
        before = {
            "test accuracy, %": [row["label"] for row in rows],
            "#Params": [_number(row["params"], 2) for row in rows],
        }
        after = _after(rows)
        accuracies = {name: [_over_seeds(row["accuracy"][name]) for row in rows] for name in rows[0]["accuracy"]}
        others = sum(map(_width, (before | after).items()))
        if others + sum(map(_width, accuracies.items())) > console.width:
            accuracies = {"mean over domains": [_over_seeds(_mean(row)) for row in rows]}
        columns = before | accuracies | after
        lines = [list(line) for line in zip(*columns.values(), strict=True)]
        console.print(table(*columns, rows=lines))
        for row in rows:
            if row["remark"]:
                console.print(f"{row['label']}: {row['remark']}", markup=False)
        console.print(result["remark"], style="dim", markup=False)
        for text in result["missing"]:
            console.print(f"missing: {text}", style="dim", markup=False)
        for file in result["files"]:
            console.print(f"wrote {file}", soft_wrap=True, markup=False)


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _over_seeds(one: dict[str, Any] | None) -> str:
    if one is None:
        return "–"
    return f"{one['mean']:.1f}" if one["sd"] is None else f"{one['mean']:.1f} ± {one['sd']:.1f}"


def _mean(row: dict[str, Any]) -> dict[str, Any] | None:
    if row["mean"] is None:
        return None
    by_seed = row["mean_by_seed"]
    return {"mean": row["mean"], "sd": None if by_seed is None else by_seed["sd"]}


def _after(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Scores, bits that moved and what was chosen; the last two where a row has them."""
    from polymask.benchmarks.tables import settings_text
    from polymask.report.sheet import moved_text

    shares = [row["share_moved"] for row in rows]
    scored = {
        "Score": [_number(row["score"], 0) for row in rows],
        "Score / #Params": [_number(row["score_per_param"], 0) for row in rows],
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


@dataclass(kw_only=True)
class Serve(BaseVerb):
    """Serve a library over HTTP: predictions, uploads, a web page."""

    library: tyro.conf.Positional[Path]
    """A folder of packs; one that appears in it is served at once."""
    base: str | None = None
    """The base, where it is not the one that the first pack names."""
    host: str = "127.0.0.1"
    """The address to listen on. Beyond this machine, writing needs --token-file."""
    port: int = 8000
    """The port; 0 takes a free one."""
    cache_bytes: int = 1 << 30
    """Bytes of merged networks that each worker keeps warm."""
    workers: int = 1
    """Processes; they share the base's memory."""
    runners: int = 2
    """Threads of each worker that run networks."""
    threads: int | None = None
    """Threads of torch for each runner; the cores shared out where none is given."""
    window_ms: float = 2.0
    """How long a request waits for others to be run with."""
    max_batch: int = 32
    """Images that are run together at most."""
    max_queue: int = 512
    """Images that a worker admits before it answers 429."""
    max_body_bytes: int = 32 << 20
    """The largest request."""
    max_pack_bytes: int = 512 << 20
    """The largest upload."""
    max_pixels: int = 25_000_000
    """The largest image."""
    auto_domains: int = 64
    """Domains that /v1/predict/auto compares at most."""
    timeout: float = 30.0
    """Seconds after which a request is given up."""
    drain: int = 30
    """Seconds that requests under way have when the server is told to stop."""
    token_file: Path | None = None
    """A file with the token that uploads and deletions must carry."""
    token_for_reads: bool = False
    """Ask for the token in every request."""
    allow_host: list[str] | None = None
    """Names that requests may call the server by, without a port."""
    cors_origin: list[str] | None = None
    """Origins whose pages may use the server from a browser; none is the default."""
    no_request_log: bool = False
    """Do not log each request."""

    def run(self) -> dict[str, Any]:
        try:
            from polymask.serve.process import serve
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'polymask[serve]'") from error
        began = time.monotonic()
        address: list[str] = []

        def ready(url: str) -> None:
            address.append(url)
            self.say(f"serving {self.library} at {url}")
            sys.stderr.flush()

        serve(self.settings(), host=self.host, port=self.port, workers=self.workers, drain=self.drain, ready=ready)
        return {"address": address[0], "seconds": round(time.monotonic() - began, 1)}

    def settings(self) -> "Settings":
        """What the server is told."""
        from polymask.serve.process import is_loopback, loopback_names
        from polymask.serve.settings import Settings, read_token

        local = is_loopback(self.host)
        token = None if self.token_file is None else read_token(self.token_file)
        hosts = tuple(name.lower() for name in self.allow_host or ())
        return Settings(
            library=self.library,
            base=self.base,
            weights=self.weights,
            device=self.device,
            cache_bytes=self.cache_bytes,
            runners=self.runners,
            threads=self.threads,
            window=self.window_ms / 1000,
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            max_body_bytes=self.max_body_bytes,
            max_pack_bytes=self.max_pack_bytes,
            max_pixels=self.max_pixels,
            auto_domains=self.auto_domains,
            timeout=self.timeout,
            token=token,
            token_for_reads=self.token_for_reads,
            allow_writes=local or token is not None,
            hosts=hosts + (loopback_names(self.host) if local or hosts else ()),
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=not self.no_request_log,
        )

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"stopped after {result['seconds']} s")
