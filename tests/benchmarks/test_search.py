"""Each method at its own rate: the search on validation, and what the runs make of it."""

import json
from dataclasses import replace

import pytest

from image_folders import make_folder
from polymask.benchmarks.jobs import BaseName, load_domain_data, run_job
from polymask.benchmarks.planning import SEARCH, Request, conclude, final_jobs, make_plan, search_jobs
from polymask.benchmarks.records import Outcome, read_runs
from polymask.benchmarks.search import Ladder, choose, ladders_of, read_ladder
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.errors import BenchmarkError, MethodError
from polymask.train.recipe import get_recipe

QUICK = get_recipe("quick", side=32, epochs=4, batch_size=8, warmup=0.0)
RATES = read_ladder("rate=1e-4,3e-3")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    for name in ("apples", "pears"):
        make_folder(root / name)
    return find_suite(str(root), None)


def ask(suite, out, methods=("bn-only",), **changes):
    given = {
        "suite": suite,
        "base": BaseName("efficientnet-lite0"),
        "methods": methods,
        "seeds": (0, 1),
        "protocol": Protocol(QUICK),
        "out": out,
        "ladders": (RATES,),
        "search_on": ("pears",),
    }
    return Request(**given | changes)


def found(reached, job):
    """What a job would have found, had it reached some accuracy on every domain."""
    base = {"pack_bytes": 0, "bits_per_weight": 0, "components": {}, "layers": [], "epochs": []}
    domains = {
        name: base | {"test_accuracy": reached, "learned": reached, "val_accuracy": None} for name, _ in job.domains
    }
    facts = {"registered": "", "options": {}, "base_after": None, "seconds": 0.0}
    facts |= {"params_paper": 1.0, "params_stored": 1.0, "domains": domains}
    about = {"method": job.method, "seed": job.seed, "direction": job.direction}
    return Outcome.from_json(facts | about)


def test_a_method_is_tried_with_every_value_on_the_named_domains_with_the_first_seed(suite, tmp_path):
    request = ask(suite, tmp_path, ("bn-only", "finetune"), seeds=(2, 1))
    jobs = search_jobs(request, make_plan(request))
    assert [(job.trained_as, job.domains[0][0], job.seed) for job in jobs] == [
        ("bn-only:rate=0.0001", "pears", 1),
        ("bn-only:rate=0.003", "pears", 1),
        ("finetune:rate=0.0001", "pears", 1),
        ("finetune:rate=0.003", "pears", 1),
    ]
    assert all(SEARCH in job.folder.parts for job in jobs)
    assert len({job.folder for job in jobs}) == len(jobs)


def test_a_search_never_sees_test_and_does_not_learn_from_val(suite):
    source = suite.domains["pears"]
    runs = load_domain_data("pears", source, Protocol(QUICK))
    search = load_domain_data("pears", source, replace(Protocol(QUICK), searching=True))
    assert search.test is search.val
    assert len(search.train) + len(search.val) == len(runs.train)
    assert len(runs.test) == 8


def test_the_runs_use_what_was_best_on_val_and_the_plan_says_all_that_was_tried(suite, tmp_path):
    request = ask(suite, tmp_path, ("bn-only", "affine-full"))
    plan = make_plan(request)
    reached = iter([60.0, 70.0, 55.0, 50.0])
    outcomes = [found(next(reached), job) for job in search_jobs(request, plan)]
    plan = conclude(request, plan, outcomes)
    assert plan.tuning["bn-only"].chosen == {"rate": 3e-3}
    assert plan.tuning["affine-full"].chosen == {"rate": 1e-4}
    assert [(t.values, t.mean) for t in plan.tuning["bn-only"].trials] == [
        ({"rate": 1e-4}, 60.0),
        ({"rate": 3e-3}, 70.0),
    ]
    assert plan.protocols["bn-only"] == {"rate": 3e-3, "weight_rate": 3e-3}
    trained = {job.method: job.trained_as for job in final_jobs(request, plan)}
    assert trained == {"bn-only": "bn-only:rate=0.003", "affine-full": "affine-full:rate=0.0001"}
    assert read_runs(tmp_path).plan == plan
    again = make_plan(request)
    assert again.tuning == plan.tuning
    assert search_jobs(request, again) == []


def test_the_folder_of_a_search_refuses_another_one(suite, tmp_path):
    request = ask(suite, tmp_path)
    plan = make_plan(request)
    conclude(request, plan, [found(50.0, job) for job in search_jobs(request, plan)])
    with pytest.raises(BenchmarkError, match="another search for bn-only"):
        make_plan(replace(request, ladders=(read_ladder("rate=1e-4,1e-3"),)))
    with pytest.raises(BenchmarkError, match="another search for bn-only"):
        make_plan(replace(request, search_on=("apples",)))


def test_a_smaller_seed_that_comes_later_keeps_the_search(suite, tmp_path):
    request = ask(suite, tmp_path, seeds=(2,))
    plan = make_plan(request)
    plan = conclude(request, plan, [found(50.0, job) for job in search_jobs(request, plan)])
    later = replace(request, seeds=(1,))
    again = make_plan(later)
    assert search_jobs(later, again) == []
    assert (again.tuning, again.tuning["bn-only"].seed) == (plan.tuning, 2)
    assert {job.trained_as for job in final_jobs(later, again)} == {"bn-only:rate=0.0001"}
    assert conclude(later, again, []).tuning == plan.tuning


