"""Verbs for packs and libraries of them: list, show, evaluate, predict, push, serve. list and show need no torch."""

import csv
import io
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import (
    BaseVerb,
    NamedPack,
    PackVerb,
    Verb,
    check_seed,
    error_console,
    image_files,
    measured_text,
    number_text,
    size_text,
    table,
)
from polymask.errors import DataError, DomainError, PackError
from polymask.files import write_atomically
from polymask.serve.settings import Limits, Settings, read_token

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from polymask.pack.format import PackInfo
    from polymask.train.predict import Classifier

_MOST_CLASSES = 20  # that `evaluate` prints


@dataclass(kw_only=True)
class ShowVerb(NamedPack):
    """Show what a pack holds."""

    verify: bool = False
    """Read the whole file and check its sha256."""

    def run(self) -> dict[str, Any]:
        from polymask.pack.format import inspect, read_pack

        path = self.pack_path()
        info = inspect(path)
        if self.verify:
            read_pack(path)
        return pack_summary(info) | asdict(info.manifest) | ({"verified": True} if self.verify else {})

    def present(self, result: dict[str, Any], console: "Console") -> None:
        classes = result["classes"] or []
        names = ", ".join(classes[:8]) + (" …" if len(classes) > 8 else "")
        rows = [
            ["pack", result["pack"]],
            ["method", result["method"]],
            ["base", f"{result['base']} (fingerprint {result['fingerprint'][:12]}…)"],
            [result["target"], f"{len(classes)}: {names}"],
            ["input", " × ".join(map(str, result["input"].get("shape", [])))],
            ["size", size_text(result["bytes"])],
            ["bits per masked weight", f"{result['mask_bits_per_weight']:.3f}"],
        ]
        rows += [[name.replace("_", " "), measured_text(name, value)] for name, value in result["metrics"].items()]
        console.print(table("", "", rows=rows))
        console.print(f"sha256 {result['sha256']}{' ✓' if self.verify else ''}")
        parts = [[name, size_text(size)] for name, size in result["bytes_by_part"].items()]
        console.print(table("part", "size", rows=parts))


@dataclass(kw_only=True)
class ListVerb(Verb):
    """List the domains of a library."""

    library: tyro.conf.Positional[Path] = Path("library")
    """A folder of packs."""

    def run(self) -> list[dict[str, Any]]:
        from polymask.pack.format import inspect, packs_in

        found = []
        for path in packs_in(self.library):
            try:
                found.append(pack_summary(inspect(path)))
            except PackError as error:
                found.append({"pack": str(path), "name": path.stem, "problem": str(error)})
        return found

    def exit_code(self, result: list[dict[str, Any]]) -> int:
        return int(any("problem" in pack for pack in result))

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        rows = []
        for pack in result:
            if "problem" in pack:
                rows.append([pack["name"], "damaged", *4 * ["–"]])
                continue
            name, value = pack["tested"]
            short = {"test_mean_average_precision": " mAP", "test_mean_absolute_error": " off"}.get(name, "")
            shown = measured_text(name, value) + short
            named = [pack["name"], pack["method"], pack["base"]]
            rows.append([*named, str(pack["class_count"]), shown, f"{pack['bytes']:,}"])
        console.print(table("domain", "method", "base", "classes", "test accuracy", "bytes", rows=rows))
        for pack in result:
            if "problem" in pack:
                console.print(pack["problem"], style="yellow", soft_wrap=True)


def pack_summary(info: "PackInfo") -> dict[str, Any]:
    """A pack in a few numbers."""
    manifest = info.manifest
    masked = sum(math.prod(how["shape"]) for how in manifest.bits.values())
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
        "target": manifest.target,
        "test_accuracy": manifest.metrics.get("test_accuracy"),
        "tested": list(manifest.tested),
        "bytes": info.bytes,
        "masked_weights": masked,
        "mask_bits_per_weight": 8 * mask_bytes / masked if masked else 0.0,
        "bytes_by_part": parts,
    }


