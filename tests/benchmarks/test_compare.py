from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from made_runs import alone, make_domain, make_outcome, make_plan, write_runs
from polymask.benchmarks.compare import Comparison, compare, compare_pooled, compare_with, student
from polymask.benchmarks.records import Outcome, Runs
from polymask.benchmarks.tables import ResultTable, tabulate
from polymask.errors import BenchmarkError

Accuracies = Mapping[str, Sequence[float]]
FIVE = ("a", "b", "c", "d", "e")


def runs_of(**methods: Accuracies) -> Runs:
    """Runs in which each method has these accuracies by domain, then by seed."""
    found = [o for name, values in methods.items() for o in alone(name.replace("_", "-"), values)]
    domains = tuple(dict.fromkeys(d for values in methods.values() for d in values))
    seeds = tuple(sorted({outcome.seed for outcome in found}))
    names = tuple(name.replace("_", "-") for name in methods)
    plan = make_plan(domains, names, seeds, benchmark="zoo", own=None, own_accuracy=None)
    return Runs(plan, tuple(found))


def table_of(**methods: Accuracies) -> ResultTable:
    return tabulate(runs_of(**methods))


def ahead_by(*points: float, seeds: Sequence[float] = (0, 0, 0)) -> tuple[Accuracies, Accuracies]:
    """Two methods whose difference on each domain is that, with a seed's luck on top of both."""
    names = "abcdefghij"[: len(points)]
    second = {name: [70.0 + luck for luck in seeds] for name in names}
    first = {name: [70.0 + more + luck for luck in seeds] for name, more in zip(names, points, strict=True)}
    return first, second


def compared(*points: float, seeds: Sequence[float] = (0, 0, 0)) -> Comparison:
    full, other = ahead_by(*points, seeds=seeds)
    return compare(table_of(affine_full=full, piggyback_bn=other), "affine-full", "piggyback-bn")


def stilled(outcome: Outcome, flipped: int = 89) -> Outcome:
    """The same, with masks of which so many bits moved."""
    domains = {name: replace(one, flipped=flipped, masked=3_300_000) for name, one in outcome.domains.items()}
    return replace(outcome, domains=domains)


def test_the_interval_is_students_over_domains_of_the_means_over_seeds() -> None:
    full = {"a": [71.0, 73.0], "b": [82.0, 80.0], "c": [60.5, 60.5]}
    other = {"a": [70.0, 70.0], "b": [80.0, 80.0], "c": [60.0, 60.0]}
    found = compare(table_of(x=full, y=other), "x", "y")
    assert found.by_domain == pytest.approx({"a": 2.0, "b": 1.0, "c": 0.5})
    assert found.mean == pytest.approx(3.5 / 3)
    deviation = sqrt(sum((d - 3.5 / 3) ** 2 for d in (2.0, 1.0, 0.5)) / 2)
    assert found.half_width == pytest.approx(4.30265 * deviation / sqrt(3), rel=1e-4)
    assert found.over == "domains"


def test_more_seeds_of_the_same_domains_do_not_make_the_interval_narrower() -> None:
    points = (2.0, 1.0, 0.2, 1.4)
    once, often = compared(*points, seeds=(0,)), compared(*points, seeds=(0,) * 9)
    assert once.half_width == pytest.approx(often.half_width)


@pytest.mark.parametrize(
    ("freedom", "point"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (5, 2.5706),
        (10, 2.2281),
        (11, 2.2010),
        (20, 2.0860),
        (60, 2.0003),
    ],
)
def test_students_points_are_those_of_the_tables(freedom: int, point: float) -> None:
    assert student(freedom) == pytest.approx(point, abs=2e-4)


def test_a_difference_is_told_in_one_sentence() -> None:
    assert compared(0.9, 1.1, 0.9, 1.2, -0.1).sentence == (
        "affine-full is ahead of piggyback-bn by 0.8 ± 0.6 points (4 of 5 domains; 3 seeds; 95 % over domains)"
    )
    assert compared(-0.9, -1.1, -0.9, -1.2, 0.1).sentence == (
        "affine-full is behind piggyback-bn by 0.8 ± 0.6 points (4 of 5 domains; 3 seeds; 95 % over domains)"
    )


