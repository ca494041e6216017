"""`make wheels` builds a wheel per architecture and a source archive, for hosts without a compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import paceline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NATIVE = "src/paceline/transport/native/"
GLIBC = (2, 28)
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
# The host libraries that a manylinux wheel may use, and those that the core needs.
LIBRARIES = {"libc.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1"}
NAMES = {machine: f"paceline-{paceline.__version__}-py3-none-manylinux_2_28_{machine}.whl" for machine in MACHINES}
ARCHIVE = f"paceline-{paceline.__version__}.tar.gz"

PROGRAM = """
import json
import torch
import torch.distributed as dist
import paceline
from paceline.transport import native

def add():
    with paceline.init(announce=None) as world:
        vectors = [torch.full((length,), world.rank + 1.0) for length in (3, 1 << 20)]
        for vector in vectors:
            dist.all_reduce(vector)
        return world.backend, [vector.unique().tolist() for vector in vectors]

if __name__ == "__main__":
    print(json.dumps([native.why_not(), str(native.find_library()), paceline.run_ranks(add, 2)]))
"""


def call(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program without this checkout and without the user's choice of a compiler."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "VIRTUAL_ENV")}
    words = list(map(str, command))
    return subprocess.run(words, cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=600)


def tracked() -> list[str]:
    """The files of a release, according to git."""
    wanted = ["src", "setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "LICENSE"]
    return subprocess.check_output(["git", "ls-files", *wanted], cwd=ROOT, text=True).split()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks, in a separate folder."""
    for tool in ("git", "make", "readelf", *(f"{machine}-linux-gnu-gcc" for machine in MACHINES)):
        if shutil.which(tool) is None:
            pytest.skip(f"NOT TESTED: {tool} is not here")
    folder = tmp_path_factory.mktemp("sources")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def dist(sources: Path) -> Path:
    """The output folder of `make wheels`."""
    done = call("make", "wheels", f"PYTHON={sys.executable}", cwd=sources)
    if "No matching distribution" in done.stderr:
        pytest.skip("NOT TESTED: no package registry can be reached")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return sources / "dist"


def read_core(wheel: Path) -> bytes:
    return zipfile.ZipFile(wheel).read("paceline/transport/_native.so")


