"""Memory for KV caches that processes can share: on the host and on CUDA devices.

>>> cache = allocate("cpu", 64 << 20)                          # or "cuda:0"
>>> pages = cache.array.reshape(-1, 4096)                      # or torch.from_dlpack(cache)
>>> server = BufferServer("/run/kv/rank0", {"layer0": cache})  # in the process of a rank
>>> buffers = import_buffers("/run/kv/rank0")                  # in the process with the engine
>>> with Engine("tcp", nics=["127.0.0.1"]) as engine, buffers["layer0"].region(engine) as region:
...     for_a_peer = region.remote.to_bytes()
>>> del pages; buffers.close(); server.close(); cache.close()  # arrays first: no memory is unmapped under its users
"""

from __future__ import annotations

from typing import SupportsIndex

from .buffer import BufferInfo, Exported, SharedBuffer
from .device import DeviceBuffer
from .host import HostBuffer
from .imports import ImportedBuffers, import_buffers
from .server import BufferServer
from .visibility import flush_remote_writes
from .words import WatchWord

__all__ = [
    "BufferInfo",
    "BufferServer",
    "DeviceBuffer",
    "Exported",
    "HostBuffer",
    "ImportedBuffers",
    "SharedBuffer",
    "WatchWord",
    "allocate",
    "flush_remote_writes",
    "import_buffers",
]


def allocate(device: str | int, nbytes: SupportsIndex) -> HostBuffer | DeviceBuffer:
    """Allocate memory that can be registered with NICs and given to other processes.

    Parameters
    ----------
    device : str or int
        ``"cpu"``, or ``"cuda:N"`` or N for a CUDA device, as this process counts them.
    nbytes : int
        Any positive number; what is taken from the system is a multiple of its pages.

    Raises
    ------
    ConfigError
        If there is no such device, or ``nbytes`` is out of range.
    AllocationError
        If there is not so much memory.
    DeviceError
        If CUDA cannot be used, with what is missing.
    """
    if device == "cpu":
        return HostBuffer.allocate(nbytes)
    return DeviceBuffer.allocate(device, nbytes)