def test_a_value_that_never_ended_is_not_chosen_and_of_equals_the_first_is():
    ladders = (Ladder("", "rate", (1e-4, 1e-3, 1e-2)),)
    job = type("Job", (), {"domains": (("pears", ""),), "method": "m", "seed": 0, "direction": ""})
    equal = [
        ({"rate": 1e-4}, []),
        ({"rate": 1e-3}, [found(9.0, job)]),
        ({"rate": 1e-2}, [found(9.0, job)]),
    ]
    assert choose(ladders, ["pears"], 0, equal).chosen == {"rate": 1e-3}
    with pytest.raises(BenchmarkError, match="none of the values"):
        choose(ladders, ["pears"], 0, [({"rate": 1e-4}, [])])


def test_a_value_at_the_end_of_its_ladder_is_remarked():
    ladders = (Ladder("", "rate", (1e-4, 1e-3, 1e-2)),)
    job = type("Job", (), {"domains": (("pears", ""),), "method": "m", "seed": 0, "direction": ""})
    trials = [({"rate": rate}, [found(100 * rate, job)]) for rate in (1e-4, 1e-3, 1e-2)]
    assert choose(ladders, ["pears"], 0, trials).remark == "rate=0.01 is at the end of its ladder"
    assert not choose(ladders, ["pears"], 0, trials[:2]).remark


@pytest.mark.parametrize("values", [("affine", "own", "shared"), ("auto", 1.0, 0.5), (True, False), (1e-3,)])
def test_words_and_a_single_number_have_no_ends(values):
    job = type("Job", (), {"domains": (("pears", ""),), "method": "m", "seed": 0, "direction": ""})
    trials = [({"option": value}, [found(50.0 - place, job)]) for place, value in enumerate(values)]
    for order in (trials, trials[::-1]):
        tuned = choose((Ladder("", "option", values),), ["pears"], 0, order)
        assert (tuned.chosen, tuned.remark) == ({"option": values[0]}, "")


def test_a_method_has_its_own_ladder_or_that_of_all_and_keeps_what_is_set_by_hand():
    own = read_ladder("lora-conv:rate=1e-3,3e-3")
    assert ladders_of("lora-conv:rank=4", (RATES, own)) == (own,)
    assert ladders_of("affine-full", (RATES, own)) == (RATES,)
    assert ladders_of("affine-full:rate=1e-4", (RATES, own)) == ()


def test_where_only_the_head_learns_no_other_rate_is_searched_for(suite, tmp_path):
    request = ask(suite, tmp_path, ("classifier-only",))
    plan = make_plan(request)
    assert search_jobs(request, plan) == []
    assert plan.tuning["classifier-only"].remark == "only its head learns"
    heads = replace(request, ladders=(read_ladder("head_rate=1e-3,1e-2"),), out=tmp_path / "heads")
    assert len(search_jobs(heads, make_plan(heads))) == 2


@pytest.mark.parametrize("text", ["rate", "rate=", "=1e-3", "rate=1e-3,1e-3", "lora-conv:=3"])
def test_a_ladder_that_makes_no_sense_is_refused(text):
    with pytest.raises(BenchmarkError, match=r"is not FIELD=|twice"):
        read_ladder(text)


def test_a_field_that_nothing_has_is_refused_before_training(suite, tmp_path):
    with pytest.raises(MethodError, match="colour"):
        make_plan(ask(suite, tmp_path, ladders=(read_ladder("colour=1,2"),)))
    with pytest.raises(BenchmarkError, match="a search on 'plums'"):
        make_plan(ask(suite, tmp_path, search_on=("plums",)))


def test_a_search_and_its_runs_from_images_to_results(suite, tmp_path):
    rates = read_ladder("rate=1e-3,1e30")
    request = ask(suite, tmp_path, ("finetune",), seeds=(0,), ladders=(rates,))
    plan = make_plan(request)
    plan = conclude(request, plan, [run_job(job) for job in search_jobs(request, plan)])
    first, second = plan.tuning["finetune"].trials
    assert plan.tuning["finetune"].chosen == {"rate": 1e-3}
    assert second.mean is None  # its loss was not finite
    assert set(first.accuracy) == {"pears"}
    (job, _) = final_jobs(request, plan)
    outcome = run_job(job)
    assert (outcome.recipe["rate"], outcome.recipe["weight_rate"]) == (1e-3, 1e-3)
    assert json.loads((job.folder / "result.json").read_text())["method"] == "finetune"
    assert len(read_runs(tmp_path).outcomes) == 1


def test_a_run_says_how_many_bits_of_its_masks_moved(suite, tmp_path):
    texts = ("affine-full:distance=1", "piggyback:distance=1000", "classifier-only")
    request = ask(suite, tmp_path, texts, seeds=(0,), ladders=())
    by_method = {}
    for job in final_jobs(request, make_plan(request)):
        if job.domains[0][0] == "pears":
            by_method[job.method] = run_job(job).domains["pears"]
    near, far, none = (by_method[text] for text in texts)
    assert near.masked == far.masked > 3_000_000
    assert 0 < near.flipped < near.masked  # its start is a step away
    assert far.flipped == 0  # a thousand steps away: what was learned is norms and head
    assert (none.flipped, none.masked) == (None, None)
