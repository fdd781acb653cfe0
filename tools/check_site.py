"""Check the built site: every link leads somewhere, and no page needs anything from elsewhere.

    python tools/check_site.py [SITE]

MkDocs checks the links that are written in Markdown. This looks at the pages as a browser gets
them: what mkdocstrings, the theme and the hooks made of them too. It needs no network.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ROOT = Path(__file__).parents[1]
HOST = "http://site.invalid/"
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
NOT_LOADED = {"canonical", "next", "prev", "edit"}  # kinds of <link> that are for programs
IN_STYLES = re.compile(r"url\(\s*['\"]?(?P<url>[^)'\"]+)|@import\s+['\"](?P<also>[^'\"]+)")


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that a link may name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = {"", "top"}
        self.titles = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's addresses and its name."""
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        self.titles += tag == "h1"
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADS.get(tag) in found and found.get("rel") not in NOT_LOADED:
            self.loads.append(found[LOADS[tag]])


def main() -> int:
    """Say what is wrong, one line each; 1 if anything is."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = [] if pages else [f"{site} has no pages; build it with make docs"]
    for path, page in pages.items():
        problems += [f"{path}: {wrong}" for wrong in wrong_in(page, path, site, pages)]
    for path in sorted(site.rglob("*.css")):
        for match in IN_STYLES.finditer(path.read_text(encoding="utf-8")):
            if urlsplit(match["url"] or match["also"]).netloc:
                problems.append(f"{path}: loads {match[0]}")
    print("\n".join(problems) or f"{len(pages)} pages: no dead link, nothing from elsewhere")
    return 1 if problems else 0


def wrong_in(page: Page, path: Path, site: Path, pages: dict[Path, Page]) -> list[str]:
    """What is wrong with one page."""
    here = HOST + path.relative_to(site).as_posix()
    problems = [] if page.titles == 1 else [f"has {page.titles} titles"]
    for address in page.links + page.loads:
        target, place = urldefrag(urljoin(here, address))
        if not target.startswith(HOST):
            if address in page.loads and urlsplit(target).scheme != "data":
                problems.append(f"loads {address} from elsewhere")
            continue
        file = site / unquote(urlsplit(target).path).lstrip("/")
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            problems.append(f"{address} leads nowhere")
        elif file in pages and unquote(place) not in pages[file].places:
            problems.append(f"{address} names a place that is not there")
    return problems


if __name__ == "__main__":
    sys.exit(main())
