"""A plan for so many minutes: sizes and epochs from what a machine does, and a head alone as the rival."""

import json
import time
from dataclasses import replace

import pytest
import torch

import polymask as pm
from brightness import made_base, made_data
from image_folders import make_folder
from polymask.cli import main
from polymask.cli.learn import LearnVerb
from polymask.core.target import ValueTarget
from polymask.data.loader import Loader
from polymask.errors import PolymaskError, TrainingError
from polymask.train import minutes
from polymask.train.fit import fit
from polymask.train.minutes import MOST_EPOCHS, OFTEN, Pace, plan_for, plan_minutes
from polymask.train.recipe import method_by
from polymask.train.regression import fit_head, learn_head

SIDES = [64, 96, 128, 160, 224]
PACE = Pace(0.001, 1e-6)  # 5 ms for an image of 64 px, 51 ms at 224
QUICK = pm.get_recipe("quick")


def plan(seconds, images=1000, val=200, pace=PACE):
    return plan_for(QUICK, pace, SIDES, images, val, seconds)


def test_more_minutes_give_larger_images_and_then_more_epochs():
    plans = [plan(60 * minutes).recipe for minutes in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert [one.side for one in plans] == sorted(one.side for one in plans)
    assert plans[0].side < plans[-1].side == 224
    assert all(one.epochs >= OFTEN for one in plans[1:])
    assert plans[-1].epochs == MOST_EPOCHS


@pytest.mark.parametrize("seconds", [60, 180, 600, 3600])
@pytest.mark.parametrize("images", [100, 1000, 5000])
def test_a_plan_keeps_to_its_time_where_one_epoch_fits(seconds, images):
    chosen = plan(seconds, images)
    least = 1.4 * images * PACE.seconds(64)
    assert chosen.seconds <= seconds or (chosen.recipe.epochs == 1 and least > 0.5 * seconds)


def test_where_nothing_fits_there_is_one_epoch_of_the_smallest_images():
    chosen = plan(10, images=100_000)
    assert (chosen.recipe.epochs, chosen.recipe.side, chosen.recipe.first_side) == (1, 64, None)
    assert chosen.seconds > 10
    assert "1 epoch at 64 px" in chosen.text


def test_where_there_is_no_time_to_train_a_head_alone_sees_larger_images():
    short, long = (plan_for(QUICK, PACE, SIDES, 2000, 300, seconds, alone=True) for seconds in (40, 600))
    assert (short.recipe.epochs, short.recipe.frozen_side) == (0, 160)
    assert short.seconds <= 40
    assert "a head alone at 160 px" in short.text
    assert long.recipe.epochs >= OFTEN
    assert plan_for(QUICK, PACE, SIDES, 2000, 300, 40).recipe.epochs >= 1


def test_the_last_head_has_time_for_its_pass():
    recipes = (QUICK, pm.get_recipe("quick", refit_on_val=True))
    without, last = (plan_for(recipe, PACE, SIDES, 1000, 200, 100_000) for recipe in recipes)
    assert without.recipe.epochs == last.recipe.epochs == MOST_EPOCHS
    assert last.seconds - without.seconds == pytest.approx(1200 * minutes.MEASURING * PACE.seconds(224))


def test_the_first_half_has_smaller_images():
    chosen = plan(3600).recipe
    assert (chosen.first_side, chosen.side) == (160, 224)
    assert chosen.test_side == "auto"


def test_a_faster_machine_does_more_in_the_same_time():
    slow, fast = plan(120).recipe, plan(120, pace=Pace(0.0001, 1e-7)).recipe
    assert (slow.side, slow.epochs) < (fast.side, fast.epochs)


@pytest.fixture(scope="module")
def data():
    return made_data("night", "dusk", "day", "noon")


@pytest.fixture
def base():
    return made_base()


def test_a_machine_is_timed_and_the_plan_is_for_it(base, data, monkeypatch):
    monkeypatch.setattr(minutes, "SIDES", (8, 16, 24))
    monkeypatch.setattr(minutes, "FEW", 1)  # this machine may be slow
    asked = replace(QUICK, least_steps=400)
    chosen = plan_minutes(base, data, method_by(asked, "affine-full"), asked, 2)
    assert chosen.recipe.least_steps is None  # time decides, not steps
    assert chosen.recipe.side in (8, 16, 24)
    assert 1 <= chosen.recipe.epochs <= MOST_EPOCHS
    assert chosen.recipe.frozen_side in (8, 16, 24)
    assert chosen.recipe.rate == QUICK.rate


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, (True, False)),  # all the same: as it is
        ({"rows": 0.95, "bf16": 0.8}, (True, False)),  # faster, and not clearly so
        ({"rows": 0.5}, (False, False)),
        ({"bf16": 0.5}, (True, True)),
        ({"rows": 0.5, "bf16": 0.5}, (False, True)),
    ],
)
def test_layout_and_type_of_numbers_are_those_that_are_clearly_faster(base, monkeypatch, seconds, expected):
    def timed(learner, base, side, most):
        recipe = learner.recipe
        return seconds.get("rows", 1) ** (not recipe.channels_last) * seconds.get("bf16", 1) ** recipe.autocast

    monkeypatch.setattr(minutes, "_timed", timed)
    chosen = minutes.fastest_recipe(base, method_by(QUICK, "affine-full"), QUICK, ["a", "b"], 16)
    assert (chosen.channels_last, chosen.autocast) == expected


