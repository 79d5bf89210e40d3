"""One engine without a network: what it registers, whom it knows, and what it has in flight.

>>> engine = MemoryFabric(seed=7).engine()
>>> memory = engine.register(numpy.zeros(4096, "u1"))
>>> engine.write(engine.add_peer(their_address), memory, 0, their_region, 0, 4096, token=their_token)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..config import EngineOptions
from ..errors import ClosedError, ConfigError, ProtocolError, TransferError, WouldBlockError
from ..regions import CounterToken, EngineAddress, RemoteRegion
from ..transfers import Counter, Fence, MemoryRegion, PagePiece, Peer, Transfer
from .counters import Counters
from .handles import MemoryPrepared, MemoryTransfer, MemoryWatch
from .memory import Memory
from .writes import Write, expand

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepared import Prepared, PreparedPiece, Watch
    from .fabric import MemoryFabric

__all__ = ["MemoryEngine"]


class MemoryEngine:
    """One engine of a MemoryFabric, with the calls of :class:`~fabric_kv.engine.Engine` that the messenger uses."""

    def __init__(self, fabric: MemoryFabric, options: EngineOptions) -> None:
        self.fabric = fabric
        self.options = options
        self.epoch = fabric.random.randbytes(16)
        self.address = EngineAddress(self.epoch, ((b"memory",),)).to_bytes()
        self.closed = False
        self.dead = False
        self.monitored: set[bytes] = set()
        self._counters = Counters(options.num_counters, self._announce)
        self.slots = self._counters.slots
        self._memory = Memory(self.epoch)
        self._peers: dict[bytes, Peer] = {}
        self._open: dict[Transfer, Write | None] = {}  # None: a message
        self._on_message: Callable[[bytes, bytes], None] | None = None
        self._on_lost: Callable[[bytes, str], None] | None = None
        self._on_held_up: Callable[[list[Transfer], str], None] | None = None
        self._early: list[tuple[bytes, bytes]] = []

    # --- Memory and peers ---------------------------------------------------------------------------------------------

    def register(self, buffer: NDArray[Any], *, group: int = 0) -> MemoryRegion:
        """As Engine.register, for NumPy arrays."""
        self._check_open()
        array = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        return MemoryRegion(cast("Engine", self), cast("Any", None), buffer, self._memory.register(array, group))

    def add_peer(self, address: bytes, *, monitor: bool = False) -> Peer:
        """As Engine.add_peer."""
        self._check_open()
        epoch = EngineAddress.from_bytes(address).epoch
        if monitor:
            self.monitored.add(epoch)
        return self._peers.setdefault(epoch, Peer(cast("Any", None), epoch))

    @property
    def fence_means(self) -> str:
        """As Engine.fence_means."""
        return "registrations" if self.fabric.prove_fences > 0 else "none"

    def fence(self, peer: Peer, *, timeout_s: float = 1.0) -> Fence:
        """As Engine.fence; whether it is proven is drawn from the seed, and then the peer's keys are good no more."""
        with self.fabric._changed:
            self._check_open()
            self.remove_peer(peer)
            proven = self.fabric.coin(self.fabric.prove_fences)
            if proven:
                self._memory.take_back(peer.epoch)
            return Fence(proven, self.fence_means, "drawn from the seed")

    def _share(self, region: MemoryRegion, peer: Peer) -> RemoteRegion:
        with self.fabric._changed:
            self._check_open()
            return self._memory.share(region.remote, peer.epoch)

    def remove_peer(self, peer: Peer) -> None:
        """As Engine.remove_peer."""
        self.monitored.discard(peer.epoch)
        self._peers.pop(peer.epoch, None)

    # --- Moving data --------------------------------------------------------------------------------------------------

    def write(
        self,
        peer: Peer,
        src: MemoryRegion,
        src_offset: int,
        dst: RemoteRegion,
        dst_offset: int,
        nbytes: int,
        *,
        token: CounterToken | None = None,
    ) -> Transfer:
        """As Engine.write."""
        return self.submit(peer, [PagePiece(src, src_offset, 0, dst, dst_offset, 0, nbytes, [0], [0])], token=token)

    def submit(
        self,
        peer: Peer,
        pieces: Iterable[PagePiece],
        *,
        token: CounterToken | None = None,
        watch: Watch | None = None,
        step: int = 0,
    ) -> Transfer:
        """As Engine.submit."""
        with self.fabric._changed:
            copies = [copy for piece in pieces for copy in expand(piece)]
            for copy in copies:
                copy.check()
            transfer = self._open_transfer(peer, sum(copy.nbytes for copy in copies))
            write = self._open[transfer] = Write(self, transfer, copies, token)
            write.start(cast("MemoryWatch | None", watch), step)
            return transfer

    def prepare(self, peer: Peer, pieces: Iterable[PreparedPiece]) -> Prepared:
        """As Engine.prepare."""
        return cast("Prepared", MemoryPrepared(self, peer, list(pieces)))

    def connect_rails(self, peer: Peer, dst: RemoteRegion, *, group: int = 0) -> Transfer:
        """As Engine.connect_rails."""
        with self.fabric._changed:
            transfer = self._open_transfer(peer, 0)
            write = self._open[transfer] = Write(self, transfer, [], None)
            write.start()
            return transfer

    def watch(self) -> Watch:
        """As Engine.watch, for words that ``set`` alone writes."""
        return cast("Watch", MemoryWatch(self.fabric))

    def send(self, peer: Peer, payload: bytes) -> Transfer:
        """As Engine.send."""
        if len(payload) > self.options.max_message_bytes:
            raise ConfigError(f"a message of {len(payload)} bytes is above max_message_bytes")
        with self.fabric._changed:
            transfer = self._open_transfer(peer, len(payload))
            self._open[transfer] = None
            self.fabric.add(partial(self._carry, transfer, peer.epoch, bytes(payload)))
            return transfer

    def on_message(self, fn: Callable[[bytes, bytes], None] | None) -> None:
        """As Engine.on_message."""
        self._on_message = fn
        if fn is None:
            return
        early, self._early = self._early, []
        for sender, payload in early:
            self.fabric.add(partial(self.take_message, sender, payload))

    def on_peer_lost(self, fn: Callable[[bytes, str], None] | None) -> None:
        """As Engine.on_peer_lost."""
        self._on_lost = fn

    def on_held_up(self, fn: Callable[[list[Transfer], str], None] | None) -> None:
        """As Engine.on_held_up; see ``MemoryFabric.hold_up``."""
        self._on_held_up = fn

    # --- Counting -----------------------------------------------------------------------------------------------------

    def counter(self, *, unit_bytes: int, expected_units: int | None = None, group: int = 0) -> Counter:
        """As Engine.counter."""
        with self.fabric._changed:
            self._check_open()
            return self._counters.take(cast("Engine", self), unit_bytes, expected_units, group)

    @property
    def counters_in_use(self) -> int:
        """Slots that are neither free nor poisoned."""
        return self._counters.num_in_use

    @property
    def stale_units(self) -> int:
        """How often data arrived for a counter that is no more."""
        return self._counters.stale_units

    def close(self) -> None:
        """As Engine.close: nothing lands here any more, and nothing leaves."""
        with self.fabric._changed:
            if self.closed:
                return
            self.closed = True
            transfers, self._open = list(self._open), {}
            counters = [slot.counter for slot in self.slots if slot.counter is not None]
        for item in (*transfers, *counters):
            item._fail(ClosedError(f"the engine was closed while {type(item).__name__} was open"))

    # --- What arrives; inside fabric.step() ---------------------------------------------------------------------------

    def take_message(self, sender: bytes, payload: bytes) -> None:
        """Deliver a message here, whoever sent it: tests play hostile peers with it."""
        if self.closed or self.dead:
            return
        if self._on_message is None:
            self._early.append((sender, payload))
        else:
            self.fabric.call_soon(partial(self._on_message, sender, payload))

    def tell_lost(self, epoch: bytes) -> None:
        """Report a peer lost."""
        if self._on_lost is not None and not self.closed and not self.dead:
            self.fabric.call_soon(partial(self._on_lost, epoch, "silent for too long"))

    def tell_held_up(self) -> None:
        """Report writes with pieces in flight."""
        with self.fabric._changed:
            writes = [write for write in self._open.values() if write is not None and write.is_in_flight]
        if self._on_held_up is not None and not self.closed and not self.dead:
            self.fabric.call_soon(partial(self._on_held_up, [write.transfer for write in writes], "nothing completes"))

    def _carry(self, transfer: Transfer, to: bytes, payload: bytes) -> None:
        target = self.fabric.engines.get(to)
        if target is None or target.closed or target.dead:
            self._end(transfer, TransferError("the peer is gone", peer=to.hex()))
            return
        if not self.fabric.coin(self.fabric.drop_messages):
            target.take_message(self.epoch, payload)
            if self.fabric.coin(self.fabric.duplicate_messages):
                self.fabric.add(partial(target.take_message, self.epoch, payload))
        self.fabric.add(partial(self._end, transfer, None))

    def _land(self, dst: RemoteRegion, at: int, data: NDArray[np.uint8], token: CounterToken | None) -> None:
        if self.closed or self.dead or not self._memory.opens(dst):
            return
        self._memory.of(dst)[at : at + data.size] = data
        if token is None:
            return
        if self.fabric.lose_counts > 0:
            self.fabric.lose_counts -= 1
            return
        self._counters.count(token, data.size)

    def _announce(self, counter: Counter, error: ProtocolError | None) -> None:
        self.fabric.add(partial(self._fire, counter, error))

    def _fire(self, counter: Counter, error: ProtocolError | None) -> None:
        if not self.dead:
            self.fabric.call_soon(partial(counter._succeed, None) if error is None else partial(counter._fail, error))

    def _end(self, transfer: Transfer, error: TransferError | None) -> None:
        if self._open.pop(transfer, self) is self or self.dead:
            return
        self.fabric.call_soon(partial(transfer._succeed, None) if error is None else partial(transfer._fail, error))

    # --- What Transfer and Counter call -------------------------------------------------------------------------------

    def _open_transfer(self, peer: Peer, nbytes: int) -> Transfer:
        self._check_open()
        if self._peers.get(peer.epoch) is not peer:
            raise ClosedError("the peer was removed")
        if len(self._open) >= self.options.max_transfers:
            raise WouldBlockError("too many transfers", limit=self.options.max_transfers)
        return MemoryTransfer(cast("Engine", self), peer, nbytes)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the engine is closed")

    def _cancel(self, transfer: Transfer) -> None:
        write = self._open.get(transfer)
        if write is not None:
            with self.fabric._changed:
                write.cancel()

    def _arm(self, counter: Counter, expected_units: int) -> None:
        with self.fabric._changed:
            self._counters.arm(counter, expected_units)

    def _received(self, counter: Counter) -> int:
        return self._counters.received(counter)

    def _release(self, counter: Counter, quiescent: bool | None) -> None:
        with self.fabric._changed:
            if counter._released:
                return
            counter._released = True
            self._counters.release(counter, quiescent)
        counter._fail(ClosedError("the counter was released before it fired"))