@dataclass(kw_only=True)
class EvaluateVerb(PackVerb):
    """Measure a domain on the test images of a source: accuracy with its interval, by class, and the confusions."""

    data: str
    """A folder of images, or another source (see the documentation of `learn`)."""
    split: str = "test"
    """Which images: train, val or test."""
    seed: int = 0
    """The seed that split the source, where it does not come with splits."""
    csv: Path | None = None
    """A file for a line per class: its numbers, then how many of its images were taken for each class."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> dict[str, Any]:
        from polymask.data.cache import cache_splits
        from polymask.data.images import some
        from polymask.data.load import load_data
        from polymask.data.loader import Loader
        from polymask.data.preprocess import eval_transform
        from polymask.files import write_atomically
        from polymask.pack.format import inspect
        from polymask.train.predict import evaluate_by_name, evaluate_in_detail

        check_seed(self.seed)
        if self.csv is not None and self.csv.is_dir():
            raise DataError(f"--csv {self.csv} is a folder; give a file's name")
        data = load_data(self.data, seed=self.seed, target=inspect(self.pack_path()).manifest.target)
        splits = data.splits()
        if self.split not in splits:
            raise DataError(f"{self.data} has no {self.split} images; it has {', '.join(splits)}")
        base, domain = self.open_domain()
        if list(data.classes) != domain.classes:
            theirs, ours = some(list(data.classes), 4), some(domain.classes or [], 4)
            raise DomainError(
                f"the classes of {self.data} ({theirs}) are not those of the domain ({ours}); "
                "evaluate on images of the same classes"
            )
        preprocess = eval_transform(data, domain.input)
        (cache,) = cache_splits([splits[self.split]], preprocess.shrink)
        loader = Loader(cache, preprocess, batch_size=64)
        about: dict[str, Any] = {"pack": str(self.pack_path())}
        if domain.target.kind != "classes":
            named_results = evaluate_by_name(base, domain, loader)
            if self.csv is not None:
                write_atomically(self.csv, named_results.csv().encode())
            numbers = asdict(named_results)
            return about | {f"{self.split}_{numbers['metric']}": numbers.pop("result")} | numbers
        found = evaluate_in_detail(base, domain, loader)
        if self.csv is not None:
            write_atomically(self.csv, found.csv().encode())
        files = cache.split.origin
        named = {
            "wrong": [files(place) for place in found.wrong],
            "hardest": [asdict(answer) | {"image": files(answer.image)} for answer in found.hardest],
        }
        numbers = found.to_json() | named
        return about | {f"{self.split}_accuracy": numbers.pop("accuracy")} | numbers

    def present(self, result: dict[str, Any], console: "Console") -> None:
        if "by_name" in result:
            metric, words = result["metric"], result["metric"].replace("_", " ")
            measured = measured_text(metric, result[f"{self.split}_{metric}"])
            console.print(f"{words} {measured} on {result['images']:,} {self.split} images")
            rows = [[name, measured_text(metric, value)] for name, value in result["by_name"].items()]
            console.print(table("name", words, rows=rows))
            return
        low, high = result["interval"]
        accuracy = number_text(result[f"{self.split}_accuracy"], unit=" %")
        console.print(f"{accuracy} of {result['images']:,} {self.split} images (95 % interval {low:.1f} to {high:.1f})")
        if result["top5_accuracy"] is not None:
            console.print(f"{number_text(result['top5_accuracy'], unit=' %')} have their class among the first five")
        classes = sorted((one for one in result["by_class"] if one["images"]), key=lambda one: one["accuracy"])
        rows = []
        for one in classes[:_MOST_CLASSES]:
            right, interval = f"{one['right']:,} of {one['images']:,}", f"{one['low']:.1f} to {one['high']:.1f}"
            rows.append([one["name"], right, f"{one['accuracy']:.1f}", interval, one["taken_for"] or "–"])
        console.print(table("class", "right", "accuracy, %", "95 % interval", "most often taken for", rows=rows))
        if len(classes) > _MOST_CLASSES:
            console.print(f"the {_MOST_CLASSES} hardest of {len(classes):,} classes; --csv FILE has all", style="dim")
        if self.csv is not None:
            console.print(f"wrote {self.csv}", soft_wrap=True, markup=False)


@dataclass(kw_only=True)
class PredictVerb(PackVerb):
    """Say what is on images: files, folders or patterns."""

    files: tyro.conf.Positional[list[str]]
    """Files, folders or patterns (quote them)."""
    top: int = 3
    """How many classes to name for each image."""
    csv: Path | None = None
    """Write the answers to this file, a line for each image and class."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> list[dict[str, Any]]:
        from polymask.train.predict import Classifier

        if self.top < 1:
            raise DataError(f"--top {self.top} must be at least 1")
        if self.csv is not None and not self.csv.absolute().parent.is_dir():
            raise DataError(f"--csv {self.csv}: there is no folder {self.csv.parent}")
        self.pack_path()  # a name that nobody has is said before files are looked for
        files = image_files(self.files)
        if not files:
            raise DataError("no image is given; polymask predict NAME FILES…")
        base, domain = self.open_domain()
        if domain.classes is None:
            raise DomainError(f"{self.pack} has no classes: it gives features, not predictions")
        classify = Classifier(base, domain)
        rows: list[dict[str, Any]] = []
        for batch in batched_files(files, "predicting"):
            for file, answer in read_some(classify, batch):
                if isinstance(answer, DataError):
                    rows.append({"image": str(file), "problem": str(answer)})
                    continue
                rows.append({"image": str(file)} | domain.target.said(answer, domain.classes, self.top))
        if self.csv is not None:
            write_predictions(self.csv, rows)
        return rows

    def exit_code(self, result: list[dict[str, Any]]) -> int:
        return int(any("problem" in row for row in result))

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        answered = [row for row in result if "problem" not in row]
        rows = [[row["image"], *_answer_cells(row)] for row in answered]
        if self.csv is not None:
            console.print(f"wrote {self.csv}: {len(rows)} images", soft_wrap=True)
        elif not console.is_terminal:
            for row in rows:  # whole lines for other programs
                print("\t".join(row))
        elif rows:
            places = ["first", "second", "third"] + [f"{n}th" for n in range(4, self.top + 1)]
            headings = list(answered[0].get("values", places))
            console.print(table("image", *headings[: len(rows[0]) - 1], rows=rows))
        problems = [row["problem"] for row in result if "problem" in row]
        for problem in problems:
            self.say(f"skipped: {problem}", style="yellow")
        if problems:
            self.say(f"{len(problems)} of {len(result)} files could not be read")


