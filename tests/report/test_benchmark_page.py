import csv
import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from made_runs import ABLATION, DECATHLON, make_domain, make_plan, make_runs, write_runs
from polymask.benchmarks.compare import Frontier, Point
from polymask.benchmarks.findings import find
from polymask.benchmarks.records import DomainFacts, Runs, read_runs
from polymask.cli import main
from polymask.errors import PolymaskError
from polymask.report.figures import points_lost, size_against_score
from polymask.report.page_parts import Cell, Heading, PageRow, PageTable, listed, markdown
from polymask.report.pages import all_tables, benchmark_markdown, benchmark_page, write_report
from polymask.report.tables_of_results import results_csv
from polymask.report.tables_of_runs import safe_text
from strict_page import Page

NO_TORCH = (
    "import sys; from polymask.cli import main; code = main(sys.argv[1:]);"
    "assert 'torch' not in sys.modules; sys.exit(code)"
)
HOSTILE = "</svg><script>alert('x')</script>&$\\frac{|漢\""


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Twelve methods, one of which is not done, and another's last seed on one domain neither."""
    whole = make_runs()
    done = [
        outcome
        for outcome in whole.outcomes
        if outcome.method != "bn-only" and (outcome.method, outcome.seed, *outcome.domains) != ("ba2", 2, "flowers")
    ]
    return Runs(whole.plan, tuple(done))


