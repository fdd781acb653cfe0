import pytest

from polymask.report.page_parts import (
    bits_text,
    bytes_text,
    count_text,
    difference_text,
    duration_text,
    listed,
    moved_text,
    share_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.00 kB"),
        (64_000, "64.0 kB"),
        (640_123, "640 kB"),
        (999_999, "1.00 MB"),
        (18_700_000, "18.7 MB"),
        (2.5e9, "2.50 GB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_bits_have_units_of_their_own() -> None:
    assert bits_text(6_100_000) == "6.10 Mbit"


def test_counts_are_grouped_or_in_millions() -> None:
    assert [count_text(n) for n in (7, 1797, 4_652_008)] == ["7", "1,797", "4.7 million"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.21, "4.2 s"), (9.97, "10 s"), (59.6, "1 min 00 s"), (401.2, "6 min 41 s")],
)
def test_durations_round_to_what_matters(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_shares_keep_two_digits_when_small() -> None:
    assert [share_text(p, 1000) for p in (727, 10, 4.91)] == ["72.7 %", "1.0 %", "0.49 %"]


def test_lists_read_as_english() -> None:
    assert [listed(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_a_difference_that_rounds_to_nothing_is_level() -> None:
    assert [difference_text(d) for d in (0.42, -21.13, -0.04)] == [
        "0.4 points above",
        "21.1 points below",
        "level with",
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.473, "47.3 %"),
        (0.00364, "0.36 %"),
        (0.000027, "0.003 %"),
        (1 / 3_300_000, "< 0.001 %"),
        (0.0, "0 %"),
        (1.0, "100.0 %"),
    ],
)
def test_shares_that_moved_have_few_digits_and_never_an_exponent(share: float, text: str) -> None:
    assert moved_text(share) == text
