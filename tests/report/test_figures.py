import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymask.report.canvas import method_styles, spread
from polymask.report.demo_page import DemoResult, bits_by_component, learning_curves, size_against_accuracy
from polymask.report.figures import density_by_depth, scalars_by_depth
from polymask.report.page_parts import COLOURS, INK, MUTED, PAPER, SERIES

Figure = Callable[[DemoResult], str]
FIGURES: dict[str, Figure] = {
    "curves": lambda r: learning_curves(r.domains[0].methods, name="f"),
    "density": lambda r: density_by_depth({d.title: d.layers for d in r.domains}, name="f"),
    "scalars": lambda r: scalars_by_depth(r.domains[0].layers, name="f"),
    "size": lambda r: size_against_accuracy(r.domains, name="f"),
    "bits": lambda r: bits_by_component({d.title: d.components for d in r.domains}, name="f"),
}
every_figure = pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)


def text_of(svg: str) -> str:
    return " ".join(ElementTree.fromstring(svg).itertext())


@every_figure
def test_a_figure_is_xml_that_follows_the_page_and_leaves_it_alone(draw: Figure, result: DemoResult) -> None:
    svg = draw(result)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("role") == "img"
    assert len(root.get("aria-label", "")) > 20  # what it shows, in words
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"style", "metadata", "script", "image"}
    assert all(e.get("id", "f-").startswith("f-") for e in root.iter())
    themed = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", svg)
    assert not re.findall(r"(?:fill|stroke): (?:#[0-9a-f]{3,6}|rgb)", themed)
    assert "font-family: inherit" in svg


@every_figure
def test_hostile_names_stay_text_and_equal_results_give_equal_bytes(draw: Figure, hostile: DemoResult) -> None:
    svg = draw(hostile)
    assert not [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("script")]
    assert svg == draw(DemoResult.from_json(hostile.to_json()))


def test_names_with_dollars_are_not_formulas(result: DemoResult) -> None:
    layers = result.domains[0].layers
    assert "$5 or $6" in text_of(density_by_depth({"$5 or $6": layers}, name="f"))


def test_density_has_a_dot_for_every_layer_of_every_domain(result: DemoResult) -> None:
    svg = density_by_depth({d.title: d.layers for d in result.domains}, name="f")
    layers = sum(len(domain.layers) for domain in result.domains)
    colours = [SERIES[i].role for i in range(len(result.domains))]
    uses = re.findall(r"<use [^>]*>", svg)
    dots = [use for use in uses if any(f"--{colour}," in use for colour in colours)]
    in_key = len(result.domains)
    assert len(dots) == layers + in_key


def test_curves_name_each_method_beside_its_line(result: DemoResult) -> None:
    text = text_of(FIGURES["curves"](result))
    assert all(name in text for name in ("affine-full", "classifier-only", "finetune"))


@pytest.mark.parametrize(
    "svg",
    [
        lambda: learning_curves([], name="f"),
        lambda: density_by_depth({"Digits": ()}, name="f"),
        lambda: scalars_by_depth((), name="f"),
    ],
)
def test_a_figure_of_nothing_is_empty_axes(svg: Callable[[], str]) -> None:
    ElementTree.fromstring(svg())


@given(
    st.lists(st.floats(0, 100), max_size=8),
    st.floats(1, 10),
)
def test_labels_are_spread_apart_in_order_and_within_bounds(places: list[float], gap: float) -> None:
    moved = spread(places, gap, 0, 100)
    ordered = sorted(moved)
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(ordered))
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in moved)
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            assert a >= b or moved[i] <= moved[j]


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([50.0, 10.0, 90.0], 20, 0, 100) == [50.0, 10.0, 90.0]


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_in_every_colour_can_be_read_on_both_papers(theme: str) -> None:
    paper = _luminance(getattr(PAPER, theme))
    for colour in (INK, MUTED, *SERIES):
        ink = _luminance(getattr(colour, theme))
        contrast = (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05)
        assert contrast >= 4.5, f"{colour.role} in {theme}: {contrast:.2f}"


def test_no_two_roles_are_drawn_in_one_colour() -> None:
    assert len({colour.light for colour in COLOURS}) == len(COLOURS)


def test_importing_reports_loads_nothing_heavy() -> None:
    code = (
        "import sys, polymask.report;sys.exit(', '.join({'torch', 'matplotlib', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_method_has_one_look_in_every_figure_and_under_every_name() -> None:
    alone = method_styles(["affine-full"])["affine-full"]
    among = method_styles(["finetune", "mine", "Full", "Full (k0=1)", "PackNet ↓", "PackNet ↑"])
    assert among["Full"] == alone
    assert among["Full (k0=1)"].colour == alone.colour
    assert among["PackNet ↓"] == method_styles(["packnet"])["packnet"]
    assert among["PackNet ↑"].colour == among["PackNet ↓"].colour
    assert among["mine"] == method_styles(["mine"])["mine"]
    assert len(set(among.values())) == 6


def test_the_figures_of_the_demo_agree_on_the_colours_of_methods(result: DemoResult) -> None:
    ours = f"var(--{SERIES[0].role},"
    for draw in (FIGURES["curves"], FIGURES["size"]):
        texts = re.findall(r"<text[^>]*style=\"([^\"]*)\"[^>]*>affine-full</text>", draw(result))
        assert texts
        assert all(ours in style for style in texts)
