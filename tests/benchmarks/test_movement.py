from dataclasses import replace

import pytest

from made_runs import ABLATION, make_domain, make_outcome, make_runs, table_of
from polymask.benchmarks.compare import find_frontier
from polymask.benchmarks.findings import find, find_unmoved, summarise, summarise_layers
from polymask.benchmarks.records import Movement, Outcome, movement
from polymask.benchmarks.tables import tabulate


def masked(method: str, flipped: dict[str, int], seed: int = 0) -> Outcome:
    """A job whose masks of a million bits moved so much on each domain."""
    domains = {n: make_domain(80.0, flipped=f, masked=1_000_000) for n, f in flipped.items()}
    return replace(make_outcome(method, {}, seed), domains=domains)


def test_movement_is_over_all_masks_together() -> None:
    parts = [make_domain(80.0, flipped=f, masked=m) for f, m in ((10, 100), (30, 300))]
    assert movement(parts) == Movement(40, 400)
    assert movement([*parts, make_domain(80.0)]) == Movement(40, 400)


def test_methods_without_masks_and_old_results_have_no_movement() -> None:
    assert movement([make_domain(80.0)]) is None
    assert movement([]) is None
    (row,) = table_of([make_outcome("bn-only", {"birds": 80, "cars": 80})]).rows
    assert (row.moved, row.still, row.remark) == (None, (), "")


def test_masks_are_still_below_one_bit_in_a_thousand() -> None:
    assert Movement(999, 1_000_000).is_still
    assert not Movement(1000, 1_000_000).is_still
    assert Movement(0, 1_000_000).is_still


def test_a_row_whose_masks_never_moved_is_said_to_be_its_norms_and_head() -> None:
    (row,) = table_of([masked("piggyback-star", {"birds": 27, "cars": 0})]).rows
    assert row.still == ("birds", "cars")
    assert row.remark == "its masks did not move: it is its norms and head"


def test_a_row_whose_masks_moved_on_some_domains_is_still_on_the_others() -> None:
    seeds = [masked("affine-full", {"birds": 400_000, "cars": 3}, seed) for seed in (0, 1)]
    (row,) = table_of(seeds).rows
    assert row.still == ("cars",)
    assert row.remark == "its masks did not move on cars: there it is its norms and head"
    assert row.moved == Movement(800_006, 4_000_000)


def test_a_row_with_still_masks_is_neither_on_the_frontier_nor_in_anyones_way() -> None:
    better = replace(masked("star", {"birds": 0, "cars": 0}), params_paper=1.0)
    worse = make_outcome("ba2", {"birds": 70, "cars": 70}, params=1.2)
    frontier = find_frontier(table_of([better, worse]))
    assert [point.label for point in frontier.members] == ["BA²"]
    assert [point.label for point in frontier.left_out] == ["star"]
    moved = replace(masked("star", {"birds": 9999, "cars": 9999}), params_paper=1.0)
    assert [p.label for p in find_frontier(table_of([moved, worse])).members] == ["star"]


def test_masks_that_did_not_move_are_not_shown_by_layer() -> None:
    methods = ("piggyback", "piggyback-star", "affine-full")
    table = tabulate(make_runs(methods=methods, still=("piggyback",)))
    assert {one.method for one in summarise_layers(table)} == {"piggyback-star", "affine-full"}
    assert find_unmoved(table) == {"Piggyback": tuple(table.plan.domains)}


def test_only_the_domains_whose_masks_moved_are_shown_by_layer() -> None:
    runs = make_runs(methods=("piggyback", "affine-full"))
    outcomes = tuple(
        replace(o, domains={"cubs": replace(o.domains["cubs"], flipped=1)})
        if (o.method, *o.domains) == ("affine-full", "cubs")
        else o
        for o in runs.outcomes
    )
    table = tabulate(replace(runs, outcomes=outcomes))
    shown = {(one.method, one.domain) for one in summarise_layers(table)}
    assert ("piggyback", "cubs") in shown
    assert ("affine-full", "flowers") in shown
    assert ("affine-full", "cubs") not in shown
    assert find_unmoved(table) == {"Full": ("cubs",)}


def test_findings_say_of_each_row_how_far_its_masks_moved() -> None:
    methods = ("finetune", "affine-full", *ABLATION)
    result = find(make_runs(methods=methods, still=("piggyback-star",))).to_json()
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["affine-full"]["share_moved"] == pytest.approx(0.38, abs=0.02)
    assert rows["affine-full"]["still"] == []
    assert rows["finetune"]["share_moved"] is None
    assert rows["piggyback-star"]["share_moved"] < 1e-4
    assert rows["piggyback-star"]["remark"].startswith("its masks did not move")
    against = {one["method"]: one for one in result["comparisons"]["finetune"]}
    assert against["Piggyback*"]["verdict"] == "nothing can be said"
    assert against["Full"]["verdict"] != "nothing can be said"


def test_the_summary_has_deviations_seeds_and_remarks() -> None:
    runs = make_runs(methods=("finetune", "piggyback-star"), still=("piggyback-star",))
    result = summarise(runs.plan, runs.outcomes)
    finetune, star = result["rows"]
    row = tabulate(runs).rows[0]
    statistic = row.accuracy["cubs"]
    assert statistic is not None
    assert finetune["accuracy"]["cubs"] == statistic.mean
    assert finetune["deviation"]["cubs"] == statistic.sd
    assert (finetune["seeds"], finetune["share_moved"], finetune["remark"]) == (3, None, "")
    assert star["remark"] == "its masks did not move: it is its norms and head"
