import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import polymask as pm
from image_folders import make_decathlon, make_folder
from made_runs import make_outcome
from polymask.benchmarks.jobs import BaseName, load_domain_data
from polymask.benchmarks.local import run_jobs
from polymask.benchmarks.planning import Request, environment, final_jobs, make_plan
from polymask.benchmarks.records import read_runs
from polymask.benchmarks.suites import Protocol, deviations, find_suite
from polymask.benchmarks.tables import protocol_of, tabulate
from polymask.cli.benchmark import BenchmarkVerb
from polymask.files import locked
from polymask.train.recipe import get_recipe

QUICK = get_recipe("quick", side=32, epochs=1)


def request(root: Path, out: Path, **changes):
    given = {
        "suite": find_suite(str(root), None),
        "base": BaseName("efficientnet-lite0"),
        "methods": ("classifier-only", "packnet"),
        "seeds": (0,),
        "protocol": Protocol(QUICK),
        "out": out,
    }
    return Request(**given | changes)


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    for name in ("apples", "pears"):
        make_folder(root / name)
    return root


def test_sketch_domains_come_in_the_papers_order_whatever_their_folders_are_called(tmp_path):
    for name in ("flowers", "cubs_cropped", "imagenet", "sketches"):
        make_folder(tmp_path / name, train=4, test=1)
    suite = find_suite("imagenet-to-sketch", tmp_path)
    assert list(suite.domains) == ["cubs", "flowers", "sketch"]
    assert suite.own == ("imagenet", f"sketch:{tmp_path / 'imagenet'}")
    assert suite.lacking == ("Stanford Cars", "WikiArt")
    assert load_domain_data("cubs", suite.domains["cubs"], Protocol(QUICK)).squash


def test_decathlon_domains_are_those_with_annotations(tmp_path):
    make_decathlon(tmp_path, "dtd")
    make_decathlon(tmp_path, "aircraft")
    suite = find_suite("decathlon", tmp_path)
    assert list(suite.domains) == ["aircraft", "dtd"]
    assert suite.own is None
    assert "svhn" in suite.lacking


def test_two_folders_for_one_domain_are_refused_by_name(tmp_path):
    for name in ("flowers", "oxford_flowers"):
        make_folder(tmp_path / name, train=1, test=1)
    with pytest.raises(pm.BenchmarkError, match="are both Flowers"):
        find_suite("imagenet-to-sketch", tmp_path)


