"""The demo on few, small images: it learns, proves, and reports."""

import json

import pytest
import torch
from rich.console import Console

import polymask as pm
from image_folders import make_folder
from polymask.cli import demo
from polymask.cli.pretrain import DemoVerb
from polymask.report.demo_page import DemoResult
from polymask.train.fit import Listener


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The demo on few, small images."""
    out = tmp_path_factory.mktemp("demo")
    small = pytest.MonkeyPatch()
    sources = [make_folder(out / "images" / name, classes) for name, classes in (("two", 2), ("three", 3))]
    small.setattr(demo, "DOMAINS", tuple(demo.DemoDomain(str(path), path.name, 60, 1, 32) for path in sources))
    console = Console(file=(out / "said.txt").open("w"), width=120)
    result = demo.run_demo(out, 0, console, lambda title: Listener(), "polymask demo")
    console.file.close()
    small.undo()
    return out, result


def test_nothing_is_forgotten_and_every_method_is_measured(run):
    _, result = run
    assert result.nothing_forgotten
    assert result.fingerprint_before == result.fingerprint_after
    for domain in result.domains:
        assert [m.method for m in domain.methods] == ["classifier-only", "finetune", "affine-centred"]
        assert domain.unchanged
        assert len(domain.layers) == 49
        assert len(domain.predictions) == 6
        share = 1 - domain.result_of("affine-centred").test_accuracy / 100
        wrong, right = round(domain.test_images * share), round(domain.test_images * (1 - share))
        shown = sum(not example.right for example in domain.predictions)
        assert shown == min(wrong, max(3, 6 - right))


def test_what_is_shown_is_fed_at_the_size_that_val_chose(tmp_path, monkeypatch):
    path = make_folder(tmp_path / "two", 2)
    monkeypatch.setattr(demo, "DOMAINS", (demo.DemoDomain(str(path), "two", 60, 1, 32),))
    monkeypatch.setattr(demo, "get_recipe", lambda name, **changes: pm.get_recipe(name, test_side=64, **changes))
    result = demo.run_demo(tmp_path, 0, Console(quiet=True), lambda title: Listener(), "polymask demo")
    assert result.nothing_forgotten
    assert pm.inspect(tmp_path / "two.safetensors").manifest.input["shape"] == [3, 64, 64]


def test_the_verb_prints_a_table_with_the_packs_sizes(run, tmp_path):
    out, result = run
    console = Console(file=(tmp_path / "said.txt").open("w"), width=120)
    DemoVerb(out=out).present(demo.main_numbers(result, out / "report.html"), console)
    console.file.close()
    said = (tmp_path / "said.txt").read_text()
    assert "affine-centred" in said
    assert all(f"{d.result_of('affine-centred').bytes / 1e6:.2f} MB" in said for d in result.domains)
    assert "nothing was forgotten" in said


def test_the_packs_stay_and_can_be_used(run):
    out, result = run
    base = pm.load_base("efficientnet-lite0")
    model = pm.MultiDomainModel(base, library=out)
    assert model.domains == ["three", "two"]
    assert model(torch.zeros(2, 3, 32, 32), domain="three").shape == (2, 3)
    for domain in result.domains:
        assert domain.result_of("affine-centred").bytes == (out / f"{domain.name}.safetensors").stat().st_size
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_the_report_is_one_file_with_the_numbers(run):
    out, result = run
    page = (out / "report.html").read_text()
    accuracy = result.domains[0].result_of("affine-centred").test_accuracy
    assert f"{accuracy:.1f}" in page
    assert 'src="http' not in page
    again = DemoResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result


def test_a_changed_domain_would_be_noticed(run, monkeypatch):
    """Break the promise on purpose: the proof must fail."""
    out, _ = run
    source = str(out / "images" / "two")
    monkeypatch.setattr(demo, "DOMAINS", (demo.DemoDomain(source, "two", 40, 1, 32),))
    monkeypatch.setattr(demo, "RIVALS", ())

    class Tampered(demo.MultiDomainModel):
        def __call__(self, images, *, domain):
            return super().__call__(images, domain=domain) + 1e-6

    monkeypatch.setattr(demo, "MultiDomainModel", Tampered)
    console = Console(quiet=True)
    result = demo.run_demo(out / "again", 0, console, lambda title: Listener(), "polymask demo")
    assert not result.nothing_forgotten
