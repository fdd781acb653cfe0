"""Models: one domain in a training loop of one's own, or many at inference."""

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.bits import Bits
from polymask.core.domain import Domain
from polymask.core.merge import WorkingNetwork
from polymask.core.network import digest_tensors
from polymask.core.unknown import split_score
from polymask.errors import DomainError, InputError, PolymaskError, near_matches
from polymask.files import SUFFIX, check_name
from polymask.library.cache import CacheStats, MergedCache
from polymask.library.shelf import ShelvedDomain
from polymask.pack.format import packs_in
from polymask.pack.mould import Mould
from polymask.pack.storing import load_domain

if TYPE_CHECKING:
    from polymask.train.predict import Prediction

CACHE_BYTES = 1 << 29  # five networks of ResNet-50's size
_READ = 8  # domains of libraries that were asked for by name, the last ones


class DomainModel(nn.Module):
    """A base and one domain as one module, for a training loop of one's own.

    Its parameters and its state dict are exactly the domain's; the base goes along with `.to`. It
    can stand in another network too: with a base that gives feature maps, as a detector's backbone.

        >>> import torch, polymask as pm
        >>> base = pm.load_base(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4)),
        ...                     input=pm.InputSpec(shape=(3, 2, 2)), classifier=None)
        >>> model = pm.DomainModel(base, pm.new_domain(base, "affine-full", ["cat", "dog"]))
        >>> model(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 2])
        >>> [name.rpartition(".")[2] for name, _ in model.named_parameters()]
        ['k0', 'k1', 'k2', 'k3', 'scores', 'weight', 'bias']
    """

    def __init__(self, base: Base, domain: Domain) -> None:
        super().__init__()
        self.base, self.domain = base, domain

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Logits (N, classes) of images (N, C, H, W); features where the domain has no head.

        With labels (N,) it is a dict of "loss", the target's (cross-entropy for classes), and "logits": what the
        Trainer of transformers asks of a model.
        """
        logits = cast(Tensor, self.domain(self.base, images))
        if labels is None:
            return logits
        if self.domain.head is None:
            raise DomainError(
                "a domain without classes has no logits to compare with labels; make it with "
                "classes=[…], or compute a loss of its features"
            )
        return {"loss": self.domain.target.loss(logits, labels), "logits": logits}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.base.apply(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


class MultiDomainModel:
    """One base and any number of domains, for inference.

    Domains of a library stay on disk until they are used, so there may be more of them than memory has room for. A
    domain runs as a merged network. Those used last are kept, up to `cache_bytes` of memory beyond the base's and that
    of domains that were added; calls from several threads run side by side. Where not even one network fits, there is
    one whose weights are written again when the domain changes, and calls wait for each other, as they do for methods
    that cannot be merged.

        >>> import torch, polymask as pm
        >>> base = pm.load_base(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4)),
        ...                     input=pm.InputSpec(shape=(3, 2, 2)), classifier=None)
        >>> model = pm.MultiDomainModel(base)
        >>> model.add("pets", pm.new_domain(base, "affine-full", ["cat", "dog"]))
        >>> model.add("time", pm.new_domain(base, "piggyback", ["day", "dusk", "night"]))
        >>> images = torch.zeros(2, 3, 2, 2)
        >>> model(images, domain="pets").shape
        torch.Size([2, 2])
        >>> [len(logits) for logits in model(images, domain=["time", "pets"])]
        [3, 2]
    """

    def __init__(
        self,
        base: Base,
        library: str | Path | None = None,
        *,
        strict: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.base, self.cache_bytes = base, cache_bytes
        self._domains: dict[str, Domain | ShelvedDomain] = {}
        self._fingerprints: dict[str, str] = {}  # of those in memory
        self._read = lru_cache(_READ)(ShelvedDomain.load)
        self._keys: WeakKeyDictionary[Domain | ShelvedDomain, str] = WeakKeyDictionary()
        self._numbers = count()
        self._lock = threading.Lock()
        self._forget_networks()
        if library is not None:
            self.load_library(library, strict=strict)

    def __repr__(self) -> str:
        names = ", ".join(self.domains[:5]) + (", …" if len(self._domains) > 5 else "")
        count = f"{len(self._domains)} domain{'' if len(self._domains) == 1 else 's'}"
        return f"MultiDomainModel({count} on {self.base.name}{': ' if names else ''}{names})"

    @property
    def domains(self) -> list[str]:
        """Names of the domains, in the order they were added."""
        return list(self._domains)

    def add(self, name: str, domain: Domain) -> None:
        """Add a domain in its stored form; training the given one on does not change it."""
        self._check_new(name)
        domain.check_base(self.base)
        self._put(name, domain.frozen())

    def load(self, path: str | Path, name: str | None = None) -> str:
        """Read a pack and keep its domain in memory; its name is the file's unless another is given."""
        path = Path(path)
        name = path.name.removesuffix(SUFFIX) if name is None else name
        self._check_new(name)
        self._put(name, load_domain(path, self.base))
        return name

    def load_library(self, folder: str | Path, *, strict: bool = False) -> None:
        """Take up the packs of a folder, which stay there; one that cannot run on this base is skipped with a warning.

        Only their heads are read now. A pack is read and checked when it is used, and must then be the one that was
        there: a file that was replaced or damaged raises. With `strict` every pack is read and checked now, one that
        is wrong is an error, and then none is taken up.
        """
        packs = {path.stem: path for path in packs_in(folder)}
        for name in packs.keys() & self._domains.keys():
            self._check_new(name)
        found = {}
        for name, path in packs.items():
            try:
                check_name(name)
                found[name] = ShelvedDomain.of(path, self.base)
                if strict:
                    found[name].load()
            except PolymaskError as error:
                if strict:
                    raise
                warnings.warn(f"pack {name} is skipped: {error}", stacklevel=2)
        self._domains |= found

    def rename(self, old: str, new: str) -> None:
        """Give a domain another name."""
        self._known(old)
        self._check_new(new)
        self._domains[new] = self._domains.pop(old)
        if old in self._fingerprints:
            self._fingerprints[new] = self._fingerprints.pop(old)

    def remove(self, name: str) -> None:
        """Drop a domain; its pack, if it has one, stays where it is."""
        self._known(name)
        self._cache.drop(self._key(self._domains.pop(name)))
        self._fingerprints.pop(name, None)

    def domain(self, name: str) -> Domain:
        """The domain of this name; one of a library is read from its pack."""
        known = self._known(name)
        return known if isinstance(known, Domain) else self._read(known)

    @torch.no_grad()
    def __call__(self, images: Tensor, *, domain: str | Sequence[str]) -> Tensor | list[Tensor]:
        """Logits of a batch.

        With one domain's name: (N, classes). With one name per image: a list of N vectors in
        the images' order, each as long as its domain has classes.
        """
        if isinstance(domain, str):
            return self._logits(domain, images)
        if len(domain) != len(images):
            raise InputError(f"{len(domain)} domain names for {len(images)} images; give one per image, or one")
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(domain):
            self._known(name)
            rows.setdefault(name, []).append(row)
        logits: list[Tensor] = [images] * len(domain)
        for name, where in rows.items():
            found = self._logits(name, images[where])
            if not isinstance(found, Tensor):
                raise DomainError(f"domain {name} gives feature maps, not vectors; ask for one domain at a time")
            for row, vector in zip(where, found, strict=True):
                logits[row] = vector
        return logits

    def predict(
        self,
        images: Any,
        *,
        domain: str | Sequence[str] | None = None,
        top: int = 5,
        batch_size: int = 32,
        reject: bool = False,
    ) -> "list[Prediction]":
        """What is on images: for each, its `top` likeliest classes with their probabilities.

        An image is a path, a Pillow image, the bytes of a file, or uint8 pixels (a tensor (C, H, W), an array (H, W,
        C)), of any size; give one, or a list of any of these. `domain` is one name, or one for each image; without it
        the domain that an image looks most like answers. With `reject` a prediction says whether the image is
        `unknown`: nothing that the domain learned. Each batch of `batch_size` images is read and run at once.
        """
        from polymask.train.predict import best_domains, listed_images, predict_images

        listed = listed_images(images)
        if domain is None:
            with self._lock:
                domain = best_domains(self.base, self._domains, listed, batch_size=batch_size)
        names = [domain] * len(listed) if isinstance(domain, str) else list(domain)
        if len(names) != len(listed):
            raise InputError(f"{len(names)} domain names for {len(listed)} images; give one per image, or one")
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            self._known(name)
            rows.setdefault(name, []).append(row)
        found: dict[int, Prediction] = {}
        how: dict[str, Any] = {"top": top, "batch_size": batch_size, "reject": reject}
        for name, where in rows.items():
            chosen = {row: listed[row] for row in where}
            net, owner = partial(self._outputs, name), self._known(name)
            found |= zip(where, predict_images(net, self.base, owner, chosen, name=name, **how), strict=True)
        return [found[row] for row in range(len(listed))]

    def merge(self, name: str) -> nn.Module:
        """An ordinary network that gives one domain's logits, at the base's own cost."""
        with self._lock:
            return self.domain(name).merged(self.base)

    def verify(self) -> None:
        """Raise unless the base and every domain are byte for byte what they were when added, on disk too."""
        with self._lock:
            self.base.verify()
            for name, domain in self._domains.items():
                if isinstance(domain, ShelvedDomain):
                    domain.load()
                elif _fingerprint(domain) != self._fingerprints[name]:
                    raise DomainError(f"domain {name} has changed since it was added; load its pack again")

    def to(self, device: torch.device | str) -> Self:
        """Move the base and all domains."""
        with self._lock:
            self.base.to(device)
            for domain in self._domains.values():
                if isinstance(domain, Domain):
                    domain.to(device)
            self._forget_networks()
        return self

    @property
    def cache_stats(self) -> CacheStats:
        """What the cache of merged networks has done since the domains were last moved."""
        return self._cache.stats

    def _forget_networks(self) -> None:
        self._cache = MergedCache(self.base, self.cache_bytes, lock=self._lock)
        one = sum(site.numel * site.dtype.itemsize for site in self.base.sites.values())
        self._working = WorkingNetwork(self.base) if self.cache_bytes < one else None
        self._current: Domain | ShelvedDomain | None = None  # what the working network is now
        self._network: Callable[[Tensor], Tensor] | None = None
        self._mould: Mould | None = None  # whose domain the working network is of, where it is of one
        self._read.cache_clear()

    def _logits(self, name: str, images: Tensor) -> Tensor:
        domain, outputs = self._known(name), self._outputs(name, images)
        return outputs if domain.judgement is None else split_score(outputs, len(domain.classes or []))[0]

    def _outputs(self, name: str, images: Tensor) -> Tensor:
        """Logits, and scores after them where the domain has a rule for unknown images."""
        domain = self._known(name)
        self.base.check_images(images)
        if domain.classes is not None:
            domain.input.check_batch(images, f"domain {name}")
        if self._working is None:
            origin = domain.scored if isinstance(domain, Domain) else domain.source
            with self._cache.use(self._key(domain), origin) as net:
                return self.base.feed(net, images)
        with self._lock:
            if self._current is not domain:
                self._current = None  # while it is written, it is nobody's
                self._network, self._current = self._written(self._working, domain), domain
            assert self._network is not None
            return self.base.feed(self._network, images)

    def _written(self, working: WorkingNetwork, domain: Domain | ShelvedDomain) -> Callable[[Tensor], Tensor]:
        """What runs a domain where there is memory for one network only."""
        mould = None if isinstance(domain, Domain) else domain.poured(self._mould)
        scored = domain.scored() if isinstance(domain, Domain) else cast(Mould, mould).domain
        if not scored.method.mergeable:
            return partial(scored, self.base)
        again = mould is not None and mould is self._mould
        self._mould = mould
        return working.rewrite(scored) if again else working.switch(scored)

    def _key(self, domain: Domain | ShelvedDomain) -> str:
        """What its network is kept under: never that of another, though a name may come to another domain."""
        with self._lock:
            if domain not in self._keys:
                self._keys[domain] = str(next(self._numbers))
            return self._keys[domain]

    def _known(self, name: str) -> Domain | ShelvedDomain:
        if name not in self._domains:
            raise DomainError(f"no domain is named {name!r}; {near_matches(name, self._domains)}")
        return self._domains[name]

    def _check_new(self, name: str) -> None:
        check_name(name)
        if name in self._domains:
            raise DomainError(f"a domain is named {name!r} already; remove it, or take another name")

    def _put(self, name: str, domain: Domain) -> None:
        self._domains[name], self._fingerprints[name] = domain, _fingerprint(domain)


def _fingerprint(domain: Domain) -> str:
    return digest_tensors({n: t.words if isinstance(t, Bits) else t for n, t in domain.stored().items()})