def test_a_setting_that_is_many_times_slower_is_given_up_early(base):
    steps = []

    class Slow:
        recipe, domain = QUICK, pm.new_domain(base, "bn-only", ["a", "b"])

        def step(self, images, labels, epoch):
            steps.append(images.shape)
            time.sleep(0.02)

    minutes._timed(Slow(), base, 16, most=0.001)
    assert len(steps) == 2
    minutes._timed(Slow(), base, 16)
    assert len(steps) == 2 + 4


def test_a_loader_gives_smaller_images_before_an_epoch(base, data):
    recipe = pm.get_recipe("quick", epochs=4, batch_size=8, side=24, first_side=16)
    train = pm.make_loaders(data, base.input, recipe).train
    assert isinstance(train, Loader)
    assert [next(train.batches(epoch))[0].shape[-1] for epoch in range(4)] == [16, 16, 24, 24]


def test_the_head_of_frozen_features_solves_what_features_tell(base, data):
    alone = learn_head(base, data, 24)
    domain, record = alone.domain, alone.record
    assert domain.method.name == "classifier-only"
    assert record.val_accuracy == 100
    assert pm.evaluate(base, domain, pm.make_loaders(data, base.input, pm.get_recipe("quick", side=24)).val) == 100


def test_a_head_for_numbers_has_no_logistic_regression(base):
    domain = pm.new_domain(base, "classifier-only", ["height"], target=ValueTarget())
    with pytest.raises(TrainingError, match="for classes"):
        fit_head(base, domain, None, None)


@pytest.mark.parametrize("side", [None, 24])
def test_the_better_one_on_val_is_kept(base, data, side):
    """Rates of 0 learn nothing, so the rival is better wherever there is one."""
    recipe = pm.get_recipe("quick", epochs=1, batch_size=8, side=24, rate=0.0, head_rate=0.0, frozen_side=side)
    learned = pm.learn(base, data, "bn-only", recipe)
    assert learned.domain.method.name == ("bn-only" if side is None else "classifier-only")
    assert side is None or (learned.test_accuracy, learned.domain.metrics["kept_epoch"]) == (100, 1)


