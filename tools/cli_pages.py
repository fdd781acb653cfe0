"""Write docs/reference/cli.md: every verb of the command line with its options, from the code.

    python tools/cli_pages.py [--check]

`--check` writes nothing and fails if the page is not what would be written.
"""

import argparse
import inspect
import sys
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from polymask.cli.parser import VERBS, meanings_of, value_type
from polymask.cli.verb import Verb

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
EVERYWHERE = tuple(field.name for field in fields(Verb))
WORDS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}
OPENING = """\
# Command-line reference

`polymask VERB --help` prints the same. What holds for all verbs, exit codes and what `--json`
prints are in [the command line](../cli.md); fields of a recipe are explained in
[training and recipes](../training.md#recipes) and at [`Recipe`](training.md#polymask.Recipe).
"""


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print(f"{PAGE.name} is stale; run python tools/cli_pages.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


def page() -> str:
    """The whole page."""
    rows = [f"| [`{name}`](#{name}) | {summary(verb)} |" for name, verb in VERBS.items()]
    overview = "\n".join(["| verb | what it does |", "|---|---|", *rows])
    common = table([option(Verb, field) for field in fields(Verb)])
    parts = [OPENING, overview, "Every verb has", common]
    parts += [section(name, verb) for name, verb in VERBS.items()]
    parts.append("Made by `python tools/cli_pages.py`.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(name: str, verb: type[Verb]) -> str:
    """One verb: how it is called, and its options."""
    own = [field for field in fields(verb) if field.name not in EVERYWHERE]
    groups = {field.name: group(verb, field) for field in own}
    options = [option(verb, field) for field in own if groups[field.name] is None]
    explained = [kind for kind in groups.values() if kind is not None and meanings_of(kind)]
    options += [option(kind, field) for kind in explained for field in fields(kind)]
    options.sort(key=lambda o: o.rank)
    usage = ["polymask", name, *(o.in_usage for o in options if o.rank < 2), "[options]"]
    about = inspect.cleandoc(verb.__doc__ or "")
    parts = [f"## {name}", about, f"    {' '.join(usage)}", table(options)]
    for kind in (kind for kind in groups.values() if kind is not None and kind not in explained):
        flags = ", ".join(f"`{flag(field.name)}`" for field in fields(kind))
        about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
        parts.append(textwrap.fill(f"{about} {flags}.", 110, break_on_hyphens=False))
    return "\n\n".join(filter(None, parts))


class Option:
    """One option, as it is typed and as it is explained."""

    def __init__(self, kind: Any, field: Field[Any], meaning: str) -> None:
        self.positional, kind = value_type(kind)
        self.meaning = meaning
        several = "…" if get_origin(kind) in (list, tuple) else ""
        if self.positional:
            self.shown = field.name.upper() + several
        elif kind is bool:
            self.shown = flag(field.name)
        else:
            self.shown = f"{flag(field.name)} {value(kind)}{several}"
        self.default = "" if kind is bool else default(field)
        self.needed = field.default is MISSING and field.default_factory is MISSING
        self.rank = 0 if self.positional else 1 if self.needed else 2

    @property
    def in_usage(self) -> str:
        """How it stands in the line that shows a command."""
        return f"[{self.shown}]" if self.positional and not self.needed else self.shown


def option(verb: type[Any], field: Field[Any]) -> Option:
    """An option of a verb."""
    kind = get_type_hints(verb, include_extras=True)[field.name]
    return Option(kind, field, meanings_of(verb).get(field.name, ""))


def table(options: list[Option]) -> str:
    """Options, one a line."""
    if not options:
        return ""
    rows = [
        f"| `{o.shown}` | {o.meaning.replace('|', chr(92) + '|')} | {'needed' if o.needed else o.default} |"
        for o in options
    ]
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def summary(verb: type[Verb]) -> str:
    """The first line of what a verb says of itself."""
    return (verb.__doc__ or "").strip().splitlines()[0]


def group(verb: type[Verb], field: Field[Any]) -> Any:
    """The dataclass of a field that stands for several options; None for one that is an option."""
    kind = get_type_hints(verb)[field.name]
    return kind if is_dataclass(kind) else None


def value(kind: Any) -> str:
    """What stands for a value of this type."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) in (list, tuple):
        return value(get_args(kind)[0])
    return WORDS.get(kind, "VALUE")


def default(field: Field[Any]) -> str:
    """The value that an option has unless it is given."""
    start = field.default if field.default is not MISSING else field.default_factory
    if start is None or start in (MISSING, (), []) or callable(start):
        return ""
    return f"`{start}`"


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
