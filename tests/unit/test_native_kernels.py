"""Individual reductions: every type, operation and kind of processor against torch and numpy, bit by bit."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.transport import native

if native.why_not():
    pytest.skip(f"NOT TESTED: {native.why_not()}", allow_module_level=True)

DTYPES = {
    native.F32: torch.float32, native.F64: torch.float64, native.BF16: torch.bfloat16, native.F16: torch.float16,
    native.I32: torch.int32, native.I64: torch.int64,
}  # fmt: skip
OPS = {native.SUM: "sum", native.AVG: "avg", native.MIN: "min", native.MAX: "max"}
REAL = [dtype for dtype in DTYPES if DTYPES[dtype].is_floating_point]
HALVES = [native.BF16, native.F16]
SOURCES = Path(native.__file__).parent / "native"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Lengths around the vector size of every kind of processor, and around the unrolled loops' groups of vectors.
EDGES = sorted({0, 1, 2, 3, *(unit + d for unit in (4, 8, 16, 32, 64, 128, 256) for d in (-1, 0, 1)), 1000, 4099})

library = native.load_library()
CPUS = [name for name in ("neon", "sse2", "portable", "avx2", "avx512") if not library.pln_use_cpu(name.encode())]


@pytest.fixture(autouse=True)
def _best_kernels() -> Iterator[None]:
    """Start and end each test with the kernels chosen when the core was loaded: the last in the list."""
    library.pln_use_cpu(CPUS[-1].encode())
    yield
    library.pln_use_cpu(CPUS[-1].encode())


def reduce(dtype: int, op: int, out: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], divisor: int = 0) -> None:
    def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array:
        return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))

    count = sources[0].numel()
    divisor = divisor or len(sources)
    library.pln_reduce(dtype, op, addresses(out), len(out), addresses(sources), len(sources), count, divisor)


def expected(op: int, sources: Sequence[torch.Tensor], divisor: int = 0) -> torch.Tensor:
    """Reduce in source order with torch's elementary operations; two-byte types in float32, rounded once."""
    dtype, divisor = sources[0].dtype, divisor or len(sources)
    wide = [source.float() if dtype in (torch.bfloat16, torch.float16) else source for source in sources]
    # If both values are zero, the later one is kept; in torch's own minimum, the processor determines the sign.
    lower, higher = (
        (lambda a, b: torch.where((a < b) | (a != a), a, b)),
        (lambda a, b: torch.where((a > b) | (a != a), a, b)),
    )
    step = {native.MIN: lower, native.MAX: higher}.get(op, torch.add)
    total = functools.reduce(step, wide)
    if op == native.AVG:
        total = total / divisor if dtype.is_floating_point else torch.div(total, divisor, rounding_mode="trunc")
    return total.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, with all NaNs made equal, because the processor chooses the resulting NaN."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(BITS[tensor.element_size()])


def assert_same(found: torch.Tensor, wanted: torch.Tensor, *what: object) -> None:
    differ = (bits(found) != bits(wanted)).nonzero().flatten()
    if differ.numel():
        at = int(differ[0])
        raise AssertionError(f"{what}: element {at} of {found.numel()} is {found[at]}, not {wanted[at]}")


def draw(dtype: int, count: int, seed: int, special: bool = True) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        made = torch.randint(limits.min, limits.max, (count,), generator=random, dtype=torch.int64).to(kind)
        made[::7] = limits.max
        made[3::11] = limits.min
        return made
    made = (torch.randn(count, generator=random, dtype=torch.float64) * 3).to(kind)
    if special:
        info = torch.finfo(kind)
        values = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, info.max, -info.max, info.tiny]
        values += [-info.tiny, info.tiny / 4, info.smallest_normal * info.eps]  # the last two are subnormal
        # Use every second element: each value then meets every other value in some pair of sources.
        where = torch.randint(0, 2 * len(values), (count,), generator=random)
        for number, value in enumerate(values):
            made[where == number] = value
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(DTYPES[dtype]).split(".")[1])
@pytest.mark.parametrize(
    ("cpu", "op"),
    [
        pytest.param(cpu, op, id=f"{cpu}-{OPS[op]}", marks=[pytest.mark.slow] * (cpu != CPUS[-1] and op != native.AVG))
        for cpu in CPUS
        for op in OPS
    ],
)
def test_every_length_and_number_of_sources(cpu, dtype, op):
    library.pln_use_cpu(cpu.encode())
    counts = itertools.cycle([1, 2, 3, 5, 8, 17])
    for count in EDGES:
        for num_sources in {next(counts), next(counts), 2}:
            sources = [draw(dtype, count, seed) for seed in range(num_sources)]
            wanted = expected(op, sources)
            for num_out in (1, 2, 3):
                out = [torch.empty_like(wanted) for _ in range(num_out)]
                reduce(dtype, op, out, sources)
                for place in out:
                    assert_same(place, wanted, cpu, OPS[op], count, num_sources, num_out)
            copies = [source.clone() for source in sources]
            reduce(dtype, op, copies, copies)  # every source as an in-place operand
            for place in copies:
                assert_same(place, wanted, cpu, OPS[op], count, num_sources, "in place")
            mixed = [source.clone() for source in sources]
            out = [torch.empty_like(wanted), mixed[-1]]  # as on a rank: into its own vector, or into its slot
            reduce(dtype, op, out, mixed)
            for place in out:
                assert_same(place, wanted, cpu, OPS[op], count, num_sources, "into the last source")


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("num_sources", range(1, 18))
def test_every_number_of_sources_for_float32(cpu, num_sources):
    library.pln_use_cpu(cpu.encode())
    sources = [draw(native.F32, 333, seed) for seed in range(num_sources)]
    for op in OPS:
        out = torch.empty(333)
        reduce(native.F32, op, [out], sources)
        assert_same(out, expected(op, sources), OPS[op])


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("num_sources", [1, 2, 3, 8])
def test_an_average_in_bfloat16_rounds_each_share_and_the_sum(cpu, num_sources):
    library.pln_use_cpu(cpu.encode())
    for count in (0, 1, 31, 65, 4099):
        sources = [draw(native.F32, count, seed) for seed in range(num_sources)]
        for number, bits in enumerate((0x7F800001, 0x7FFFFFFF, -1, 0x3F808000, 0x3F818000)):  # NaNs and ties
            sources[0][number : number + 1] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        shares = [(source * (1 / num_sources)).bfloat16().float() for source in sources]
        wanted = functools.reduce(torch.add, shares).bfloat16().float()
        for num_out in (1, 2, 3):
            out = [torch.empty_like(wanted) for _ in range(num_out)]
            reduce(native.F32, native.ROUNDED, out, sources)
            for place in out:
                assert_same(place, wanted, cpu, count, num_out)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(DTYPES[dtype]).split(".")[1])