def test_a_head_alone_is_learned_without_an_epoch(base, data):
    recipe = pm.get_recipe("quick", epochs=0, side=24, frozen_side=24)
    learned = pm.learn(base, data, "affine-full", recipe)
    assert learned.domain.method.name == "classifier-only"
    assert (learned.test_accuracy, learned.domain.metrics["val_accuracy"], len(learned.history)) == (100, 100, 1)
    with pytest.raises(TrainingError, match="epochs=0 leaves nothing to train"):
        pm.fit(base, pm.new_domain(base, "bn-only", ["a", "b"]), [], None, recipe)
    with pytest.raises(PolymaskError, match="epochs=0 must be at least 1"):
        pm.get_recipe("quick", epochs=0)


def long_plan(epochs=MOST_EPOCHS, side=224):
    return minutes.Plan(pm.get_recipe("standard", name="minutes", epochs=epochs, side=side), 100.0)


STANDARD = pm.get_recipe("standard")


@pytest.mark.parametrize(
    ("recipe", "plan", "seconds", "side"),
    [
        (STANDARD, long_plan(), 100_000, 224),
        (STANDARD, long_plan(), 12, 128),
        (STANDARD, long_plan(), 1, None),
        (STANDARD, long_plan(epochs=MOST_EPOCHS - 1), 100_000, None),
        (STANDARD, long_plan(side=160), 100_000, None),
        (pm.get_recipe("standard", rate=5e-4), long_plan(), 100_000, None),
        (pm.get_recipe("standard", name="mine"), long_plan(), 100_000, None),
    ],
    ids=["time", "less time", "no time", "more epochs first", "larger images first", "a rate that was given", "a file"],
)
def test_rates_are_tried_in_time_that_training_cannot_use(data, recipe, plan, seconds, side):
    assert minutes.side_of_trials(recipe, plan, PACE, SIDES, data, seconds) == side


def test_a_rate_that_is_clearly_better_on_val_is_taken(base, monkeypatch):
    """A millionth of the rate learns nothing, and a head that stays as it was drawn does not either."""
    data = made_data("dark", "light")
    monkeypatch.setattr(minutes, "FACTORS", (1e-6, 1.0))
    monkeypatch.setattr(minutes, "SHORT", 20)
    rates = {"rate": 1e-2, "weight_rate": 1e-2, "head_rate": 0.0}
    recipe = pm.get_recipe("quick", batch_size=8, side=24, norms="own", **rates)
    said = []
    plan = minutes.with_best_rate(base, data, pm.create_method("finetune"), minutes.Plan(recipe, 1.0), 24, said.append)
    assert plan.recipe == recipe
    assert plan.tried == {1e-8: 50, 1e-2: 100}
    assert "of 2 rates 0.01, by val" in plan.text
    assert [line.split(" for ")[0] for line in said] == ["rate 1e-08", "rate 0.01"]


def test_a_rate_that_is_not_clearly_better_leaves_the_recipes(base, data, monkeypatch):
    monkeypatch.setattr(minutes, "FACTORS", (1.0, 1.0001))
    monkeypatch.setattr(minutes, "SHORT", 1)
    recipe = pm.get_recipe("quick", batch_size=8, side=24)
    plan = minutes.with_best_rate(base, data, pm.create_method("bn-only"), minutes.Plan(recipe, 1.0), 24, print)
    assert plan.recipe == recipe


def test_rates_move_together_and_the_heads_stays():
    recipe = minutes.at_rate(pm.get_recipe("standard", scalar_rate=1e-2), 3.0)
    assert (recipe.rate, recipe.weight_rate, recipe.scalar_rate) == (3e-3, 9e-4, 3e-2)
    assert recipe.head_rate == STANDARD.head_rate


def test_learn_takes_minutes(base, data, monkeypatch):
    monkeypatch.setattr(minutes, "SIDES", (16, 24))
    monkeypatch.setattr(minutes, "MOST_EPOCHS", 3)
    learned = pm.learn(base, data, "bn-only", pm.get_recipe("quick", batch_size=8), minutes=1)
    assert learned.domain.recipe["name"] == "minutes"
    assert learned.test_accuracy is not None


