"""Sizes, times and rates: parsing user input and formatting output."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import units
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512B", 512),
        ("1kB", 1000), ("1KB", 1000), ("1MB", 10**6), ("1GB", 10**9), ("2TB", 2 * 10**12),
        ("4KiB", 4096), ("25MiB", 25 * 2**20), ("1GiB", 2**30), ("1TiB", 2**40),
        ("25mib", 25 * 2**20), ("25MIB", 25 * 2**20), ("1gb", 10**9),
        (" 25 MiB ", 25 * 2**20),
        ("1.5MiB", 3 * 2**19), ("0.5KiB", 512), ("2.50kB", 2500), ("0.1MB", 100_000),
        ("9007199254740993B", 2**53 + 1), ("4503599627370.497kB", 4503599627370497),
    ],
)  # fmt: skip
def test_a_size_is_read_exactly(text, num_bytes):
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("25", "has no unit: write 25MiB, 25MB or 25B"),
        ("1.5", "has no unit"),
        ("25 parsecs", "unknown unit 'parsecs'"),
        ("1Mbit", "unknown unit"),
        ("0.3B", "whole number of bytes"),
        ("1.0001kB", "whole number of bytes"),
        ("", "not a number with a unit"),
        ("MiB", "not a number with a unit"),
        ("-1MiB", "not a number with a unit"),
        ("1e3MB", "not a number with a unit"),
        ("1MiB2", "not a number with a unit"),
    ],
)
def test_a_bad_size_is_refused_with_its_reason(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        units.parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 10**30 - 1), st.sampled_from([("B", 1), ("MB", 10**6), ("GiB", 2**30)]))
def test_whole_numbers_of_any_unit_stay_exact(number, unit):
    assert units.parse_size(f"{number}{unit[0]}") == number * unit[1]


@given(
    st.integers(0, 2**10)
    | st.integers(0, 2**10).map(lambda k: k * 2**10)
    | st.integers(0, 2**30).map(lambda m: m * 2**20)
)
def test_a_size_of_whole_units_survives_printing_and_reading(num_bytes):
    assert units.parse_size(units.format_bytes(num_bytes)) == num_bytes


def test_a_list_of_sizes_keeps_its_order_and_drops_repeats():
    assert units.parse_sizes("10MiB, 1MiB,1024KiB,,2B") == (10 * 2**20, 2**20, 2)


@pytest.mark.parametrize(
    ("text", "reason"), [("", "no size"), (" , ", "no size"), ("1MiB,0B", "size 0"), ("1MiB,3", "has no unit")]
)
def test_a_bad_list_of_sizes_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        units.parse_sizes(text)


@pytest.mark.parametrize(
    ("first", "last", "factor", "sizes"),
    [
        (8, 64, 2, (8, 16, 32, 64)),
        (8, 63, 2, (8, 16, 32)),
        (100, 100, 2, (100,)),
        (1, 4, 1.3, (1, 2, 3, 4)),
        (10**6, 10**9, 10, (10**6, 10**7, 10**8, 10**9)),
        (2**29, 2**30 - 1, 2, (2**29,)),  # one byte less than 1 GiB
    ],
)
def test_a_range_of_sizes(first, last, factor, sizes):
    assert units.size_range(first, last, factor) == sizes


@pytest.mark.parametrize(
    ("first", "last", "factor"),
    [(0, 8, 2), (16, 8, 2), (8, 16, 1), (8, 16, 0.5), (8, 16, -2), (8, 16, float("nan")), (8, 16, float("inf"))],
)
def test_an_empty_or_endless_range_is_refused(first, last, factor):
    with pytest.raises(ConfigError, match="sizes"):
        units.size_range(first, last, factor)


@given(st.integers(1, 10**6), st.integers(0, 10**8), st.floats(1.1, 16))
def test_a_range_rises_from_the_first_size_to_within_one_factor_of_the_last(first, more, factor):
    sizes = units.size_range(first, first + more, factor)
    assert sizes[0] == first
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert sizes[-1] <= first + more < (sizes[-1] + 1) * factor


def test_counts_keep_their_order_and_drop_repeats():
    assert units.parse_counts("4, 2,4", "--ranks") == (4, 2)


@pytest.mark.parametrize("text", ["", "0", "2,0", "2,,4", "-2", "1.5", "two"])
def test_a_bad_count_is_refused_with_its_options_name(text):
    with pytest.raises(ConfigError, match="--ranks"):
        units.parse_counts(text, "--ranks")


@pytest.mark.parametrize(("text", "seconds"), [("120s", 120), ("1.5min", 90), (" 3 h ", 10800), ("2d", 172800),
                                               ("3 h 5 min", 11100), ("1d2s", 86402)])  # fmt: skip
def test_a_time_has_a_unit(text, seconds):
    assert units.parse_duration(text, "--mtbf") == seconds


@pytest.mark.parametrize(
    "text", ["", "3", "3m", "-3h", "3 hours", "1e3s", "nan", "inf", "9" * 5000 + "s", "2min3h", "3h3h"]
)
def test_a_time_without_a_unit_is_refused_with_its_options_name(text):
    with pytest.raises(ConfigError, match="--mtbf") as caught:
        units.parse_duration(text, "--mtbf")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("render", "value", "text"),
    [
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 1023, "1023 B"),
        (units.format_bytes, 4096, "4 KiB"),
        (units.format_bytes, -895488, "-874.50 KiB"),
        (units.format_bytes, -(2**20), "-1 MiB"),
        (units.format_bytes, 1536, "1.50 KiB"),
        (units.format_bytes, 25 * 2**20, "25 MiB"),
        (units.format_bytes, 10**6, "976.56 KiB"),
        (units.format_bytes, 2**30, "1024 MiB"),
        (units.format_count, 999, "999"),
        (units.format_count, 15_000_000, "15 000 000"),
        (units.format_ms, 12.3e-6, "0.0123"),
        (units.format_ms, 0.0123456, "12.3"),
        (units.format_ms, 0.123456, "123"),
        (units.format_ms, 0.009999, "10.0"),
        (units.format_ms, 0.0, "0"),
        (units.format_ms, 1.23456, "1235"),
        (units.format_duration, 12.34e-6, "12.3 µs"),
        (units.format_duration, 4.56e-3, "4.56 ms"),
        (units.format_duration, 1.2, "1.2 s"),
        (units.format_duration, 200, "3 min 20 s"),
        (units.format_duration, 7199, "119 min 59 s"),
        (units.format_duration, 3 * 3600, "3 h"),
        (units.format_duration, 3 * 3600 + 360, "3 h 6 min"),
        (units.format_duration, 30 * 86400, "30 d"),
        (units.format_duration, 2.5 * 86400, "2 d 12 h"),
        (units.format_rate, 123.44e9, "123"),
        (units.format_rate, 1.234e9, "1.23"),
        (units.format_rate, 0.01234e9, "0.0123"),
    ],
)
def test_values_are_formatted_for_people(render, value, text):
    assert render(value) == text


@given(st.floats(1e-9, 1e6))
def test_no_duration_prints_with_an_exponent(seconds):
    assert "e" not in units.format_duration(seconds)


@pytest.mark.parametrize("seconds", [0.9996, 0.0009996])
def test_a_duration_just_below_a_unit_prints_without_an_exponent(seconds):
    assert "e" not in units.format_duration(seconds)