def test_two_wheels_and_a_source_archive_are_built(dist):
    assert sorted(path.name for path in dist.iterdir()) == sorted([ARCHIVE, *NAMES.values()])


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_holds_the_package_with_its_core(dist, machine):
    archive = zipfile.ZipFile(dist / NAMES[machine])
    files = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name.removeprefix("src/") for name in tracked() if name.startswith("src/") and NATIVE not in name}
    assert files == package | {"paceline/transport/_native.so"}
    (info,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    header = HeaderParser().parsestr(archive.read(info).decode())
    assert header.get_all("Tag") == [f"py3-none-manylinux_2_28_{machine}"]
    assert header["Root-Is-Purelib"] == "false"
    entries = archive.read(info.replace("WHEEL", "entry_points.txt")).decode()
    assert "paceline = paceline.transport:register" in entries


@pytest.mark.parametrize("machine", MACHINES)
def test_a_core_is_for_its_processor_and_needs_neither_python_nor_a_newer_glibc(dist, machine, tmp_path):
    core = tmp_path / "_native.so"
    core.write_bytes(read_core(dist / NAMES[machine]))
    text = call("readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", core, cwd=tmp_path).stdout
    assert re.search(r"Machine:\s+(.*)", text)[1] == MACHINES[machine]
    assert "RUNPATH" not in text and "RPATH" not in text
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    assert {"libc.so.6", "libpthread.so.0"} <= needed <= LIBRARIES
    symbols = re.findall(r"(FUNC|OBJECT|NOTYPE)\s+(GLOBAL|WEAK)\s+\w+\s+(\w+)\s+([\w@.]+)", text)
    used = [name for _, strength, place, name in symbols if place == "UND" and strength == "GLOBAL"]
    assert any(name.startswith("pthread_create@GLIBC_2.") for name in used)
    versions = {name: re.fullmatch(r"\w+@GLIBC_(\d+)\.(\d+)(\.\d+)?", name) for name in used}
    assert not [name for name, version in versions.items() if version is None]
    assert not [name for name, version in versions.items() if tuple(map(int, version.groups()[:2])) > GLIBC]
    offered = {name for _, _, place, name in symbols if place != "UND"}
    declared = set(re.findall(r"\b(pln_\w+)\(", (ROOT / NATIVE / "paceline_native.h").read_text()))
    assert offered - {"_init", "_fini"} == declared


@pytest.mark.parametrize("version", ["3.11", "3.14"])
@pytest.mark.parametrize("machine", MACHINES)
def test_pip_takes_a_wheel_for_any_python_of_its_platform_and_for_no_other(dist, machine, version, tmp_path):
    other = next(name for name in MACHINES if name != machine)
    for wanted, accepted in ((f"manylinux_2_28_{machine}", True), (f"manylinux_2_28_{other}", False)):
        options = ["--no-deps", "--only-binary", ":all:", "--platform", wanted, "--python-version", version]
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--target", tmp_path / wanted, *options]
        done = call(*command, dist / NAMES[machine], cwd=tmp_path)
        assert (done.returncode == 0) is accepted, done.stderr
        assert accepted or "not a supported wheel" in done.stderr


def test_the_source_archive_holds_what_builds_and_both_cores(dist):
    prefix = f"{ARCHIVE.removesuffix('.tar.gz')}/"
    with tarfile.open(dist / ARCHIVE) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        contents = {m.name.removeprefix(prefix): archive.extractfile(m).read() for m in members}
    made = {"PKG-INFO", "setup.cfg", *(name for name in contents if ".egg-info/" in name)}
    cores = {f"prebuilt/{machine}.so": read_core(dist / NAMES[machine]) for machine in MACHINES}
    assert set(contents) - made == {*tracked(), *cores} - {"Makefile"}
    assert {name: contents[name] for name in cores} == cores


@pytest.mark.parametrize("kind", ["wheel", "source archive"])
def test_without_a_compiler_it_installs_and_ranks_share_memory(dist, tmp_path, kind):
    machine = platform.machine()
    archive = dist / (NAMES[machine] if kind == "wheel" else ARCHIVE)
    bare = tmp_path / "bare"
    assert call(sys.executable, "-m", "venv", bare, cwd=tmp_path).returncode == 0
    path = {"PATH": str(bare / "bin")}
    assert not any(shutil.which(name, path=path["PATH"]) for name in ("cc", "gcc", "clang", "c99"))
    done = call(bare / "bin" / "python", "-m", "pip", "install", "--no-deps", archive, cwd=tmp_path, **path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Paceline's dependencies come from the environment of the tests. Only the folder is added: its .pth files
    # are ignored, so the checkout is not found.
    site = next(bare.glob("lib/python3*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = call(bare / "bin" / "python", "program.py", cwd=tmp_path, **path)
    assert done.returncode == 0, done.stderr[-3000:]
    core = site / "paceline" / "transport" / "_native.so"
    assert json.loads(done.stdout) == ["", str(core), [["shm", [[3.0], [3.0]]]] * 2]
    assert core.read_bytes() == read_core(dist / NAMES[machine])


def build_with(compiler: str, sources: Path, folder: Path, wheel_platform: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel with this program as the compiler; it gets the compiler's arguments."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{compiler}\n")
    (folder / "cc").chmod(0o755)
    option = f"--config-settings=--build-option=--plat-name={wheel_platform}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", option, "--wheel-dir", folder, sources]
    return call(*command, cwd=folder, CC=str(folder / "cc"))


WRITE = "Path(sys.argv[sys.argv.index('-o') + 1]).write_bytes({!r})"


def test_a_wheel_whose_tag_would_be_untrue_is_not_made(sources, tmp_path):
    newer = WRITE.format(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0")
    refused = build_with(newer, sources, tmp_path / "old", "manylinux_2_28_x86_64")
    assert refused.returncode != 0 and "the C core needs glibc 2.34" in refused.stdout + refused.stderr
    assert not list((tmp_path / "old").glob("*.whl"))
    assert build_with(newer, sources, tmp_path / "new", "manylinux_2_34_x86_64").returncode == 0
    (wheel,) = (tmp_path / "new").glob("*.whl")
    assert "-py3-none-manylinux_2_34_x86_64" in wheel.name


def test_the_package_is_built_without_a_core_if_compiling_fails(sources, tmp_path):
    done = build_with("sys.exit('no headers')", sources, tmp_path / "plain", "linux_x86_64")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "plain").glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert "paceline/transport/native.py" in files and "paceline/transport/_native.so" not in files
    refused = build_with("sys.exit('no headers')", sources, tmp_path / "many", "manylinux_2_28_x86_64")
    assert refused.returncode != 0 and not list((tmp_path / "many").glob("*.whl"))
