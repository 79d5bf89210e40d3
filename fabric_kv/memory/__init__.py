"""Memory for KV caches that processes can share.

>>> with allocate("cpu", 64 << 20) as cache, Engine("tcp", nics=["127.0.0.1"]) as engine:
...     pages = cache.array.reshape(-1, 4096)  # or torch.from_dlpack(cache)
...     with cache.region(engine) as region: ...
"""

from __future__ import annotations

from ..errors import ConfigError
from .buffer import BufferInfo, Exported, SharedBuffer
from .host import HostBuffer

__all__ = ["BufferInfo", "Exported", "HostBuffer", "SharedBuffer", "allocate"]


def allocate(device: str | int, nbytes: int) -> HostBuffer:
    """Allocate memory that can be registered with NICs and given to other processes.

    Parameters
    ----------
    device : str
        ``"cpu"``.
    nbytes : int
        Any positive number; what is taken from the system is a multiple of its pages.

    Raises
    ------
    ConfigError
        If there is no such kind of device, or ``nbytes`` is out of range.
    AllocationError
        If there is not so much memory.
    """
    if device != "cpu":
        raise ConfigError(f"device={device!r} is neither 'cpu' nor a CUDA device")
    return HostBuffer.allocate(nbytes)
