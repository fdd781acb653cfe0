from dataclasses import replace

import pytest

from made_runs import make_outcome, make_plan, make_runs
from polymask.benchmarks.records import Runs, Trial, Tuned
from polymask.benchmarks.tables import ResultRow, Statistic, protocol_of, settings_text, tabulate

RECIPE = {"name": "quick", "rate": 1e-4, "epochs": 6, "drops": [4]}


def tuned(*rates: float, chosen: float) -> Tuned:
    trials = tuple(Trial({"rate": rate}, {"cubs": 50.0}, 50.0) for rate in rates)
    return Tuned(("rate",), ("cubs",), 0, trials, {"rate": chosen})


def row_of(method: str, **recipe: object) -> ResultRow:
    outcome = replace(make_outcome(method, {"cubs": 80.0}), recipe=recipe)
    plan = make_plan(("cubs",), (method,), (0,), own=None, recipe=RECIPE)
    return tabulate(Runs(plan, (outcome,))).rows[0]


def test_a_rows_protocol_is_where_it_was_trained_differently_from_the_plan() -> None:
    plan = make_plan(recipe=RECIPE)
    own = {**RECIPE, "name": "own", "rate": 1e-3, "drops": (4,)}
    assert protocol_of(plan, row_of("ba2", **own)) == {"rate": 1e-3}
    assert protocol_of(plan, row_of("ba2", **RECIPE)) == {}


def test_a_row_without_a_recorded_recipe_has_the_protocol_that_the_plan_says() -> None:
    search = {"ba2": tuned(1e-4, 1e-3, chosen=1e-3), "dan": tuned(1e-4, 1e-3, chosen=1e-4)}
    plan = make_plan(recipe=RECIPE, protocols={"ba2": {"epochs": 9}}, tuning=search)
    assert protocol_of(plan, row_of("ba2")) == {"epochs": 9, "rate": 1e-3}
    assert protocol_of(plan, row_of("dan")) == {}
    assert plan.chosen("dan") == {"rate": 1e-4}
    assert plan.chosen("ewc") == {}


def test_an_option_that_was_tuned_is_part_of_a_rows_protocol() -> None:
    search = {"ba2": Tuned(("share",), ("cubs",), 0, (), {"share": 0.5})}
    plan = make_plan(recipe=RECIPE, tuning=search)
    assert protocol_of(plan, row_of("ba2", **RECIPE)) == {"share": 0.5}


@pytest.mark.parametrize(("chosen", "end"), [(1e-4, "smallest"), (3e-3, "largest"), (1e-3, None)])
def test_a_value_at_the_end_of_its_ladder_is_known(chosen: float, end: str | None) -> None:
    expected = {} if end is None else {"rate": end}
    assert tuned(1e-4, 1e-3, 3e-3, chosen=chosen).at_the_end == expected


def test_words_and_a_single_value_have_no_ladder() -> None:
    norms = tuple(Trial({"norms": n}, {}, 50.0) for n in ("own", "affine"))
    assert Tuned(("norms",), (), 0, norms, {"norms": "own"}).at_the_end == {}
    assert tuned(1e-3, chosen=1e-3).at_the_end == {}


def test_settings_are_written_as_on_a_command_line() -> None:
    assert settings_text({"rate": 3e-4, "drops": [4, 6], "norms": "own"}) == ("rate=0.0003, drops=4,6, norms=own")


def test_a_rows_mean_over_domains_has_a_deviation_over_whole_seeds() -> None:
    runs = make_runs(methods=("ba2",))
    (row,) = tabulate(runs).rows
    assert row.mean_by_seed is not None
    assert row.mean_by_seed.n == 3
    assert row.mean_by_seed.mean == pytest.approx(row.mean)
    lacking = [o for o in runs.outcomes if (o.seed, *o.domains) != (2, "cubs")]
    (row,) = tabulate(Runs(runs.plan, tuple(lacking))).rows
    assert isinstance(row.mean_by_seed, Statistic)
    assert row.mean_by_seed.n == 2
    assert row.seeds == (0, 1, 2)