@pytest.fixture(scope="module")
def html(runs: Runs) -> str:
    return benchmark_page(find(runs))


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere(html: str, page: Page) -> None:
    assert html.startswith("<!doctype html>")
    assert page.tags["h1"] == page.tags["main"] == 1
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert all(v.startswith("#") for v in page.values("href"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) == {"http://www.w3.org/2000/svg"}


def test_every_id_is_there_once_and_every_reference_meets_one(page: Page) -> None:
    ids = Counter(page.values("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    references = [value[1:] for value in page.values("href")] + page.values("aria-labelledby")
    references += [m for v in page.values("clip-path") for m in re.findall(r"#([^)]+)", v)]
    assert set(references) <= set(ids)


def test_every_figure_is_also_there_in_words(page: Page) -> None:
    assert page.tags["svg"] > 8
    assert page.values("role").count("img") == page.tags["svg"]


def test_the_page_follows_light_and_dark_and_is_set_for_a4(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    assert "size: A4" in html


def test_ours_and_published_rows_are_told_apart(page: Page) -> None:
    assert "imagenet-to-sketch on efficientnet-lite0 measured here" in page.text
    assert "imagenet-to-sketch on torchvision:resnet50 published" in page.text
    assert "Full, the paper's own affine-full 1.17 76.2 82.4 91.4 96.7 75.3 80.2 1458 1246" in (page.text)
    assert "Ours" not in page.text


def test_cells_have_means_deviations_and_scores(runs: Runs, page: Page) -> None:
    row = find(runs).table.row("affine-full")
    assert row is not None
    assert row.score is not None
    assert row.score_by_seed is not None
    cells = [f"{one.mean:.1f} ± {one.sd:.1f}" for one in list(row.accuracy.values())[1:] if one]
    by_seed = f"{row.score_by_seed.mean:.0f} ± {row.score_by_seed.sd:.0f}"
    line = ["Full affine-full", f"{row.params:.2f}", "75.5", *cells, f"{row.score.score:.0f}"]
    assert " ".join([*line, by_seed, f"{row.score_per_param:.0f}"]) in page.text


def test_what_is_missing_is_shown_and_said(page: Page) -> None:
    assert "BN only bn-only – – – – – – – –" in page.text
    assert "BA²: flowers (seed 2); no result yet: BN only." in page.text


def test_the_first_lines_name_the_reference_the_deviations_and_the_frontier(runs: Runs, page: Page) -> None:
    findings = find(runs)
    top = page.text.partition("Results")[0]
    assert findings.table.reference.remark in top
    assert f"in {len(runs.plan.deviations)} points" in top
    assert listed([point.label for point in findings.frontier.members]) in top


def test_who_cannot_forget_is_said_and_who_forgot_is_measured(runs: Runs, page: Page) -> None:
    assert safe_text(find(runs).forgotten) in page.text
    assert "EWC ↓ 18.0 ± 0.0 9.0 ± 0.0 0.0 ± 0.0 9.0" in page.text
    assert "PackNet ↓ 20.0 80.0 ± 0.0 75.5 74.0 ± 0.0" in page.text


def test_the_plan_and_its_deviations_are_there(runs: Runs, page: Page) -> None:
    assert runs.plan.command in page.text
    assert all(text in page.text for text in runs.plan.deviations)
    assert "flowers 102 2,040 510 6,149 sketch:data/flowers half of train" in page.text


def test_the_ablation_stands_beside_the_papers() -> None:
    methods = ("piggyback", "affine-simple", "affine-full", *ABLATION)
    runs = make_runs({"flowers": 93.0}, methods=methods, seeds=(0,), own=None, own_accuracy=None)
    findings = find(runs)
    table = all_tables(findings)["ablation"]
    assert table is not None
    row = findings.table.rows[2]
    accuracy, moved = row.accuracy["flowers"], row.moved
    assert accuracy is not None
    assert moved is not None
    (full,) = [line for line in table.rows if line.detail == "affine-full"]
    ours = [f"{accuracy.mean:.1f}", f"{100 * moved.share:.1f} %", "–"]
    assert [cell.text for cell in full.cells] == ["1", "✓", "✓", "✓", *ours, "96.7", "96.9"]
    groups = [group for group, _ in table.groups]
    assert groups == ["", "measured here, efficientnet-lite0", "published, resnet50", "published, densenet121"]
    assert findings.frontier.measure == "mean accuracy"


def test_the_decathlon_has_two_decimals_and_its_own_table() -> None:
    own = {"own": "imagenet12", "own_accuracy": 60.3}
    methods = ("affine-full", "ewc")
    findings = find(make_runs(DECATHLON, benchmark="decathlon", methods=methods, **own))
    assert findings.table.reference.official
    assert "| 60.30 |" in benchmark_markdown(findings)


def test_parts_without_data_are_left_out() -> None:
    plan = make_plan(methods=("ba2", "dan"), benchmark="zoo", deviations=())
    page = Page(benchmark_page(find(Runs(plan, ()))))
    assert page.tags["svg"] == 0
    for part in ("Ablation", "Masks and scalars", "Learning", "Not as in the paper"):
        assert part not in page.text


def test_validation_stands_in_where_test_images_have_no_labels() -> None:
    runs = make_runs({"flowers": 93.0}, methods=("affine-full",), seeds=(0,))
    (outcome,) = runs.outcomes
    blind = replace(outcome, domains={"flowers": make_domain(None, val_accuracy=88.25)})
    facts = {"flowers": DomainFacts("sketch:data/flowers", 102, 2040, 510, None)}
    table = all_tables(find(Runs(replace(runs.plan, domains=facts), (blind,))))["validation"]
    assert table is not None
    assert [(row.detail, row.cells) for row in table.rows] == [("affine-full", [Cell("88.2")])]


def test_hostile_names_are_shown_not_run() -> None:
    runs = make_runs({HOSTILE: 80.0}, methods=("finetune", "affine-full", "piggyback", "ewc"))
    notes = DomainFacts(HOSTILE, 2, 2, 2, 2, (HOSTILE,))
    plan = replace(
        runs.plan,
        base=HOSTILE,
        command=HOSTILE,
        domains={HOSTILE: notes},
        deviations=(HOSTILE,),
        recipe={HOSTILE: {HOSTILE: HOSTILE}},
        environment={HOSTILE: HOSTILE},
    )
    findings = find(Runs(plan, runs.outcomes))
    html = benchmark_page(findings)
    assert "<script" not in html
    assert "<script>alert('x')</script>" in Page(html).text
    for line in benchmark_markdown(findings).splitlines():
        assert "<script" not in line.replace("\\<", "") or line.startswith("    ")


def test_a_table_in_markdown_escapes_what_would_be_markup() -> None:
    columns = (Heading("a|b", "g"), Heading("words", "h", words=True))
    line = PageRow("x*y", (Cell("1", "± 2", strong=True), Cell("p|q")), "x")
    text = markdown(PageTable("s", "T\nitle", "published", "m", columns, (line,), ("n_b",)))
    assert text.splitlines() == [
        "### T itle (published)",
        "",
        r"| m | g: a\|b | h: words |",
        "| --- | ---: | --- |",
        r"| x\*y (x) | **1 ± 2** | p\|q |",
        "",
        r"n\_b",
    ]


def test_the_files_are_written_beside_the_runs_or_elsewhere(tmp_path: Path) -> None:
    runs = make_runs({"flowers": 93.0}, methods=("finetune", "ba2"), seeds=(0,))
    folder = write_runs(runs, tmp_path / "runs")
    assert read_runs(folder).plan == runs.plan
    findings, files = write_report(folder)
    names = ["report.html", "report.md", "results.csv"]
    assert files == [folder / name for name in names]
    assert files[0].read_text() == benchmark_page(findings)
    _, again = write_report(folder, tmp_path / "new" / "place")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
    assert sorted(p.name for p in (tmp_path / "new" / "place").iterdir()) == names


def test_the_csv_has_a_line_for_each_method_direction_and_domain(runs: Runs) -> None:
    table = find(runs).table
    lines = list(csv.DictReader(io.StringIO(results_csv(table))))
    assert len(lines) == len(table.rows) * 4
    (line,) = [
        line for line in lines if (line["method"], line["direction"], line["domain"]) == ("ewc", "up", "flowers")
    ]
    row = table.row("ewc", "up")
    assert row is not None
    accuracy = row.accuracy["flowers"]
    assert accuracy is not None
    assert float(line["accuracy_mean"]) == accuracy.mean
    assert float(line["accuracy_sd"]) == accuracy.sd
    assert (line["seeds"], line["seeds_planned"]) == ("3", "3")
    assert float(line["learned_mean"]) == pytest.approx(accuracy.mean + 18)
    assert float(line["params"]) == row.params
    assert float(line["pack_bytes"]) > 0
    assert line["base_own_domain"] == "no"
    (nothing,) = [x for x in lines if (x["method"], x["domain"]) == ("bn-only", "cubs")]
    assert (nothing["accuracy_mean"], nothing["seeds"]) == ("", "0")


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    runs = write_runs(make_runs(methods=("ba2",), seeds=(0,)), tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(PolymaskError, match="cannot be made"):
        write_report(runs, tmp_path / "file" / "report")


def points(**values: tuple[float, float, bool]) -> Frontier:
    return Frontier(
        "score",
        tuple(Point(label, 1 + bits, bits, value, on) for label, (bits, value, on) in values.items()),
    )


@pytest.mark.parametrize(
    "frontier",
    [
        points(a=(0, 0, True)),
        points(a=(0, 500, True), b=(1.0, 700, True), c=(1.0, 700, True), d=(32, 2500, True)),
        points(**{HOSTILE: (1.0, 1000, True)}),
        points(**{f"method-{i}": (1 + i / 1000, 100 + i, i == 29) for i in range(30)}),
    ],
)
def test_size_against_score_names_every_member_of_the_frontier(frontier: Frontier) -> None:
    root = ElementTree.fromstring(size_against_score(frontier, name="f"))
    text = " ".join(root.itertext())
    assert all(point.label[:16] in text for point in frontier.members)


@pytest.mark.parametrize("lost", [{"a": 0.0}, {"a": -0.01, "b": -3.0}, {"a": 12.0, "b": -1.0}])
def test_points_lost_have_a_bar_and_a_number_each(lost: dict[str, float]) -> None:
    text = " ".join(ElementTree.fromstring(points_lost(lost, name="f")).itertext())
    assert all(label in text for label in lost)
    assert "-" not in text


def test_the_verb_writes_the_files_and_prints_the_tables_without_torch(tmp_path: Path, runs: Runs) -> None:
    folder = write_runs(runs, tmp_path / "runs")
    command = [sys.executable, "-c", NO_TORCH, "report", folder, "--out", tmp_path / "out", "--json"]
    result = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
    assert [Path(file).name for file in result["files"]] == [
        "report.html",
        "report.md",
        "results.csv",
    ]
    assert all(Path(file).is_file() for file in result["files"])
    rows = {(row["method"], row["direction"]): row for row in result["rows"]}
    assert rows["finetune", ""]["score"] == pytest.approx(1000)
    assert rows["finetune", ""]["accuracy"]["cubs"]["n"] == 3
    assert result["published"]["table"] == "resnet50"
    assert result["forgetting"]["losses"][-1]["lost"]["flowers"]["mean"] == pytest.approx(18)
    assert result["missing"] == ["BA²: flowers (seed 2)", "no result yet: BN only"]


def test_the_verb_shows_a_person_the_table_and_where_the_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = make_runs({"flowers": 93.0}, methods=("finetune", "packnet"), seeds=(0,))
    folder = write_runs(runs, tmp_path / "runs")
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"finetune +2\.00 +75\.5 +9[\d.]+ +500 +250", shown)
    assert "packnet ↓" in shown
    assert "report.html" in shown
    assert (folder / "report.md").is_file()


def test_a_folder_without_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "plan.json cannot be read" in line
