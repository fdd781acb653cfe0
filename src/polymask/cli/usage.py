"""How a verb is used: its options as its dataclass has them, its help, and what is wrong with a command."""

import ast
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from polymask.cli.verb import Verb
from polymask.errors import PolymaskError, near_matches
from polymask.train.recipe import ALSO_CALLED

NEEDED, OWN, EVERYWHERE = "What it needs", "Options", "For every verb"
_WORDS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}
_KINDS = {int: "a whole number", float: "a number"}
_PLACES = {"pack": "NAME"}  # positionals that go by another name than their field's
_ALSO_CALLED = {name.replace("_", "-"): field.replace("_", "-") for name, field in ALSO_CALLED.items()} | {
    "model": "base",
    "output": "out",
    "top-k": "top",
    "topk": "top",
    "gpu": "device",
    "overwrite": "force",
    "restart": "fresh",
}


class Misused(PolymaskError):  # noqa: N818 - not a fault of ours
    """A command that makes no sense."""


@dataclass(frozen=True)
class Option:
    """One option of a verb, or a positional argument."""

    name: str  # as it is typed, without dashes
    meaning: str
    group: str  # the title that it stands under
    positional: bool
    kind: Any  # the type of its value
    needed: bool
    default: str

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.kind is bool

    @property
    def several(self) -> bool:
        """Whether it takes more than one value."""
        return get_origin(self.kind) in (list, tuple)

    @property
    def one(self) -> Any:
        """The type of one of its values."""
        return get_args(self.kind)[0] if self.several else self.kind

    @property
    def words(self) -> tuple[str, ...]:
        """The values that it can have, where they are few."""
        return tuple(map(str, get_args(self.one))) if get_origin(self.one) is Literal else ()

    @property
    def shown(self) -> str:
        """How it is typed."""
        more = "…" if self.several else ""
        if self.positional:
            return _PLACES.get(self.name, self.name.upper()) + more
        if self.is_flag:
            return f"--{self.name}"
        return f"--{self.name} {'|'.join(self.words) or _WORDS.get(self.one, 'VALUE')}{more}"

    @property
    def in_usage(self) -> str:
        """How it stands in the line that shows a command."""
        return self.shown if self.needed else f"[{self.shown}]"

    def complaint(self, value: str) -> str | None:
        """What is wrong with a value, if anything is."""
        if self.words:
            return None if value in self.words else near_matches(value, self.words)
        try:
            self.one(value)
        except (ValueError, TypeError):
            return f"give {_KINDS.get(self.one, 'another')}"
        return None


@cache
def options_of(verb: type[Verb]) -> tuple[Option, ...]:
    """All options of a verb, those of nested groups too; what it needs comes first."""
    found = list(_options(verb, OWN))
    found.append(Option("help", "Show this.", EVERYWHERE, False, bool, False, ""))
    return tuple(sorted(found, key=lambda o: 0 if o.positional else 1 if o.needed else 2))


def _options(kind: type, group: str) -> Iterator[Option]:
    hints, meanings = get_type_hints(kind, include_extras=True), meanings_of(kind)
    everywhere = {field.name for field in fields(Verb)}
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _options(hint, " ".join((hint.__doc__ or "").split()).rstrip("."))  # type: ignore[arg-type]
            continue
        positional, value = value_type(hint)
        needed = field.default is MISSING and field.default_factory is MISSING
        common = kind is not Verb and issubclass(kind, Verb) and field.name in everywhere
        yield Option(
            name=field.name.rstrip("_").replace("_", "-"),  # `from_` is typed --from
            meaning=meanings.get(field.name, ""),
            group=NEEDED if needed else EVERYWHERE if common else group,
            positional=positional,
            kind=value,
            needed=needed,
            default="" if value is bool else _default(field),
        )


def value_type(hint: Any) -> tuple[bool, Any]:
    """Whether an option is positional, and the type of its value."""
    positional = get_origin(hint) is Annotated and "Positional" in repr(hint.__metadata__)
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(inner for inner in get_args(hint) if inner is not type(None))
    return positional, hint


def _default(field: Field[Any]) -> str:
    """The value that an option has unless it is given."""
    if field.default in (MISSING, None, (), []):
        return ""
    return str(field.default)


def meanings_of(kind: type) -> dict[str, str]:
    """What is written below the fields of a class and of those that it comes from."""
    found: dict[str, str] = {}
    for home in reversed(kind.__mro__):
        home = vars(home).get("fields_of", home)  # a class that was made has its fields from another
        if is_dataclass(home):
            found |= dict(_written_below(home))
    return found


