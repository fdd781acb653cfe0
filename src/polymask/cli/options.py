"""What a verb can be given: its options and places, read off its dataclass."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from polymask.cli.verb import Verb


@dataclass(frozen=True)
class Option:
    """One option of a verb, or what it is given by its place."""

    name: str  # as it is typed, without dashes
    meaning: str
    by_place: bool
    is_flag: bool  # takes no value
    words: tuple[str, ...]  # the values that it can have, where they are few


@cache
def options_of(verb: type[Verb]) -> tuple[Option, ...]:
    """All options of a verb, those of nested groups too."""
    return (*_options(verb), Option("help", "Show what the verb takes.", False, True, ()))


def _options(kind: type) -> Iterator[Option]:
    hints, meanings = get_type_hints(kind, include_extras=True), meanings_of(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _options(hint)  # type: ignore[arg-type]
            continue
        by_place, value = taken_apart(hint)
        yield Option(
            name=field.name.replace("_", "-"),
            meaning=meanings.get(field.name, ""),
            by_place=by_place,
            is_flag=value is bool,
            words=tuple(map(str, get_args(value))) if get_origin(value) is Literal else (),
        )


def taken_apart(hint: Any) -> tuple[bool, Any]:
    """Whether an option is known by its place, and the type of its value."""
    by_place = get_origin(hint) is Annotated and "Positional" in repr(hint.__metadata__)
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(inner for inner in get_args(hint) if inner is not type(None))
    return by_place, hint


def meanings_of(kind: type) -> dict[str, str]:
    """What is written below the fields of a class and of those that it comes from."""
    found: dict[str, str] = {}
    for home in reversed(kind.__mro__):
        if is_dataclass(home) and home.__module__ != "types":  # made ones have no source
            found |= dict(_written_below(home))
    return found


def _written_below(kind: type) -> Iterator[tuple[str, str]]:
    """(field, the string that follows it) in the source of one class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield field.target.id, " ".join(str(after.value.value).split())