def test_any_alignment_works_without_writing_out_of_bounds(cpu, dtype):
    library.pln_use_cpu(cpu.encode())
    wide = DTYPES[dtype].itemsize
    for offset, count in itertools.product((1, 2, 3, 5, 7, 9, 15, 31, 33), (1, 31, 66, 517)):
        sources = [draw(dtype, count, seed) for seed in (1, 2, 3)]
        places = [np.full(offset + n + count * wide + 64, 0xA5, dtype=np.uint8) for n in range(3)]
        for n, (place, source) in enumerate(zip(places, sources, strict=True)):
            begin = offset + n
            place[begin : begin + count * wide] = source.view(torch.uint8).numpy()
        addresses = (ctypes.c_void_p * 3)(*(place.ctypes.data + offset + n for n, place in enumerate(places)))
        library.pln_reduce(dtype, native.SUM, addresses, 3, addresses, 3, count, 3)
        wanted = expected(native.SUM, sources)
        for n, place in enumerate(places):
            begin, end = offset + n, offset + n + count * wide
            found = torch.from_numpy(place[begin:end].copy()).view(DTYPES[dtype])
            assert_same(found, wanted, offset, count, n)
            assert (place[:begin] == 0xA5).all() and (place[end:] == 0xA5).all(), (offset, count, n)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", REAL, ids=lambda dtype: str(DTYPES[dtype]).split(".")[1])
@pytest.mark.parametrize("op", OPS, ids=OPS.get)
def test_a_nan_from_any_source_is_kept(cpu, dtype, op):
    library.pln_use_cpu(cpu.encode())
    kind = DTYPES[dtype]
    for num_sources, where in [(1, 0), (2, 0), (2, 1), (5, 0), (5, 2), (5, 4)]:
        for nan_bits in (-1, torch.tensor(float("nan"), dtype=kind).view(BITS[kind.itemsize]).item()):
            sources = [torch.ones(77, dtype=kind) for _ in range(num_sources)]
            sources[where][13] = torch.tensor(nan_bits, dtype=BITS[kind.itemsize]).view(kind)
            out = torch.empty(77, dtype=kind)
            reduce(dtype, op, [out], sources)
            assert out[13].isnan() and out.isnan().sum() == 1, (num_sources, where)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
def test_every_two_byte_number_is_preserved(cpu, dtype):
    library.pln_use_cpu(cpu.encode())
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    for op in (native.SUM, native.MIN, native.MAX):
        out = torch.empty_like(every)
        reduce(dtype, op, [out], [every])
        assert_same(out, every, OPS[op])


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("op", [native.SUM, native.AVG], ids=["sum", "avg"])
def test_sums_of_two_byte_numbers_round_as_in_torch(cpu, dtype, op):
    """Every number, combined with large and small ones: this covers ties, overflow to infinity and subnormal
    results."""
    library.pln_use_cpu(cpu.encode())
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    found: set[str] = set()
    for shift in (1, 2, 3, 77, 128, 513, 1024, 1025, 2**14, 2**15):
        sources = [every, every.roll(shift)]
        wanted = expected(op, sources)
        out = torch.empty_like(every)
        reduce(dtype, op, [out], sources)
        assert_same(out, wanted, shift)
        found |= describe_rounding(sources[0].double() + sources[1].double(), wanted)
    if op == native.SUM:
        assert found >= {"up", "down", "subnormal", "to infinity"}


