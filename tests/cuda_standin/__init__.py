"""Stand-ins for CUDA's driver and for a libfabric that reaches device memory. They prove nothing about hardware.

>>> lib = load_driver_standin(folder)            # before cuda-bindings looks for libcuda.so.1
>>> build_fabric_standin(folder)                 # for FABRIC_KV_LIBFABRIC_HOME
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def build(source: str, soname: str, folder: Path, *flags: str) -> Path:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    assert compiler, "the stand-ins take a C compiler (cc, or CC)"
    out = folder / soname
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run(
        [*command, f"-Wl,-soname,{soname}", "-o", str(out), str(HERE / source), "-lpthread", "-ldl"], check=True
    )
    return out


def load_driver_standin(folder: Path) -> ctypes.CDLL:
    """Whoever opens libcuda.so.1 afterwards, in this process, gets the one that is loaded."""
    return ctypes.CDLL(str(build("not_a_gpu.c", "libcuda.so.1", folder)), mode=ctypes.RTLD_GLOBAL)


def build_fabric_standin(folder: Path) -> None:
    """A folder for FABRIC_KV_LIBFABRIC_HOME."""
    home = os.environ.get("FABRIC_KV_LIBFABRIC_HOME")
    include = f"{home}/include" if home else "/usr/include"
    build("not_a_fabric.c", "libfabric.so.1", folder, f"-I{include}")
