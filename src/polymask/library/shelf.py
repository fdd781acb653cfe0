"""A domain that stays on disk until it is used, known by the head of its pack.

A library may have more domains than memory has room for. What a caller must know of one before it runs is in the
manifest. Its tensors are read when it is used, and then the pack must still be the one that was looked at.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymask.core.base import Base
from polymask.core.domain import LIKENESS, Domain
from polymask.core.input import InputSpec
from polymask.core.registry import create_method
from polymask.core.target import Target
from polymask.core.unknown import Judgement, read_judgement
from polymask.errors import PackError, PolymaskError
from polymask.library.cache import Source
from polymask.pack.format import inspect
from polymask.pack.mould import Kind, Mould, kind_of, poured
from polymask.pack.storing import OpenPack, check_made_for, facts_of


@dataclass(frozen=True, eq=False)
class ShelvedDomain:
    """What is known of a domain without its tensors; little, since there may be very many."""

    path: Path
    base: Base
    sha256: str  # of the pack
    kind: Kind
    classes: list[str] | None
    input: InputSpec
    target: Target
    judgement: Judgement | None  # how it tells unknown images
    likeness: Any  # the note of what its images look like

    @classmethod
    def of(cls, path: Path, base: Base) -> "ShelvedDomain":
        """The domain of a pack; raise where its head says that it cannot run on this base."""
        manifest = inspect(path).manifest
        check_made_for(path, manifest, base)
        facts = facts_of(path, manifest, base)
        try:
            create_method(manifest.method)
            judgement = read_judgement(manifest.unknown)
        except (PolymaskError, TypeError) as error:
            raise PackError(f"{path}: {error}") from error
        if manifest.beside is not None and not (path.parent / manifest.beside).is_file():
            raise PackError(f"{path} needs {manifest.beside}, which is missing: copy it from where the pack came from")
        kind, likeness = kind_of(manifest), manifest.recipe.get(LIKENESS)
        return cls(path, base, manifest.sha256, kind, manifest.classes, facts.input, facts.target, judgement, likeness)

    @property
    def source(self) -> Source:
        """Where its network comes from."""
        return Source(self.kind, self.poured)

    def poured(self, mould: Mould | None = None) -> Mould:
        """Its domain, in a mould that may be this one."""
        return poured(self.path, self.base, mould, sha256=self.sha256)

    def load(self) -> Domain:
        """The domain itself, in its stored form."""
        pack = OpenPack.read(self.path, self.base)
        pack.check_same(self.sha256)
        return pack.domain()
