"""What a report says of each row so that rows can be compared: masks, seeds, rates, differences."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from made_runs import ABLATION, DECATHLON, make_runs, write_runs
from polymask.benchmarks.compare import Comparison, compare_with
from polymask.benchmarks.findings import Findings, find, summarise
from polymask.benchmarks.records import Runs, Trial, Tuned
from polymask.benchmarks.tables import tabulate
from polymask.cli import main
from polymask.cli.benchmark import BenchmarkVerb
from polymask.report.figures import differences
from polymask.report.page_parts import Cell, PageTable, escaped
from polymask.report.pages import (
    all_tables,
    benchmark_markdown,
    benchmark_page,
    draw,
    lead,
    left_out_text,
    unmoved_text,
)
from polymask.report.tables_of_results import results_csv
from strict_page import Page

HOSTILE = "</svg><script>alert('x')</script>&$\\frac{|漢\""
METHODS = ("finetune", "bn-only", "affine-full", "piggyback-star", "affine-simple")
RECIPE = {"name": "quick", "epochs": 6, "rate": 1e-4, "weight_rate": 1e-4, "head_rate": 1e-2}


def tuned(means: Mapping[float, float | None], chosen: float, remark: str = "") -> Tuned:
    trials = tuple(Trial({"rate": rate}, {"cubs": mean}, mean) for rate, mean in means.items())
    return Tuned(("rate",), ("cubs", "flowers"), 0, trials, {"rate": chosen}, remark)


TUNING = {
    "affine-full": tuned({1e-3: 62.5, 1e-4: 60.1, 3e-3: None}, 1e-3, "3e-3 left the numbers"),
    "bn-only": tuned({1e-4: 50.0, 1e-3: 51.0, 3e-3: 55.5}, 3e-3),
}


@pytest.fixture(scope="module")
def findings() -> Findings:
    """Piggyback* has masks that did not move, two methods were tuned, a third set by hand."""
    plan = {
        "methods": METHODS,
        "recipe": RECIPE,
        "tuning": TUNING,
        "protocols": {"finetune": {"epochs": 4}},
    }
    return find(make_runs(still=("piggyback-star",), **plan))


@pytest.fixture(scope="module")
def page(findings: Findings) -> Page:
    return Page(benchmark_page(findings))


def line_of(table: PageTable | None, method: str) -> dict[str, Cell]:
    """A row's cells by their headings."""
    assert table is not None
    (line,) = [line for line in table.rows if method in (line.detail, line.name)]
    return {c.title: cell for c, cell in zip(table.headings, line.cells, strict=True)}


def test_every_row_says_how_far_its_masks_moved_beside_its_accuracies(findings: Findings) -> None:
    table = all_tables(findings)["results"]
    assert re.fullmatch(r"3\d\.\d %", line_of(table, "affine-full")["bits moved"].text)
    assert line_of(table, "piggyback-star")["bits moved"].text == "0.002 %"
    assert line_of(table, "finetune")["bits moved"].text == "–"


def test_a_row_with_still_masks_is_marked_beside_every_accuracy(findings: Findings, page: Page) -> None:
    table = all_tables(findings)["results"]
    assert table is not None
    still, moved = line_of(table, "piggyback-star"), line_of(table, "affine-full")
    for column in ("cubs", "stanford-cars", "flowers", "Score"):
        assert still[column].after.startswith("‡")
        assert "‡" not in moved[column].after
    remark = "its masks did not move: it is its norms and head"
    assert f"Piggyback* piggyback-star {remark}" in page.text
    assert f"piggyback-star): *{remark}*" in benchmark_markdown(findings)
    assert any(note.startswith("‡ ") for note in table.notes)


def test_nobody_is_the_best_by_masks_that_did_not_move() -> None:
    runs = make_runs(methods=("finetune", "affine-full", "bn-only"), still=("affine-full",))
    findings = find(runs)
    line = line_of(all_tables(findings)["results"], "affine-full")
    assert not any(cell.strong for cell in line.values())
    assert "Full" not in lead(findings)[0]
    assert any("Full (cubs" in paragraph for paragraph in lead(findings))
    moving = find(make_runs(methods=("finetune", "affine-full", "bn-only")))
    assert any(c.strong for c in line_of(all_tables(moving)["results"], "affine-full").values())
    assert "Full" in lead(moving)[0]


