"""Parses and formats sizes, times and rates: MiB is 2^20, GB/s is 10^9. No other module formats units."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from paceline.errors import ConfigError, refuse

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MAX_DIGITS = 30  # longest number in a size


def shorten(number: int) -> str:
    """Format a number for an error message: 12 500, or a power of ten such as 10^24 if it has too many digits."""
    return format_count(number) if abs(number) < 10**12 else f"10^{len(str(abs(number))) - 1}"


def parse_size(text: str) -> int:
    """Bytes of a size such as `25MiB` (2^20) or `1MB` (10^6). The unit is required."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ConfigError(f"size {text!r} is not a number with a unit: write it like 25MiB, 1MB or 512B")
    number, unit = match.groups()
    refuse((len(number) > _MAX_DIGITS, f"size {text[:40]!r} has {len(number)} digits: use a larger unit"))
    if not unit:
        raise ConfigError(f"size {text!r} has no unit: write {number}MiB, {number}MB or {number}B")
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise ConfigError(f"size {text!r} has the unknown unit {unit!r}: use B, kB, MB, GB, KiB, MiB or GiB")
    size = Fraction(number) * scale  # exact, unlike a float
    if size.denominator > 1:
        raise ConfigError(f"size {text!r} is {float(size):.3f} bytes: a size must be a whole number of bytes")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of a comma-separated list of sizes, in the user's order, without duplicates."""
    sizes = tuple(dict.fromkeys(parse_size(part) for part in text.split(",") if part.strip()))
    if not sizes:
        raise ConfigError(f"no size in {text!r}: write a list such as 1MiB,10MiB,100MiB")
    if min(sizes) <= 0:
        raise ConfigError(f"size 0 in {text!r}: a message has at least one element")
    return sizes


def size_range(first_bytes: int, last_bytes: int, factor: float, multiple: int = 1) -> tuple[int, ...]:
    """Sizes from first to last, each `factor` times the previous one, like nccl-tests' -b -e -f. Sizes after the first
    are rounded down to a `multiple`, so that they are whole numbers of elements."""
    ends = f"the range of sizes {format_bytes(first_bytes)} to {format_bytes(last_bytes)}"
    refuse(
        (first_bytes <= 0 or last_bytes < first_bytes, f"{ends} is empty: sizes must be above 0 and ascending"),
        (not 1 < factor < math.inf, f"{ends} by a factor of {factor:g}: the factor must be above 1"),
    )
    if math.log(last_bytes / first_bytes) > 1000 * math.log(factor):
        raise ConfigError(f"{ends} by a factor of {factor:g}: that makes more than 1000 sizes")
    sizes: list[int] = []
    size = float(first_bytes)
    while round(size) <= last_bytes:
        sizes.append(round(size) // multiple * multiple if sizes else first_bytes)
        size *= factor
    return tuple(dict.fromkeys(sizes))


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """The positive integers of a comma-separated list, in the user's order, without duplicates."""
    counts = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,18}\s*", part) or int(part) < 1:
            raise ConfigError(f"{what} {part.strip()[:40]!r} is not a whole number of at least 1")
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def parse_duration(text: str, what: str) -> float:
    """Seconds of a duration such as `120s`, `90min`, `3h` or `3 h 5 min`; `what` names the option in errors."""
    scales = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    parts = (rf"(?:(\d{{1,15}}(?:\.\d{{1,15}})?)\s*{unit}\s*)?" for unit in scales)
    match = re.fullmatch(r"\s*" + "".join(parts), text)
    if match is None or not any(match.groups()):
        raise ConfigError(f"{what} {text[:40]!r} is not a time with a unit: write it like 120s, 90min, 3h or 2d")
    return sum(float(number) * scale for number, scale in zip(match.groups(), scales.values(), strict=True) if number)


def format_bytes(num_bytes: float) -> str:
    """A size such as `64 B`, `4 KiB`, `25 MiB`, `1024 MiB`. Exact sizes have no decimals."""
    scales = ((MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    scale, unit = next(pair for pair in scales if abs(num_bytes) >= pair[0] or pair[0] == 1)
    value = num_bytes / scale
    return f"{value:.0f} {unit}" if value == int(value) or scale == 1 else f"{value:.2f} {unit}"


def format_memory(num_bytes: float) -> str:
    """A size in GiB; below 0.1 GiB, in a smaller unit."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB or not num_bytes else format_bytes(num_bytes)


def format_count(count: int) -> str:
    """An integer in groups of three digits: 15 000 000."""
    return f"{count:,}".replace(",", " ")


def format_ms(seconds: float) -> str:
    """Milliseconds with three significant digits and without the unit, for table columns in ms."""
    return _format_short(seconds * 1e3)


def _format_short(value: float) -> str:
    """Three significant digits, at most four decimals, and all digits of an integer part."""
    if not value:
        return "0"
    if abs(value) < 1000:
        value = float(f"{value:.3g}")  # 9.999 becomes 10.0, not 10.00
    decimals = 2 - math.floor(math.log10(abs(value))) if math.isfinite(value) else 0
    return f"{value:.{min(4, max(0, decimals))}f}"


def format_duration(seconds: float) -> str:
    """A duration such as `12.3 µs`, `4.56 ms`, `1.2 s`, `3 min 20 s`, `3 h 5 min`, `2 d`."""
    for limit_s, scale, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (60, 1, "s")):
        if seconds < limit_s:  # a value that would round to 1000 is shown as 1 of the next unit
            return f"{seconds * scale:.3g} {unit}"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    large, small, units = (86400, 3600, "dh") if seconds >= 2 * 86400 else (3600, 60, ("h", "min"))
    rest = int(seconds % large // small)
    return f"{int(seconds // large)} {units[0]}" + (f" {rest} {units[1]}" if rest else "")


def format_rate(bytes_per_s: float) -> str:
    """GB/s (10^9) with three significant digits and without the unit, for table columns in GB/s."""
    return _format_short(bytes_per_s / GB)


def format_speed(per_s: float) -> str:
    """A rate such as samples per second: an integer, or with decimals if it is small."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def format_number_of(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`; for nouns with a regular plural."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
