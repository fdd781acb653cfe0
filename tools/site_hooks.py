"""What MkDocs does beyond its own for this site (`hooks` in mkdocs.yml).

Documents are written to be read in the repository too. There a link may lead out of docs/: to
CONTRIBUTING.md, or to a result that a number comes from. The site takes in the files that are
linked so, at the same path from its root, and links follow. Maths becomes MathML, which needs no
script. The search index is written as a script too, since pages that are opened from a folder may
load nothing else; docs/assets/search-from-folder.js does the rest.
"""

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE_DOCS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # pages of the site that no link needs to lead to
LINK = re.compile(r"(?<=\]\()(?!\w+:)(?P<path>[^)#\s]+)(?=(?:#[^)\s]*)?\))")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
NOT_UNDERSTOOD = re.compile(r"&#x00026;|&amp;|\\")  # left over from commands that it does not know


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/ and is linked."""
    known = {f"docs/{file.src_uri}" for file in files}
    waiting = [*BESIDE_DOCS, *sorted(path for path in known if path.endswith(".md"))]
    while waiting:
        path = waiting.pop()
        if not (ROOT / path).is_file():
            continue
        if path not in known:
            known.add(path)
            files.append(_beside(config, path))
        if path.endswith(".md"):
            waiting += [t for t in _targets(path) if t not in known and t != "README.md"]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of the repository those of the site."""
    home = _in_repository(page.file)
    if home == "CHANGELOG.md":  # it has every word; a search should end here, not begin
        page.meta["search"] = {"boost": 0.1}

    def follow(link: re.Match[str]) -> str:
        target = _resolve(home, link["path"])
        if home.startswith("docs/") and target.startswith("docs/"):
            return link["path"]
        return posixpath.relpath(_in_site(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(follow, markdown)


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write formulas as MathML."""

    def write(formula: re.Match[str]) -> str:
        latex = html.unescape(formula[2]).strip()
        display = formula[1] == "div"
        written = convert(latex, display="block" if display else "inline")
        if NOT_UNDERSTOOD.search(written):
            raise PluginError(f"{page.file.src_uri}: latex2mathml does not understand {latex!r}")
        return f'<div class="formula">{written}</div>' if display else written

    return MATHS.sub(write, content)


@event_priority(-100)  # once the search plugin has written its own
def on_post_build(*, config: MkDocsConfig) -> None:
    """Write the search index as a script."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')};\n", encoding="utf-8")


def _beside(config: MkDocsConfig, path: str) -> File:
    """A file of the repository as one of the site."""
    place = InclusionLevel.UNDEFINED if path in BESIDE_DOCS else InclusionLevel.NOT_IN_NAV
    source = str(ROOT / path)
    return File.generated(config, _in_site(path), abs_src_path=source, inclusion=place)


def _targets(path: str) -> Iterator[str]:
    """Repository paths that a page links to."""
    for link in LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        yield _resolve(path, link["path"])


def _resolve(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _in_repository(file: File) -> str:
    """Where a file of the site is in the repository."""
    return f"docs/{file.src_uri}" if file.generated_by is None else file.src_uri