@pytest.mark.parametrize(
    ("benchmark", "data", "message"),
    [
        ("decathlon", None, "give --data DIR"),
        ("decathlon", "nowhere", "is not a folder"),
        ("decathlon", ".", "has no domain of decathlon"),
        ("decatlon", None, "neither a benchmark"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, benchmark, data, message):
    with pytest.raises(pm.BenchmarkError, match=message):
        find_suite(benchmark, None if data is None else tmp_path / data)


def test_a_suite_can_be_cut_to_some_domains(domains):
    suite = find_suite(str(domains), None).only(["pears"])
    assert list(suite.domains) == ["pears"]
    assert suite.lacking == ("apples",)
    with pytest.raises(pm.BenchmarkError, match="no domain 'plums'"):
        suite.only(["plums"])


def test_the_papers_own_protocol_deviates_in_nothing(tmp_path):
    for name in ("imagenet", "cubs", "cars", "flowers", "wikiart", "sketch"):
        make_folder(tmp_path / name, train=1, test=1)
    suite = find_suite("imagenet-to-sketch", tmp_path)
    paper = Protocol(get_recipe("imagenet-to-sketch"))
    assert deviations(suite, paper, "torchvision:resnet50", {}) == ()
    changed = replace(paper, recipe=get_recipe(paper.recipe, epochs=3), selection="test", limit=9)
    found = deviations(suite, changed, "timm:vit", {"cubs": ("cropped",)})
    assert [text.split(";")[0] for text in found] == [
        "base timm:vit",
        "epochs 3",
        "selection by test",
        "at most 9 training images a domain",
        "cubs: cropped",
    ]


def test_selection_decides_what_is_trained_on(domains):
    sizes = {}
    for selection in ("last", "val", "test"):
        data = load_domain_data("apples", str(domains / "apples"), Protocol(QUICK, selection))
        sizes[selection] = len(data.train)
    assert sizes == {"last": 16, "val": 14, "test": 16}
    assert Protocol(QUICK, "last").training.selection == "last"
    assert Protocol(QUICK, "test").training.selection == "best"


def test_crops_of_a_submission_depend_on_whether_a_domain_may_be_mirrored():
    rule = Protocol(QUICK, crops="submission")
    assert (rule.crops_of(True), rule.crops_of(False)) == (10, 5)
    assert Protocol(QUICK).crops_of(True) == 1
    with pytest.raises(pm.BenchmarkError, match="crops='3' is not one of"):
        Protocol(QUICK, crops="3")


def test_classes_can_be_cut_for_all_domains_or_for_some(tmp_path):
    make_folder(tmp_path / "a", classes=4)
    everywhere = Protocol(QUICK, classes=(("", 3), ("b", 2)))
    assert everywhere.classes_of("a") == 3
    assert everywhere.classes_of("b") == 2
    data = load_domain_data("a", str(tmp_path / "a"), everywhere)
    assert data.classes == ("class-0", "class-1", "class-2")
    assert set(data.train.labels.tolist()) == {0, 1, 2}
    assert any("first 3 of 4 classes" in note for note in data.notes)


def test_ordered_methods_get_one_job_for_each_direction_and_others_one_for_each_domain(domains, tmp_path):
    asked = request(domains, tmp_path / "runs", seeds=(0, 1))
    plan = make_plan(asked)
    jobs = final_jobs(asked, plan)
    assert list(plan.domains) == ["apples", "pears"]
    assert [job.folder.relative_to(tmp_path / "runs").as_posix() for job in jobs[:4]] == [
        "classifier-only/apples/seed-0",
        "classifier-only/pears/seed-0",
        "packnet/together-down/seed-0",
        "packnet/together-up/seed-0",
    ]
    assert [name for name, _ in jobs[3].domains] == ["pears", "apples"]
    assert len(jobs) == 8
    assert jobs[0].total == 3


def test_a_folder_of_runs_takes_more_methods_and_seeds_but_no_other_protocol(domains, tmp_path):
    out = tmp_path / "runs"
    make_plan(request(domains, out, methods=("classifier-only",)))
    asked = request(domains, out, methods=("bn-only",), seeds=(1,))
    plan = make_plan(asked)
    jobs = final_jobs(asked, plan)
    assert plan.methods == ("classifier-only", "bn-only")
    assert plan.seeds == (0, 1)
    assert len(jobs) == 2
    other = Protocol(get_recipe(QUICK, epochs=2))
    with pytest.raises(pm.BenchmarkError, match="runs with another recipe"):
        make_plan(request(domains, out, protocol=other))


def test_a_folder_of_runs_goes_on_with_the_same_images_elsewhere_and_with_no_others(domains, tmp_path):
    out, moved = tmp_path / "runs", tmp_path / "elsewhere" / domains.name
    make_plan(request(domains, out))
    shutil.copytree(domains, moved)
    assert make_plan(request(moved, out)).seeds == (0,)
    next((moved / "pears" / "train").rglob("*.png")).unlink()
    with pytest.raises(pm.BenchmarkError, match=r"holds runs with other images of pears \(train: 16; now 15\)"):
        make_plan(request(moved, out))
    shutil.rmtree(moved / "pears")
    with pytest.raises(pm.BenchmarkError, match=r"runs with the domains apples, pears \(now apples\)"):
        make_plan(request(moved, out))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"methods": ("bn-only", "bn-only")}, pm.BenchmarkError, "name each once"),
        ({"methods": ("affine-ful",)}, pm.MethodError, "affine-full"),
        ({"methods": ("mtan:bogus=1",)}, pm.MethodError, "bogus"),
        ({"protocol": Protocol(QUICK, classes=(("plums", 2),))}, pm.BenchmarkError, "plums"),
        ({"base": BaseName("resnet5")}, pm.BaseError, "not known"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(domains, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        make_plan(request(domains, tmp_path / "runs", **changes))
    assert not (tmp_path / "runs").exists()


def test_a_base_is_not_measured_on_classes_that_it_does_not_have(tmp_path):
    for name in ("imagenet", "flowers"):
        make_folder(tmp_path / name, train=4, test=1)
    suite = find_suite("imagenet-to-sketch", tmp_path)
    with pytest.raises(pm.BenchmarkError, match=r"imagenet has 2 classes, the base's .* 1000"):
        make_plan(request(tmp_path, tmp_path / "runs", suite=suite))


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, 6),
        ({"workers": 2}, 3),
        ({"workers": 9}, 1),
        ({"workers": 2, "threads": 4}, 4),
        ({"engine": "ray", "cpus_per_job": 2}, 2),
        ({"engine": "ray", "threads": 5}, 5),
    ],
)
def test_the_plan_records_the_threads_of_a_job_not_of_the_process_that_plans(
    domains, tmp_path, monkeypatch, options, threads
):
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    verb = BenchmarkVerb(benchmark=str(domains), methods="classifier-only", out=tmp_path, **options)
    recorded = environment(verb.request())
    assert recorded["threads"] == str(threads)
    workers = "ray" if options.get("engine") == "ray" else str(options.get("workers", 1))
    assert recorded["workers"] == workers


