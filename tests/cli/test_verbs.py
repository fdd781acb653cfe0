"""The command line, run as users run it: as a process."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import polymask as pm
from polymask.nets.torchvision_guard import import_torchvision

SMALL = ["--side", "32", "--limit", "60", "--epochs", "2"]


def polymask(*words, cwd, check=True, **options):
    run = subprocess.run(
        [sys.executable, "-m", "polymask", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert not check or run.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with a library in which one domain has been learned."""
    room = tmp_path_factory.mktemp("room")
    run = polymask("learn", "digits", "--data", "digits", *SMALL, "--json", cwd=room)
    (room / "learned.json").write_text(run.stdout)
    (room / "learned.err").write_text(run.stderr)
    return room


def test_learn_says_what_it_chose_and_prints_json_only_on_standard_output(room):
    result = json.loads((room / "learned.json").read_text())
    assert result["pack"] == "library/digits.safetensors"
    assert 0 <= result["test_accuracy"] <= 100
    assert result["bytes"] == (room / result["pack"]).stat().st_size
    assert 1 < result["bits_per_weight"] < 2.5
    said = (room / "learned.err").read_text()
    assert "base efficientnet-lite0, method affine-full, recipe quick" in said
    assert "a second" in said


def test_learn_takes_a_method_with_options_and_fields_of_the_recipe(room):
    words = "learn small --data digits --limit 40 --method lora-conv:rank=2:epochs=1:side=32"
    result = json.loads(polymask(*words.split(), "--json", cwd=room).stdout)
    manifest = pm.inspect(room / result["pack"]).manifest
    assert (manifest.method, manifest.options["rank"]) == ("lora-conv", 2)
    assert (manifest.recipe["epochs"], manifest.recipe["side"]) == (1, 32)


