"""Durations, rates and counts: what is printed can be parsed, and no share lies."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_locust.errors import InputError
from vllm_locust.quantity import (
    duration_s,
    format_count,
    format_duration,
    format_list,
    format_milliseconds,
    format_rate,
    format_share,
    number,
    share,
)

DASH = "\N{EN DASH}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300ms", 0.3),
        ("5m", 300),
        ("1m30s", 90),
        ("1h 2min 3s", 3723),
        ("30", 30),
        ("1.5", 1.5),
        (" 1.2 s ", 1.2),
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("40ns", 40e-9),
        ("1,200 s", 1200),
        ("1,234,567", 1_234_567),
        ("1,200.5 s", 1200.5),
        ("0", 0),
        (0, 0),
        (2.5, 2.5),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str | float, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "5 parsecs",
        "-3s",
        "1m30",
        "30 1m",
        "1..2s",
        "s",
        "5ms!",
        "nan",
        "inf",
        "1,2 s",
        ",5s",
        "1e3",
        "9" * 400,
    ],
)
def test_what_is_no_duration_is_refused_with_the_key_and_an_example(text: str) -> None:
    with pytest.raises(InputError) as refused:
        duration_s(text, where="--window")
    message = str(refused.value)
    assert message.startswith("--window: ")
    assert repr(text) in message
    assert "30s" in message


@pytest.mark.parametrize("number", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_number_that_no_time_can_last_is_refused(number: float) -> None:
    with pytest.raises(InputError, match=r"^duration: .*30s"):
        duration_s(number)


@given(st.floats(min_value=1e-9, max_value=1e8))
@example(0.99995e-3)
@example(0.99995)
@example(9.995)
@example(99.95)
@example(1234.5)
def test_a_printed_duration_can_be_parsed_and_is_right_to_three_digits(seconds: float) -> None:
    tolerance = 0.5e-9 if seconds < 1e-6 else seconds * 0.0051
    assert abs(duration_s(format_duration(seconds)) - seconds) <= tolerance


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ns"),
        (5e-7, "500 ns"),
        (1.234e-6, "1.23 µs"),
        (8.4e-3, "8.40 ms"),
        (45.12e-3, "45.1 ms"),
        (0.9996, "1.00 s"),
        (1.25, "1.25 s"),
        (61.2, "61.2 s"),
        (1234.4, "1,234 s"),
        (None, DASH),
    ],
)
def test_a_duration_is_shown_with_three_digits_and_its_unit(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_what_is_absent_is_a_dash_and_never_a_zero() -> None:
    assert format_milliseconds(None) == format_count(None) == format_rate(None) == format_share(0, 0) == DASH


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (8000, "8,000"), (9_999_999, "9,999,999"), (12_500_000, "12.5 M")]
)
def test_a_count_shows_all_its_digits_while_they_fit_a_column(number: int, shown: str) -> None:
    assert format_count(number) == shown


def test_milliseconds_and_rates_have_three_digits() -> None:
    assert format_milliseconds(0.0123456) == "12.3"
    assert format_rate(4800.4) == "4,800"
    assert format_rate(0.125) in ("0.12", "0.13")


@given(whole=st.integers(1, 10**9), data=st.data())
def test_something_is_never_shown_as_nothing_nor_nearly_all_as_all(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole))
    shown = format_share(part, whole)
    assert (shown == "0.0 %") == (part == 0)
    assert (shown == "100.0 %") == (part == whole)


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (0, "0.0 %"),
        (1, "< 0.1 %"),
        (5, "0.1 %"),
        (5000, "50.0 %"),
        (9994, "99.9 %"),
        (9996, "> 99.9 %"),
        (10000, "100.0 %"),
    ],
)
def test_a_share_is_shown_in_percent(part: int, shown: str) -> None:
    assert format_share(part, 10_000) == shown


def test_an_accepted_set_is_listed_and_an_empty_one_is_none() -> None:
    assert format_list(["a", 1]) == "a, 1"
    assert format_list([]) == "none"


@pytest.mark.parametrize(
    ("text", "value"),
    [("5%", 0.05), ("5 %", 0.05), (" 12.5% ", 0.125), ("0.05", 0.05), (0.9, 0.9), ("100%", 1), ("0", 0)],
)
def test_shares_are_parsed_with_and_without_percent(text: str | float, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "five", "5", "101%", "-1%", "5%%", "5% of it", "nan", "inf%", "1e"])
def test_what_is_no_share_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InputError, match=r"--max-stalled: .* is not a share; write it like 5% or 0.05"):
        share(text, where="--max-stalled")


def test_a_share_in_percent_is_that_of_the_counts() -> None:
    assert [share(f"{n / 10}%") for n in range(1000)] == [n / 1000 for n in range(1000)]


@pytest.mark.parametrize(("text", "value"), [("8,000", 8000), ("0.5", 0.5), (" 1,234.5 ", 1234.5), ("12", 12)])
def test_numbers_are_parsed_with_and_without_commas(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "five", "-1", "1,2", "1e3", "nan", "inf", "5 %", "9" * 400])
def test_what_is_no_number_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InputError, match=r"^--limit: .* is not a number; write it like 8,000 or 0\.5"):
        number(text, where="--limit")