def test_the_frontier_says_whom_it_leaves_out(findings: Findings, page: Page) -> None:
    told = left_out_text(findings)
    assert "Piggyback*" in told
    assert told in page.text
    assert escaped(told) in benchmark_markdown(findings)


def test_layers_of_masks_that_did_not_move_are_not_drawn() -> None:
    methods = ("affine-full", "piggyback")
    findings = find(make_runs(methods=methods, still=methods))
    assert draw(replace(findings, comparisons={}))["densities"] == []
    assert all_tables(findings)["layers"] is None
    assert "Piggyback (cubs" in unmoved_text(findings)


def test_the_ablation_draws_no_difference_from_masks_that_did_not_move() -> None:
    methods = ("affine-full", *ABLATION)
    runs = make_runs(methods=methods, still=("piggyback-star-bn",))
    table = all_tables(find(runs))["ablation"]
    found = line_of(table, "piggyback-star")["more than Full, points"]
    assert found.text.startswith("−1.")
    assert found.after.startswith("± ")
    assert line_of(table, "piggyback-star-bn")["more than Full, points"] == Cell()
    assert line_of(table, "piggyback-star-bn")["bits moved"].text == "0.002 %"
    still_full = all_tables(find(make_runs(methods=methods, still=("affine-full",))))["ablation"]
    assert line_of(still_full, "piggyback-star")["more than Full, points"] == Cell()


def test_runs_that_nobody_counted_bits_in_say_so() -> None:
    runs = make_runs(methods=("affine-full",))
    old = [
        replace(o, domains={n: replace(d, flipped=None, masked=None) for n, d in o.domains.items()})
        for o in runs.outcomes
    ]
    for name in ("results", "rows"):
        notes = getattr(all_tables(find(Runs(runs.plan, (*old,))))[name], "notes", ())
        assert any("not counted (Full)" in note for note in notes)


def test_each_row_has_its_seeds_its_mean_and_what_was_chosen(findings: Findings) -> None:
    table = all_tables(findings)["rows"]
    row = findings.table.row("affine-full")
    assert row is not None
    assert row.mean_by_seed is not None
    line = line_of(table, "affine-full")
    mean = line["mean test accuracy, %"]
    assert (mean.text, mean.after) == (f"{row.mean:.1f}", f"± {row.mean_by_seed.sd:.1f}")
    assert (line["seeds"].text, line["rate"].text) == ("3", "0.001")
    assert line_of(table, "finetune")["rate"] == Cell()
    assert line_of(table, "finetune")["else not as in the plan"].text == "epochs=4"


def test_the_search_shows_every_value_and_marks_the_chosen_one(findings: Findings) -> None:
    table = all_tables(findings)["search"]
    assert table is not None
    assert table.title == "How each method's rate was chosen"
    assert [column.title for column in table.headings] == ["0.0001", "0.001", "0.003"]
    assert [line.detail for line in table.rows] == ["affine-full", "bn-only"]
    full = line_of(table, "affine-full")
    assert full["0.0001"] == Cell("60.1")
    assert full["0.001"] == Cell("62.5", "●", strong=True)
    assert full["0.003"] == Cell("failed")


def test_a_value_at_the_end_of_its_ladder_is_noted(findings: Findings) -> None:
    table = all_tables(findings)["search"]
    assert table is not None
    notes = " ".join(table.notes)
    assert "BN only: rate 0.003 is the largest value that was tried" in notes
    assert "Full: rate" not in notes
    assert "Full: 3e-3 left the numbers" in notes
    assert "validation images of cubs and flowers, seed 0 only" in notes


def test_rows_that_leave_the_plans_recipe_stand_beside_it(findings: Findings) -> None:
    table = all_tables(findings)["protocols"]
    assert line_of(table, "the plan")["epochs"] == Cell("6")
    assert line_of(table, "finetune")["epochs"] == Cell("4", strong=True)
    assert line_of(table, "affine-full")["rate"] == Cell("0.001", strong=True)
    assert line_of(table, "affine-full")["epochs"] == Cell("6")