def test_an_interval_that_holds_0_tells_nobody_apart() -> None:
    found = compared(2.0, -1.5, 1.0, -0.4, 1.1)
    assert found.verdict == "cannot be told apart"
    assert found.sentence == (
        "affine-full and piggyback-bn cannot be told apart: +0.4 ± 1.7 points "
        "(ahead on 3 of 5 domains; 3 seeds; 95 % over domains)"
    )


def test_a_number_has_two_decimals_where_one_would_hide_the_verdict() -> None:
    assert compared(0.9, 1.3, 0.6, 1.4, -0.1).points == "+0.82 ± 0.75 points"
    assert compared(0.02, 0.03, 0.04).points == "+0.03 ± 0.02 points"


def test_methods_that_are_equal_cannot_be_told_apart() -> None:
    found = compared(0.0, 0.0, 0.0)
    assert (found.verdict, found.ahead, found.behind) == ("cannot be told apart", 0, 0)
    assert "-" not in found.points


def test_with_two_domains_the_interval_is_over_seeds_and_says_so() -> None:
    full = {"a": [71.0, 72.0, 73.0], "b": [71.0, 71.5, 71.5]}
    other = {"a": [70.0, 70.0, 70.0], "b": [70.0, 70.0, 70.0]}
    found = compare(table_of(x=full, y=other), "x", "y")
    assert found.over == "seeds"
    by_seed = (1.0, 1.75, 2.25)
    mean = sum(by_seed) / 3
    deviation = sqrt(sum((d - mean) ** 2 for d in by_seed) / 2)
    assert found.half_width == pytest.approx(4.30265 * deviation / sqrt(3), rel=1e-4)
    assert "95 % over seeds, for these domains alone" in found.sentence


def test_over_seeds_the_mean_is_of_the_seeds_that_all_domains_have_as_its_interval_is() -> None:
    full = {"a": [71.0, 72.0, 99.0], "b": [71.0, 71.5]}
    other = {"a": [70.0, 70.0, 70.0], "b": [70.0, 70.0]}
    found = compare(table_of(x=full, y=other), "x", "y")
    assert (found.over, found.seeds) == ("seeds", (2, 2))
    assert found.by_domain == pytest.approx({"a": 1.5, "b": 1.25})
    assert found.mean == pytest.approx((1.0 + 1.75) / 2)


def test_one_seed_of_two_domains_is_too_little_to_tell_anyone_apart() -> None:
    found = compared(9.0, 8.0, seeds=(0,))
    assert (found.half_width, found.p, found.verdict) == (None, None, "cannot be told apart")
    assert found.sentence.endswith("1 seed; too few domains and seeds for an interval)")


def test_only_domains_and_seeds_that_both_have_are_paired() -> None:
    full = {"a": [71.0, 99.0], "b": [72.0], "c": [73.0], "d": [99.0]}
    other = {"a": [70.0], "b": [70.0, 10.0], "c": [70.0]}
    found = compare(table_of(x=full, y=other), "x", "y")
    assert found.by_domain == pytest.approx({"a": 1.0, "b": 2.0, "c": 3.0})
    assert found.seeds == (1, 1)


def test_the_share_of_sign_flips_is_exact() -> None:
    points = (2.0, 1.0, -0.5, 1.5, 0.25)
    # The sum is 4.25 of at most 5.25: nothing, 0.5 or 0.25 may have another sign, or all others.
    assert compared(*points).p == 6 / 32
    assert compared(1.0, 2.0, 3.0, 4.0).p == 2 / 16


def test_the_bases_own_domain_is_not_compared() -> None:
    table = tabulate(
        replace(
            runs_of(x={d: [80.0] for d in "abc"}, y={d: [79.0] for d in "abc"}),
            plan=make_plan(("a", "b", "c"), ("x", "y"), (0,), own="imagenet", own_accuracy=75.0),
        )
    )
    assert table.own == "imagenet"
    assert set(compare(table, "x", "y").by_domain) == {"a", "b", "c"}


def test_domains_where_masks_did_not_move_are_left_out_and_named() -> None:
    full, other = ahead_by(1.0, 1.2, 0.8, 9.0)
    runs = runs_of(x=full, y=other)
    outcomes = [stilled(o) if o.method == "y" and "d" in o.domains else o for o in runs.outcomes]
    found = compare(tabulate(replace(runs, outcomes=tuple(outcomes))), "x", "y")
    assert set(found.by_domain) == {"a", "b", "c"}
    assert found.left_out == {"d": "y"}
    assert "without d, where the masks of y did not move" in found.sentence


