"""A pack that somebody forged is refused by name, or it is exactly what it says; never anything else, and soon."""

import base64
import json
import random
import time
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import polymask as pm
from forged_packs import read_parts, write_forged
from nets import SPEC, BlockNet, TinyNet
from polymask.errors import PackError
from polymask.train.unknown import Observed, fit_unknown
from presets import ONE_OF_A_KIND

# Packs that were written before they said what their base computes.
pytestmark = pytest.mark.filterwarnings("ignore::polymask.errors.PackWarning")
FIRST_HOUSE = Path(__file__).parents[1] / "first_house"
NETS = {"learned": (TinyNet, 8), "blocks": (BlockNet, 10)}
PACKS = sorted(FIRST_HOUSE.glob("*.spots.safetensors"))
MADE = sorted(ONE_OF_A_KIND - {pack.name.split(".")[0] for pack in PACKS})  # methods without a pack there
RULES = ("cosine", "mahalanobis")  # for unknown images
MADE += ["labels", "values", *RULES]
SECONDS = 5.0  # of CPU, for a pack of a few kB
NASTY = [
    *(None, True, 0, -1, 1, 2, 3, 10**9, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, -1e-308),
    *("", "a", "\ud800", "\x00", "[/b]", "x" * 10_000, "own", "../../etc/passwd", "é\u202e"),
    *([], [0], [-1], [2**62], [[[]]], ["a", "a"], [1, 2, 3], {}, {"a": 1}, {"shape": [1], "codec": "raw"}),
]


@pytest.fixture(scope="module")
def bases():
    made = {}
    for name, (kind, classes) in NETS.items():
        net = kind(classes)
        net.load_state_dict(load_file(FIRST_HOUSE / f"{name}.safetensors"))
        made[name] = pm.load_base(net, name=name, input=SPEC)
    return made


@pytest.fixture(scope="module")
def made(bases, tmp_path_factory):
    """Writes a pack of MADE, by name."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        method = "affine-full" if name in ("labels", "values", *RULES) else name
        base = bases["learned" if pm.create_method(method).mergeable else "blocks"]
        target = name if name in ("labels", "values") else "classes"
        domain = pm.new_domain(base, method, ["a", "b"], target=target)
        domain.target = domain.target.fitted(lambda: torch.tensor([[0.0, 1.0], [2.0, 3.0]]), None)
        if name in RULES:
            seen = Observed(torch.randn(40, 12), torch.randn(40, 2), torch.arange(40) % 2)
            domain.unknown = fit_unknown(name, seen, seen)
        domain.save(folder / f"{name}.safetensors")
        return folder / f"{name}.safetensors"

    return make


def base_for(bases, pack: Path) -> pm.Base:
    return bases["learned" if pm.create_method(pm.inspect(pack).manifest.method).mergeable else "blocks"]


def places(value, path=()):
    """The path of everything inside a JSON value."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    """A copy of a JSON value with one place changed."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copy


def check(path: Path, base: pm.Base) -> bool:
    """Whether a pack loads; it may only fail by a PackError, and within seconds."""
    began = time.process_time()
    try:
        pm.inspect(path)
        domain = pm.load_domain(path, base)
    except PackError as error:
        str(error).encode("utf-8")
        return False
    finally:
        assert time.process_time() - began < SECONDS
    with torch.no_grad():
        features = domain(base, torch.zeros(1, *base.input.shape))
    assert features.shape[-1] == len(domain.classes or [0] * features.shape[-1])
    return True


