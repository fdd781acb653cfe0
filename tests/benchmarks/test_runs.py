import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue

import pytest
from rich.console import Console

import polymask as pm
from image_folders import make_decathlon, make_folder
from made_runs import make_outcome
from polymask.benchmarks.jobs import BaseName, run_job, write_submissions
from polymask.benchmarks.local import Watcher, _work, run_jobs
from polymask.benchmarks.planning import Request, final_jobs, make_plan
from polymask.benchmarks.records import read_runs
from polymask.benchmarks.submission import read_labels
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.cli import main
from polymask.cli.progress import LiveTable
from polymask.data.load import load_data
from polymask.pack.format import inspect
from polymask.train.fit import Listener
from polymask.train.recipe import get_recipe, read_method
from polymask.train.state import plain

QUICK = get_recipe("quick", side=32, epochs=2, batch_size=8)


def ask(suite, out, methods=("classifier-only",), **changes):
    given = {
        "suite": suite,
        "base": BaseName("efficientnet-lite0"),
        "methods": methods,
        "seeds": (0,),
        "protocol": Protocol(QUICK),
        "out": out,
    }
    request = Request(**given | changes)
    plan = make_plan(request)
    return plan, final_jobs(request, plan)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    for name in ("apples", "pears"):
        make_folder(root / name)
    return find_suite(str(root), None)


def numbers(outcome):
    """What an outcome says, without how long it took."""
    return {**asdict(outcome), "seconds": 0}


class Fails(Listener):
    """Stops a training like a power cut, after an epoch."""

    def epoch(self, record, seconds):
        if record.epoch == 0:
            raise KeyboardInterrupt


