from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from made_runs import (
    DECATHLON,
    TWO,
    alone,
    individual,
    make_outcome,
    make_plan,
    make_runs,
    table_of,
)
from polymask.benchmarks.published import published_table
from polymask.benchmarks.records import Outcome, Runs, label_of
from polymask.benchmarks.tables import ResultTable, Statistic, statistic, tabulate
from polymask.errors import BenchmarkError


def test_a_mean_comes_with_the_samples_standard_deviation() -> None:
    assert statistic([80, 82, 87]) == Statistic(83, pytest.approx(sqrt((9 + 1 + 16) / 2)), 3)
    assert statistic([80]) == Statistic(80, None, 1)
    assert statistic([]) is None


def test_accuracies_are_averaged_over_seeds_for_each_domain() -> None:
    table = table_of(alone("ba2", {"birds": [80, 82, 87], "cars": [70, 70, 73]}))
    (row,) = table.rows
    assert row.accuracy["birds"] == statistic([80, 82, 87])
    assert row.accuracy["cars"] == statistic([70, 70, 73])
    assert row.mean == pytest.approx((83 + 71) / 2)
    assert row.seconds == 200


def test_the_score_is_the_formulas_with_the_individual_networks_as_reference() -> None:
    # Errors of 5 and 20, at most 20 and 40 of them: 1000 (1 - 1/4)² + 1000 (1 - 1/2)².
    table = table_of([*individual(), *alone("ba2", {"birds": [95], "cars": [80]}, params=1.25)])
    finetune, ba2 = table.rows
    assert ba2.score is not None
    assert finetune.score is not None
    assert ba2.score.score == pytest.approx(562.5 + 250)
    assert ba2.score.per_domain == pytest.approx({"birds": 562.5, "cars": 250})
    assert ba2.score_per_param == pytest.approx(812.5 / 1.25)
    assert finetune.score.score == pytest.approx(500)
    assert finetune.score_per_param == pytest.approx(500 / 3)
    assert ba2.score_by_seed is None


def test_the_score_of_the_means_is_not_the_mean_of_the_seeds_scores() -> None:
    both = [90.0, 90.0], [80.0, 80.0]
    table = table_of(
        [
            *alone("finetune", {"birds": both[0], "cars": both[1]}),
            *alone("ba2", {"birds": [95, 85], "cars": [80, 80]}),
        ]
    )
    ba2 = table.rows[1]
    assert ba2.score is not None
    assert ba2.score.score == pytest.approx(500)
    by_seed = [562.5 + 250, 62.5 + 250]
    assert ba2.score_by_seed == Statistic(pytest.approx(562.5), pytest.approx((by_seed[0] - by_seed[1]) / sqrt(2)), 2)


def test_without_individual_networks_there_is_no_score_and_a_reason() -> None:
    table = table_of(alone("ba2", {"birds": [95], "cars": [80]}))
    assert table.rows[0].score is None
    assert "these runs have no finetune" in table.reference.remark


@pytest.mark.parametrize(
    ("networks", "reason"),
    [
        (individual()[:1], "have no accuracy on cars yet"),
        (individual(a=100), "have no error on birds"),
    ],
)
def test_individual_networks_that_cannot_be_measured_against_give_a_reason(
    networks: list[Outcome], reason: str
) -> None:
    table = table_of([*networks, *alone("ba2", {"birds": [95], "cars": [80]})])
    assert all(row.score is None for row in table.rows)
    assert reason in table.reference.remark


def test_individual_networks_with_options_serve_where_there_are_no_others() -> None:
    plain, changed = individual(), [replace(o, method="finetune:x=1") for o in individual(70, 70)]
    assert table_of([*changed, *plain]).reference.accuracy == {"birds": 90, "cars": 80}
    assert table_of(changed).reference.accuracy == {"birds": 70, "cars": 70}


def decathlon(**changes: Any) -> ResultTable:
    """The published accuracies of the full model, as if they were measured."""
    row = published_table("decathlon").rows["affine_full"]
    accuracy = {name: row.accuracy[name] for name in DECATHLON}
    outcomes = [make_outcome("affine-full", {name: accuracy[name]}) for name in accuracy]
    own = {"own": "imagenet12", "own_accuracy": row.accuracy["imagenet12"]}
    plan = make_plan(tuple(DECATHLON), ("affine-full",), (0,), benchmark="decathlon", **(own | changes))
    return tabulate(Runs(plan, tuple(outcomes)))


def test_the_whole_decathlon_is_scored_against_its_organisers_networks() -> None:
    table = decathlon()
    (row,) = table.rows
    assert row.score is not None
    assert row.score.score == pytest.approx(3495.1, abs=0.05)
    assert table.reference.official
    assert table.reference.whole


@pytest.mark.parametrize("changes", [{"own": None, "own_accuracy": None}, {"own": "tiny-imagenet"}, {"own": "dtd"}])
def test_less_than_the_decathlon_is_not_scored_as_the_decathlon(changes: dict[str, Any]) -> None:
    table = decathlon(**changes)
    assert not table.reference.whole
    assert table.rows[0].score is None
    assert "no finetune" in table.reference.remark