def _written_below(kind: Any) -> Iterator[tuple[str, str]]:
    """(field, the string that follows it) in the source of one class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield field.target.id, " ".join(str(after.value.value).split())


def summary(verb: type[Verb]) -> str:
    """The first line of what a verb says of itself."""
    return (verb.__doc__ or "").strip().splitlines()[0]


def usage_line(name: str, verb: type[Verb]) -> str:
    """How a verb is called."""
    first = [option.in_usage for option in options_of(verb) if option.positional or option.needed]
    return " ".join(["polymask", name, *first, "[options]"])


def help_text(name: str, verb: type[Verb]) -> str:
    """What --help prints: a line or a few for every option, under titles."""
    groups: dict[str, list[Option]] = {NEEDED: [], OWN: []}
    for option in options_of(verb):
        groups.setdefault(option.group, []).append(option)
    groups[EVERYWHERE] = groups.pop(EVERYWHERE)  # at the end
    parts = [usage_line(name, verb), _filled(inspect.cleandoc(verb.__doc__ or ""))]
    for title, options in groups.items():
        if options:
            parts.append("\n".join([_filled(f"{title}:"), *(_entry(option) for option in options)]))
    return "\n\n".join(parts)


def _entry(option: Option) -> str:
    default = f" (default: {option.default})" if option.default else ""
    lines = textwrap.wrap(option.meaning + default, _width() - 26, break_on_hyphens=False)
    shown = f"  {option.shown}"
    if len(shown) > 24:
        return "\n".join([shown, *(" " * 26 + line for line in lines)])
    return "\n".join(f"{left:26}{line}" for left, line in zip([shown, *[""] * len(lines)], lines, strict=False))


def _filled(text: str) -> str:
    return "\n".join(textwrap.fill(line, _width()) for line in text.splitlines())


def _width() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns) - 1)


def complaint(name: str, verb: type[Verb], words: Sequence[str]) -> str | None:
    """What is wrong with the words of a command after its verb, in a line; None where nothing is found."""
    options = options_of(verb)
    known = {f"--{option.name}": option for option in options if not option.positional}
    given, places, rest = set(), [], list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            places.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in known:
            meant = near_matches(f"--{_ALSO_CALLED.get(flag.lstrip('-'), flag.lstrip('-'))}", known)
            return f"{name} has no option {flag}; {meant}"
        option = known[flag]
        given.add(option.name)
        if option.is_flag:
            continue
        values = [value] if equals else []
        while not equals and rest and not _is_option(rest[0]) and (option.several or not values):
            values.append(rest.pop(0))
        if not values:
            return f"{flag} needs a value: {option.shown}"
        for value in values:
            if (problem := option.complaint(value)) is not None:
                return f"{flag} {value}: {problem}"
    positional = [option for option in options if option.positional]
    lacking = [option for option in positional[len(places) :] if option.needed]
    lacking += [option for option in options if option.needed and not option.positional and option.name not in given]
    if lacking:
        return f"{name} needs {' and '.join(option.shown for option in lacking)}: {usage_line(name, verb)}"
    for option, place in zip(positional, places, strict=False):
        if (problem := option.complaint(place)) is not None:
            return f"{option.shown} cannot be {place}; {problem}"
    if len(places) > len(positional) and not any(option.several for option in positional):
        return f"{name} does not know what to do with {places[len(positional)]!r}: {usage_line(name, verb)}"
    return None


def _is_option(word: str) -> bool:
    """Whether a word names an option; negative numbers are values."""
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] not in ("", ".")


def in_flags(message: str, verb: type[Verb]) -> str:
    """An error that speaks of a function's arguments, in the words of the command line: epochs=0 is --epochs 0."""
    import re

    names = "|".join(sorted((option.name.replace("-", "_") for option in options_of(verb)), key=len, reverse=True))

    def flag(found: re.Match[str]) -> str:
        name, value = found[1].replace("_", "-"), (found[2] or "").strip("'\"")
        return f"--{name} {value}" if value else f"--{name}"

    message = re.sub(rf"(?<![\w.:-])({names})=('[^']*'|\"[^\"]*\"|[\w./+-]*[\w/])", flag, message)
    long = "|".join(name for name in names.split("|") if "_" in name)
    return re.sub(rf"(?<![\w.-])({long})()(?![\w=.-])", flag, message) if long else message
