"""The regions of an engine: memory that is registered once for all who ask, and kept while a NIC may touch it.

>>> registry = Registry(native, dispatcher)
>>> region = registry.register(engine, locate(array), group=0)
>>> registry.register(engine, locate(array), group=0)        # another region over the same registration

It holds no reference to the Engine, so that a forgotten engine is closed by the garbage collector.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .buffers import Buffer, is_same, locate
from .errors import ClosedError, ConfigError, RegistrationError
from .memory.buffer import SharedBuffer
from .memory.staging import StagingFigures
from .memory.visibility import Visibility
from .regions import RemoteRegion
from .transfers import MemoryRegion, Peer

if TYPE_CHECKING:
    from . import _native
    from .dispatcher import Dispatcher
    from .engine import Engine

__all__ = ["Registry"]

# What NICs may still touch that could not be closed: buffers, and what transfers refer to.
_kept: dict[_native.Engine, list[object]] = {}


def _to_remote(keys: _native._Keys) -> RemoteRegion:
    """What a peer is told, from what the core says of a region."""
    epoch, group, nbytes, ends, rails = keys
    return RemoteRegion(epoch, group, nbytes, tuple(ends), tuple(tuple(rail) for rail in rails))


def _check_device(found: Buffer, device: int) -> None:
    if found.device not in ("cuda", f"cuda:{device}"):
        raise ConfigError(f"the memory at {found.address:#x} is on cuda:{device}, not on {found.device}")


class Registry:
    """Registers memory for one engine.

    Attributes
    ----------
    staging : StagingFigures
        What the staging of device memory has cost.
    """

    def __init__(self, native: _native.Engine, dispatcher: Dispatcher) -> None:
        self.staging = StagingFigures()
        self._native = native
        self._dispatcher = dispatcher
        self._by_place: weakref.WeakValueDictionary[tuple[int, int, int], MemoryRegion] = weakref.WeakValueDictionary()
        self._regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        self._visibility = Visibility()
        self._first_rails: list[dict[str, Any]] = []  # of each group, once they were asked for

    def register(self, engine: Engine, found: Buffer, group: int, staging: str | None = None) -> MemoryRegion:
        """See ``Engine.register``."""
        if staging is not None:
            return self._register_staged(engine, found, group, staging)
        key = (found.address, found.nbytes, group)
        native = self._registered_before(key, found)
        if native is None and found.device == "cpu":
            native = self._native.register_region(found.address, found.nbytes, group)
        elif native is None:
            native = self._register_device(found, group)
        region = MemoryRegion(engine, native, found.owner, _to_remote(self._native.describe_region(native)))
        if found.device != "cpu":
            region._device_address = found.address
        self._by_place[key] = region
        with self._dispatcher.lock:
            self._regions.add(region)
            if self._native in _kept:  # close() gave up meanwhile
                _kept[self._native].append(found.owner)
        return region

    def share(self, region: MemoryRegion, peer: Peer) -> RemoteRegion:
        """See ``MemoryRegion.remote_for``."""
        if region._device_address is None:
            return _to_remote(self._native.share_region(region._native, peer._native, -1, []))
        if region.closed:
            raise ClosedError("the region was deregistered")
        from .memory.ranges import device_parts

        # As at its registration: dma-bufs of its own, and the device's context current for who goes by the address.
        with device_parts(region._device_address, region.nbytes) as (device, parts):
            return _to_remote(self._native.share_region(region._native, peer._native, device, parts))

    def keep(self) -> None:
        """Hold all buffers for as long as the process lives: a NIC that could not be closed may touch them."""
        with self._dispatcher.lock:
            transfers = self._dispatcher.transfers.values()
            _kept[self._native] = [*(r._owner for r in self._regions), *(t._keep for t in transfers)]

    def let_go(self) -> None:
        """Undo ``keep``: the NICs are closed after all."""
        _kept.pop(self._native, None)

    def _registered_before(self, key: tuple[int, int, int], found: Buffer) -> _native.Region | None:
        before = self._by_place.get(key)
        # The region holds its buffer, so that a buffer which is the same object has its memory still.
        if before is None or not is_same(before._owner, found.owner):
            return None
        if found.device != "cpu" and not isinstance(found.owner, SharedBuffer):
            return None  # engines put a sleeping model's tensors on other memory, at the same addresses
        try:
            return self._native.register_again(before._native)
        except ClosedError:  # deregistered meanwhile, or the engine is closed
            return None

    def _register_staged(self, engine: Engine, found: Buffer, group: int, staging: str) -> MemoryRegion:
        if staging != "host" or found.device == "cpu":
            raise ConfigError(f"staging={staging!r} of memory on {found.device}: only 'host' of a CUDA device's memory")
        from .memory.staging import Staging

        stage = Staging(found.address, found.nbytes, found.owner, self.staging)
        _check_device(found, stage.device)
        region = self.register(engine, locate(stage.arrivals), group)
        region._staging = stage
        return region

    def _register_device(self, found: Buffer, group: int) -> _native.Region:
        if not self._first_rails:
            # Once: a description goes through all regions.
            self._first_rails = [each["rails"][0] for each in self._native.describe()]
        rail = self._first_rails[group]
        if not rail["device_memory"]:
            where = found.owner.device if isinstance(found.owner, SharedBuffer) else found.device
            raise RegistrationError(
                f"memory on {where} cannot be registered: provider {rail['provider']} was opened without device "
                "memory. Hint: EngineOptions(device_memory=True)",
                op="register",
                provider=rail["provider"],
                nic=rail["domain"],
            )
        from .memory.ranges import device_parts

        with device_parts(found.address, found.nbytes) as (device, parts):
            _check_device(found, device)
            native = self._native.register_device(found.address, device, parts, group)
        self._visibility.add(group, device)
        self._dispatcher.before_ready = self._visibility.flush
        return native
