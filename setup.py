"""The C core of the shared-memory transport; everything else is in pyproject.toml.

Without a compiler the package installs all the same, runs on gloo, and `paceline doctor` says so.
"""

from setuptools import Extension, setup

SOURCES = "src/paceline/transport/native"

setup(
    ext_modules=[
        Extension(
            "paceline.transport._native",
            sources=[f"{SOURCES}/{name}.c" for name in ("group", "kernels", "worker")],
            depends=[f"{SOURCES}/{name}" for name in ("group.h", "paceline_native.h", "kernels.inc")],
            extra_compile_args=[
                *("-std=gnu11", "-O3", "-Wall", "-Wextra"),
                *("-ffp-contract=off", "-fvisibility=hidden", "-pthread"),
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