def test_learn_leaves_a_log_and_no_checkpoint(room):
    files = {path.name for path in (room / "library" / "digits.run").iterdir()}
    assert files == {"log.jsonl"}
    lines = (room / "library" / "digits.run" / "log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["begin", "epoch", "epoch"]
    assert events[0]["seed"] == 0
    assert events[0]["recipe"]["side"] == 32


def test_a_domain_is_not_overwritten_without_force(room):
    before = (room / "library" / "digits.safetensors").read_bytes()
    run = polymask("learn", "digits", "--data", "digits", *SMALL, cwd=room, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines() == [
        "polymask: library/digits.safetensors exists; choose another name, or --force to replace it"
    ]
    assert (room / "library" / "digits.safetensors").read_bytes() == before


def test_what_a_killed_run_left_half_written_is_cleared_away(room):
    work = room / "library" / "killed.run"
    work.mkdir()
    half = [
        work / ".checkpoint.safetensors.1.2.tmp",
        room / "library" / ".killed.safetensors.1.2.tmp",
    ]
    for file in half:
        file.write_bytes(b"half")
    polymask("learn", "killed", "--data", "digits", *SMALL, cwd=room)
    assert not any(file.exists() for file in half)


def test_evaluate_gives_the_accuracy_that_learn_measured(room):
    run = polymask("evaluate", "digits", "--data", "digits", "--json", cwd=room)
    learned = json.loads((room / "learned.json").read_text())
    assert json.loads(run.stdout)["test_accuracy"] == learned["test_accuracy"]


def test_predict_takes_files_folders_and_patterns(room):
    folder = room / "pictures"
    folder.mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    words = ["pictures/0.png", "pictures", "pictures/*.png"]
    run = polymask("predict", "digits", *words, "--top-k", "2", "--json", cwd=room)
    rows = json.loads(run.stdout)
    assert [row["image"] for row in rows] == ["pictures/0.png"] + 2 * [f"pictures/{i}.png" for i in range(3)]
    assert all(len(row["top"]) == 2 for row in rows)
    assert rows[0] == rows[1] == rows[4]
    text = polymask("predict", "digits", "pictures/1.png", cwd=room).stdout
    assert "pictures/1.png" in text
    assert "%" in text


def test_merge_writes_an_ordinary_state_dict(room):
    polymask("merge", "digits", "--out", "merged.safetensors", cwd=room)
    state = load_file(room / "merged.safetensors")
    assert state["classifier.weight"].shape == (10, 1280)
    import_torchvision()
    import timm

    net = timm.create_model("tf_efficientnet_lite0", num_classes=10)
    assert state.keys() == net.state_dict().keys()
    again = polymask("merge", "digits", "--out", "merged.safetensors", cwd=room, check=False)
    assert again.returncode == 1
    assert "merged.safetensors exists" in again.stderr


def test_list_and_show_need_no_torch(room):
    code = "import sys; from polymask.cli import main; main(sys.argv[1:]);assert 'torch' not in sys.modules"
    for words in (["list", "library"], ["show", "library/digits.safetensors"]):
        run = subprocess.run([sys.executable, "-c", code, *words], cwd=room, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert "affine-full" in run.stdout
    shown = polymask("show", "library/digits.safetensors", "--json", cwd=room)
    assert json.loads(shown.stdout)["classes"] == [str(i) for i in range(10)]


def test_account_prints_the_papers_number(room):
    words = ["--base", "torchvision:resnet50", "--method", "affine-full", "--domains", "6"]
    run = polymask("account", *words, "--json", cwd=room)
    result = json.loads(run.stdout)
    assert round(result["params_paper"], 2) == 1.17
    assert {"params_stored", "bits_per_weight", "components"} <= result.keys()


def test_methods_lists_every_registered_method(room):
    rows = json.loads(polymask("methods", "--json", cwd=room).stdout)
    assert [row["name"] for row in rows] == pm.list_methods()
    assert {"mergeable", "moves_base", "bits_per_weight"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing.safetensors"], "nothing.safetensors cannot be read"),
        (["list", "nowhere"], "there is no library at nowhere"),
        (["account", "--base", "resnet"], "base 'resnet' is not known"),
        (["account", "--method", "affine"], "method 'affine' is not known; near matches: affine"),
        (["learn", "a/b", "--data", "digits"], "'a/b' cannot name a domain"),
        (["learn", "x", "--data", "digit"], "no data called 'digit'; did you mean digits?"),
        (["learn", "x", "--data", "digits", "--recipe", "quik"], "recipe 'quik' is not known"),
        (["predict", "digits", "none.jpg"], "none.jpg stands for no image"),
        (["evaluate", "digits", "--data", "letters"], "the classes of letters"),
    ],
)
def test_errors_are_one_line_without_a_traceback(room, words, message):
    run = polymask(*words, cwd=room, check=False)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("polymask: ")


def test_debug_shows_the_traceback(room):
    run = polymask("show", "nothing.safetensors", "--debug", cwd=room, check=False)
    assert run.returncode == 1
    assert "Traceback" in run.stderr


def test_a_command_that_makes_no_sense_exits_with_2(room):
    assert polymask("lern", cwd=room, check=False).returncode == 2
    assert polymask("learn", "x", cwd=room, check=False).returncode == 2


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "from polymask.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_terminating_a_run_saves_it_and_resume_finishes_it(tmp_path):
    words = ["learn", "d", "--data", "digits", *SMALL, "--epochs", "3"]
    whole = tmp_path / "whole"
    whole.mkdir()
    polymask(*words, cwd=whole)
    process = subprocess.Popen(
        [sys.executable, "-m", "polymask", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "library" / "d.run" / "log.jsonl"
    while not (log.exists() and "epoch" in log.read_text()):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    if process.returncode:  # it may have finished before the signal came
        assert process.returncode == 130
        assert "go on with --resume" in error
    polymask(*words, "--resume", cwd=tmp_path)
    pack = "library/d.safetensors"
    assert (tmp_path / pack).read_bytes() == (whole / pack).read_bytes()


@pytest.mark.slow
def test_killing_a_run_twenty_times_changes_no_byte_of_its_pack(tmp_path):
    words = [sys.executable, "-m", "polymask", "learn", "d", "--data", "digits", *SMALL]
    words += ["--epochs", "12", "--out"]
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