@pytest.mark.parametrize(
    ("fields", "minutes", "said"),
    [({}, 0, "more than 0"), ({"train_on_val": True, "selection": "last"}, 1, "train_on_val")],
)
def test_what_cannot_be_planned_is_refused(base, data, fields, minutes, said):
    recipe = pm.get_recipe("quick", **fields)
    with pytest.raises(TrainingError, match=said):
        pm.learn(base, data, "bn-only", recipe, minutes=minutes)


def test_minutes_and_frozen_side_need_images_that_are_decoded_here(base):
    batches = [(torch.rand(4, 3, 24, 24), torch.tensor([0, 1, 0, 1]))]
    with pytest.raises(TrainingError, match="decoded here"):
        pm.learn(base, {"train": batches, "val": batches}, "bn-only", classes=["a", "b"], minutes=1)
    recipe = pm.get_recipe("quick", frozen_side=24)
    with pytest.raises(PolymaskError, match="frozen_side"):
        pm.learn(base, {"train": batches, "val": batches}, "bn-only", recipe, classes=["a", "b"])


def test_minutes_and_what_they_choose_are_not_given_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "one", "--data", "digits", "--minutes", "1", "--epochs", "3", "--side", "64"]) == 1
    assert "--minutes chooses what --epochs, --side would set" in capsys.readouterr().err


def test_the_command_for_the_same_training_has_what_was_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minutes, "SIDES", (64,))
    monkeypatch.setattr(minutes, "MOST_EPOCHS", 1)
    monkeypatch.setattr(minutes, "FEW", 1)
    make_folder(tmp_path / "photos")
    arguments = "learn one --data photos --method bn-only --batch-size 4 --minutes 0.5"
    assert main(arguments.split()) == 0
    said = capsys.readouterr().err
    assert "0.5 minutes: 1 epoch at" in said
    assert json.loads((tmp_path / "library/one.run/plan.json").read_text())["recipe"]["test_side"] == "auto"
    command = json.loads((tmp_path / "library/one.run/evaluation.json").read_text())["command"]
    assert "--minutes" not in command
    assert "--epochs 1" in command
    assert "--test-side auto" in command


def test_the_command_has_rates_that_are_not_the_recipes():
    verb = LearnVerb(name="one", data="photos", minutes=20)
    verb.trained_by = pm.get_recipe("standard")
    assert "rate" not in verb.command()
    verb.trained_by = minutes.at_rate(verb.trained_by, 3.0)
    assert "--rate 0.003 --weight-rate 0.0009" in verb.command()


@pytest.mark.slow
def test_the_command_line_tries_rates_where_there_is_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minutes, "SIDES", ())
    monkeypatch.setattr(minutes, "MOST_EPOCHS", 1)
    monkeypatch.setattr(minutes, "FEW", 1)
    monkeypatch.setattr(minutes, "SHORT", 1)
    monkeypatch.setattr(minutes, "clearly_better", lambda *_: True)  # the last is taken
    make_folder(tmp_path / "photos")
    arguments = "learn one --data photos --method bn-only --batch-size 4 --minutes 20"
    assert main(arguments.split()) == 0
    said = capsys.readouterr().err
    assert "rate 0.0003 for 1 epochs at" in said
    assert "of 3 rates 0.003, by val" in said
    command = json.loads((tmp_path / "library/one.run/evaluation.json").read_text())["command"]
    assert "--rate 0.003 --weight-rate 0.0009" in command


def test_a_command_without_time_to_train_says_so_and_can_be_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minutes, "SIDES", (64,))
    monkeypatch.setattr(minutes, "FEW", minutes.MOST_EPOCHS + 1)
    make_folder(tmp_path / "photos")
    assert main(["learn", "one", "--data", "photos", "--minutes", "0.1", "--report"]) == 0
    said = capsys.readouterr().err
    assert "0.1 minutes: a head alone at" in said
    assert "better on val" not in said
    assert pm.inspect(tmp_path / "library/one.safetensors").manifest.method == "classifier-only"
    command = json.loads((tmp_path / "library/one.run/evaluation.json").read_text())["command"]
    assert "--epochs 0 --frozen-side" in command
    assert main([*command.split()[1:], "--force"]) == 0
    assert "a head alone at" in capsys.readouterr().err


