"""A library from fine-tuned networks that people already have: many checkpoints of one base become packs.

One checkpoint is in memory at a time, beside the base; `tall-mask` and `emr` have the update of all there too. A
checkpoint that does not fit is listed with its reason, and the others go on. Packs that the same call has made before
are kept, so an interrupted conversion goes on where it was.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from polymask.conversion.convert import RATE, STEPS, Converted, Statistics, convert, convertible, recipe_at
from polymask.conversion.finetuned import ConvertError, Finetuned
from polymask.core.base import Base
from polymask.core.method import Method
from polymask.core.network import digest_tensors
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.errors import PolymaskError
from polymask.files import SUFFIX, check_name
from polymask.methods.shared_update import SharedUpdate, united
from polymask.nets.base_file import checkpoint_bytes
from polymask.pack.format import inspect
from polymask.train.fit import Listener
from polymask.train.learn import Loaders
from polymask.train.recipe import Recipe

NOTE = "conversion"  # in a pack's recipe: a digest of all that it was made from


@dataclass(frozen=True)
class Checkpoint:
    """A fine-tuned network on disk, the names of its outputs, and images for it, where there are some."""

    path: Path
    classes: list[str] | None = None
    data: str | Path | DomainData | None = None


@dataclass(frozen=True)
class Conversion:
    """What became of one checkpoint: a pack, made now or before, or the reason why there is none."""

    name: str
    pack: Path | None
    checkpoint_bytes: int
    pack_bytes: int | None = None
    kept: bool = False  # from an earlier call
    metrics: dict[str, Any] = field(default_factory=dict)  # the pack's: accuracies, agreement, what is missed
    notes: tuple[str, ...] = ()
    left: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self) | {"pack": None if self.pack is None else str(self.pack)}


@dataclass(frozen=True)
class ConvertOptions:
    """How every checkpoint of a call is converted; see `convert`."""

    recipe: str | Recipe = "quick"
    side: int | None = None
    statistics: Statistics = "auto"
    steps: int = STEPS
    rate: float = RATE
    train_masks: bool = False
    seed: int = 0
    limit: int | None = None
    force: bool = False

    def how(self) -> dict[str, Any]:
        """What `convert` takes of them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("limit", "force")}

    def key(self, base: Base, method: Method, update: str | None) -> str:
        """What makes packs of two calls the same, as text."""
        recipe = recipe_at(base, self.recipe, self.side).to_json()
        ours = self.how() | {"recipe": recipe, "limit": self.limit}
        return json.dumps([method.name, method.options(), ours, update], sort_keys=True)


def convert_all(
    base: Base,
    checkpoints: Mapping[str, Checkpoint],
    out: str | Path,
    *,
    method: str | Method = "bitdelta",
    options: ConvertOptions | None = None,
    loaders: Callable[[DomainData], Loaders] | None = None,
    listener: Callable[[str], Listener] | None = None,
) -> Iterator[Conversion]:
    """Convert many networks that were fine-tuned from one base to packs in the folder `out`, one after another.

    `method` is `bitdelta`, `bitdelta-row` or `bitdelta-column`, or `tall-mask` or `emr`, whose packs share one file.
    Each result is given as soon as its pack is written.
    """
    options = options or ConvertOptions()
    chosen, out = convertible(method, masks=options.train_masks), Path(out)
    if not checkpoints:
        raise ConvertError("no checkpoint is given; give at least one")
    for name in checkpoints:
        check_name(name)
    problems: dict[str, str] = {}
    update = None
    if isinstance(chosen, SharedUpdate):
        update = united(chosen.rule, _Changes(base, checkpoints, problems))
    shared = None if update is None else digest_tensors(update)
    for name, checkpoint in checkpoints.items():
        if name in problems:
            yield _failed(name, checkpoint, problems[name])
            continue
        pack = out / f"{name}{SUFFIX}"
        try:
            data = checkpoint.data
            if isinstance(data, str | Path):
                data = load_data(data, seed=options.seed, limit=options.limit)
            made_from = f"{options.key(base, chosen, shared)}\n{_digest_of(checkpoint, data)}"
            key = hashlib.sha256(made_from.encode()).hexdigest()
            if pack.exists() and not options.force:
                yield _kept(name, pack, checkpoint, key)
                continue
            converted = convert(
                base,
                Finetuned.read(base, checkpoint.path),
                method=chosen,
                classes=checkpoint.classes,
                data=data,
                update=update,
                loaders=None if loaders is None or data is None else loaders(data),
                **options.how(),
                listener=None if listener is None else listener(name),
            )
            converted.domain.recipe |= {NOTE: key}
            converted.domain.save(pack)
        except PolymaskError as error:
            yield _failed(name, checkpoint, str(error))
            continue
        yield _made(name, pack, checkpoint, converted)


class _Changes:
    """Δ of every checkpoint that fits, read again each time; those that do not fit are left out, with the reason."""

    def __init__(self, base: Base, checkpoints: Mapping[str, Checkpoint], problems: dict[str, str]) -> None:
        self.base, self.checkpoints, self.problems = base, checkpoints, problems

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for name, checkpoint in self.checkpoints.items():
            if name in self.problems:
                continue
            try:
                tuned = Finetuned.read(self.base, checkpoint.path)
            except PolymaskError as error:
                self.problems[name] = str(error)
                continue
            changes = {site: tuned.delta(self.base, site) for site in self.base.sites}
            del tuned
            yield changes


def _digest_of(checkpoint: Checkpoint, data: DomainData | None) -> str:
    """What a checkpoint's pack is made from: its files, names and images."""
    found = hashlib.sha256()
    try:
        for file in sorted(checkpoint.path.iterdir()) if checkpoint.path.is_dir() else [checkpoint.path]:
            if not file.is_dir():
                with file.open("rb") as stream:
                    found.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise ConvertError(f"{checkpoint.path} cannot be read: {error.strerror}") from error
    images = None if data is None else data.train.fingerprint()
    return json.dumps([found.hexdigest(), checkpoint.classes, images])


def _kept(name: str, pack: Path, checkpoint: Checkpoint, key: str) -> Conversion:
    """A pack that is there already; a problem where something else made it."""
    manifest = inspect(pack).manifest
    if manifest.recipe.get(NOTE) != key:
        reason = f"{pack} exists and was made of something else; choose another name, or force to replace it"
        return _failed(name, checkpoint, reason)
    size = checkpoint_bytes(checkpoint.path)
    return Conversion(name, pack, size, pack.stat().st_size, kept=True, metrics=manifest.metrics)


def _failed(name: str, checkpoint: Checkpoint, problem: str) -> Conversion:
    return Conversion(name, None, checkpoint_bytes(checkpoint.path), problem=problem)


def _made(name: str, pack: Path, checkpoint: Checkpoint, converted: Converted) -> Conversion:
    return Conversion(
        name,
        pack,
        checkpoint_bytes(checkpoint.path),
        pack.stat().st_size,
        metrics=converted.domain.metrics,
        notes=converted.notes,
        left=converted.left,
    )
