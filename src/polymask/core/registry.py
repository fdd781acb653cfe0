"""Methods by name: ours, and those that other packages bring.

Ours are the `PRESETS` of the modules in `polymask.methods`, found by a scan of that folder. A
package brings methods through the entry point group `polymask.methods`: the entry's name is the
method's, its value an instance of a `Method` with the options that the name stands for.
"""

from dataclasses import fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from polymask.core.method import Method
from polymask.errors import MethodError, near_matches

_METHODS: dict[str, Method] = {}
_found = False


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
        polymask.errors.MethodError: method 'afine-full' is not known; near matches: affine-full...
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
    global _found
    if _found:
        return
    _found = True
    folder = Path(__file__).parents[1] / "methods"
    for found in sorted(iter_modules([str(folder)]), key=lambda module: module.name):
        module = import_module(f"polymask.methods.{found.name}")
        for name, prototype in getattr(module, "PRESETS", {}).items():
            register(name, prototype)
    for entry in entry_points(group="polymask.methods"):
        register(entry.name, entry.load())
