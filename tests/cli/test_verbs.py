"""The command line, most of it in this process; what concerns processes, in one of its own."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from safetensors.numpy import load_file

import polymask as pm
from image_folders import draw_image, make_folder
from polymask.cli import main, report
from polymask.cli.learn import LearnVerb
from polymask.cli.verb import measured_text
from polymask.errors import TrainingError
from polymask.library.versions import keep_version
from polymask.nets.zoo import import_torchvision

SMALL = ["--data", "pictures", "--side", "32", "--epochs", "2"]

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # quicker where other tests run too


def polymask(*words, cwd, check=True):
    """The command as a process of its own."""
    command = [sys.executable, "-m", "polymask", *map(str, words)]
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=ONE_THREAD)
    assert not check or run.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A folder with images and a library in which one domain has been learned; what that printed."""
    room = tmp_path_factory.mktemp("room")
    make_folder(room / "pictures", classes=3)
    return room, polymask("learn", "shapes", *SMALL, "--json", cwd=room)


@pytest.fixture
def room(learned, monkeypatch):
    """That folder, as the current one."""
    monkeypatch.chdir(learned[0])
    return learned[0]


@pytest.fixture
def printed(capsys):
    """Run a command in this process; what it prints, read as JSON."""

    def run(*words):
        assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def test_learn_says_what_it_chose_and_prints_json_only_on_standard_output(learned):
    room, run = learned
    result = json.loads(run.stdout)
    assert result["pack"] == "library/shapes.safetensors"
    assert 0 <= result["test_accuracy"] <= 100
    assert result["bytes"] == (room / result["pack"]).stat().st_size
    assert 1 < result["bits_per_weight"] < 2.5
    for choice in ("efficientnet-lite0", "affine-centred", "standard"):
        assert choice in run.stderr


def test_learn_takes_a_method_with_options_and_fields_of_the_recipe(room, printed):
    result = printed("learn", "small", "--data", "pictures", "--method", "lora-conv:rank=2:epochs=1:side=32")
    manifest = pm.inspect(room / result["pack"]).manifest
    assert (manifest.method, manifest.options["rank"]) == ("lora-conv", 2)
    assert (manifest.recipe["epochs"], manifest.recipe["side"]) == (1, 32)


def test_learn_within_so_many_bits(room, printed, capsys):
    result = printed("learn", "few", *SMALL[:-1], "1", "--bits", "0.25", "--out", "few")
    base = pm.load_base("efficientnet-lite0")
    domain = pm.load_domain(room / result["pack"], base)
    masks = sum(transform.mask().numel() for _, transform in domain.named_transforms())
    assert result["method"] == "affine-coarse"
    assert masks < 0.26 * sum(site.numel for site in base.sites.values())
    assert main(["learn", "more", *SMALL, "--method", "lora", "--bits", "0.5"]) == 1
    assert "--bits is for affine-coarse" in capsys.readouterr().err