def test_a_job_that_was_cut_goes_on_to_the_same_result(suite, tmp_path):
    _, (whole, *_) = ask(suite, tmp_path / "whole", ("affine-full",))
    undisturbed = run_job(whole)
    _, (cut, *_) = ask(suite, tmp_path / "cut", ("affine-full",))
    with pytest.raises(KeyboardInterrupt):
        run_job(cut, Fails())
    assert cut.outcome() is None
    again = run_job(cut)
    assert numbers(again) == numbers(undisturbed)
    packs = [job.folder / "packs" / "apples.safetensors" for job in (whole, cut)]
    assert packs[0].read_bytes() == packs[1].read_bytes()
    assert not (cut.folder / "packs" / "learned").exists()
    epochs = [json.loads(line) for line in (cut.folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs if line["event"] == "epoch"][-2:] == [0, 1]


def test_a_folder_is_cut_as_a_benchmark_cut_it_whatever_seed_it_was_trained_with(tmp_path, capsys):
    root = tmp_path / "photos"
    root.mkdir()
    for name in ("apples", "pears"):  # folders of classes alone
        (make_folder(tmp_path / "made" / name, train=12) / "train").rename(root / name)
    _, (job, *_) = ask(find_suite(str(root), None), tmp_path / "runs", seeds=(1,))
    run_job(job)
    pack, data = job.folder / "packs" / "apples.safetensors", root / "apples"
    assert main(["evaluate", str(pack), "--data", str(data), "--json"]) == 0
    looked_at = {one["image"] for one in json.loads(capsys.readouterr().out)["hardest"]}
    test = load_data(data, seed=0).test
    assert looked_at == {test.origin(place) for place in range(len(test))}


def test_what_is_done_is_read_and_not_done_again(suite, tmp_path):
    _, jobs = ask(suite, tmp_path)
    first = run_jobs(jobs)
    before = [(job.folder / "result.json").stat().st_mtime_ns for job in jobs]
    heard = []

    class Hears(Watcher):
        def started(self, job):
            heard.append(job)

    assert [numbers(o) for o in run_jobs(jobs, watcher=Hears())] == [numbers(o) for o in first]
    assert before == [(job.folder / "result.json").stat().st_mtime_ns for job in jobs]
    assert heard == []


def test_results_are_read_back_in_the_order_of_the_plan(suite, tmp_path):
    plan, jobs = ask(suite, tmp_path, ("packnet", "classifier-only"), directions=("up",))
    found = run_jobs(jobs)
    runs = read_runs(tmp_path)
    assert runs.plan == plan
    assert [(o.method, o.direction) for o in runs.outcomes] == [
        ("packnet", "up"),
        ("classifier-only", ""),
        ("classifier-only", ""),
    ]
    assert numbers(runs.outcomes[0]) == numbers(found[0])
    packnet = runs.outcomes[0]
    assert list(packnet.domains) == ["pears", "apples"]
    assert packnet.base_after["change"] > 0
    assert packnet.params_paper > 1


def test_a_job_that_fails_is_named_and_the_others_are_done(suite, tmp_path):
    _, jobs = ask(suite, tmp_path)
    broken = replace(jobs[0], domains=(("apples", str(tmp_path / "nowhere")),))
    with pytest.raises(pm.BenchmarkError, match=r"1 of 2 jobs failed: .*apples.*nowhere"):
        run_jobs([broken, jobs[1]])
    assert jobs[1].outcome() is not None


def test_the_best_epoch_on_val_is_recorded_only_where_val_is_held_out(suite, tmp_path):
    _, (job, *_) = ask(suite, tmp_path, protocol=Protocol(QUICK, "val"))
    found = run_job(job).domains["apples"]
    assert found.val_accuracy == max(epoch["val_accuracy"] for epoch in found.epochs)


def test_several_crops_of_a_test_image_are_averaged(suite, tmp_path):
    _, (job, *_) = ask(suite, tmp_path, protocol=Protocol(QUICK, crops="5"))
    assert 0 <= run_job(job).domains["apples"].test_accuracy <= 100


def test_a_run_gives_a_submission_that_its_labels_score(tmp_path):
    make_decathlon(tmp_path, "dtd")
    protocol = Protocol(get_recipe("decathlon", side=32, resized=36, epochs=1, batch_size=8))
    _, jobs = ask(find_suite("decathlon", tmp_path), tmp_path / "runs", protocol=protocol)
    (outcome,) = run_jobs(jobs)
    (path,) = write_submissions(jobs)
    assert path == tmp_path / "runs" / "classifier-only" / "results-seed-0.json"
    answers = {e["image_id"]: e["category_id"] for e in json.loads(path.read_text())}
    truth = json.loads((tmp_path / "annotations" / "dtd_test.json").read_text())["annotations"]
    right = sum(answers[e["image_id"]] == e["category_id"] for e in truth)
    assert len(answers) == len(truth)
    assert outcome.domains["dtd"].test_accuracy == pytest.approx(100 * right / len(truth))


def test_stripped_test_images_get_their_labels_from_the_organisers_archive(tmp_path, make_labels):
    make_decathlon(tmp_path, "dtd", labelled=False)
    numbers_of = [
        e["id"] for e in json.loads((tmp_path / "annotations" / "dtd_test_stripped.json").read_text())["images"]
    ]
    answers = [{"image_id": image, "category_id": 40_000_001} for image in numbers_of]
    archive = make_labels(dtd={"images": [], "annotations": answers, "categories": []})
    assert read_labels(archive)["dtd"]
    recipe = get_recipe("decathlon", side=32, resized=36, epochs=1, batch_size=8)
    suite = find_suite("decathlon", tmp_path)
    blind, _ = ask(suite, tmp_path / "blind", protocol=Protocol(recipe))
    assert blind.domains["dtd"].test is None
    plan, jobs = ask(suite, tmp_path / "seen", protocol=Protocol(recipe, labels=archive))
    assert plan.domains["dtd"].test == len(numbers_of)
    assert run_job(jobs[0]).domains["dtd"].test_accuracy is not None


def test_the_live_table_shows_what_is_done_and_what_waits(suite, tmp_path):
    plan, jobs = ask(suite, tmp_path, ("classifier-only", "bn-only"))
    console = Console(file=(tmp_path / "seen.txt").open("w"), force_terminal=False, width=100)
    with LiveTable(plan, jobs, console) as watcher:
        outcome = run_job(jobs[0])
        watcher.started(jobs[0])
        watcher.finished(jobs[0], outcome)
        watcher.started(jobs[1])
        watcher.progressed(jobs[1], 0.5, "epoch 1")
        watcher.failed(jobs[2], "no images")
        with console.capture() as capture:
            console.print(watcher.picture())
    text = capture.get()
    assert f"{outcome.domains['apples'].test_accuracy:.1f}" in text
    assert "50 %" in text
    assert "failed" in text
    assert "2 of 4 jobs" in text
    console.file.close()
    lines = (tmp_path / "seen.txt").read_text()
    assert "1/4 classifier-only · apples · seed 0: apples" in lines


@pytest.mark.slow
def test_processes_give_what_one_process_gives(suite, tmp_path):
    results = []
    for name, workers in (("one", 1), ("two", 2)):
        _, jobs = ask(suite, tmp_path / name, ("affine-full",))
        results.append([numbers(o) for o in run_jobs(jobs, workers=workers, threads=1)])
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_benchmark_that_is_killed_and_started_again_gives_the_same_table(suite, tmp_path):
    root = Path(next(iter(suite.domains.values()))).parent
    words = ["benchmark", str(root), "--methods", "affine-full,packnet", "--epochs", "3"]
    words += ["--side", "32", "--batch-size", "4", "--threads", "1", "--json"]

    def start(out):
        command = [sys.executable, "-m", "polymask", *words, "--out", str(tmp_path / out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    whole = start("whole")
    expected, said = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    kills = 0
    while True:
        run = start("cut")
        logs = sum(len(f.read_text()) for f in tmp_path.glob("cut/*/*/*/log.jsonl"))
        while run.poll() is None and kills < 3:
            if sum(len(f.read_text()) for f in tmp_path.glob("cut/*/*/*/log.jsonl")) > logs + 200:
                os.kill(run.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.02)
        found, said = run.communicate(timeout=300)
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, said
    assert kills == 3
    assert json.loads(found) == json.loads(expected)


def test_a_domain_without_labelled_test_images_has_no_test_accuracy_whatever_val_says(tmp_path):
    make_decathlon(tmp_path, "dtd", labelled=False)
    recipe = get_recipe("decathlon", side=32, resized=36, epochs=1, batch_size=8)
    _, jobs = ask(find_suite("decathlon", tmp_path), tmp_path / "runs", protocol=Protocol(recipe, selection="val"))
    found = run_job(jobs[0]).domains["dtd"]
    assert (found.test_accuracy, found.learned) == (None, None)
    assert found.val_accuracy is not None
    metrics = inspect(jobs[0].folder / "packs" / "dtd.safetensors").manifest.metrics
    assert metrics.keys() == {"val_accuracy"}


def test_fields_that_change_the_batches_of_training_reach_a_benchmarks_batches(suite, tmp_path, monkeypatch):
    seen = []

    def look(base, lessons, *_, **__):
        seen.extend(lessons.values())
        raise KeyboardInterrupt

    monkeypatch.setattr("polymask.benchmarks.jobs.fit_all", look)
    protocol = Protocol(get_recipe(QUICK, first_side=24, balance="sampler"))
    _, jobs = ask(suite, tmp_path / "runs", protocol=protocol)
    with pytest.raises(KeyboardInterrupt):
        run_job(jobs[0])
    assert seen[0].train.balanced
    transform, until = seen[0].train.early
    assert (transform.spec.side, until) == (24, 1)


def write_result(job, **changes):
    """What a job would have found, with the settings that it has or others."""
    text = read_method(job.trained_as)
    recipe, method = text.recipe(job.protocol.training), text.method(job.protocol.training)
    given = {"recipe": plain(recipe.to_json()), "options": plain(method.options())}
    made = make_outcome(job.method, {job.domains[0][0]: 80.0}, job.seed)
    outcome = replace(made, **{name: given[name] | changes.get(name, {}) for name in given})
    outcome.write(job.folder)
    return outcome


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"epochs": 9}}, r"other settings: epochs 9 \(now 2\); delete it, or give another --out"),
        ({"recipe": {"rate": 0.5, "patience": 3}}, r"other settings: patience 3 \(now None\), rate 0.5 \(now "),
        ({"options": {"per": "channel"}}, r"other settings: per channel \(now layer\)"),
    ],
)
def test_a_result_of_other_settings_is_not_taken_for_a_jobs_own(suite, tmp_path, changes, said):
    _, (job, other) = ask(suite, tmp_path, ("affine-full",))
    write_result(job, **changes)
    write_result(other)
    assert other.outcome() is not None
    with pytest.raises(pm.BenchmarkError, match=said) as refused:
        run_jobs([job, other])
    assert str(job.folder) in str(refused.value)