def with_other_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes of tensors with some of them changed: numbers that are none, numbers without end, noise."""
    piece = draw.choice([b"\xff\xff\xff\x7f", b"\x00\x00\x80\x7f", b"\xff" * 64, draw.randbytes(8), b"\x00" * 16])
    place = draw.randrange(max(1, len(data) - len(piece))) // 4 * 4
    return (data[:place] + piece + data[place + len(piece) :])[: len(data)]


def forge_at_random(base: pm.Base, pack: Path, rounds: int, seed: int, tmp_path: Path) -> int:
    """How many of so many forged packs loaded."""
    draw = random.Random(f"{pack.name} {seed}")
    manifest, header, data = read_parts(pack)
    forged, loaded = tmp_path / "forged.safetensors", 0
    for _ in range(rounds):
        target = draw.choice(["manifest", "manifest", "manifest", "header", "data"])
        if target == "data":
            write_forged(forged, manifest, header, with_other_bytes(draw, data))
            loaded += check(forged, base)
            continue
        content = manifest if target == "manifest" else header
        path, new = draw.choice(list(places(content))), draw.choice(NASTY)
        wrong = changed(content, path, new)
        try:
            parts = (wrong, header, data) if target == "manifest" else (manifest, wrong, data)
            write_forged(forged, *parts)
        except (TypeError, AttributeError, KeyError, ValueError, UnicodeEncodeError):
            write_forged(forged, manifest, header, data, text=json.dumps(wrong))
        loaded += check(forged, base)
    return loaded


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
def test_a_forged_manifest_or_header_is_refused_or_exact(pack, bases, tmp_path):
    forge_at_random(base_for(bases, pack), pack, 12, 0, tmp_path)


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
def test_a_forged_manifest_or_header_of_the_format_that_is_written_is_refused_or_exact(pack, bases, tmp_path):
    base = base_for(bases, pack)
    pm.load_domain(pack, base).save(tmp_path / pack.name)
    forge_at_random(base, tmp_path / pack.name, 12, 3, tmp_path)
    forge_layouts(base, tmp_path / pack.name, 12, tmp_path)


def forge_layouts(base: pm.Base, pack: Path, rounds: int, tmp_path: Path) -> int:
    """How many packs loaded whose layout has one place changed."""
    draw = random.Random(pack.name)
    manifest, header, data = read_parts(pack)
    layout = json.loads(zlib.decompress(base64.b64decode(manifest["layout"]), -15))
    loaded = 0
    for _ in range(rounds if layout else 0):
        path = draw.choice(list(places(layout)))
        new = draw.choice([*NASTY, [["transform/x/mask", [8]]], draw.choice(list(layout.values()))])
        text = json.dumps(changed(layout, path, new)).encode()
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        forged = manifest | {"layout": base64.b64encode(packer.compress(text) + packer.flush()).decode()}
        write_forged(tmp_path / "forged.safetensors", forged, header, data)
        loaded += check(tmp_path / "forged.safetensors", base)
    return loaded


def test_a_layout_that_inflates_to_very_much_is_refused_soon(bases, made, tmp_path):
    manifest, header, data = read_parts(made("labels"))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(b" " * (200 << 20)) + packer.flush()
    write_forged(tmp_path / "bomb.safetensors", manifest | {"layout": base64.b64encode(bomb).decode()}, header, data)
    began = time.process_time()
    with pytest.raises(PackError, match="does not end where it should"):
        pm.load_domain(tmp_path / "bomb.safetensors", bases["learned"])
    assert time.process_time() - began < SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
def test_a_thousand_forgeries_of_the_format_that_is_written_are_refused_or_exact(pack, bases, tmp_path):
    base = base_for(bases, pack)
    pm.load_domain(pack, base).save(tmp_path / pack.name)
    forge_at_random(base, tmp_path / pack.name, 500, 4, tmp_path)
    forge_layouts(base, tmp_path / pack.name, 500, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
def test_a_thousand_forgeries_of_every_method_are_refused_or_exact(pack, bases, tmp_path):
    forge_at_random(base_for(bases, pack), pack, 1000, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_forgeries_of_newer_methods_and_of_other_targets_are_refused_or_exact(name, made, bases, tmp_path):
    pack = made(name)
    forge_at_random(base_for(bases, pack), pack, 300, 2, tmp_path)
    forge_every_option(base_for(bases, pack), pack, tmp_path)


def test_forgeries_of_a_rule_for_unknown_images_are_refused_or_exact(made, bases, tmp_path):
    assert forge_at_random(bases["learned"], made("cosine"), 60, 3, tmp_path) < 60


@pytest.mark.parametrize("shape", [[3, 16, -(2**63)], [3, 0, 16], [3, 10**6, 10**6], [3], [], "abc", [1e308] * 3])
def test_what_a_pack_says_of_its_base_is_refused_where_no_image_has_such_a_shape(shape, made, bases, tmp_path):
    manifest, header, data = read_parts(made("labels"))
    wrong = changed(manifest, ("recipe", "base_response", "shape"), shape)
    write_forged(tmp_path / "forged.safetensors", wrong, header, data)
    with pytest.raises(PackError, match="what it says of its base makes no sense"):
        pm.load_domain(tmp_path / "forged.safetensors", bases["learned"])


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
def test_every_option_with_every_nasty_value_is_refused_or_exact(pack, bases, tmp_path):
    forge_every_option(base_for(bases, pack), pack, tmp_path)


def forge_every_option(base: pm.Base, pack: Path, tmp_path: Path) -> None:
    manifest, header, data = read_parts(pack)
    for option in manifest["options"]:
        for value in NASTY:
            wrong = changed(manifest, ("options", option), value)
            try:
                write_forged(tmp_path / "forged.safetensors", wrong, header, data)
            except UnicodeEncodeError:  # half a character cannot be signed
                write_forged(tmp_path / "forged.safetensors", wrong, header, data, text=json.dumps(wrong))
            check(tmp_path / "forged.safetensors", base)


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name.split(".")[0])
@pytest.mark.parametrize("absurd", [10**9, 2**62, -1, 1e308])
def test_options_of_absurd_size_are_refused_soon(pack, absurd, bases, tmp_path):
    manifest, header, data = read_parts(pack)
    for option, value in manifest["options"].items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            wrong = changed(manifest, ("options", option), absurd)
            write_forged(tmp_path / "forged.safetensors", wrong, header, data)
            check(tmp_path / "forged.safetensors", base_for(bases, pack))


def forged_text(tmp_path: Path, old: str, new: str) -> Path:
    manifest, header, data = read_parts(FIRST_HOUSE / "affine-full.spots.safetensors")
    manifest["metrics"]["marked"] = "MARK"
    text = json.dumps(manifest).replace(old, new)
    write_forged(tmp_path / "forged.safetensors", manifest, header, data, text=text)
    return tmp_path / "forged.safetensors"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + 400 * "0", "NaN", "-Infinity"])
def test_a_number_that_no_machine_holds_is_refused(number, tmp_path):
    forged = forged_text(tmp_path, '"MARK"', number)
    for read in (pm.inspect, lambda path: pm.load_domain(path, None)):
        with pytest.raises(PackError, match="not JSON"):
            read(forged)


@pytest.mark.parametrize("place", ["classes", "metrics", "base", "library", "method", "recipe", "options"])
def test_half_a_character_in_any_text_is_refused(place, tmp_path):
    manifest, header, data = read_parts(FIRST_HOUSE / "affine-full.spots.safetensors")
    value = manifest[place]
    manifest[place] = "\ud800" if isinstance(value, str) else ["\ud800"] if isinstance(value, list) else {"a": "\ud800"}
    write_forged(tmp_path / "forged.safetensors", manifest, header, data)
    with pytest.raises(PackError, match="not JSON"):
        pm.inspect(tmp_path / "forged.safetensors")


def test_very_many_equal_class_names_are_refused_soon(bases, tmp_path):
    manifest, header, data = read_parts(FIRST_HOUSE / "affine-full.spots.safetensors")
    write_forged(tmp_path / "forged.safetensors", manifest | {"classes": ["a", "b"] * 20_000}, header, data)
    assert not check(tmp_path / "forged.safetensors", bases["learned"])


def test_a_header_of_many_megabytes_is_refused_before_it_is_parsed(tmp_path):
    manifest, header, data = read_parts(FIRST_HOUSE / "affine-full.spots.safetensors")
    write_forged(tmp_path / "forged.safetensors", manifest | {"metrics": {"a": "x" * (30 << 20)}}, header, data)
    with pytest.raises(PackError, match="header would be"):
        pm.inspect(tmp_path / "forged.safetensors")
