"""Write docs/methods (a page for each file), their place in the navigation, and the bits that `polymask methods` shows.

    python tools/method_pages.py [--check]

`--check` writes nothing and fails if a page is not what would be written.
"""

import argparse
import inspect
import json
import sys
import textwrap
from pathlib import Path

import polymask as pm
from polymask.cli.report import COUNTED, count_bits
from polymask.core.accounting import COMPONENTS
from polymask.core.method import Method

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "docs" / "methods", ROOT / "mkdocs.yml"
WORDS = {
    "mask": "masks",
    "scalars": "scalars",
    "norm_affine": "norms' scale and shift",
    "norm_statistics": "norms' statistics",
    "bias": "biases",
    "weights": "weights",
    "index": "owner index (once)",
    "shared": "shared tensors (once)",
    "moved": "the moved base (in its place)",
    "sources": "masks of other domains (in their packs)",
}
BASE = "torchvision:resnet50"


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    pages = {PAGES / name: text for name, text in written().items()} | {SITE: navigation(families())}
    own = [method.name for methods in families().values() for method in methods]
    pages[COUNTED] = json.dumps(count_bits(own), indent=1) + "\n"
    stale = [p for p, text in pages.items() if not p.exists() or p.read_text() != text]
    stale += [p for p in PAGES.glob("*.md") if p not in pages]
    if check:
        for page in stale:
            print(f"{page.name} is stale; run python tools/method_pages.py", file=sys.stderr)
        return 1 if stale else 0
    PAGES.mkdir(exist_ok=True)
    for page in stale:
        page.unlink(missing_ok=True)
    for page, text in pages.items():
        page.write_text(text)
    return 0


def written() -> dict[str, str]:
    """File name -> text of every page."""
    base = pm.load_base(BASE, pretrained=False, device="meta")
    pages = {page_name(module): page(base, methods) for module, methods in families().items()}
    return pages | {"README.md": index(base)}


def families() -> dict[str, list[Method]]:
    """The methods of each file, by its name."""
    found: dict[str, list[Method]] = {}
    for method in map(pm.create_method, pm.list_methods()):
        module = type(method).__module__
        if module.startswith("polymask.methods."):
            found.setdefault(module.split(".")[2], []).append(method)
    return found


def page_name(module: str) -> str:
    """The file of a page."""
    return f"{module.replace('_', '-')}.md"


def title(module: str, methods: list[Method]) -> str:
    """What a file of methods is called, with a capital."""
    words = type(methods[0]).title or module.replace("_", " ")
    return words[0].upper() + words[1:]


def navigation(families: dict[str, list[Method]]) -> str:
    """mkdocs.yml with a line for every page of methods, after the page that lists them."""
    first = "      - methods/README.md\n"
    lines = [line for line in SITE.read_text().splitlines(keepends=True) if line == first or ": methods/" not in line]
    entries = [
        f"      - {title(module, methods)}: methods/{page_name(module)}\n" for module, methods in families.items()
    ]
    place = lines.index(first) + 1
    return "".join([*lines[:place], *entries, *lines[place:]])


def page(base: pm.Base, methods: list[Method]) -> str:
    """The page of one file of methods."""
    home = sys.modules[type(methods[0]).__module__]
    first, _, rest = inspect.cleandoc(home.__doc__ or "").partition("\n")
    parts = [f"# {', '.join(f'`{m.name}`' for m in methods[:3])}" + (" …" if methods[3:] else "")]
    parts.append(first)
    if rest.strip():
        parts.append(rest.strip("\n"))
    parts.append(table(base, methods))
    for kind in dict.fromkeys(type(method) for method in methods):
        parts.append(f"## {kind.__name__}")
        parts.append(inspect.cleandoc(kind.__doc__ or ""))
        parts.append(options(kind, next(m for m in methods if type(m) is kind)))
        facts = [f"Reference: {kind.reference}."]
        facts += [textwrap.fill(kind.differences, 110)] if kind.differences else []
        parts.append("### Reference, and differences from the original\n\n" + "\n\n".join(facts))
    note = f"Made by `python tools/method_pages.py` from `src/{home.__name__.replace('.', '/')}.py`."
    return "\n\n".join([*parts, note]) + "\n"


def options(kind: type[Method], method: Method) -> str:
    """The options with the values that the first name stands for."""
    rows = [f"| `{name}` | `{value!r}` |" for name, value in method.options().items()]
    return "\n".join([f"| option | in `{method.name}` |", "|---|---|", *rows])


def table(base: pm.Base, methods: list[Method]) -> str:
    """What each method stores, and what it is like; on ResNet-50."""
    heads = (
        "method",
        "stored for a domain, without the head",
        "bits per weight",
        "#Params, 6 domains",
        "norms",
        "notes",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method in methods:
        account = pm.account(base, method, domains=6)
        stored = [
            f"{WORDS[name]} {size(account.components[name])}"
            for name in COMPONENTS
            if name != "head" and account.components[name]
        ]
        flags = {
            "cannot be merged": not method.mergeable,
            "order matters": method.ordered,
            "moves the base": method.moves_base,
            "domains learn together": method.joint,
            "ends with all domains": not (method.alone or method.ordered or method.joint),
        }
        cells = [
            f"`{method.name}`",
            "; ".join(stored) or "nothing",
            f"{account.bits_per_weight:.3f}",
            f"{account.params_paper:.3f}",
            method.norms,
            "; ".join(note for note, true in flags.items() if true),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size(bits: int) -> str:
    """A number of bits, for people."""
    return f"{bits / 8e6:.2f} MB" if bits >= 8e4 else f"{bits / 8e3:.1f} kB"


def index(base: pm.Base) -> str:
    """The page that lists all."""
    parts = [
        "# The methods",
        "Every method learns a domain on a frozen base, is packed, loaded, counted and used in the "
        "same\nway. Numbers are of ResNet-50; bits per weight are what one more domain takes, of "
        "six, without\nits head, as a pack stores it; #Params is the paper's convention "
        "([params.md](../params.md)).\nAll can be merged, learn each domain alone and leave the "
        "base as it is, unless a note says otherwise.",
    ]
    for module, methods in families().items():
        parts.append(f"## [{title(module, methods)}]({page_name(module)})")
        parts.append(table(base, methods))
    parts.append("Made by `python tools/method_pages.py`.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