def test_a_result_that_does_not_tell_its_settings_is_a_jobs_own(suite, tmp_path):
    _, (job, _) = ask(suite, tmp_path, ("affine-full",))
    found = replace(write_result(job), recipe={}, options={})
    found.write(job.folder)
    assert job.outcome() == found


def test_a_result_that_cannot_be_read_is_named_with_what_it_lacks(suite, tmp_path):
    _, (job, _) = ask(suite, tmp_path)
    job.folder.mkdir(parents=True)
    (job.folder / "result.json").write_text('{"method": "classifier-only"}')
    for read in (job.outcome, lambda: read_runs(tmp_path)):
        with pytest.raises(
            pm.BenchmarkError, match=r"is not a result of this version.*delete it and run again"
        ) as found:
            read()
        assert str(job.folder / "result.json") in str(found.value)


FULL = OSError(28, "No space left on device")
NO_MEMORY = RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("trouble", [MemoryError("of 9 GB"), FULL, NO_MEMORY], ids=lambda error: type(error).__name__)
def test_a_job_without_memory_or_space_fails_alone_and_says_why(suite, tmp_path, monkeypatch, trouble):
    _, jobs = ask(suite, tmp_path)
    outcome = make_outcome("classifier-only", {"pears": 80.0})

    def run(job, listener):
        if job is jobs[0]:
            raise trouble
        return outcome

    class Hears(Watcher):
        def finished(self, job, outcome):
            done.append(job)

    done = []
    monkeypatch.setattr("polymask.benchmarks.local.run_job", run)
    with pytest.raises(pm.BenchmarkError, match=f"1 of 2 jobs failed: .*apples.*{type(trouble).__name__}: ") as found:
        run_jobs(jobs, watcher=Hears())
    assert str(trouble) in str(found.value)
    assert done == [jobs[1]]


def test_a_process_goes_on_with_the_next_job_where_one_has_no_memory(suite, tmp_path, monkeypatch):
    _, jobs = ask(suite, tmp_path)
    todo, events = Queue(), Queue()
    for item in (*enumerate(jobs), None):
        todo.put(item)

    def run(job, listener):
        if job is jobs[0]:
            raise MemoryError("of 9 GB")
        return "found"

    monkeypatch.setattr("polymask.benchmarks.local.run_job", run)
    for name in ("signal.signal", "_end_with_parent", "torch.set_num_threads"):  # of a process of its own
        monkeypatch.setattr(f"polymask.benchmarks.local.{name}", lambda *_: None)
    _work(todo, events, 1)
    told = [events.get() for _ in range(events.qsize())]
    assert told == [("started", 0), ("failed", 0, "MemoryError: of 9 GB"), ("started", 1), ("finished", 1, "found")]
