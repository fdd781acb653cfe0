"""What the documentation shows runs, and what it links to is there."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import get_args

import pytest
import yaml

import polymask as pm
from browser import chromium
from polymask.core.parts import NormPolicy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
PYTHON = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def examples(page: Path) -> list[str]:
    return [dedent(block) for _, block in PYTHON.findall(page.read_text())]


def anchors(page: Path) -> set[str]:
    """Where a link may lead in a page: its headings, as GitHub and the site name them."""
    text = FENCED.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}
    return slugs | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def navigation(entries: list) -> list[str]:
    """The pages of a navigation, in order."""
    found = []
    for entry in entries:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += navigation(inside) if isinstance(inside, list) else [inside]
    return found


@pytest.mark.parametrize("page", ["core.md", "concepts.md"])
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = examples(DOCS / page)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_is_python(page):
    for block in examples(page):
        compile(block, page.name, "exec")


def test_the_examples_in_public_docstrings_give_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for name in pm.__all__:
        for example in finder.find(getattr(pm, name), name, globs={}):
            runner.run(example)
    failed, attempted = runner.summarize(verbose=False)
    assert not failed
    assert attempted > 30


@pytest.mark.parametrize(
    "tool",
    re.search(r"for tool in (.*); do", (ROOT / "Makefile").read_text())[1].split(),
)
def test_pages_that_are_made_from_the_code_are_as_the_code_has_them(tool):
    script = ROOT / "tools" / f"{tool}.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_link_between_pages_leads_somewhere():
    dead = []
    for page in PAGES:
        for path, place in LINK.findall(FENCED.sub("", page.read_text())):
            target = page.parent / path if path else page
            if not target.exists() or (place and place not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)} links to {path}{place and '#'}{place}")
    assert not dead


@pytest.mark.parametrize("policy", get_args(NormPolicy))
def test_every_policy_for_norms_is_told_with_what_packs_hold_of_it(policy):
    for page in ("architecture.md", "core.md"):
        assert f"\n| `{policy}` |" in (DOCS / page).read_text()
    assert f"`{policy}`" in (DOCS / "pack-format.md").read_text() or policy == "shared"  # of which it holds nothing


def test_every_file_of_the_package_that_a_page_names_is_there():
    rooms = "core|nets|methods|pack|library|data|train|conversion|benchmarks|report|serve|cli"
    for page in PAGES:
        for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", page.read_text()):
            places = [ROOT / "src" / "polymask" / name, ROOT / name]
            assert any(place.exists() for place in places), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_stand_apart_so_that_the_site_shows_them_too(page):
    begins = re.compile(r"[*+-] |\d+\. |\|")
    for block in re.split(r"\n\s*\n", FENCED.sub("", page.read_text())):
        first, *rest = [line for line in block.strip("\n").splitlines() if "<!--" not in line] or [""]
        if not first.startswith("    ") and not begins.match(first.lstrip()):
            assert not any(begins.match(line) for line in rest), block


def test_every_public_name_is_in_the_reference_once():
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^::: polymask\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(pm.__all__) - {"__version__"})


def test_every_public_method_and_property_says_what_it_does():
    kinds = [kind for name in pm.__all__ if isinstance(kind := getattr(pm, name), type)]
    silent = []
    for kind in kinds:
        inherited = {name for parent in kind.__mro__[1:] for name in vars(parent)}
        for name, value in vars(kind).items():
            code = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if callable(code) and not name.startswith("_") and name not in inherited:
                silent += [] if code.__doc__ else [f"{kind.__name__}.{name}"]
    assert not silent


def test_every_page_is_in_the_navigation_once():
    class Loader(yaml.SafeLoader):
        """A loader that passes over what names Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    there = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(navigation(nav)) == sorted([*there, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(site):
    check = [sys.executable, ROOT / "tools" / "check_site.py", site]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index.html", "methods/ba2.html"])
def test_the_site_can_be_searched_when_it_is_opened_from_a_folder(site, page):
    with chromium() as browser:
        browser.resize(1280)
        browser.open((site / page).as_uri())
        browser.click("input.md-search__input")
        browser.type("input.md-search__input", "fingerprint of the base")
        found = browser.wait_for("document.querySelector('.md-search-result__item a')?.href")
        assert found.startswith(site.as_uri())
        assert "CHANGELOG" not in found


def test_committed_results_name_no_place_of_one_machine():
    """A plan says where its images were; who runs it again has them elsewhere, beside the project."""
    plans = sorted((ROOT / "results").glob("*/plan.json"))
    assert plans
    for plan in plans:
        assert not re.search(r"[\s:\"]/(tmp|home|root|work)/", plan.read_text()), plan