def test_learn_leaves_a_log_and_no_checkpoint(room):
    files = {path.name for path in (room / "library" / "shapes.run").iterdir()}
    assert files == {"log.jsonl", "evaluation.json"}
    lines = (room / "library" / "shapes.run" / "log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["begin", "epoch", "epoch"]
    assert events[0]["seed"] == 0
    assert events[0]["recipe"]["side"] == 32


def test_learn_reports_what_it_learned_and_offers_to(room, capsys, printed):
    quick = [*SMALL, "--method", "classifier-only", "--epochs", "1"]
    assert main(["learn", "plain", *quick]) == 0
    assert "polymask report library/plain.run" in capsys.readouterr().out
    found = printed("report", "library/plain.run")
    assert found["evaluation"]["images"] == 12
    page = (room / "library" / "plain.run" / "report.html").read_text()
    assert "--method classifier-only" in page
    assert page.count("data:image/png") == 12
    result = printed("learn", "shown", *quick, "--report")
    assert (room / result["report"]).is_file()


def test_a_domain_is_not_overwritten_without_force(room, capsys):
    before = (room / "library" / "shapes.safetensors").read_bytes()
    assert main(["learn", "shapes", *SMALL]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("polymask: library/shapes.safetensors exists")
    assert "--force" in line
    assert (room / "library" / "shapes.safetensors").read_bytes() == before


def test_what_a_killed_run_left_half_written_is_cleared_away(room):
    work = room / "library" / "killed.run"
    work.mkdir()
    half = [work / ".checkpoint.safetensors.1.2.tmp", room / "library" / ".killed.safetensors.1.2.tmp"]
    for file in half:
        file.write_bytes(b"half")
    assert main(["learn", "killed", *SMALL, "--method", "classifier-only", "--epochs", "1"]) == 0
    assert not any(file.exists() for file in half)


def test_evaluate_gives_the_accuracy_that_learn_measured(learned, room, printed):
    found = printed("evaluate", "shapes", "--data", "pictures", "--csv", "by/class.csv")
    assert found["test_accuracy"] == json.loads(learned[1].stdout)["test_accuracy"]
    low, high = found["interval"]
    assert low < found["test_accuracy"] <= high
    assert [sum(row) for row in found["confusion"]] == [4, 4, 4]
    assert all((room / image).is_file() for image in found["wrong"])
    lines = (room / "by" / "class.csv").read_text().splitlines()
    assert lines[0] == "class,images,right,accuracy,low,high,as class-0,as class-1,as class-2"
    assert len(lines) == 4


def test_evaluate_says_how_sure_it_is_and_what_is_confused(room, capsys):
    assert main(["evaluate", "shapes", "--data", "pictures"]) == 0
    text = capsys.readouterr().out
    assert "of 12 test images (95 % interval" in text
    assert "most often taken for" in text
    assert all(f"class-{i}" in text for i in range(3))


def test_evaluate_measures_all_images_of_a_source_on_request(room, capsys):
    assert main(["evaluate", "shapes", "--data", "pictures"]) == 0
    whole = int(re.search(r"--split all measures all (\d+) images", capsys.readouterr().err)[1])
    assert main(["evaluate", "shapes", "--data", "pictures", "--split", "all"]) == 0
    assert f"of {whole} images (95 % interval" in capsys.readouterr().out
    assert whole > 12


def test_predict_takes_files_folders_and_patterns(room, printed, capsys):
    folder = room / "some"
    for i in range(3):
        draw_image(folder / f"{i}.png", i, 0)
    rows = printed("predict", "shapes", "some/0.png", "some", "some/*.png", "--top", "2")
    assert [row["image"] for row in rows] == ["some/0.png"] + 2 * [f"some/{i}.png" for i in range(3)]
    assert all(len(row["top"]) == 2 for row in rows)
    assert rows[0] == rows[1] == rows[4]
    assert main(["predict", "shapes", "some/1.png"]) == 0
    text = capsys.readouterr().out
    assert "some/1.png" in text
    assert "%" in text


def test_merge_writes_an_ordinary_state_dict(room, capsys):
    assert main(["merge", "shapes", "--out", "merged.safetensors"]) == 0
    state = load_file(room / "merged.safetensors")
    assert state["classifier.weight"].shape == (3, 1280)
    import_torchvision()
    import timm

    net = timm.create_model("tf_efficientnet_lite0", num_classes=3)
    assert state.keys() == net.state_dict().keys()
    assert main(["merge", "shapes", "--out", "merged.safetensors"]) == 1
    assert "merged.safetensors exists" in capsys.readouterr().err


def test_show_tells_the_classes(room, printed):
    assert printed("show", "library/shapes.safetensors")["classes"] == [f"class-{i}" for i in range(3)]


def test_account_prints_the_papers_number(printed):
    result = printed("account", "--base", "torchvision:resnet50", "--method", "affine-full", "--domains", "6")
    assert round(result["params_paper"], 2) == 1.17
    assert {"params_stored", "bits_per_weight", "components"} <= result.keys()


def test_methods_lists_every_registered_method_with_its_bits(printed):
    rows = printed("methods")
    assert [row["name"] for row in rows] == pm.list_methods()
    assert {"mergeable", "moves_base", "norms", "reference"} <= rows[0].keys()
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    for row in rows:
        counted = pm.account(base, row["name"], domains=6).bits_per_weight
        assert row["bits_per_weight"] == counted, f"{row['name']}: run python tools/method_pages.py"


def test_a_method_that_was_never_counted_is_counted_when_it_is_listed(printed, monkeypatch, tmp_path):
    (tmp_path / "none.json").write_text("{}")
    known = printed("methods", "affine-full")
    monkeypatch.setattr(report, "COUNTED", tmp_path / "none.json")
    assert printed("methods", "affine-full") == known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing.safetensors"], "nothing.safetensors cannot be read"),
        (["list", "nowhere"], "there is no library at nowhere"),
        (["account", "--base", "resnet"], "base 'resnet' is not known"),
        (["account", "--method", "affine"], "method 'affine' is not known; did you mean affine"),
        (["learn", "a/b", "--data", "digits"], "'a/b' cannot name a domain"),
        (["learn", "x", "--data", "digit"], "no data called 'digit'; did you mean digits?"),
        (["learn", "x", "--data", "digits", "--recipe", "quik"], "recipe 'quik' is not known"),
        (["predict", "shapes", "none.jpg"], "none.jpg matches no image"),
        (["evaluate", "shapes", "--data", "letters"], "the classes of letters"),
    ],
)
def test_errors_are_one_line_without_a_traceback(room, capsys, words, message):
    assert main(words) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("polymask: ")
    assert message in lines[-1]
    assert "Traceback" not in "".join(lines)


