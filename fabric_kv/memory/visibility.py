"""When what a NIC has written is there for kernels: a device's GPUDirect write ordering, and the flush without it.

>>> flush_remote_writes(0)      # True: it was needed and is done

A completion is seen in host memory while the data is on its way to the device's. Only the device says whether the one
can overtake the other: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING in the CUDA driver API.
"""

from __future__ import annotations

import functools
import threading

from ..errors import DeviceError
from .driver import Driver, load_driver

__all__ = ["Visibility", "flush_remote_writes"]

_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, and the flush's scope of the same meaning
_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST


@functools.cache
def _needs_flush(driver: Driver, device: int) -> bool:
    if driver.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING", device) >= _OWNER:
        return False
    if not driver.attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", device) & _BY_HOST:
        raise DeviceError(
            f"cuda:{device} neither keeps GPUDirect writes in order nor lets the host flush them: what has arrived "
            "cannot be told from what has not",
            op="cuFlushGPUDirectRDMAWrites",
            device=f"cuda:{device}",
        )
    return True


def flush_remote_writes(device: int) -> bool:
    """Let every write that a NIC has completed be visible to kernels that are started from now on.

    Parameters
    ----------
    device : int
        As this process counts them.

    Returns
    -------
    bool
        Whether the device needs it; where it does not, nothing is done.

    Raises
    ------
    DeviceError
        If the device has no such guarantee and no flush, or the driver fails.
    """
    driver = load_driver()
    if not _needs_flush(driver, device):
        return False
    api = driver.api
    target = api.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
    scope = api.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    with driver.current(device):
        driver.call("cuFlushGPUDirectRDMAWrites", target, scope, device=device)
    return True


class Visibility:
    """Which devices an engine's groups write to. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._devices: dict[int, frozenset[int]] = {}
        self._lock = threading.Lock()

    def add(self, group: int, device: int) -> None:
        """From now on what arrives in the group may be for this device."""
        with self._lock:
            self._devices[group] = self._devices.get(group, frozenset()) | {device}

    def flush(self, group: int) -> None:
        """Make what has arrived in the group visible; as :func:`flush_remote_writes`."""
        for device in self._devices.get(group, ()):
            flush_remote_writes(device)