def test_plain_runs_have_no_searches_and_no_protocols() -> None:
    findings = find(make_runs(methods=("finetune", "ba2")))
    assert all_tables(findings)["search"] is all_tables(findings)["protocols"] is None
    assert "How each method was trained" not in benchmark_markdown(findings)


def test_the_report_says_who_is_ahead_of_whom(findings: Findings, page: Page) -> None:
    markdown = benchmark_markdown(findings)
    assert "## Who is ahead of whom" in markdown
    for opponent, name in (("finetune", "ahead"), ("affine-full", "ahead_full")):
        table = all_tables(findings)[name]
        for one in findings.comparisons[opponent]:
            line = line_of(table, one.method)
            assert line["points more"] == (Cell(one.difference or "–", one.interval))
            assert f"Against {one.other}" in page.text
    norms = line_of(all_tables(findings)["ahead"], "BN only")
    assert (norms["ahead on"].text, norms["so it is"].text) == ("0 of 3", "behind")
    still = line_of(all_tables(findings)["ahead"], "Piggyback*")
    assert still["so it is"].text == "the masks of Piggyback* did not move"


def test_the_first_lines_compare_the_full_model_with_individual_networks(
    findings: Findings,
) -> None:
    (full,) = [one for one in findings.comparisons["finetune"] if one.method == "Full"]
    assert f"{full.sentence}." in lead(findings)


def test_without_the_other_method_nobody_is_compared() -> None:
    tables = all_tables(find(make_runs(methods=("ba2", "bn-only"))))
    assert tables["ahead"] is tables["ahead_full"] is None


def against(levels: Mapping[str, float], methods: Sequence[str]) -> tuple[Comparison, ...]:
    return compare_with(tabulate(make_runs(levels, methods=methods)), "finetune")


@pytest.mark.parametrize("levels", [{"a": 80.0}, {"a": 80.0, "b": 70.0}, {HOSTILE: 60.0}, DECATHLON])
def test_the_figure_of_differences_names_every_method_and_its_number(
    levels: Mapping[str, float],
) -> None:
    found = against(levels, ("finetune", "classifier-only", "affine-full", "ewc"))
    svg = differences(found, name="f")
    root = ElementTree.fromstring(svg)
    text = " ".join(root.itertext())
    for one in found:
        assert one.method in text
        assert f"{one.difference} {one.interval}".strip() in text
        assert one.points in root.attrib["aria-label"]
    keyed = [domain for domain in levels if domain[:16] in text]
    assert keyed == (list(levels) if len(levels) <= 7 else [])


def test_the_figure_has_a_colour_for_each_domain_and_follows_the_theme() -> None:
    two = differences(against({"a": 80.0, "b": 70.0}, ("finetune", "ba2")), name="f")
    three = differences(against({"a": 80.0, "b": 70.0, "c": 60.0}, ("finetune", "ba2")), name="f")
    assert "var(--series-1," in two
    assert "var(--series-2," not in two
    assert "var(--series-2," in three
    assert "var(--ink," in two
    assert "var(--muted," in two


def test_the_figure_has_one_mark_a_domain_in_every_row() -> None:
    for methods in (("ba2",), ("ba2", "bn-only", "affine-full")):
        found = against({"a": 80.0, "b": 70.0}, ("finetune", *methods))
        root = ElementTree.fromstring(differences(found, name="f"))
        marks = [use.get("style", "") for use in root.iter("{http://www.w3.org/2000/svg}use")]
        for series in ("var(--series-0,", "var(--series-1,"):
            in_the_key = 1
            assert sum(series in style for style in marks) == in_the_key + len(methods)


def test_the_figure_leaves_out_methods_of_which_nothing_can_be_said(page: Page) -> None:
    (figure,) = [label for label in page.values("aria-label") if label.startswith("Differences")]
    assert "BN only" in figure
    assert "Piggyback*" not in figure


