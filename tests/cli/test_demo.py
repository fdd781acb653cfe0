"""The demo, cut to a minute: it learns, proves, and reports."""

import json

import pytest
import torch
from rich.console import Console

import polymask as pm
from polymask.cli import demo
from polymask.report.demo_page import DemoResult
from polymask.train.fit import Listener


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The demo on few, small images."""
    out = tmp_path_factory.mktemp("demo")
    small = pytest.MonkeyPatch()
    domains = (
        demo.DemoDomain("digits", "handwritten digits", 60, 1, 32),
        demo.DemoDomain("letters", "letters", 80, 1, 32),
    )
    small.setattr(demo, "DOMAINS", domains)
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
        assert [m.method for m in domain.methods] == ["classifier-only", "finetune", "affine-full"]
        assert domain.unchanged
        assert len(domain.layers) == 49
        assert len(domain.predictions) == 6


def test_the_packs_stay_and_can_be_used(run):
    out, result = run
    base = pm.load_base("efficientnet-lite0")
    model = pm.MultiDomainModel(base, library=out)
    assert model.domains == ["digits", "letters"]
    assert model(torch.zeros(2, 3, 32, 32), domain="letters").shape == (2, 26)
    sizes = [domain.result_of("affine-full").bytes for domain in result.domains]
    assert sizes == [(out / f"{name}.safetensors").stat().st_size for name in model.domains]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_the_report_is_one_file_with_the_numbers(run):
    out, result = run
    page = (out / "report.html").read_text()
    accuracy = result.domains[0].result_of("affine-full").test_accuracy
    assert f"{accuracy:.1f}" in page
    assert 'src="http' not in page
    again = DemoResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result


def test_a_changed_domain_would_be_noticed(run, monkeypatch):
    """Break the promise on purpose: the proof must fail."""
    out, _ = run
    monkeypatch.setattr(demo, "DOMAINS", (demo.DemoDomain("digits", "digits", 40, 1, 32),))

    class Tampered(demo.MultiDomainModel):
        def __call__(self, images, *, domain):
            return super().__call__(images, domain=domain) + 1e-6

    monkeypatch.setattr(demo, "MultiDomainModel", Tampered)
    console = Console(quiet=True)
    result = demo.run_demo(out / "again", 0, console, lambda title: Listener(), "polymask demo")
    assert not result.nothing_forgotten
