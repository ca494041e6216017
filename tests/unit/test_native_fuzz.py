"""The C core against a plain reference: thousands of random operations, also under AddressSanitizer and UBSan."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.transport import native

PROGRAM = Path(__file__).parents[1] / "native" / "fuzz.c"
SOURCES = Path(native.__file__).parent / "native"
# the flags of setup.py
COMPILE_FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-pthread"]
QUICK = ("-O0",)  # compiler timeout: the kernels are long
MEMORY = (*QUICK, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@functools.cache
def find_compiler() -> list[str]:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not found:
        pytest.skip("NOT TESTED: no C compiler is here to build the fuzz program with")
    return found.split()


def build(
    folder: Path, flags: tuple[str, ...] = (), core: Path = SOURCES, *, compiler: str = "", emulator: str = ""
) -> Path:  # fmt: skip
    """The fuzz program with the core in that folder; skips if it cannot be compiled with these flags."""
    compile_ = [compiler] if compiler else find_compiler()
    run = [emulator] if emulator else []
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    for command in ([*compile_, *flags, "probe.c", "-o", "probe"], [*run, "./probe"]):
        if subprocess.run(command, cwd=folder, capture_output=True).returncode:
            pytest.skip(f"NOT TESTED: programs built with {' '.join(flags)} do not run here")
    sources = [str(PROGRAM), *map(str, sorted(core.glob("*.c")))]
    # A rank may call from a thread with a small stack.
    wanted = [*COMPILE_FLAGS, "-Werror", "-g", "-Wframe-larger-than=16384", *flags, f"-I{core}"]
    done = subprocess.run([*compile_, *wanted, *sources, "-lm", "-o", "fuzz"], cwd=folder, capture_output=True)
    assert not done.returncode, done.stderr.decode()
    return folder / "fuzz"


def fuzz(program: Path, ranks: str, seconds: int, emulator: str = "") -> subprocess.CompletedProcess[str]:
    # Leak detection takes longer than everything else; `make sanitize` runs it.
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    command = [*([emulator] if emulator else []), str(program), ranks, str(seconds)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)

    # With the shipped flags, compilation takes half a minute.


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        pytest.param(QUICK, 1, id="quick"),
        pytest.param((), 3, id="plain", marks=pytest.mark.slow),
        pytest.param(MEMORY, 3, id="sanitized", marks=pytest.mark.slow),
    ],
)
def test_random_operations_match_the_reference(tmp_path, flags, seconds):
    program = build(tmp_path, flags)
    for ranks in ("threads", "processes"):
        done = fuzz(program, ranks, seconds)
        assert not done.returncode, f"{done.stdout}{done.stderr[-6000:]}"
        assert "none wrong" in done.stdout


@pytest.mark.slow
def test_the_core_for_the_other_architecture_gives_the_same(tmp_path):
    machine = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(platform.machine())
    compiler, emulator = shutil.which(f"{machine}-linux-gnu-gcc"), shutil.which(f"qemu-{machine}-static")
    if not compiler or not emulator:
        pytest.skip(f"NOT TESTED: {machine}-linux-gnu-gcc and qemu-{machine}-static are needed")
    program = build(tmp_path, ("-O1", "-static"), compiler=compiler, emulator=emulator)
    for ranks in ("threads", "processes"):
        done = fuzz(program, ranks, 5, emulator)
        assert not done.returncode, f"{done.stdout}{done.stderr[-6000:]}"
        assert "none wrong" in done.stdout


@pytest.mark.slow
def test_a_core_that_rounds_differently_is_found(tmp_path):
    core = shutil.copytree(SOURCES, tmp_path / "core")
    kernels = (core / "kernels.inc").read_text()
    broken = kernels.replace("half = vdupq_n_u32(0x7fff)", "half = vdupq_n_u32(0x7ffe)").replace("0x7fff +", "0x7ffe +")
    assert broken != kernels
    (core / "kernels.inc").write_text(broken)
    done = fuzz(build(tmp_path, QUICK, core), "threads", 10)
    assert done.returncode and "type 2" in done.stderr and "is wrong" in done.stderr  # bfloat16