def test_nothing_is_said_of_a_method_whose_masks_never_moved() -> None:
    full, other = ahead_by(5.0, 5.0, 5.0)
    runs = runs_of(x=full, y=other)
    outcomes = tuple(stilled(o) if o.method == "x" else o for o in runs.outcomes)
    found = compare(tabulate(replace(runs, outcomes=outcomes)), "x", "y")
    assert (found.mean, found.half_width, found.verdict) == (None, None, "nothing can be said")
    assert found.sentence == "nothing can be said of x and y: the masks of x did not move"


def test_methods_with_nothing_in_common_are_not_compared() -> None:
    found = compare(table_of(x={"a": [80.0]}, y={"b": [80.0]}), "x", "y")
    assert found.sentence.endswith("they have no domain and seed in common")


def test_every_row_with_results_is_compared_with_one() -> None:
    down, up = (make_outcome("packnet", {"a": 60.0}, direction=d) for d in ("down", "up"))
    runs = runs_of(finetune={"a": [80.0]}, x={"a": [79.0]}, packnet={}, later={})
    table = tabulate(replace(runs, outcomes=(*runs.outcomes, down, up)))
    assert [one.method for one in compare_with(table, "finetune")] == [
        "x",
        "PackNet ↓",
        "PackNet ↑",
    ]
    assert compare_with(table, "later") == compare_with(table, "nobody") == ()


def test_a_row_that_is_not_there_is_named_with_those_that_are() -> None:
    down, up = (make_outcome("packnet", {"a": 60.0}, direction=d) for d in ("down", "up"))
    runs = runs_of(x={"a": [79.0]}, packnet={})
    table = tabulate(replace(runs, outcomes=(*runs.outcomes, down, up)))
    assert compare(table, "packnet-down", "x").mean == pytest.approx(-19)
    with pytest.raises(BenchmarkError, match="no row 'dan'; it has x, packnet-down, packnet-up"):
        compare(table, "dan", "x")
    with pytest.raises(BenchmarkError, match="several rows 'packnet'"):
        compare(table, "packnet", "x")


def test_runs_are_pooled_with_each_domain_of_each_run_by_itself(tmp_path: Path) -> None:
    near, far = ({"a": [70.0, 71.0], "b": [60.0]}, {"a": [72.0, 73.0], "b": [61.0]})
    one = write_runs(runs_of(x=far, y=near), tmp_path / "one")
    two = write_runs(runs_of(x={"a": [83.0]}, y={"a": [80.0]}), tmp_path / "two")
    found = compare_pooled([one, two], "x", "y")
    assert found.by_domain == pytest.approx({"one/a": 2.0, "one/b": 1.0, "two/a": 3.0})
    assert found.mean == pytest.approx(2.0)
    assert (found.over, found.seeds) == ("domains", (1, 2))
    assert set(compare_pooled([one], "x", "y").by_domain) == {"a", "b"}
    with pytest.raises(BenchmarkError, match="one has no row 'z'"):
        compare_pooled([one, two], "z", "y")


def test_folders_of_the_same_name_are_told_apart_when_pooled(tmp_path: Path) -> None:
    runs = runs_of(x={"a": [83.0]}, y={"a": [80.0]})
    folders = [write_runs(runs, tmp_path / part / "runs") for part in ("one", "two")]
    assert len(compare_pooled(folders, "x", "y").by_domain) == 2


def test_a_comparison_is_json_with_its_sentence() -> None:
    found = compared(1.0, 1.2, 0.8).to_json()
    assert found["sentence"].startswith("affine-full is ahead of piggyback-bn by 1.0 ± 0.5 points")
    assert (found["ahead"], found["domains"], found["interval_over"]) == (3, 3, "domains")


def test_a_domain_without_test_labels_is_no_pair() -> None:
    blind = replace(make_outcome("x", {}), domains={"a": make_domain(None)})
    runs = runs_of(x={}, y={"a": [80.0]})
    table = tabulate(replace(runs, outcomes=(*runs.outcomes, blind)))
    assert compare(table, "x", "y").mean is None
