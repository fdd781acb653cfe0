import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from polymask.errors import PolymaskError
from polymask.report.demo_page import DemoResult, demo_page, write_demo_report
from strict_page import Page


@pytest.fixture(scope="module")
def html(result: DemoResult) -> str:
    return demo_page(result)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_is_well_formed_and_has_one_headline(html: str, page: Page) -> None:
    assert html.startswith("<!doctype html>")
    assert page.tags["h1"] == page.tags["main"] == 1
    assert page.tags["script"] == page.tags["link"] == 0


def test_the_page_loads_nothing_from_elsewhere(html: str, page: Page) -> None:
    for attribute in ("src", "href", "srcset", "data"):
        assert all(v.startswith(("data:image/", "#")) for v in page.values(attribute))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "@import" not in html
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not a place


def test_every_id_is_there_once_and_every_reference_meets_one(page: Page) -> None:
    ids = Counter(page.values("id"))
    assert [i for i, count in ids.items() if count > 1] == []
    references = [v[1:] for v in page.values("href") if v.startswith("#")]
    references += page.values("aria-labelledby")
    references += [m for v in page.values("clip-path") for m in re.findall(r"#([^)]+)", v)]
    assert set(references) <= set(ids)


def test_every_picture_and_figure_is_also_there_in_words(page: Page) -> None:
    assert len(page.values("alt")) == page.tags["img"] == 4
    assert page.values("role").count("img") == page.tags["svg"]


def test_the_headline_and_table_hold_the_real_numbers(page: Page) -> None:
    assert "94.0 % of the test images right on average" in page.text
    assert "0.5 points below finetune" in page.text
    assert "25.0 points above classifier-only" in page.text
    assert "a domain takes 640 kB: 3.4 % of a full copy" in page.text
    assert "97.0 72.0 97.5 640 kB 1.31 3.4 % 1 min 01 s" in page.text


def test_both_kinds_of_picture_are_embedded(page: Page) -> None:
    kinds = {src.partition(";")[0] for src in page.values("src")}
    assert kinds == {"data:image/png", "data:image/jpeg"}


def test_right_and_wrong_are_told_in_words(page: Page) -> None:
    assert "✓ right: seven" in page.text
    assert "✗ wrong: it is two" in page.text


def test_a_kept_promise_raises_no_alarm(page: Page) -> None:
    assert page.text.count("✓ yes") == 2
    assert "alert" not in page.values("role")
    assert not any("alarm" in value for value in page.values("class"))


def test_a_base_and_a_domain_that_changed_raise_one(broken: DemoResult) -> None:
    page = Page(demo_page(replace(broken, fingerprint_after="cd" * 32)))
    assert page.text.count("✗ no") == 1
    assert "✗ different" in page.text
    assert "alert" in page.values("role")


def test_hostile_names_are_shown_not_run(hostile: DemoResult) -> None:
    html = demo_page(hostile)
    page = Page(html)
    assert page.tags["script"] == 0
    assert "<script" not in html
    assert "<script>alert('x')</script>" in page.text


def test_a_method_that_a_domain_lacks_has_no_mean(result: DemoResult) -> None:
    first, second = result.domains
    fewer = replace(second, methods=second.methods[:2])
    page = Page(demo_page(replace(result, domains=(first, fewer))))
    assert "below finetune" not in page.text
    assert "–" in page.text


def test_parts_without_data_are_left_out(result: DemoResult) -> None:
    bare = replace(result.domains[0], predictions=(), layers=(), components={})
    page = Page(demo_page(replace(result, domains=(bare,))))
    assert "Mask density" not in page.text
    assert "Where the bits go" not in page.text
    assert page.tags["img"] == 0


def test_equal_results_give_equal_files(tmp_path: Path, result: DemoResult) -> None:
    for name, same in (("a", result), ("b", DemoResult.from_json(result.to_json()))):
        write_demo_report(tmp_path / name, same)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_report_that_cannot_be_written_says_where_and_leaves_the_old_one(
    tmp_path: Path, result: DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymask.report.demo_page.demo_page", lambda result: "\ud800")
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_demo_report(path, result)
    assert path.read_text() == "old"
    monkeypatch.setattr("polymask.report.demo_page.demo_page", lambda result: "new")
    with pytest.raises(PolymaskError, match=r"inside cannot be written"):
        write_demo_report(path / "inside", result)