def test_an_interrupted_run_with_minutes_goes_on_with_the_same_settings_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos")
    run = tmp_path / "library/one.run"
    run.mkdir(parents=True)
    verb = LearnVerb(name="one", data="photos", minutes=1)
    (run / "plan.json").write_text(json.dumps({"asked": verb.asked(), "recipe": pm.get_recipe("quick").to_json()}))
    (run / "checkpoint.safetensors").write_bytes(b"")
    assert main(["learn", "one", "--data", "photos", "--minutes", "2", "--rate", "0.01"]) == 1
    said = capsys.readouterr().err
    assert "plan.json is of a run with other settings: rate 0.001 → 0.01" in said
    assert "minutes 1 → 2" in said


def test_a_plan_of_a_version_with_fewer_fields_is_gone_on_with(tmp_path, monkeypatch):
    verb = LearnVerb(name="one", data="photos", minutes=1, out=tmp_path)
    monkeypatch.setattr(LearnVerb, "goes_on", True)
    recipe, asked = pm.get_recipe("quick"), verb.asked()
    del asked["patience"]
    verb.plan_file.parent.mkdir(parents=True)
    for known in (asked, asked | {"of an older one": None}):
        verb.plan_file.write_text(json.dumps({"asked": known, "recipe": recipe.to_json()}))
        assert verb.planned(None, None, None, None) == recipe


def test_minutes_that_fit_the_head_again_say_so_in_the_command():
    verb = LearnVerb(name="one", data="photos", minutes=20, recipe="quick")
    verb.trained_by = pm.get_recipe("quick", refit="auto")
    assert "--refit auto" in verb.command()


def test_what_is_left_out_is_left_out_in_the_command_too():
    verb = LearnVerb(name="one", data="photos")
    verb.overrides.refit = "none"
    assert verb.command().endswith("--refit none")
    verb = LearnVerb(name="one", data="photos", minutes=20, recipe="decathlon")
    verb.trained_by = pm.get_recipe("decathlon", resized=None)  # a plan has no margin
    assert "--resized none" in verb.command()
    assert pm.get_recipe("decathlon").resized is not None


def test_methods_that_draw_on_others_try_no_rates(base, data, monkeypatch):
    monkeypatch.setattr(minutes, "side_of_trials", lambda *_: 24)
    monkeypatch.setattr(minutes, "with_best_rate", lambda *_: pytest.fail("rates were tried"))
    minutes.plan_minutes(base, data, pm.create_method("affine-mix"), pm.get_recipe("quick", batch_size=8), 0.05)


def test_statistics_that_are_gathered_again_are_of_the_last_size(base, data):
    recipe = pm.get_recipe("quick", epochs=2, batch_size=8, side=24, first_side=12, norms="own", norm_reestimate=True)
    loaders = pm.make_loaders(data, base.input, recipe)
    assert next(loaders.train.batches(0))[0].shape[-1] == 12
    assert next(loaders.train.as_later().batches(0))[0].shape[-1] == 24
    domain = pm.new_domain(base, "bn-only", data.classes, norm_reestimate=True)
    fit(base, domain, loaders.train, None, pm.get_recipe(recipe, selection="last"))
    kept = {name: norm.running_mean.clone() for name, norm in domain.named_norms()}
    for batches, same in ((loaders.train.as_later(), True), (loaders.train, False)):
        domain.reestimate_norms(base, (images for images, _ in batches.batches(0)))
        close = [torch.allclose(n.running_mean, kept[name], atol=1e-5) for name, n in domain.named_norms()]
        assert all(close) == same
