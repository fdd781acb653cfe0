"""Verbs for packs and libraries of them: list, show, push, serve. list and show need no torch."""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import (
    BaseVerb,
    NamedPack,
    PackVerb,
    Verb,
    measured_text,
    size_text,
    table,
)
from polymask.errors import PackError
from polymask.serve.settings import Limits, Settings, read_token

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.pack.format import PackInfo


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
        if sources := result["options"].get("sources"):
            names = ", ".join(str(text).rpartition(":")[0] for text in sources)
            rows.append(["draws on", names + (", held in the pack" if result["options"].get("baked") else "")])
        if isinstance(start := result["recipe"].get("start"), dict):
            rows.append(["began as", f"a domain of {start.get('data')} by {start.get('method')}"])
        if isinstance(judged := result["recipe"].get("unknown"), dict):
            rows.append(["unknown images", f"told by {judged.get('rule')}"])
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
    kernels: Literal["auto", "eager", "compiled"] | None = None
    """What makes the weights of domains; by default auto: eager at once, compiled once a thread aside has done so."""
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
            kernels=self.kernels,
            window=self.window_ms / 1000,
            token=token,
            allow_writes=local or token is not None,
            hosts=hosts + (loopback_names(self.host) if local or hosts else ()),
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=not self.no_request_log,
        )

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"stopped after {result['seconds']} s")
