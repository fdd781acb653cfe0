"""Methods by name, ours and those of other packages, and new domains by them.

Ours are the `PRESETS` of the modules in `polymask.methods`, found by a scan of that folder. A
package brings methods through the entry point group `polymask.methods`: the entry's name is the
method's, its value an instance of a `Method` with the options that the name stands for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from threading import RLock
from typing import Any

import torch

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.method import Method
from polymask.core.survey import Site
from polymask.core.target import CLASSES, Target, get_target
from polymask.errors import DomainError, MethodError, near_matches

_METHODS: dict[str, Method] = {}
_found = _looking = False
_lock = RLock()  # guards the search: threads that come meanwhile wait for all of it


def register(name: str, prototype: Method) -> None:
    """Make `prototype`'s options available under a name."""
    _find_methods()
    if not isinstance(prototype, Method):
        raise MethodError(f"{name} is a {type(prototype).__name__}, not an instance of a Method")
    if name in _METHODS:
        raise MethodError(f"a method named {name} is registered already; choose another name")
    _METHODS[name] = replace(prototype, name=name)


def create_method(name: str, **options: Any) -> Method:
    """The method `name`, with some of its options changed.

    A name or an option that is not known is an error that names near ones.

        >>> import polymask as pm
        >>> method = pm.create_method("affine-full", per="channel")
        >>> method.per, method.norms, method.mergeable
        ('channel', 'own', True)
        >>> pm.create_method("afine-full")
        Traceback (most recent call last):
        polymask.errors.MethodError: method 'afine-full' is not known; did you mean affine-full?
    """
    _find_methods()
    if name not in _METHODS:
        raise MethodError(f"method {name!r} is not known; {near_matches(name, _METHODS)}")
    prototype = _METHODS[name]
    known = {f.name for f in fields(prototype)} - {"name"}
    for option in options:
        if option not in known:
            raise MethodError(f"{name} has no option {option!r}; {near_matches(option, known)}")
    return replace(prototype, **options)


def list_methods(pattern: str = "*") -> list[str]:
    """Names of the methods that match a pattern (* and ?), in order of registration.

    Those of other packages, by their entry points, are among them.

        >>> import polymask as pm
        >>> pm.list_methods("affine-simple*")
        ['affine-simple', 'affine-simple-no-k1', 'affine-simple-sigmoid']
    """
    _find_methods()
    return [name for name in _METHODS if fnmatchcase(name, pattern)]


def _find_methods() -> None:
    """Register ours, then those of other packages, once."""
    global _found, _looking
    if _found:
        return
    with _lock:
        if _found or _looking:  # by this thread: what it finds registers itself
            return
        _looking = True
        try:
            folder = import_module("polymask.methods").__path__
            for file in sorted(found.name for found in iter_modules(folder)):
                presets = getattr(import_module(f"polymask.methods.{file}"), "PRESETS", {})
                for name, prototype in presets.items():
                    register(name, prototype)
            for entry in entry_points(group="polymask.methods"):
                register(entry.name, entry.load())
        finally:
            _found, _looking = True, False


def new_domain(
    base: Base,
    method: str | Method = "affine-full",
    classes: Sequence[str] | None = None,
    *,
    target: str | Target = CLASSES,
    **options: Any,
) -> Domain:
    """A fresh domain on `base`, with a head for `classes` (none where classes is None).

    `target` says what the head's outputs mean: "classes", "labels" (several for each image) or "values" (numbers).
    """
    if isinstance(method, str):
        method = create_method(method, **options)
    elif options:
        raise DomainError(f"options {sorted(options)} go with a method's name, not an instance")
    target = get_target(target)
    if method.for_classes and target.kind != "classes":
        raise MethodError(f"{method.name} is for classes, not for {target.kind}; take another method, affine-full say")
    domain = Domain(base, method.first_stage(), classes)
    domain.target = target
    check_reach(domain)
    domain.begin(base)
    return domain


def skeleton(
    base: Base, method: Method, classes: Sequence[str] | None, sites: Mapping[str, Site] | None = None
) -> Domain:
    """A domain without memory for its tensors: names, shapes and types only.

    `sites` are those of a domain that exists already; without them it is checked like a new one.
    """
    with torch.device("meta"):
        domain = Domain(base, method, classes, sites)
    if sites is None:
        check_reach(domain)
    return domain


_FEW = 0.1  # of a base's sites: fewer are practically none


def check_reach(domain: Domain) -> None:
    """Raise where the method finds next to no site that it is made for.

    Such a domain would be norms and a head under the method's name. Adapters of spatial kernels find none in a
    transformer, or just the one that embeds patches.
    """
    method, sites = domain.method, domain.sites
    reached = [name for name, transform in domain.named_transforms() if transform.adapts]
    if method.leaves_sites or len(reached) >= _FEW * len(sites):
        return
    wider = [
        f"make it with {name}={value!r}, or " for name, value in method.wider.items() if getattr(method, name) != value
    ]
    only = f" ({', '.join(reached[:3])})" if reached else ""
    raise MethodError(
        f"{method.name or type(method).__name__} adapts {len(reached)} of {len(sites)} sites of base "
        f"{domain.base_name}{only}, so little but norms and head would learn; {''.join(wider)}take a method for layers "
        "of every kind, affine-full or lora"
    )
