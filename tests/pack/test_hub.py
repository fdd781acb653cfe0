"""Packs on the Hugging Face Hub: the real client against a stand-in of the Hub's API."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants

import polymask as pm
from nets import batch, tiny_base, trained
from polymask.benchmarks.jobs import layer_statistics
from polymask.pack.hub import HubName
from sequences import moved_at_random, new
from stand_in_hub import READ_ONLY, TOKEN, StandInHub

REPO = "someone/digits"
# The client's own, when it uploads a large file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domain(base):
    domain = trained(base)
    domain.metrics = {"test_accuracy": 75.5, "bits_per_weight": 1.25}
    domain.recipe = {"name": "quick", "data": "digits"}
    return domain


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of one's own, with an empty cache and a token."""
    hub = StandInHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    huggingface_hub.close_session()
    hub.close()


@pytest.fixture
def pack(domain, tmp_path):
    path = tmp_path / "digits.safetensors"
    domain.save(path)
    return path.read_bytes()


def test_what_domains_share_goes_along(hub, base):
    method = pm.create_method("emr")
    learned = [moved_at_random(new(base, method.first_stage(), seed=i), seed=i) for i in range(2)]
    one, _ = method.settle(base, learned)
    pm.push(one, REPO)
    assert [name for name in hub.files(REPO) if name.endswith(".shared")]
    images, _ = batch()
    assert torch.equal(pm.load_domain(f"hf:{REPO}", base)(base, images), one(base, images))


def test_what_is_pushed_comes_back_to_the_bit(hub, base, domain):
    address = pm.push(domain, REPO)
    assert address.startswith(f"{hub.url}/{REPO}/commit/")
    assert hub.files(REPO).keys() == {
        ".gitattributes",
        "digits.safetensors",
        "digits.masks.svg",
        "README.md",
    }
    loaded = pm.load_domain(f"hf:{REPO}", base)
    assert loaded.classes == domain.classes
    assert loaded.metrics == domain.metrics
    images, _ = batch()
    assert torch.equal(loaded(base, images), domain.eval()(base, images))


def test_a_push_is_one_commit_and_the_pack_travels_as_a_large_file(hub, domain):
    pm.push(domain, REPO, message="First")
    posts = [path for method, path in hub.requests if method in ("POST", "PUT")]
    assert sum("/commit/" in path for path in posts) == 1
    assert sum(path.startswith("/lfs/") for path in posts) == 1


def test_the_card_says_what_the_hub_and_a_reader_want_to_know(hub, domain):
    pm.push(domain, REPO, license="apache-2.0")
    text = hub.files(REPO)["README.md"].decode()
    card = ModelCard(text)
    assert card.data.library_name == "polymask"
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-classification"
    assert "affine-full" in card.data.tags
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_name, result.dataset_split) == (
        75.5,
        "digits",
        "test",
    )
    for said in (
        "class 0, class 1, class 2",
        "75.50 %",
        "| method | `affine-full` |",
        f"fingerprint `{domain.fingerprint[:16]}",
        "mask 1,",
        'pm.load_domain("hf:someone/digits", base)',
        "(digits.masks.svg)",
    ):
        assert said in text, said


def test_the_cards_figure_is_an_svg_of_the_masks(hub, base, domain):
    pm.push(domain, REPO)
    drawing = hub.files(REPO)["digits.masks.svg"].decode()
    root = ElementTree.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "font-family: inherit" not in drawing
    layers = layer_statistics(domain)
    shares = [t.mask().double().mean().item() for _, t in domain.named_transforms()]
    assert [s.density for s in layers] == pytest.approx(shares)
    share = sum(s.density * s.weights for s in layers) / sum(s.weights for s in layers)
    assert f"affine-full {100 * share:.0f} %" in root.get("aria-label")
    assert [s.site for s in layers] == [name for name, _ in domain.named_transforms()]


def test_names_in_a_card_cannot_break_it(hub, base):
    names = ["a | b", "<script>", "`x`", "c: [d]\n# e"]
    domain = pm.new_domain(base, "classifier-only", names)
    pm.push(domain, REPO)
    text = hub.files(REPO)["README.md"].decode()
    assert "<script>" not in text
    assert "\\`x\\`" in text
    assert not any(line.startswith("# e") for line in text.splitlines())
    assert "digits.masks.svg" not in hub.files(REPO)  # the method has no masks


def test_a_pack_is_replaced_by_force_only_and_an_edited_card_never(hub, base, domain):
    first = pm.push(domain, REPO)
    before = hub.files(REPO)
    other = trained(base, seed=1)
    with pytest.raises(pm.HubError, match=r"has digits\.safetensors already; push under another"):
        pm.push(other, REPO)
    assert hub.files(REPO) == before
    pm.push(other, REPO, force=True)
    assert hub.files(REPO)["digits.safetensors"] != before["digits.safetensors"]
    assert b"75.50 %" not in hub.files(REPO)["README.md"]
    hub.put(REPO, {"README.md": b"mine"})
    pm.push(domain, REPO, force=True)
    assert hub.files(REPO)["README.md"] == b"mine"
    commit = first.rpartition("/")[2]
    assert pm.load_domain(f"hf:{REPO}@{commit}", base).metrics == domain.metrics


def test_of_several_packs_one_must_be_named(hub, base, domain, pack):
    hub.put(REPO, {"digits.safetensors": pack, "other.safetensors": b"", "README.md": b""})
    with pytest.raises(
        pm.HubError,
        match=r"2 packs \(digits.safetensors, other.safetensors\); name one, as in "
        r"hf:someone/digits/digits\.safetensors",
    ):
        pm.load_domain(f"hf:{REPO}", base)
    loaded = pm.load_domain(f"hf:{REPO}/digits.safetensors", base)
    assert loaded.classes == domain.classes
    assert pm.load_domain(f"hf:{REPO}@main/digits.safetensors", base).classes == domain.classes


