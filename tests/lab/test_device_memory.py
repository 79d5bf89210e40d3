"""Device memory on a GPU: what the stand-in's tests say, by NVIDIA's driver."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ..cuda_standin.device_engine_suite import *  # noqa: F403
from ..cuda_standin.device_suite import *  # noqa: F403


def _no_gpu() -> str:
    """What is missing, if anything."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU: /dev/nvidiactl is missing"
    try:
        ctypes.CDLL("libcuda.so.1")
        import cuda.bindings.driver  # noqa: F401
    except (OSError, ImportError) as error:
        return f"CUDA cannot be used: {error}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_no_gpu()), reason=_no_gpu() or "a GPU is there")]


@pytest.fixture
def held() -> Callable[[], object]:
    """Descriptors of this process; the driver's own are opened before the first count."""
    from fabric_kv.memory import DeviceBuffer

    with DeviceBuffer.allocate(0, 1) as buffer:
        buffer.write(0, b"x")

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count
