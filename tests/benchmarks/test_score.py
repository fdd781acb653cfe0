"""The score: its laws, its interval, and what it refuses."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymask.benchmarks.score import read_accuracies, score
from polymask.benchmarks.suites import BENCHMARKS, DECATHLON, IMAGENET_TO_SKETCH, get_benchmark
from polymask.errors import BenchmarkError

DOMAINS = IMAGENET_TO_SKETCH.domains
FULL = [60.8, 52.8, 82.0, 96.2, 58.7, 99.2, 88.2, 89.2, 96.8, 48.6]
PAPER = ["ImNet", "Airc.", "C100", "DPed", "DTD", "GTSR", "Flwr.", "Oglt.", "SVHN", "UCF"]

percent = st.floats(0, 100)
below_100 = st.floats(0, 99)


def row(values: st.SearchStrategy[float], domains: tuple[str, ...] = DOMAINS):
    return st.fixed_dictionaries(dict.fromkeys(domains, values))


def test_the_score_is_the_formula() -> None:
    result = score("decathlon", dict(zip(PAPER, FULL, strict=True)))
    expected = {}
    for domain, accuracy in zip(DECATHLON.domains, FULL, strict=True):
        worst = 2 * (100 - DECATHLON.reference[domain]) / 100
        error = (100 - accuracy) / 100
        expected[domain] = 1000 / worst**2 * max(0, worst - error) ** 2
    assert result.per_domain == pytest.approx(expected)
    assert result.score == pytest.approx(sum(expected.values()))
    assert result.score == pytest.approx(3495.07, abs=0.01)
    assert list(result.per_domain) == list(DECATHLON.domains)


def test_the_decathlons_constants_are_the_challenges() -> None:
    worst = [round(2 * (100 - value), 2) for value in DECATHLON.reference.values()]
    assert worst == [80.26, 79.32, 35.76, 14.36, 88.94, 4.94, 37.18, 24.62, 6.90, 97.60]


@given(row(below_100))
def test_the_reference_scores_250_a_domain(reference: dict[str, float]) -> None:
    result = score("imagenet-to-sketch", reference, reference=reference)
    assert result.per_domain == pytest.approx(dict.fromkeys(DOMAINS, 250.0))


@given(row(below_100))
def test_no_error_scores_1000_a_domain_and_twice_the_reference_none(
    reference: dict[str, float],
) -> None:
    perfect = score("imagenet-to-sketch", dict.fromkeys(DOMAINS, 100), reference=reference)
    assert perfect.per_domain == dict.fromkeys(DOMAINS, 1000.0)
    twice = {domain: max(0.0, 2 * value - 100) for domain, value in reference.items()}
    poor = score("imagenet-to-sketch", twice, reference=reference)
    for domain, points in poor.per_domain.items():
        if twice[domain] > 0:
            assert points == pytest.approx(0, abs=1e-9)


@given(row(percent), row(below_100), st.sampled_from(DOMAINS), percent)
def test_more_accuracy_never_scores_less(
    accuracy: dict[str, float], reference: dict[str, float], domain: str, other: float
) -> None:
    changed = accuracy | {domain: other}
    first = score("imagenet-to-sketch", accuracy, reference=reference).score
    second = score("imagenet-to-sketch", changed, reference=reference).score
    assert (second >= first) if other >= accuracy[domain] else (second <= first)


@given(row(percent), row(below_100), st.integers(0, 4), st.integers(0, 4))
def test_the_interval_holds_the_score_of_what_was_rounded(
    accuracy: dict[str, float], reference: dict[str, float], decimals: int, others: int
) -> None:
    rounded = {domain: round(value, decimals) for domain, value in accuracy.items()}
    rounded_reference = {domain: round(value, others) for domain, value in reference.items()}
    result = score(
        "imagenet-to-sketch",
        rounded,
        reference=rounded_reference,
        decimals=decimals,
        reference_decimals=others,
    )
    true = score("imagenet-to-sketch", accuracy, reference=reference).score
    assert result.low <= result.score <= result.high
    assert result.low - 1e-6 <= true <= result.high + 1e-6


def test_exact_accuracies_have_no_interval() -> None:
    result = score("decathlon", DECATHLON.reference)
    assert result.low == result.high == result.score == 2500


def test_one_decimal_moves_the_decathlon_by_up_to_38_points() -> None:
    result = score("decathlon", dict(zip(PAPER, FULL, strict=True)), decimals=1)
    assert (round(result.low, 1), round(result.high, 1)) == (3457.6, 3532.8)


def test_the_decathlons_reference_is_not_taken_as_rounded() -> None:
    exact = score("decathlon", DECATHLON.reference)
    assert score("decathlon", DECATHLON.reference, reference_decimals=0) == exact


def test_the_score_per_parameter_divides_by_the_parameters() -> None:
    assert score("decathlon", DECATHLON.reference, params=10).score_per_param == 250
    assert "score_per_param" not in score("decathlon", DECATHLON.reference).to_json()


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)
def test_no_spelling_stands_for_two_domains(benchmark) -> None:
    spellings = [key for others in benchmark.spellings.values() for key in set(others)]
    assert len(set(spellings)) == len(spellings)
    for domain, others in benchmark.spellings.items():
        assert {benchmark.find(name) for name in (domain, *others)} == {domain}
    assert list(map(DECATHLON.find, PAPER)) == list(DECATHLON.domains)
    assert DECATHLON.find("VGG Flowers") == "vgg-flowers"
    assert IMAGENET_TO_SKETCH.find("CARS") == "Stanford Cars"


REFERENCE = dict.fromkeys(DOMAINS, 80.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"CUBS": 101}, "the accuracy on CUBS is 101; it must be 0 to 100 percent"),
        ({"CUBS": float("nan")}, "the accuracy on CUBS is nan"),
        ({"Flwers": 3}, "'Flwers' is not a domain of imagenet-to-sketch; did you mean Flowers"),
        ({"cars": 3}, "given for 'Stanford Cars' and 'cars', which are both Stanford Cars"),
    ],
)
def test_odd_accuracies_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        score("imagenet-to-sketch", REFERENCE | change, reference=REFERENCE)


def test_what_is_missing_or_too_much_is_named() -> None:
    few = dict.fromkeys(DOMAINS[:4], 80.0)
    with pytest.raises(BenchmarkError, match=r"for WikiArt, Sketch; .* all 6"):
        score("imagenet-to-sketch", few, reference=REFERENCE)
    with pytest.raises(BenchmarkError, match="no reference is given for WikiArt, Sketch"):
        score("imagenet-to-sketch", REFERENCE, reference=few)
    with pytest.raises(BenchmarkError, match="individual networks of the same backbone"):
        score("imagenet-to-sketch", REFERENCE)
    with pytest.raises(BenchmarkError, match="no error on CUBS"):
        score("imagenet-to-sketch", REFERENCE, reference=REFERENCE | {"CUBS": 100})
    with pytest.raises(BenchmarkError, match="leave out the reference"):
        score("decathlon", DECATHLON.reference, reference=DECATHLON.reference)
    with pytest.raises(BenchmarkError, match="#Params is 0"):
        score("decathlon", DECATHLON.reference, params=0)
    with pytest.raises(BenchmarkError, match="-1 decimals"):
        score("decathlon", DECATHLON.reference, decimals=-1)
    with pytest.raises(BenchmarkError, match="'decatlon' is not known; did you mean decathlon"):
        get_benchmark("decatlon")


def write(folder: Path, text: str) -> Path:
    path = folder / "accuracies.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "decimals"),
    [
        ('{"a": 82, "b": 3}', 0),
        ('{"a": 82.4, "b": 3}', 1),
        ('{"a": 82.4, "b": 3.10}', 2),
        ('{"a": 82.0}', 1),
        ('{"a": 8.24e1}', 1),
        ('{"a": 8e1}', 0),
    ],
)
def test_decimals_are_those_of_the_longest_number_as_written(tmp_path: Path, text: str, decimals: int) -> None:
    read = read_accuracies(write(tmp_path, text))
    assert read.accuracy.decimals == decimals
    assert read.accuracy.values == json.loads(text)
    assert read.reference is None
    assert read.params is None


def test_a_file_may_have_a_reference_and_parameters(tmp_path: Path) -> None:
    text = '{"accuracy": {"a": 82.4}, "reference": {"a": 83.25}, "params": 1.17}'
    read = read_accuracies(write(tmp_path, text))
    assert read.reference is not None
    assert (read.reference.values, read.reference.decimals) == ({"a": 83.25}, 2)
    assert read.params == 1.17


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "is not JSON"),
        ("{}", "must give a percentage for each domain"),
        ('{"a": "82.4"}', "the accuracy of 'a' must be a number"),
        ('{"a": true}', "the accuracy of 'a' must be a number"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1e99999999999999999999}', "is not JSON"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": 0.824, "b": 0.5}', "they look like fractions; give percent"),
        ('{"accuracy": {"a": 2}, "refrence": {}}', "'refrence' has no meaning"),
        ('{"accuracy": {"a": 2}, "reference": 3}', "reference must give a percentage"),
        ('{"accuracy": {"a": 2}, "params": "1"}', "params must be a number"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_odd_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        read_accuracies(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"none\.json cannot be read: No such file"):
        read_accuracies(tmp_path / "none.json")
