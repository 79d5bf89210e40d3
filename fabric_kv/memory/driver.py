"""CUDA's driver, by cuda-python: calls that raise, devices by number or UUID, and the right context on this thread.

>>> driver = load_driver()
>>> driver.call("cuMemRelease", handle)
>>> with driver.current(device=0): driver.call("cuMemGetAddressRange", address)

cuda-python is an optional dependency, and the driver comes with the machine: what is missing is said at first use.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ..errors import ConfigError, DeviceError

__all__ = ["Driver", "device_index", "load_driver"]

_DEVICE = re.compile(r"cuda(?::([0-9]{1,9}))?")


class Driver:
    """``cuda.bindings.driver`` with errors raised. ``api`` is the module itself, for its enumerations and structs."""

    def __init__(self, api: ModuleType) -> None:
        self.api: Any = api
        self.pid = os.getpid()  # CUDA does not survive a fork
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}  # retained, guarded by _lock

    def call(self, name: str, *args: Any, device: int | None = None, nbytes: int | None = None) -> Any:
        """Call a function of the driver; its result, a tuple if there are several, None if there is none.

        Raises
        ------
        DeviceError
            With the driver's name for what went wrong.
        """
        on = None if device is None else f"cuda:{device}"
        try:
            code, *values = getattr(self.api, name)(*args)
        except (AttributeError, RuntimeError) as error:  # the driver is missing, or older than the function
            raise DeviceError(
                f"{name} is not to be had: {error}. Hint: it takes NVIDIA's driver (libcuda.so.1), as new as "
                "cuda-bindings wants it",
                op=name,
                device=on,
            ) from None
        if int(code) != 0:
            what = "" if nbytes is None else f" for {nbytes} bytes"
            where = "" if on is None else f" on {on}"
            out_of_memory = int(code) == int(self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            hint = ". Hint: nvidia-smi shows who uses the device's memory" if out_of_memory else ""
            raise DeviceError(
                f"{name} failed{what}{where}: {getattr(code, 'name', 'CUresult')} ({int(code)}){hint}",
                op=name,
                device=on,
                nbytes=nbytes,
                code=int(code),
            )
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def attribute(self, name: str, device: int) -> int:
        """A device's attribute, named without its ``CU_DEVICE_ATTRIBUTE_``."""
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", which, self.handle(device), device=device))

    def handle(self, device: int) -> Any:
        """The driver's own number of a device."""
        return self.call("cuDeviceGet", device, device=device)

    def num_devices(self) -> int:
        """How many devices this process sees."""
        return int(self.call("cuDeviceGetCount"))

    def uuid(self, device: int) -> str:
        """What names a device in every process, as hexadecimal digits."""
        return bytes(self.call("cuDeviceGetUuid", self.handle(device), device=device).bytes).hex()

    def index_of(self, uuid: str) -> int:
        """The number of the device with this UUID.

        Raises
        ------
        DeviceError
            If this process does not see it.
        """
        for index in range(self.num_devices()):
            if self.uuid(index) == uuid:
                return index
        raise DeviceError(
            f"the GPU with UUID {uuid} is none of the {self.num_devices()} that this process sees. Hint: "
            "CUDA_VISIBLE_DEVICES of the process with the engine must show the devices of all its ranks",
            op="cuDeviceGetUuid",
        )

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make the device's primary context current on this thread, and put back what was."""
        with self._lock:
            # Kept until the process ends: the last one to release it destroys it, with everything in it.
            if device not in self._contexts:
                self._contexts[device] = self.call("cuDevicePrimaryCtxRetain", self.handle(device), device=device)
            context = self._contexts[device]
        self.call("cuCtxPushCurrent", context, device=device)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent", device=device)


@functools.cache
def _load(pid: int) -> Driver:
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise DeviceError(
            f"CUDA needs the Python package cuda-bindings: {error}. Hint: pip install 'fabric_kv[cuda]'", op="import"
        ) from None
    driver = Driver(api)
    driver.call("cuInit", 0)
    return driver


def load_driver() -> Driver:
    """The driver, initialised. What failed is tried again at the next call.

    Raises
    ------
    DeviceError
        If cuda-bindings or the driver is missing, with what to install; or there is no device.
    """
    return _load(os.getpid())


def device_index(device: str | int) -> int:
    """The number that ``"cuda:N"``, ``"cuda"`` or N means, if there is such a device.

    Raises
    ------
    ConfigError
        If it means none, or there is no such device.
    DeviceError
        As :func:`load_driver`.
    """
    if isinstance(device, str):
        found = _DEVICE.fullmatch(device)
        index = int(found[1] or 0) if found else -1
    else:
        index = -1 if isinstance(device, bool) or not hasattr(device, "__index__") else operator.index(device)
    if index < 0:
        raise ConfigError(f"device={device!r} is neither 'cpu' nor a CUDA device: 'cuda:N' or N")
    count = load_driver().num_devices()
    if index >= count:
        raise ConfigError(f"device={device!r} does not exist: this process sees {count} CUDA device(s)")
    return index
