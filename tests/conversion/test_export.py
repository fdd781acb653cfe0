"""A domain's network for other runtimes says what it says in PyTorch."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import polymask as pm
from nets import SPEC, batch, block_base, tiny_base, tiny_net, trained
from polymask.cli import main
from polymask.conversion import export as exporting
from polymask.data.load import load_data
from polymask.data.preprocess import Preprocess

CLASSES = ["class 0", "class 1", "class 2"]
PAGE = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domain(base):
    domain = trained(base)
    domain.metrics = {"test_accuracy": 75.0}
    return domain


@pytest.fixture(scope="module")
def digits(domain):
    """Real images as the domain sees them: uint8 (N, 3, 16, 16)."""
    data = load_data("digits", limit=40)
    feed = Preprocess(domain.input)
    crops = [feed.piece(data.test.image(i, feed.shrink.side)) for i in range(6)]
    return feed.pixels(crops)


@pytest.fixture(scope="module")
def written(base, domain, digits, tmp_path_factory):
    """An ONNX file, and what was said when it was written."""
    path = tmp_path_factory.mktemp("exported") / "digits.onnx"
    return path, pm.export_domain(base, domain, path, images=digits)


@torch.no_grad()
def logits_of(base, domain, pixels):
    return domain.merged(base)(Preprocess(domain.input).batch(pixels))


def test_an_onnx_file_says_what_pytorch_says_of_real_images_in_batches_of_any_size(base, domain, digits, written):
    path, exported = written
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = Preprocess(domain.input).batch(digits)
    wanted = logits_of(base, domain, digits)
    for count in (1, 2, 6):
        (found,) = session.run(["logits"], {"images": images[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), wanted[:count], rtol=0, atol=1e-4)
    assert exported.checked_images == 6
    assert exported.difference <= 1e-4
    assert exported.bytes == path.stat().st_size


def test_an_onnx_file_is_valid_and_describes_itself(domain, written):
    path, exported = written
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {i.version for i in model.opset_import if not i.domain} == {exported.opset}
    notes = {entry.key: entry.value for entry in model.metadata_props}
    description = json.loads(notes["polymask"])
    assert description == exported.description
    assert description["classes"] == CLASSES
    assert description["fingerprint"] == domain.fingerprint
    assert description["metrics"] == {"test_accuracy": 75.0}
    assert description["input"] | {"interpolation": "", "resize": 0} == {
        "name": "images",
        "type": "float32",
        "shape": ["batch", 3, 16, 16],
        "normalised": True,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "squash": False,
        "square": False,
        "resize": 0,
        "interpolation": "",
    }


def test_an_exported_file_names_no_folder_of_the_machine(base, domain, written, tmp_path):
    pm.export_domain(base, domain, tmp_path / "d.pt2", "torch-export", check=False)
    for path in (written[0], tmp_path / "d.pt2"):
        assert str(Path(pm.__file__).parents[1]).encode() not in path.read_bytes()
        assert not re.search(rb"[/\\][\w-]+\.py\b", path.read_bytes())


def test_a_torch_export_archive_takes_pixels_where_normalisation_is_within(base, domain, digits, tmp_path):
    path = tmp_path / "digits.pt2"
    exported = pm.export_domain(base, domain, path, "torch-export", with_normalisation=True, images=digits)
    extra = {"polymask.json": ""}
    net = torch.export.load(path, extra_files=extra).module()
    description = json.loads(extra["polymask.json"])
    assert description == exported.description
    assert (description["input"]["type"], description["input"]["normalised"]) == ("uint8", False)
    for count in (1, 5):
        torch.testing.assert_close(net(digits[:count]), logits_of(base, domain, digits)[:count], rtol=0, atol=1e-4)


def test_exporting_leaves_base_and_domain_as_they_were(base, domain, written):
    base.verify()
    assert domain(base, batch()[0]).isfinite().all()
    assert not base.net.training


def test_an_export_that_says_something_else_is_not_written(base, domain, tmp_path, monkeypatch):
    load = torch.export.load

    def lie(file):
        net = load(file).module()
        return SimpleNamespace(module=lambda: lambda images: net(images) + 1e-2)

    monkeypatch.setattr(torch.export, "load", lie)
    with pytest.raises(pm.ExportError, match=r"differs from PyTorch's by 1\.0e-02"):
        pm.export_domain(base, domain, tmp_path / "d.pt2", "torch-export")
    assert not list(tmp_path.iterdir())


def test_a_method_that_cannot_be_merged_is_refused(tmp_path):
    base = block_base()
    domain = pm.new_domain(base, "mtan", CLASSES)
    with pytest.raises(pm.DomainError, match=r"mtan decides by the image .* cannot be merged"):
        pm.export_domain(base, domain, tmp_path / "d.onnx")


class Packed(nn.Module):
    """A network that gives what another says as one entry of a dict, as transformers do."""

    def __init__(self, key):
        super().__init__()
        self.net, self.key = tiny_net(), key

    def forward(self, images):
        said = self.net(images)
        return {self.key: said} if self.key == "logits" else {self.key: said, "more": images}


def test_a_network_that_packs_its_logits_exports_the_tensor_and_feature_maps_are_refused(tmp_path):
    base = pm.load_base(Packed("logits"), name="packed", input=SPEC)
    domain = pm.new_domain(base, "affine-full", CLASSES)
    exported = pm.export_domain(base, domain, tmp_path / "d.pt2", "torch-export")
    assert exported.description["output"] == {"name": "logits", "shape": ["batch", 3]}
    base = pm.load_base(Packed("maps"), name="maps", input=SPEC)
    with pytest.raises(pm.ExportError, match="is not written: the network returns dict"):
        pm.export_domain(base, pm.new_domain(base), tmp_path / "m.pt2", "torch-export")


def test_nothing_is_overwritten_without_force(base, domain, tmp_path):
    path = tmp_path / "d.pt2"
    path.write_bytes(b"mine")
    with pytest.raises(pm.ExportError, match=r"d\.pt2 exists"):
        pm.export_domain(base, domain, path, "torch-export")
    assert path.read_bytes() == b"mine"


def test_what_is_missing_is_said_before_the_work(base, domain, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if "onnx" in name else 1)
    with pytest.raises(pm.ExportError, match=r"onnxruntime; pip install 'polymask\[export\]'"):
        pm.export_domain(base, domain, tmp_path / "d.onnx")
    with pytest.raises(pm.ExportError, match="format 'tflite' is not known; use onnx or"):
        pm.export_domain(base, domain, tmp_path / "d.tflite", "tflite")
    with pytest.raises(pm.ExportError, match="there is no folder"):
        pm.export_domain(base, domain, tmp_path / "no" / "d.pt2", "torch-export")


def test_images_to_check_with_must_be_pixels_of_the_domains_shape(base, domain, tmp_path):
    for images in (torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(pm.ExportError, match=r"give uint8 pixels of the shape \(N, 3, 16, 16"):
            pm.export_domain(base, domain, tmp_path / "d.pt2", "torch-export", images=images)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one file to write: --onnx FILE or --torch-export FILE"),
        (["--onnx", "a.onnx", "--torch-export", "a.pt2"], "give one file to write"),
        (["--onnx", "a.onnx", "--images", "x.png", "--no-check"], "--images says what to check"),
    ],
)
def test_a_command_that_is_unclear_is_refused(words, message, capsys):
    assert main(["export", "nothing.safetensors", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_verb_exports_a_real_network_that_the_documented_snippet_runs(tmp_path, monkeypatch):
    """EfficientNet-Lite0 on solar cells: pillow, numpy and onnxruntime give what predict gives."""
    monkeypatch.chdir(tmp_path)
    data = load_data("solar-cells", limit=40)
    base = pm.load_base("efficientnet-lite0")
    torch.manual_seed(0)
    domain = pm.new_domain(base, "affine-full", data.classes)
    domain.save("cells.safetensors")
    Path("images").mkdir()
    for i in range(4):
        data.test.image(i).save(f"images/{i}.png")
    assert main(["export", "cells.safetensors", "--onnx", "cells.onnx", "--images", "images"]) == 0
    (snippet,) = re.findall(r"```python\n(import json.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(snippet.replace("digits.onnx", "cells.onnx"), "export.md", "exec"), names)
    domain = pm.load_domain("cells.safetensors", base)
    files = [Path(f"images/{i}.png") for i in range(4)]
    from polymask.train.predict import Classifier

    for file, wanted in zip(files, Classifier(base, domain)(files), strict=True):
        found = names["classify"](file)
        assert list(found) == list(data.classes)
        np.testing.assert_allclose(list(found.values()), wanted.numpy(), atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["torchvision:resnet50", "timm:vit_tiny_patch16_224"])
def test_other_architectures_export(network, tmp_path):
    base = pm.load_base(network, pretrained=False)
    domain = pm.new_domain(base, "affine-full", CLASSES)
    exported = pm.export_domain(base, domain, tmp_path / "d.onnx", with_normalisation=True)
    assert exported.difference <= 1e-4


@pytest.mark.slow
def test_the_verb_prints_json_and_checks_with_files(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    domain = pm.new_domain(pm.load_base("efficientnet-lite0"), "affine-full", CLASSES)
    domain.save("d.safetensors")
    Image.fromarray(np.full((50, 70, 3), 90, np.uint8)).save("grey.png")
    words = ["d.safetensors", "--torch-export", "d.pt2", "--images", "grey.png", "--json"]
    assert main(["export", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["checked_images"], result["opset"]) == (
        "torch-export",
        1,
        None,
    )
    assert main(["export", *words]) == 1
    assert "d.pt2 exists; give another file, or --force to replace it" in capsys.readouterr().err
