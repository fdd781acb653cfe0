"""A domain on the Hugging Face Hub: its pack, a model card and a figure in one commit."""

import html
import json
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymask.core.accounting import component_bits
from polymask.core.domain import Domain
from polymask.errors import HubError
from polymask.files import SUFFIX, check_name
from polymask.nets.zoo import BUILT_IN
from polymask.pack.format import ENDING, PackInfo, inspect
from polymask.pack.hub import PREFIX, HubName, explained, files_in, open_hub
from polymask.report.page_parts import PAPER

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MARK = "<!-- polymask wrote this card for {pack}; delete this line to keep your own edits -->"
CLASSIFY = "image-classification"  # a task of the Hub's
_LIBRARY = "polymask ([the paper](https://arxiv.org/abs/2103.13894))"


@dataclass(frozen=True)
class Card:
    """What a card is made of."""

    title: str
    name: str  # how the pack is loaded: hf:USER/REPO…
    pack: str  # the file in the repository
    info: PackInfo
    domain: Domain
    figure: str | None  # a file in the repository
    license: str | None = None

    def text(self) -> str:
        """The whole README.md."""
        parts = [
            f"---\n{self.metadata()}\n---",
            MARK.format(pack=self.pack),
            f"# {_plain(self.title)}",
            self._introduction(),
            _table(self._facts()),
            self._use(),
        ]
        if self.figure:
            parts.append(
                "## Masks\n\nThe share of ones in the mask of each layer, from input to output.\n\n"
                f"![Ones in the masks by layer]({self.figure})"
            )
        if self.domain.classes:
            names = ", ".join(map(_plain, self.domain.classes))
            parts.append(f"## Classes\n\n{names}")
        if self.domain.recipe:
            recipe = json.dumps(self.domain.recipe, indent=1)
            parts.append(f"## Training\n\n```json\n{recipe}\n```")
        return "\n\n".join(parts) + "\n"

    def metadata(self) -> str:
        """What the Hub reads: YAML."""
        from huggingface_hub import EvalResult, ModelCardData

        base = self.info.manifest.base.removeprefix("timm:")
        on_hub = base != self.info.manifest.base and "." in base  # a name with its weights' tag
        results = []
        for key, value in self.domain.metrics.items():
            if key.endswith("_accuracy") and isinstance(value, int | float):
                results.append(
                    EvalResult(
                        task_type=CLASSIFY,
                        dataset_type="images",
                        dataset_name=str(self.domain.recipe.get("data", "images")),
                        dataset_split=key.removesuffix("_accuracy"),
                        metric_type="accuracy",
                        metric_name=f"{key.replace('_', ' ')}, %",
                        metric_value=value,
                    )
                )
        data = ModelCardData(
            library_name="polymask",
            license=self.license,
            base_model=f"timm/{base}" if on_hub else None,
            pipeline_tag=CLASSIFY if self.domain.classes else "image-feature-extraction",
            tags=["polymask", "multi-domain-learning", self.info.manifest.method],
            model_name=self.title,
            eval_results=results or None,
        )
        return str(data.to_yaml())

    def _introduction(self) -> str:
        return (
            f"A visual domain for the frozen network `{_code(self.info.manifest.base)}`, learned "
            f"by the method `{_code(self.info.manifest.method)}` with {_LIBRARY}. The pack "
            f"`{_code(self.pack)}` holds what the domain adds to the network, not the network."
        )

    def _facts(self) -> dict[str, str]:
        manifest, domain = self.info.manifest, self.domain
        bits = component_bits(domain)
        facts = {
            "base": f"`{_code(manifest.base)}`, fingerprint `{manifest.fingerprint[:16]}…`",
            "method": f"`{_code(manifest.method)}`",
            "classes": str(len(domain.classes)) if domain.classes else "none: it gives features",
            "size": f"{self.info.bytes:,} bytes",
            "bits": ", ".join(f"{k.replace('_', ' ')} {n:,}" for k, n in bits.items() if n),
            "input": " × ".join(map(str, domain.input.shape)),
            "written by": f"polymask {manifest.library}, sha256 `{manifest.sha256[:16]}…`",
        }
        known = {k: v for k, v in domain.metrics.items() if v is not None}
        return facts | {k.replace("_", " "): _metric(k, v) for k, v in known.items()}

    def _use(self) -> str:
        base = self.info.manifest.base
        known = base in BUILT_IN or base.startswith(("timm:", "torchvision:"))
        source = json.dumps(base) if known else "net"
        remark = "" if known else f"  # the network that was called {json.dumps(base)}"
        return (
            "## Use\n\n```python\nimport polymask as pm\n\n"
            f"base = pm.load_base({source}){remark}\n"
            f'domain = pm.load_domain("{self.name}", base)\n'
            "net = domain.merged(base)  # an ordinary network\n```\n\n"
            f"    polymask predict {self.name} photo.jpg"
        )


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {_plain(k)} | {v} |" for k, v in rows.items())])


