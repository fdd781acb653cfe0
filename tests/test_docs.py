"""What the documentation shows runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["core.md"])
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = PYTHON.findall((DOCS / page).read_text())
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})


def test_every_link_between_pages_leads_somewhere():
    pages = [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
