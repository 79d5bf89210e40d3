"""Builds ``fabric_kv._native`` from native/; everything else about the package is in pyproject.toml.

>>> FABRIC_KV_LIBFABRIC_HOME=/opt/amazon/efa pip install .
>>> FABRIC_KV_WERROR=1 pip install -e .
>>> CXX=clang++ pip install .

Only libfabric's headers are needed here. The library is opened at run time, so one build serves every version of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE_FOLDERS = ("base", "fabric", "ofi", "engine", "bindings")

MISSING_LIBFABRIC = """\
libfabric's headers were not found (rdma/fabric.h): {reason}.
Install them with one of
    apt-get install libfabric-dev pkg-config        # Debian, Ubuntu
    AWS's EFA installer                             # then FABRIC_KV_LIBFABRIC_HOME=/opt/amazon/efa
or set FABRIC_KV_LIBFABRIC_HOME to the folder that has include/rdma/fabric.h."""


def libfabric_include_dirs() -> list[str]:
    home = os.environ.get("FABRIC_KV_LIBFABRIC_HOME")
    if home:
        include = Path(home) / "include"
        if not (include / "rdma" / "fabric.h").is_file():
            sys.exit(MISSING_LIBFABRIC.format(reason=f"FABRIC_KV_LIBFABRIC_HOME={home} has no include/rdma/fabric.h"))
        return [str(include)]
    command = [os.environ.get("PKG_CONFIG", "pkg-config"), "--cflags-only-I", "libfabric"]
    try:
        flags = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        sys.exit(MISSING_LIBFABRIC.format(reason=f"FABRIC_KV_LIBFABRIC_HOME is not set and {command[0]} is missing"))
    except subprocess.CalledProcessError as error:
        reason = f"FABRIC_KV_LIBFABRIC_HOME is not set and {' '.join(command)} said: {error.stderr.strip()}"
        sys.exit(MISSING_LIBFABRIC.format(reason=reason))
    return [flag.removeprefix("-I") for flag in flags]


def relative_glob(pattern: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for folder in NATIVE_FOLDERS for path in (ROOT / "native" / folder).glob(pattern)
    )


def is_stale(obj: str, src: str) -> bool:
    """Whether `obj` is older than its source or any header it was compiled from (the .d file that -MMD writes)."""
    try:
        built = os.stat(obj).st_mtime_ns
        rule = Path(obj).with_suffix(".d").read_text().replace("\\\n", " ")
        inputs = rule.partition(":")[2].split()
        return any(os.stat(path).st_mtime_ns >= built for path in [src, *inputs])
    except FileNotFoundError:
        return True


class BuildExt(build_ext):
    """Keeps the objects of editable builds, so that a changed source file costs one compilation and a link."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            flags = repr([(e.extra_compile_args, e.include_dirs) for e in self.extensions])
            key = hashlib.sha256(f"{sys.version}{os.environ.get('CXX')}{flags}".encode()).hexdigest()[:12]
            self.build_temp = f"build/editable-{key}"


native = Pybind11Extension(
    "fabric_kv._native",
    sources=relative_glob("*.cc"),
    depends=relative_glob("*.h"),
    include_dirs=["native", *libfabric_include_dirs()],
    cxx_std=20,
    libraries=["dl"],
    extra_compile_args=[
        *("-O2", "-g0", "-MMD", "-fvisibility=hidden", "-pthread"),
        *("-Wall", "-Wextra", "-Wno-missing-field-initializers"),
    ],
    extra_link_args=["-pthread"],
)
if os.environ.get("FABRIC_KV_WERROR") == "1":
    native.extra_compile_args.append("-Werror")

with ParallelCompile("FABRIC_KV_BUILD_JOBS", needs_recompile=is_stale):
    setup(ext_modules=[native], cmdclass={"build_ext": BuildExt})
