"""Write docs/reference/cli.md: every verb of the command line with its options, from the code.

    python tools/cli_pages.py [--check]

`--check` writes nothing and fails if the page is not what would be written.
"""

import argparse
import inspect
import sys
from pathlib import Path

from polymask.cli.parser import VERBS
from polymask.cli.usage import EVERYWHERE, NEEDED, OWN, Option, options_of, summary, usage_line
from polymask.cli.verb import Verb

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
OPENING = """\
# Command-line reference

`polymask VERB --help` prints the same. What holds for all verbs, exit codes and what `--json`
prints are in [the command line](../cli.md); more on the fields of a recipe is in
[training and recipes](../training.md#recipes).
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
    common = table([option for option in options_of(VERBS["list"]) if option.group == EVERYWHERE])
    parts = [OPENING, overview, "Every verb has", common]
    parts += [section(name, verb) for name, verb in VERBS.items()]
    parts.append("Made by `python tools/cli_pages.py`.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(name: str, verb: type[Verb]) -> str:
    """One verb: how it is called, and its options, those of nested groups under their titles."""
    groups: dict[str, list[Option]] = {}
    for option in options_of(verb):
        groups.setdefault(OWN if option.group == NEEDED else option.group, []).append(option)
    groups.pop(EVERYWHERE)
    parts = [f"## {name}", inspect.cleandoc(verb.__doc__ or ""), f"    {usage_line(name, verb)}"]
    parts.append(table(groups.pop(OWN, [])))
    for title, options in groups.items():
        parts += [f"{title}:", table(options)]
    return "\n\n".join(filter(None, parts))


def table(options: list[Option]) -> str:
    """Options, one a line."""
    if not options:
        return ""
    rows = []
    for option in options:
        shown, meaning = (text.replace("|", "\\|") for text in (option.shown, option.meaning))
        default = "needed" if option.needed else f"`{option.default}`" if option.default else ""
        rows.append(f"| `{shown}` | {meaning} | {default} |")
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