def _metric(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f} %" if name.endswith("_accuracy") else f"{value:.4g}"
    return _plain(json.dumps(value) if isinstance(value, dict | list) else str(value))


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    flat = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in flat)


def _code(text: str) -> str:
    """Text for between backticks."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())


README = "README.md"


def push(
    domain: Domain,
    repo: str,
    *,
    name: str | None = None,
    private: bool | None = None,
    license: str | None = None,
    message: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    force: bool = False,
) -> str:
    """Put a domain's pack on the Hugging Face Hub, with a model card; the address of the commit.

    `repo` is USER/REPO, made if it is not there; the pack is called `name`, or as the repository. A
    pack that is there is replaced by `force` only, a card that someone has edited never.
    `load_domain("hf:USER/REPO", base)` reads it back.
    """
    place = HubName.parse(f"{PREFIX}{repo}")
    if place.file or place.revision:
        raise HubError(f"{repo} is not a repository; write USER/REPO")
    name = name or repo.partition("/")[2]
    check_name(name)
    if needs := [source for source, _ in domain.method.needs]:
        raise HubError(
            f"the domain draws on the masks of {', '.join(needs)}, which {repo} would lack; bake it (polymask bake, or "
            "polymask.bake) and push that"
        )
    hub, pack = open_hub(token), f"{name}{SUFFIX}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / pack
        domain.save(file)  # checks the domain before anything is created
        with explained(repo):
            hub.create_repo(repo, private=private, exist_ok=True)
            there = files_in(hub, HubName(repo, revision))
            if pack in there and not force:
                raise HubError(
                    f"{repo} has {pack} already; push under another name, or by force (earlier "
                    "versions stay in the repository's history)"
                )
            files = _files(hub, domain, file, HubName(repo, revision), license, there)
            return _commit(hub, repo, files, message or f"Add {pack}", revision)


def _files(
    hub: "HfApi", domain: Domain, file: Path, place: HubName, license: str | None, there: list[str]
) -> dict[str, bytes]:
    """The files of the commit, by their paths in the repository."""
    pack = file.name
    alone = not any(other.endswith(SUFFIX) and other != pack for other in there)
    files = {path.name: path.read_bytes() for path in (file, *file.parent.glob(f"*{ENDING}"))}
    drawing = _figure(domain)
    figure = f"{pack.removesuffix(SUFFIX)}.masks.svg" if drawing else None
    if figure and drawing:
        files[figure] = drawing.encode()
    if README not in there or _is_ours(hub, place, pack):
        card = Card(
            title=pack.removesuffix(SUFFIX),
            name=str(HubName(place.repo, place.revision, None if alone else pack)),
            pack=pack,
            info=inspect(file),
            domain=domain,
            figure=figure,
            license=license,
        )
        files[README] = card.text().encode()
    return files


def _is_ours(hub: "HfApi", place: HubName, pack: str) -> bool:
    """Whether the card that is there was written for this pack, and not edited since."""
    path = Path(hub.hf_hub_download(place.repo, README, revision=place.revision))
    return MARK.format(pack=pack) in path.read_text(errors="replace")


def _figure(domain: Domain) -> str | None:
    """The ones in the masks by layer, as an SVG file; None without masks or matplotlib."""
    from polymask.benchmarks.jobs import layer_statistics

    layers = layer_statistics(domain)
    if not layers or find_spec("matplotlib") is None:
        return None
    from polymask.report.figures import density_by_depth

    return _as_file(density_by_depth({domain.method.name: layers}, name="masks"))


def _as_file(svg: str) -> str:
    """A drawing that stands in no page: on light paper, in a font of its own."""
    alone = f"font-family: sans-serif; background: {PAPER.light}"
    return svg.replace("font-family: inherit", alone, 1)


def _commit(hub: "HfApi", repo: str, files: dict[str, bytes], message: str, revision: str | None) -> str:
    from huggingface_hub import CommitOperationAdd

    done = hub.create_commit(
        repo,
        [CommitOperationAdd(path, content) for path, content in files.items()],
        commit_message=message,
        revision=revision,
    )
    return str(done.commit_url)