def test_a_score_over_fewer_domains_says_that_it_cannot_be_compared() -> None:
    remark = tabulate(make_runs()).reference.remark
    assert "over 4 domains, not the 6 of imagenet-to-sketch (without WikiArt, Sketch)" in remark
    assert "cannot be compared with published scores" in remark
    other = table_of([*individual(), *alone("ba2", {"birds": [95], "cars": [80]})])
    assert "not a published benchmark" in other.reference.remark


def test_all_of_imagenet_to_sketch_is_said_to_be_whole() -> None:
    levels = {"cubs": 80.0, "stanford-cars": 90.0, "flowers": 95.0, "wikiart": 70.0, "sketch": 78.0}
    reference = tabulate(make_runs(levels)).reference
    assert reference.whole
    assert not reference.official
    assert "over all 6 domains" in reference.remark


def test_what_is_not_done_is_empty_unscored_and_listed() -> None:
    done = [*individual(), *alone("ba2", {"birds": [95]})]
    plan = make_plan(
        TWO,
        ("finetune", "ba2", "dan", "series-adapter"),
        (0, 1),
        benchmark="zoo",
        own=None,
        own_accuracy=None,
    )
    table = tabulate(Runs(plan, tuple(done)))
    finetune, ba2, dan, _ = table.rows
    assert ba2.accuracy["cars"] is None
    assert ba2.mean is None
    assert ba2.score is None
    assert dan.params is None
    assert finetune.score is not None
    assert finetune.score_by_seed is None
    assert table.missing == (
        "Individual: every domain (seed 1)",
        "BA²: birds (seed 1), cars (seeds 0, 1)",
        "no result yet: DAN, RA",
    )


def test_seeds_that_differ_between_domains_are_not_scored_by_seed() -> None:
    uneven = {"birds": [95.0, 94.0], "cars": [80.0]}
    ba2 = table_of([*individual(), *alone("ba2", uneven)]).rows[1]
    assert ba2.score is not None
    assert ba2.score_by_seed is None


def test_results_that_the_plan_does_not_name_are_left_out_and_counted() -> None:
    plan = make_plan(TWO, ("ba2",), (0,), benchmark="zoo", own=None, own_accuracy=None)
    found = alone("ba2", {"birds": [80, 10], "cars": [70, 10]})
    table = tabulate(Runs(plan, (*found, make_outcome("dan", {"birds": 10}))))
    assert [row.method for row in table.rows] == ["ba2"]
    assert table.rows[0].accuracy["birds"] == Statistic(80, None, 1)
    assert table.left_out == 3


def test_directions_are_rows_of_their_own() -> None:
    table = table_of(
        [
            make_outcome("packnet", {"birds": 80, "cars": 60}, direction="down"),
            make_outcome("packnet", {"cars": 70, "birds": 75}, direction="up"),
        ]
    )
    assert [row.label for row in table.rows] == ["PackNet ↓", "PackNet ↑"]
    assert [row.accuracy["cars"].mean for row in table.rows if row.accuracy["cars"]] == [60, 70]


def test_labels_have_options_and_arrows_and_unknown_methods_keep_their_names() -> None:
    assert label_of("ba2:norms=own:budget=0.5") == "BA² (norms=own, budget=0.5)"
    assert label_of("packnet:share=0.5", "up") == "PackNet (share=0.5) ↑"
    assert label_of("channel-scale") == "channel-scale"


def test_the_base_keeps_its_own_accuracy_unless_a_method_moves_it() -> None:
    after = {"change": 0.1, "agreement": 80.0, "accuracy_before": 75.0, "accuracy_after": 60.0}
    moved = [
        make_outcome("ewc", {"birds": 80, "cars": 70}, seed, "down", base_after=one)
        for seed, one in enumerate((after, after | {"accuracy_after": 64.0}))
    ]
    kept = alone("ba2", {"birds": [80, 80], "cars": [70, 70]})
    table = table_of([*kept, *moved], own="imagenet", own_accuracy=75.0)
    assert table.columns == ("imagenet", *TWO)
    ba2, ewc = table.rows
    assert ba2.accuracy["imagenet"] == Statistic(75, None, 2)
    assert ewc.accuracy["imagenet"] == Statistic(62, pytest.approx(sqrt(8)), 2)
    assert not ba2.moves_base
    assert ewc.moves_base


def test_a_moved_base_that_was_not_measured_leaves_its_row_without_a_score() -> None:
    unknown = {"change": 0.1, "agreement": None, "accuracy_before": None, "accuracy_after": None}
    moved = make_outcome("ewc", {"birds": 80, "cars": 70}, 0, "down", base_after=unknown)
    finetune, ewc = table_of([*individual(), moved], own="imagenet", own_accuracy=75.0).rows
    assert ewc.accuracy["imagenet"] is None
    assert ewc.score is None
    assert finetune.score is not None


def test_test_images_without_labels_leave_a_row_without_a_score() -> None:
    finetune, ba2 = table_of([*individual(), make_outcome("ba2", {"birds": None, "cars": 70})]).rows
    assert ba2.accuracy["birds"] is None
    assert ba2.score is None
    assert finetune.score is not None


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="has no methods, domains or seeds"):
        tabulate(Runs(make_plan(methods=()), ()))