def _answer_cells(row: dict[str, Any]) -> list[str]:
    """What is said of one image, as texts: classes with their probabilities, or values."""
    if "values" in row:
        return [f"{value:.4g}" for value in row["values"].values()]
    return [f"{guess['class']} {100 * guess['probability']:.1f} %" for guess in row["top"]]


def batched_files(files: list[Path], title: str, size: int = 32) -> Iterator[list[Path]]:
    """Files, some at a time, while a bar shows how many are done."""
    from rich.progress import Progress

    with Progress(console=error_console(), transient=True, disable=len(files) <= size) as bar:
        task = bar.add_task(f"  {title}", total=len(files))
        for start in range(0, len(files), size):
            yield files[start : start + size]
            bar.advance(task, size)


def read_some(classify: "Classifier", files: list[Path]) -> "Iterator[tuple[Path, Tensor | DataError]]":
    """The probabilities of each file, or why it cannot be read; one that is damaged does not harm the others."""
    try:
        yield from zip(files, classify(files), strict=True)
        return
    except DataError as error:
        if len(files) == 1:
            yield files[0], error
            return
    for file in files:
        yield from read_some(classify, [file])


def write_predictions(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write predictions as CSV: image, rank, class, probability; of values, image and every value by its name."""
    text = io.StringIO()
    writer = csv.writer(text)
    values = next((row["values"] for row in rows if "values" in row), None)
    writer.writerow(["image", *(("rank", "class", "probability") if values is None else values)])
    for row in rows:
        if "values" in row:
            writer.writerow([row["image"], *row["values"].values()])
        for rank, found in enumerate(row.get("top", ()), 1):
            writer.writerow([row["image"], rank, found["class"], f"{found['probability']:.6f}"])
    write_atomically(path, text.getvalue().encode())


@dataclass(kw_only=True)
class PushVerb(PackVerb):
    """Put a domain on the Hugging Face Hub, with a model card."""

    repo: tyro.conf.Positional[str]
    """USER/REPO; it is made if it is not there."""
    name: str | None = None
    """The pack's name in the repository; by default the repository's own."""
    private: bool = False
    """Make the repository private, if it is made."""
    license: str | None = None
    """The licence of the pack, as the Hub abbreviates it (apache-2.0, mit, …)."""
    message: str | None = None
    """What the commit says."""
    revision: str | None = None
    """The branch."""
    force: bool = False
    """Replace a pack of the same name."""

    def needs(self) -> list[str]:
        return ["huggingface_hub"]

    def run(self) -> dict[str, Any]:
        from polymask.report.card import push

        base, domain = self.open_domain()
        self.say(f"pushing {self.pack} ({domain.method.name} on {base.name}) to {self.repo}")
        commit = push(
            domain,
            self.repo,
            name=self.name,
            private=self.private or None,
            license=self.license,
            message=self.message,
            revision=self.revision,
            force=self.force,
        )
        return {"repo": self.repo, "commit": commit, "load": f"hf:{self.repo}"}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"{result['commit']}\nload it as {result['load']}", soft_wrap=True)


@dataclass(kw_only=True)
class ServeVerb(BaseVerb):
    """Serve a library over HTTP: predictions, uploads, a web page."""

    library: tyro.conf.Positional[Path]
    """A folder of packs; one that appears in it is served at once."""
    base: str | None = None
    """The base, where it is not the one that the first pack names."""
    host: str = "127.0.0.1"
    """The address to listen on. Beyond this machine, writing needs --token-file."""
    port: int = 8000
    """The port; 0 takes a free one."""
    workers: int = 1
    """Processes; they share the base's memory."""
    window_ms: float = 1000 * Settings.window
    """How long a request waits for others to be run with."""
    drain: int = 30
    """Seconds that requests under way have when the server is told to stop."""
    token_file: Path | None = None
    """A file with the token that uploads and deletions must carry."""
    allow_host: list[str] | None = None
    """Names that requests may call the server by, without a port."""
    cors_origin: list[str] | None = None
    """Origins whose pages may use the server from a browser; by default none."""
    no_request_log: bool = False
    """Do not log each request."""
    limits: Limits = field(default_factory=Limits)

    def needs(self) -> list[str]:
        return ["PIL", "fastapi", "uvicorn", "prometheus_client", "python_multipart"]

    def run(self) -> dict[str, Any]:
        from polymask.serve.process import serve

        began = time.monotonic()
        address: list[str] = []

        def ready(url: str, device: str, skipped: Mapping[str, str]) -> None:
            address.append(url)
            for name, reason in skipped.items():
                self.say(f"not served: {name}: {reason}", style="yellow")
            self.say(f"serving {self.library} at {url}, computing on {device}")
            sys.stderr.flush()

        serve(self.settings(), host=self.host, port=self.port, workers=self.workers, drain=self.drain, ready=ready)
        return {"address": address[0], "seconds": round(time.monotonic() - began, 1)}

    def settings(self) -> Settings:
        """What the server is told."""
        from polymask.serve.process import is_loopback, loopback_names

        local = is_loopback(self.host)
        token = None if self.token_file is None else read_token(self.token_file)
        hosts = tuple(name.lower() for name in self.allow_host or ())
        return Settings(
            **asdict(self.limits),
            library=self.library,
            base=self.base,
            weights=self.weights,
            device=self.device,
            window=self.window_ms / 1000,
            token=token,
            allow_writes=local or token is not None,
            hosts=hosts + (loopback_names(self.host) if local or hosts else ()),
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=not self.no_request_log,
        )

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"stopped after {result['seconds']} s")