def test_methods_are_measured_as_they_learned_whatever_the_recipe_does_afterwards(domains, tmp_path):
    verb = BenchmarkVerb(benchmark=str(domains), methods="classifier-only", recipe="standard", out=tmp_path)
    recipe = verb.request().protocol.recipe
    assert (recipe.test_side, recipe.refit_on_val) == (None, None)
    assert recipe.refit == "auto"


def test_jobs_run_with_the_threads_that_the_plan_records(domains, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    asked = request(domains, tmp_path, methods=("classifier-only",))
    jobs = final_jobs(asked, make_plan(asked))
    monkeypatch.setattr("polymask.benchmarks.local.run_job", lambda job, listener: seen.append(job))
    monkeypatch.setattr("polymask.benchmarks.local.Tally.finished", lambda *_: None)
    monkeypatch.setattr("polymask.benchmarks.local.Tally.result", lambda *_: [])
    run_jobs(jobs, threads=4)
    assert seen == [4, *jobs, 6]


def test_a_method_with_a_path_among_its_options_has_one_folder(domains, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "short.toml").write_text('recipe = "quick"\nepochs = 1\n')
    text = f"classifier-only:recipe={tmp_path}/mine/short.toml"
    asked = request(domains, tmp_path / "runs", methods=(text,))
    (job, _) = final_jobs(asked, make_plan(asked))
    folder, domain, seed = job.folder.relative_to(tmp_path / "runs").parts
    assert folder.startswith("classifier-only+recipe=")
    assert folder.endswith("mine_short.toml")
    assert (domain, seed) == ("apples", "seed-0")
    make_outcome(text, {"apples": 80.0}).write(job.folder)
    assert [outcome.method for outcome in read_runs(tmp_path / "runs").outcomes] == [text]


@pytest.mark.parametrize(
    ("recipe", "text", "differing"),
    [
        ("quick", "classifier-only:head_start=centred", {"head_start": "centred"}),
        ("standard", "classifier-only:refit=none", {"refit": None}),
        ("standard", "classifier-only", {}),
    ],
)
def test_a_plan_tells_rows_that_have_or_lack_a_newer_field_of_a_recipe(domains, tmp_path, recipe, text, differing):
    protocol = Protocol(get_recipe(recipe, side=32, epochs=1), "val")
    plan = make_plan(request(domains, tmp_path, methods=(text,), protocol=protocol))
    assert plan.protocols.get(text, {}) == differing
    (row,) = tabulate(read_runs(tmp_path)).rows
    assert protocol_of(plan, row) == differing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: plan.pop("seeds"), r"plan\.json is not a plan of this version \('seeds'\); give another folder"),
        (lambda plan: plan["recipe"].update(colour=1), r"plan\.json has a recipe of another version \(.*colour"),
        (lambda plan: plan["recipe"].update(epochs=-1), r"plan\.json has a recipe of another version \(.*epochs"),
    ],
)
def test_a_plan_of_another_version_is_named(domains, tmp_path, change, said):
    make_plan(request(domains, tmp_path))
    plan = json.loads((tmp_path / "plan.json").read_text())
    change(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(pm.BenchmarkError, match=said):
        make_plan(request(domains, tmp_path))


def test_a_second_benchmark_in_a_folder_is_told_who_has_it(domains, tmp_path):
    verb = BenchmarkVerb(benchmark=str(domains), methods="classifier-only", out=tmp_path / "runs")
    with locked(verb.out / "plan.json"):
        with pytest.raises(pm.FileError, match=r"plan\.json is being made by process \d+"):
            verb.run()
        assert not (verb.out / "plan.json").exists()
