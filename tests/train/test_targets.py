"""Domains of labels and of values, from a table to the answers of a server; balance and patience."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import polymask as pm
from nets import tiny_base
from polymask.cli import main
from polymask.core.target import get_target
from polymask.errors import DataError, InterruptedTraining, MethodError, PackError, TrainingError
from polymask.pack.format import read_pack, write_pack
from polymask.serve import Settings, create_app
from polymask.train.fit import Listener
from polymask.train.predict import Classifier, evaluate_by_name
from polymask.train.recipe import Recipe, RecipeError
from short_training import TRAIN, VAL, StopAt, fresh, same
from tables import make_classes, make_labels, make_values

RATES = {"weight_rate": 3e-3, "head_rate": 3e-2, "head_optimiser": "adam", "drops": ()}
RECIPE = Recipe(epochs=15, batch_size=8, mirror=False, crop_scale=(0.5, 1.0), norms="shared", **RATES)
MADE = {"labels": make_labels, "values": make_values}


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module", params=["labels", "values"])
def learned(request, base, tmp_path_factory):
    kind = request.param
    root = MADE[kind](tmp_path_factory.mktemp(kind) / "pictures")
    data = pm.load_data(root, target=kind)
    loaders = pm.make_loaders(data, base.input, RECIPE)
    found = pm.learn(base, data, "finetune", RECIPE, loaders=loaders)
    found.domain.save(root / "library" / f"{kind}.safetensors")
    return kind, root, data, loaders, found


def test_a_domain_learns_its_target_and_keeps_its_best_epoch(base, learned):
    kind, _, data, loaders, found = learned
    metric = {"labels": "mean_average_precision", "values": "mean_absolute_error"}[kind]
    assert set(found.domain.metrics) == {
        f"val_{metric}",
        f"test_{metric}",
        "bits_per_weight",
        "kept_epoch",
        "precision",
    }
    results = [record.val_accuracy for record in found.history]
    best = max(results) if kind == "labels" else min(results)
    assert results[found.domain.metrics["kept_epoch"] - 1] == best
    reached = found.domain.metrics[f"val_{metric}"]
    assert reached == pytest.approx(best, rel=2e-3)  # rounding to 16 bits may cost a thousandth
    assert pm.evaluate(base, found.domain, loaders.val) == pytest.approx(reached, rel=1e-5)
    if kind == "labels":
        assert best > 70, "by chance it is about 50"
    else:
        always_the_mean = np.abs(data.val.labels - data.train.labels.mean()).mean()
        assert best < 0.8 * always_the_mean
        assert found.domain.target.mean == pytest.approx((data.train.labels.mean(),))


def test_a_pack_keeps_the_target_and_readers_of_format_1_would_refuse_it(base, learned):
    kind, root, _, _, found = learned
    path = root / "library" / f"{kind}.safetensors"
    manifest = pm.inspect(path).manifest
    assert (manifest.format, manifest.target) == (4, kind)
    again = pm.load_domain(path, base)
    assert again.target == found.domain.target
    assert again.recipe == json.loads(json.dumps(found.domain.recipe))
    again.save(root / "again.safetensors")
    assert (root / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_pack_whose_target_makes_no_sense_is_refused(base, learned):
    kind, root, *_ = learned
    manifest, tensors = read_pack(root / "library" / f"{kind}.safetensors")
    bad = root / "bad.safetensors"
    write_pack(bad, replace(manifest, recipe=manifest.recipe | {"target": {"kind": "words"}}), tensors)
    with pytest.raises(PackError, match="target"):
        pm.load_domain(bad, base)
    write_pack(bad, replace(manifest, format=5), tensors)
    with pytest.raises(PackError, match=r"format 5, .* reads format 1"):
        pm.load_domain(bad, base)


def test_the_server_says_what_the_classifier_and_the_model_say(base, learned):
    kind, root, data, _, found = learned
    files = [root / f"{number}.png" for number in (0, 5, 31)]
    expected = Classifier(base, found.domain)(files)
    model = pm.MultiDomainModel(base, library=root / "library")
    predicted = model.predict(files, domain=kind)
    with TestClient(create_app(Settings(library=root / "library"), base), base_url="http://localhost") as client:
        sent = [("images", file.read_bytes()) for file in files]
        reply = client.post("/v1/predict", data={"domain": kind}, files=sent)
        auto = client.post("/v1/predict/auto", files=sent)
        summary = client.get("/v1/domains").json()["domains"][0]
    assert reply.status_code == 200, reply.text
    assert auto.json()["images"][0]["domain"] == kind
    assert (summary["target"], summary["test_accuracy"]) == (kind, None)
    assert summary["test_result"] == pytest.approx(found.test_accuracy)
    for image, row, prediction in zip(reply.json()["images"], expected, predicted, strict=True):
        if kind == "values":
            assert image == {"top": [], "values": {"brightness": pytest.approx(row[0].item(), rel=1e-4)}}
            assert prediction.values["brightness"] == pytest.approx(row[0].item(), rel=1e-4)
        else:
            shares = {guess["class"]: guess["probability"] for guess in image["top"]}
            assert shares == pytest.approx(dict(zip(data.classes, row.tolist(), strict=True)), abs=1e-5)
            likely = [name for name, share in zip(data.classes, row.tolist(), strict=True) if share >= 0.5]
            assert image["labels"] == list(prediction.labels) == likely


def test_results_by_name_have_the_result_as_their_mean(base, learned):
    _, _, data, loaders, found = learned
    named = evaluate_by_name(base, found.domain, loaders.test)
    assert set(named.by_name) == set(data.classes)
    known = [value for value in named.by_name.values() if value is not None]
    assert named.result == pytest.approx(np.mean(known))
    assert named.result == pytest.approx(found.test_accuracy, rel=1e-6)
    assert named.csv().splitlines()[0] == f"name,{named.metric}"


def test_a_run_that_was_cut_ends_with_the_same_bytes(base, learned, tmp_path):
    _, _, data, loaders, found = learned
    file = tmp_path / "checkpoint"
    options = {"loaders": loaders, "checkpoint": file, "listener": StopAt(2, 1, signal.SIGTERM)}
    with pytest.raises(InterruptedTraining):
        pm.learn(base, data, "finetune", RECIPE, **options)
    again = pm.learn(base, data, "finetune", RECIPE, loaders=loaders, checkpoint=file, resume=True)
    assert same(again.domain, found.domain)
    assert again.history == found.history


def test_a_model_in_a_loop_of_ones_own_has_the_loss_of_its_target(base, learned):
    _, _, _, loaders, found = learned
    images, labels = next(loaders.train.batches())
    given = pm.DomainModel(base, found.domain)(images, labels)
    assert given["loss"] == pytest.approx(found.domain.target.loss(given["logits"], labels).item())


def test_the_export_says_how_to_read_its_output(base, learned):
    from polymask.conversion.export import describe

    kind, *_, found = learned
    described = describe(found.domain, torch.float32, torch.zeros(1, 3))["output"]
    assert described["kind"] == kind
    assert described["name"] == ("standardised" if kind == "values" else "logits")


def test_what_is_for_classes_alone_says_so(base, learned):
    kind, _, data, _, _ = learned
    with pytest.raises(MethodError, match=f"lwf is for classes, not for {kind}"):
        pm.new_domain(base, "lwf", data.classes, target=data.target)
    with pytest.raises(DataError, match="pretraining is for images of one class each"):
        pm.pretrain("decathlon-resnet26", data)


@pytest.mark.parametrize(("kind", "metric"), [("labels", "mean_average_precision"), ("values", "mean_absolute_error")])
def test_the_verbs_tell_what_a_domain_was_taught(kind, metric, tmp_path, monkeypatch, capsys):
    def printed(*words):
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    MADE[kind](tmp_path / "lamps", 24)
    monkeypatch.chdir(tmp_path)
    how = ["--method", "classifier-only", "--side", "32", "--epochs", "1", "--report"]
    learned = printed("learn", "lamps", "--data", "lamps", "--target", kind, *how)
    report = (tmp_path / learned["report"]).read_text()
    assert f"The {metric.replace('_', ' ')} is " in report
    evaluated = printed("evaluate", "lamps", "--data", "lamps", "--csv", "by/name.csv")
    assert evaluated[f"test_{metric}"] == pytest.approx(learned[f"test_{metric}"], rel=1e-5)
    assert (tmp_path / "by" / "name.csv").read_text().startswith(f"name,{metric}\n")
    (summary,) = printed("list")
    assert (summary["target"], summary["tested"][0]) == (kind, f"test_{metric}")
    (row,) = printed("predict", "lamps", "lamps/3.png")
    assert ("values" in row) == (kind == "values")
    for words in (
        ["predict", "lamps", "lamps/3.png"],
        ["evaluate", "lamps", "--data", "lamps"],
        ["list"],
        ["show", "lamps"],
    ):
        assert main(words) == 0
    shown = capsys.readouterr().out
    assert metric.replace("_", " ") in shown
    assert main(["learn", "lamps", "--data", "lamps", "--target", "numbers"]) == 2
    assert "--target numbers" in capsys.readouterr().err


@pytest.mark.parametrize("balance", ["weights", "sampler"])
def test_balance_changes_what_is_learned_and_a_cut_run_still_ends_with_the_same_bytes(base, balance, tmp_path):
    data = pm.load_data(make_classes(tmp_path / "birds", (24, 6)))
    recipe = Recipe(epochs=2, batch_size=8, head_rate=1e-2, balance=balance)
    plain, whole = (pm.learn(base, data, "classifier-only", each) for each in (replace(recipe, balance=None), recipe))
    assert not same(plain.domain, whole.domain)
    assert whole.domain.recipe["balance"] == balance
    assert "balance" not in plain.domain.recipe
    file = tmp_path / "checkpoint"
    with pytest.raises(InterruptedTraining):
        pm.learn(base, data, "classifier-only", recipe, checkpoint=file, listener=StopAt(1, 1, signal.SIGTERM))
    again = pm.learn(base, data, "classifier-only", recipe, checkpoint=file, resume=True)
    assert same(again.domain, whole.domain)


def test_the_sampler_draws_classes_equally_often_and_crops_an_image_anew_each_time(base, tmp_path):
    data = pm.load_data(make_classes(tmp_path / "birds", (90, 10)))
    loaders = pm.make_loaders(data, base.input, Recipe(batch_size=16, balance="sampler"))
    drawn = [
        (image, int(label))
        for images, labels in loaders.train.batches(0)
        for image, label in zip(images, labels, strict=True)
    ]
    assert len(drawn) == len(data.train)
    share = np.mean([label == list(data.classes).index("green") for _, label in drawn])
    assert 0.3 < share < 0.7, "of the images it is 0.1"
    rare = [image for image, label in drawn if data.classes[label] == "green"]
    assert len({image.numpy().tobytes() for image in rare}) == len(rare) > 7, "there are 7 images"
    again = [image for images, _ in loaders.train.batches(0, 2) for image in images]
    assert torch.equal(torch.stack(again), torch.stack([image for image, _ in drawn[32:]]))


def test_a_sampler_needs_batches_that_are_drawn_so(base):
    with pytest.raises(TrainingError, match="balance='sampler' is for batches that make_loaders made"):
        pm.fit(base, fresh(base), TRAIN, VAL, Recipe(balance="sampler"))
    pm.fit(base, fresh(base), TRAIN, VAL, Recipe(epochs=1, balance="weights"))


class Says(Listener):
    def __init__(self):
        self.said = []

    def stopped(self, why):
        self.said.append(why)


STILL = Recipe(epochs=9, head_rate=0.0, patience=2)  # nothing is learned, so no epoch is better than the first


def test_training_stops_when_patience_ends_and_says_why(base):
    listener = Says()
    history = pm.fit(base, fresh(base, "classifier-only"), TRAIN, VAL, STILL, listener=listener)
    assert len(history) == 3
    assert listener.said == ["stopped after 3 of 9 epochs: nothing was better on val since epoch 1 (patience 2)"]


def test_patience_survives_a_cut_and_a_finished_run(base, tmp_path):
    whole = fresh(base, "classifier-only")
    pm.fit(base, whole, TRAIN, VAL, STILL)
    file, cut = tmp_path / "checkpoint", fresh(base, "classifier-only")
    with pytest.raises(InterruptedTraining):
        pm.fit(base, cut, TRAIN, VAL, STILL, checkpoint=file, listener=StopAt(2, 1, signal.SIGTERM))
    for _ in range(2):  # the second time it has ended already
        again = fresh(base, "classifier-only")
        assert len(pm.fit(base, again, TRAIN, VAL, STILL, checkpoint=file, resume=True)) == 3
        assert same(again, whole)


def test_patience_needs_val():
    base = tiny_base()
    with pytest.raises(TrainingError, match="patience=2 needs val"):
        pm.fit(base, fresh(base), TRAIN, None, replace(STILL, selection="last"))
    with pytest.raises(RecipeError, match="patience"):
        Recipe(patience=0)
    with pytest.raises(RecipeError, match="no val to be patient with"):
        Recipe(patience=1, train_on_val=True, selection="last")
    with pytest.raises(RecipeError, match="balance='more' is not one of"):
        Recipe(balance="more")


def test_a_label_that_every_image_has_is_learned_too():
    truth = torch.tensor([[1, 0], [1, 1], [1, 0]])
    target = get_target("labels").fitted(lambda: truth, "weights")
    outputs = torch.zeros(3, 2, requires_grad=True)
    target.loss(outputs, truth).backward()
    assert outputs.grad[:, 0].abs().min() > 0


def test_values_keep_their_precision_where_outputs_have_16_bits():
    years = torch.arange(2000.0, 2020.0)[:, None]
    target = get_target("values").fitted(lambda: years, None)
    exact = (years - years.mean()) / years.std(correction=0)
    assert float(target.loss(exact.bfloat16(), years)) < 1e-4
    assert target.tally(exact.bfloat16(), years) / len(years) < 0.1