def test_debug_shows_the_traceback(room):
    run = polymask("show", "nothing.safetensors", "--debug", cwd=room, check=False)
    assert run.returncode == 1
    assert "Traceback" in run.stderr


def test_a_command_that_makes_no_sense_exits_with_2():
    for words in (["lern"], ["learn", "x"]):
        assert main(words) == 2


def test_terminating_a_run_saves_it_and_resume_finishes_it(tmp_path):
    words = ["learn", "d", *SMALL, "--epochs", "3"]
    whole = tmp_path / "whole"
    make_folder(whole / "pictures")
    make_folder(tmp_path / "pictures")
    polymask(*words, cwd=whole)
    process = subprocess.Popen(
        [sys.executable, "-m", "polymask", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    log = tmp_path / "library" / "d.run" / "log.jsonl"
    while not (log.exists() and "epoch" in log.read_text()):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    if process.returncode:  # it may have finished before the signal came
        assert process.returncode == 130
        assert "the same command goes on from there" in error
    polymask(*words, "--resume", cwd=tmp_path)
    pack = "library/d.safetensors"
    assert (tmp_path / pack).read_bytes() == (whole / pack).read_bytes()


@pytest.mark.slow
def test_killing_a_run_twenty_times_changes_no_byte_of_its_pack(tmp_path):
    words = [sys.executable, "-m", "polymask", "learn", "d", *SMALL]
    words += ["--epochs", "12", "--out"]
    make_folder(tmp_path / "pictures")
    began = time.monotonic()
    subprocess.run([*words, "whole"], cwd=tmp_path, check=True, capture_output=True)
    length = time.monotonic() - began
    rng = random.Random(0)
    killed = 0
    while killed < 20:
        process = subprocess.Popen(
            [*words, "killed", "--resume"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(timeout=rng.uniform(0.2, 0.9) * length)
            # Finished before its time: the next one starts from nothing.
            (tmp_path / "killed" / "d.safetensors").unlink()
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
    subprocess.run([*words, "killed", "--resume"], cwd=tmp_path, check=True, capture_output=True)
    packs = [(tmp_path / name / "d.safetensors").read_bytes() for name in ("whole", "killed")]
    assert packs[0] == packs[1]
    assert not list((tmp_path / "killed").rglob("*.tmp"))


def test_predict_says_unknown_where_it_is_asked_and_the_pack_can_tell(room, printed, capsys):
    image = next((room / "pictures").rglob("*.png"))
    assert main(["predict", "shapes", str(image), "--reject"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("polymask:")]
    assert "polymask calibrate shapes --data DIR" in line
    make_folder(room / "more", classes=3, train=60)
    copy = room / "library" / "told.safetensors"
    copy.write_bytes((room / "library" / "shapes.safetensors").read_bytes())
    found = printed("calibrate", "told", "--data", "more")
    assert found["images"] >= 20
    assert found["bytes"] < 50_000
    assert main(["predict", "told", str(image)]) == 0
    assert "known" not in capsys.readouterr().out
    (row,) = printed("predict", "told", image, "--reject", "--csv", "told.csv")
    assert row["unknown"] in (True, False)
    assert (room / "told.csv").read_text().startswith("image,unknown,rank,class,probability")
    (row,) = printed("predict", "auto", image)
    assert row["domain"] in {path.stem for path in (room / "library").glob("*.safetensors")}
    copy.unlink()


def test_calibrate_refuses_images_that_cannot_calibrate_in_one_line(room, capsys):
    before = (room / "library" / "shapes.safetensors").read_bytes()
    for words, problem in [
        (["--data", "pictures"], "validation images are too few"),
        (["--data", "pictures", "--accepted", "2"], "--accepted 2.0 must be between 0 and 1"),
        (["--data", "digits"], "are not those of the domain"),
    ]:
        assert main(["calibrate", "shapes", *words]) == 1
        assert problem in capsys.readouterr().err.strip().splitlines()[-1]
    assert (room / "library" / "shapes.safetensors").read_bytes() == before


def test_extend_adds_classes_keeps_the_version_before_and_rollback_brings_it_back(room, printed, capsys):
    path = room / "library" / "grown.safetensors"
    path.write_bytes((room / "library" / "shapes.safetensors").read_bytes())
    first = path.read_bytes()
    make_folder(room / "new", classes=2)
    for folder in (room / "new").glob("*/class-*"):
        folder.rename(folder.with_name(folder.name.replace("class", "new")))
    found = printed("extend", "grown", "--data", "new")
    assert (found["old_classes"], found["new_classes"], found["version"], found["version_before"]) == (3, 2, 2, 1)
    assert pm.inspect(path).manifest.classes == ["class-0", "class-1", "class-2", "new-0", "new-1"]
    image = next((room / "new").rglob("*.png"))
    (row,) = printed("predict", "grown", image, "--top", "5")
    assert len(row["top"]) == 5
    (row,) = printed("predict", "grown@1", image, "--top", "5")
    assert len(row["top"]) == 3
    assert printed("show", "grown@1")["class_count"] == 3
    for words, problem in [
        (["extend", "grown", "--data", "new"], "the domain has these classes already"),
        (["extend", "grown@1", "--data", "new"], "name the domain itself"),
        (["rollback", "grown", "--to", "8"], "has no version 8"),
    ]:
        assert main(words) == 1
        assert problem in capsys.readouterr().err.strip().splitlines()[-1]
    assert printed("rollback", "grown")["version"] == 1
    assert path.read_bytes() == first
    path.unlink()


def test_learn_begins_as_another_domain(room, capsys):
    out = ["--out", "started", "--epochs", "1"]
    assert main(["learn", "first", *SMALL, *out]) == 0
    assert main(["learn", "second", *SMALL, *out, "--start", "first"]) == 0
    assert "begins as first" in capsys.readouterr().err
    assert main(["learn", "other", *SMALL, *out, "--start", "auto"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"begins as the base and as (first|second), .*\(a head alone there: .*first \d", said)
    assert re.search(r"what began as (the base|first|second) is kept: on val \d+\.\d\d % from the base", said)
    assert not list((room / "started" / "other.run").glob("*checkpoint*"))
    first, second = (pm.inspect(room / "started" / f"{name}.safetensors").manifest for name in ("first", "second"))
    assert second.recipe["start"]["data"] == first.recipe["data"]
    assert "start" not in first.recipe
    assert main(["show", "second", "--library", "started"]) == 0
    assert re.search(r"began as .*a domain of \w+ by affine-centred", capsys.readouterr().out)
    drawing = ["--method", "affine-mix", "--from", "first"]
    assert main(["learn", "third", *SMALL, *out, *drawing, "--start", "first"]) == 0
    assert main(["learn", "first", *SMALL, *out, "--start", "first", "--force"]) == 0
    again = pm.inspect(room / "started" / "first.safetensors").manifest
    assert again.recipe["start"]["digest"] == second.recipe["start"]["digest"]
    for words, problem in [
        (["--start", "fist"], "did you mean first"),
        ([*drawing, "--start", "second"], "name second among --from too"),
        (["--method", "lora", "--start", "first"], "lora cannot begin as a domain by affine-centred"),
    ]:
        assert main(["learn", "more", *SMALL, *out, *words]) == 1
        assert problem in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(("given", "problem"), [({"start": "auto"}, "name the domain"), ({"minutes": 1.0}, "--epochs")])
def test_what_one_process_chooses_is_refused_where_several_learn(given, problem):
    verb = LearnVerb(name="one", data="pictures", **given)
    verb.ranks = object()
    with pytest.raises(TrainingError, match=problem):
        verb.chosen_recipe()


def test_learn_keeps_exemplars_only_where_it_is_asked_to(room, capsys):
    assert not list((room / "library").glob("shapes.exemplars"))
    quick = ["--method", "classifier-only", "--epochs", "1", "--keep-exemplars", "2"]
    assert main(["learn", "kept", *SMALL, *quick]) == 0
    kept = room / "library" / "kept.exemplars"
    assert len(load_file(kept)["labels"]) == 6
    assert main(["learn", "kept", *SMALL, *quick[:-1], "-1", "--force"]) == 1
    assert "--keep-exemplars -1" in capsys.readouterr().err.strip().splitlines()[-1].replace("=", " ")


def test_learn_from_other_domains_remove_and_bake(room, printed, capsys):
    out = ["--out", "crossed"]
    assert main(["learn", "source", *SMALL, "--epochs", "1", *out]) == 0
    assert main(["learn", "mixed", *SMALL, "--method", "affine-mix", "--epochs", "1", "--from", "auto:3", *out]) == 0
    assert "drawing on the masks of source" in capsys.readouterr().err
    library = ["--library", "crossed"]
    keep_version(room / "crossed" / "source.safetensors")  # it goes with its pack
    for words, problem in [
        (["learn", "more", *SMALL, "--method", "affine-mix", *out], "affine-mix needs --from"),
        (["learn", "more", *SMALL, "--from", "source", *out], "affine-centred takes no --from"),
        (["learn", "more", *SMALL, "--method", "affine-cross", "--from", "sorce", *out], "did you mean source"),
        (["remove", "source", *library], "mixed draw on the masks of source"),
        (["bake", "source", *library], "stands alone already"),
    ]:
        assert main(words) == 1
        assert problem in capsys.readouterr().err.strip().splitlines()[-1]
    image = next((room / "pictures").rglob("*.png"))
    (before,) = printed("predict", "mixed", image, *library)
    found = printed("bake", "mixed", *library)
    assert found["sources"] == ["source"]
    assert found["bytes"] > found["bytes_before"]
    assert printed("remove", "source", *library)["broken"] == []
    assert [path.name for path in (room / "crossed").glob("source*")] == ["source.run"]
    assert printed("predict", "mixed", image, *library) == [before]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("test_accuracy", 91.25, "91.25 %"),
        ("val_mean_average_precision", 91.25, "91.25 %"),
        ("precision", 16, "16"),  # bits
        ("val_mean_absolute_error", 0.123456, "0.1235"),
        ("test_accuracy", None, "–"),
    ],
)
def test_only_metrics_in_percent_are_shown_as_such(name, value, shown):
    assert measured_text(name, value) == shown
