"""The C core of the shared-memory transport; everything else is in pyproject.toml.

The core is a plain library that `ctypes` loads. It uses no header of Python or torch, so one wheel for each platform
serves every version of both. Without a compiler it is copied from `prebuilt`, which source archives contain. Without
that, too, the package runs on gloo, and `paceline doctor` says so.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

SOURCES = "src/paceline/transport/native"
FLAGS = ["-shared", "-fPIC", "-pthread", "-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra"]


class BuildCore(build_ext):
    """Calls $CC, or cc, itself: Python's own way to compile adds its flags, its headers and where it is installed."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # of an earlier build
        command = [*shlex.split(os.environ.get("CC") or "cc"), *FLAGS, *ext.sources, "-o", str(library)]
        prebuilt = Path("prebuilt", f"{platform.machine()}.so")
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if not prebuilt.exists():
                raise CompileError(f"the C core was not compiled: {error}") from error
            shutil.copyfile(prebuilt, library)


class BuildWheel(bdist_wheel):
    """A wheel for every Python. One that claims a version of glibc must work with it."""

    def get_tag(self):
        wheel_platform = super().get_tag()[2]
        if claimed := re.match(r"manylinux_(\d+)_(\d+)_", wheel_platform):
            core = Path(self.bdist_dir, "paceline", "transport", "_native.so").read_bytes()
            needed = max(tuple(map(int, version)) for version in re.findall(rb"GLIBC_(\d+)\.(\d+)", core))
            if needed > tuple(map(int, claimed.groups())):
                raise SetupError(f"the C core needs glibc {needed[0]}.{needed[1]}: it is not for {wheel_platform}")
        return "py3", "none", wheel_platform


setup(
    cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel},
    ext_modules=[
        Extension(
            "paceline.transport._native",
            sources=[f"{SOURCES}/{name}.c" for name in ("codecs", "group", "kernels", "worker")],
            depends=[str(path) for path in Path(SOURCES).glob("*.[hi]*")],
            optional=True,
        )
    ],
)