def describe_rounding(exact: torch.Tensor, rounded: torch.Tensor) -> set[str]:
    """The cases that a conversion covered, to make sure that the test exercised them."""
    tiny = (rounded != 0) & (rounded.abs() < torch.finfo(rounded.dtype).tiny)
    up, down = rounded.double().abs() > exact.abs(), rounded.double().abs() < exact.abs()
    cases = {"up": up & rounded.isfinite(), "down": down, "subnormal": tiny, "to infinity": up & rounded.isinf()}
    return {name for name, where in cases.items() if where.any()}


@pytest.mark.parametrize("cpu", CPUS)
def test_bfloat16_overflows_to_infinity_by_rounding(cpu):
    library.pln_use_cpu(cpu.encode())
    largest = torch.full((40,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    half_a_step = torch.full((40,), 2.0**119, dtype=torch.bfloat16)  # the sum is a tie that float32 can represent
    out = torch.empty_like(largest)
    reduce(native.BF16, native.SUM, [out], [largest, half_a_step])
    assert out.isinf().all()
    reduce(native.BF16, native.SUM, [out], [largest, half_a_step / 2])
    assert (out == largest).all()


def test_integers_wrap_around():
    for dtype in (native.I32, native.I64):
        limits = torch.iinfo(DTYPES[dtype])
        sources = [torch.full((9,), limits.max, dtype=DTYPES[dtype]), torch.full((9,), 2, dtype=DTYPES[dtype])]
        out = torch.empty_like(sources[0])
        reduce(dtype, native.SUM, [out], sources)
        assert (out == limits.min + 1).all()


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(DTYPES[dtype]).split(".")[1])
def test_averages_divide_by_the_given_divisor(cpu, dtype):
    library.pln_use_cpu(cpu.encode())
    for divisor in (1, 2, 3, 4, 5, 6, 7, 10, 64, 100, 256):
        sources = [draw(dtype, 200, seed) for seed in (4, 5)]
        out = torch.empty_like(sources[0])
        reduce(dtype, native.AVG, [out], sources, divisor)
        assert_same(out, expected(native.AVG, sources, divisor), divisor)


def test_sources_are_summed_in_order():
    one, large = torch.full((50,), 1.0), torch.full((50,), 2.0**24)
    out = torch.empty(50)
    reduce(native.F32, native.SUM, [out], [one, one, large])
    assert (out == 2.0**24 + 2).all()
    reduce(native.F32, native.SUM, [out], [large, one, one])
    assert (out == 2.0**24).all()


def test_the_calling_threads_rounding_mode_does_not_matter():
    """A rank may have called `torch.set_flush_denormal` or changed the rounding mode; ranks must still agree."""
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    sources = [draw(native.F32, 300, seed) for seed in range(3)]
    small = [source.to(torch.bfloat16) for source in sources]
    tiny = torch.full((40,), 1e-40)
    wanted_tiny = tiny + tiny
    wanted, wanted_small, out, out_small = expected(0, sources), expected(0, small), torch.empty(300), small[0].clone()
    sum_of_tiny = torch.empty(40)
    upward = 0x400000 if "neon" in CPUS else 0x800  # FE_UPWARD
    is_flushing = torch.set_flush_denormal(True)
    try:
        assert libm.fesetround(upward) == 0 and libm.fegetround() == upward
        reduce(native.F32, native.SUM, [out], sources)
        reduce(native.BF16, native.SUM, [out_small], small)
        reduce(native.F32, native.SUM, [sum_of_tiny], [tiny, tiny])
        assert libm.fegetround() == upward  # the mode was restored
    finally:
        libm.fesetround(before)
        torch.set_flush_denormal(False)
    assert_same(out, wanted)
    assert_same(out_small, wanted_small)
    assert_same(sum_of_tiny, wanted_tiny, is_flushing)


def test_an_unknown_processor_is_refused():
    assert library.pln_use_cpu(b"abacus") != 0
    assert library.pln_cpu().decode() in CPUS


def test_constants_of_the_core_match_python():
    library.pln_constants.restype = ctypes.c_char_p
    tables = dict(line.split(" ", 1) for line in library.pln_constants().decode().splitlines())
    for name, known in (("kinds", 5), ("dtypes", 7), ("ops", 5), ("codes", 10)):
        members = tables[name].replace("U8", "BYTES").split(" ")
        assert [getattr(native, member) for member in members] == list(range(known)), name


def test_only_the_interface_is_exported():
    declared = set(re.findall(r"\b(pln_\w+)\(", (SOURCES / "paceline_native.h").read_text()))
    assert {"pln_open", "pln_run", "pln_reduce"} <= declared and all(hasattr(library, name) for name in declared)
    inner = set(re.findall(r"\b(pln_\w+)\(", (SOURCES / "group.h").read_text())) - declared
    assert "pln_execute" in inner and not [name for name in inner if hasattr(library, name)]


def test_the_core_does_not_depend_on_python():
    path = native.find_library()
    # no Python version in the suffix: any Python can load it
    assert path is not None and path.name == "_native.so"
    assert not re.search(rb"\0_?Py[A-Z_]\w+\0", path.read_bytes())