def test_a_second_pack_in_a_repository_is_named_in_no_ones_card_but_its_own(hub, base, domain):
    pm.push(domain, REPO)
    card = hub.files(REPO)["README.md"]
    pm.push(trained(base, seed=1), REPO, name="letters")
    assert hub.files(REPO)["README.md"] == card
    assert "letters.safetensors" in hub.files(REPO)


def test_a_downloaded_pack_is_checked_like_any_pack(hub, base, pack):
    hub.put(REPO, {"digits.safetensors": pack[:-1] + bytes([pack[-1] ^ 1])})
    with pytest.raises(pm.PackError, match=r"digits\.safetensors is damaged"):
        pm.load_domain(f"hf:{REPO}", base)
    hub.put("someone/foreign", {"model.safetensors": b"\x02" + bytes(7) + b"{}"})
    with pytest.raises(pm.PackError, match="not a polymask pack"):
        pm.load_domain("hf:someone/foreign", base)
    hub.put("someone/good", {"digits.safetensors": pack})
    with pytest.raises(pm.PackError, match="was made for base tiny"):
        pm.load_domain("hf:someone/good", tiny_base(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:someone/nothing", "is not on the Hub, or is private .*; check the name, or log in"),
        ("hf:someone/private", "is private and your token does not open it"),
        ("hf:someone/empty", r"holds no pack: the repository has no \.safetensors file"),
        ("hf:someone/empty@v9", "no such revision; name a branch, a tag or a commit"),
        ("hf:someone/empty/x.safetensors", "no such file; check its name"),
        ("hf:nobody", "names no pack on the Hub; write hf:USER/REPO"),
        ("hf:some one/x", "names no pack on the Hub"),
    ],
)
def test_what_cannot_be_had_is_explained(hub, base, name, message, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    hub.put("someone/empty", {"README.md": b""})
    hub.put("someone/private", {"x.safetensors": b""}, private=True)
    with pytest.raises(pm.HubError, match=message):
        pm.load_domain(name, base)


def test_without_a_token_or_with_a_readers_token_a_push_says_what_is_missing(hub, domain, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    with pytest.raises(pm.HubError, match=r"may not do this; use one with the right to write"):
        pm.push(domain, REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(pm.HubError, match="wants a valid token; log in with `hf auth login`"):
        pm.push(domain, REPO)
    pm.push(domain, REPO, token=TOKEN)
    for wrong in ("digits", f"{REPO}/x", f"{REPO}@main"):
        with pytest.raises(pm.HubError, match="USER/REPO"):
            pm.push(domain, wrong)


def test_offline_the_cache_is_used_and_what_it_lacks_is_said(hub, base, domain, monkeypatch):
    pm.push(domain, REPO)
    pm.load_domain(f"hf:{REPO}", base)
    huggingface_hub.close_session()
    hub.server.server_close()  # nobody listens any more
    assert pm.load_domain(f"hf:{REPO}", base).classes == domain.classes
    with pytest.raises(pm.HubError, match="cannot be reached, and the file is not in the local"):
        pm.load_domain("hf:someone/other", base)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert pm.load_domain(f"hf:{REPO}", base).classes == domain.classes
    with pytest.raises(pm.HubError, match="unset HF_HUB_OFFLINE"):
        pm.load_domain("hf:someone/other/x.safetensors", base)


def test_the_command_line_takes_such_names_and_needs_no_torch_to_show_one(hub, pack, tmp_path):
    hub.put(REPO, {"digits.safetensors": pack})
    code = (
        "import sys; from polymask.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    there = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cli-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }
    run = subprocess.run(
        [sys.executable, "-c", code, "show", f"hf:{REPO}", "--json"],
        env=there,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert '"class 2"' in run.stdout
    run = subprocess.run(
        [sys.executable, "-c", code, "show", "hf:someone/nothing"],
        env=there,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("polymask: hf:someone/nothing is not on the Hub")
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_name_is_read_as_it_is_written():
    name = HubName.parse("hf:a/b@refs%2Fpr%2F1/folder/c.safetensors")
    assert name == HubName("a/b", "refs/pr/1", "folder/c.safetensors")
    assert str(name) == "hf:a/b@refs%2Fpr%2F1/folder/c.safetensors"
    assert str(HubName.parse("hf:a/b")) == "hf:a/b"


def test_without_the_library_the_remedy_is_named(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(pm.HubError, match=r"pip install 'polymask\[hub\]'"):
        pm.load_domain(f"hf:{REPO}", base)


@pytest.mark.slow
def test_the_verb_pushes_a_real_domain_and_predict_reads_it(hub, tmp_path, monkeypatch, capsys):
    from polymask.cli import main
    from polymask.data.load import load_data

    monkeypatch.chdir(tmp_path)
    data = load_data("digits", limit=40)
    domain = pm.new_domain(pm.load_base("efficientnet-lite0"), "affine-full", data.classes)
    domain.save("digits.safetensors")
    data.test.image(0).save("seven.png")
    assert main(["push", "digits.safetensors", REPO, "--license", "mit", "--json"]) == 0
    assert f'"load": "hf:{REPO}"' in capsys.readouterr().out
    assert hub.files(REPO)["digits.safetensors"] == (tmp_path / "digits.safetensors").read_bytes()
    assert main(["predict", f"hf:{REPO}", "seven.png", "--json"]) == 0
    mine = capsys.readouterr().out
    assert main(["predict", "digits.safetensors", "seven.png", "--json"]) == 0
    assert capsys.readouterr().out == mine