def test_the_csv_has_bits_rates_and_protocols(findings: Findings) -> None:
    lines = list(csv.DictReader(io.StringIO(results_csv(findings.table))))
    found = {(line["method"], line["domain"]): line for line in lines}
    full, still = found["affine-full", "cubs"], found["piggyback-star", "cubs"]
    assert (full["bits_masked"], full["masks_moved"]) == (str(3 * 3_300_000), "yes")
    assert float(full["share_moved"]) == int(full["bits_flipped"]) / int(full["bits_masked"])
    assert still["masks_moved"] == "no"
    assert found["finetune", "cubs"]["masks_moved"] == ""
    assert (full["chosen"], full["protocol"]) == ("rate=0.001", "rate=0.001")
    assert found["finetune", "cubs"]["protocol"] == "epochs=4"
    assert float(full["mean_all_domains_sd"]) > 0


def test_the_json_has_searches_and_comparisons(findings: Findings) -> None:
    result = json.loads(json.dumps(findings.to_json()))
    assert result["tuning"]["bn-only"]["at_the_end"] == {"rate": "largest"}
    assert result["tuning"]["affine-full"]["trials"][0]["mean"] == 62.5
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["affine-full"]["chosen"] == {"rate": 1e-3}
    assert rows["finetune"]["protocol"] == {"epochs": 4}
    assert rows["finetune"]["seeds"] == [0, 1, 2]
    assert {one["method"] for one in result["comparisons"]["affine-full"]} >= {"BN only"}


def test_hostile_fields_are_shown_not_run() -> None:
    search = Tuned((HOSTILE,), (HOSTILE,), 0, (Trial({HOSTILE: HOSTILE}, {}, 1.0),), {})
    runs = make_runs(methods=("finetune", "ba2"), tuning={"ba2": search})
    runs = replace(runs, plan=replace(runs.plan, protocols={"ba2": {HOSTILE: HOSTILE}}))
    assert "<script" not in benchmark_page(find(runs))


def test_the_verb_compares_methods_over_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        str(write_runs(make_runs(levels, methods=("finetune", "bn-only")), tmp_path / name))
        for name, levels in (("near", {"a": 80.0, "b": 70.0}), ("far", {"a": 60.0}))
    ]
    assert main(["report", *folders, "--compare", "bn-only,finetune"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"bn-only is behind finetune by [89]\.\d ± \d\.\d points \(3 of 3 dom", shown)
    assert main(["report", *folders, "--compare", "bn-only,finetune", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert set(found["by_domain"]) == {"near/a", "near/b", "far/a"}
    assert not any(Path(folder, "report.html").exists() for folder in folders)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "a report is of one folder, not of 2"),
        (("--compare", "bn-only"), "two or more methods"),
        (("--compare", "bn-only,dan"), "near has no row 'dan'; it has finetune, bn-only"),
    ],
)
def test_the_verb_says_what_it_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], told: str
) -> None:
    runs = make_runs({"a": 80.0}, methods=("finetune", "bn-only"))
    folders = [str(write_runs(runs, tmp_path / name)) for name in ("near", "far")]
    assert main(["report", *folders, *words]) == 1
    assert told in capsys.readouterr().err


def test_the_verbs_table_has_deviations_bits_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    runs = make_runs({"a": 80.0}, methods=METHODS, still=("piggyback-star",), tuning=TUNING, own=None)
    assert main(["report", str(write_runs(runs, tmp_path / "runs"))]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"affine-full +1\.\d+ +\d\d\.\d ± \d\.\d .* 3\d\.\d % +rate=0\.001", shown)
    assert "piggyback-star: its masks did not move: it is its norms and head" in shown


def test_the_table_at_a_benchmarks_end_has_deviations_and_remarks() -> None:
    runs = make_runs({"a": 80.0}, methods=("finetune", "piggyback-star"), still=("piggyback-star",))
    console = Console(record=True, width=120, file=io.StringIO())
    verb = BenchmarkVerb(benchmark="demo", methods="finetune")
    verb.present(summarise(runs.plan, runs.outcomes), console)
    shown = console.export_text()
    assert re.search(r"finetune +\d\.\d\d +\d\d\.\d\d ± \d\.\d\d", shown)
    assert "piggyback-star: its masks did not move: it is its norms and head" in shown
