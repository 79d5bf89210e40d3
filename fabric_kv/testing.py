"""An engine without a network, for tests of what is built on engines: seeded, adversarial, and with data that moves.

>>> fabric = MemoryFabric(seed=7)
>>> prefill_engine, decode_engine = fabric.engine(), fabric.engine()
>>> fabric.run()                                   # until nothing is in flight; or fabric.start() for a thread

Everything in flight (each page and row of a write, each completion, counter and message) waits in one pool, and
``step`` picks from it at random: nothing arrives in order, sources are read as late as they may be, and a write that
was cancelled or has failed may still land until its transfer ends. The same seed and the same calls give the same run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from .config import EngineOptions
from .errors import (
    ClosedError,
    ConfigError,
    ProtocolError,
    TransferCancelledError,
    TransferError,
    WouldBlockError,
)
from .regions import CounterToken, EngineAddress, RemoteRegion
from .transfers import Counter, Fence, MemoryRegion, PagePiece, Peer, Transfer

if TYPE_CHECKING:
    from .engine import Engine
    from .prepared import Prepared, PreparedPiece, Watch

__all__ = ["MemoryEngine", "MemoryFabric"]

Event = Callable[[], object]


class MemoryFabric:
    """The pool of what is in flight between the engines of one test.

    Parameters
    ----------
    seed : int
        Decides every order and every coin.

    Attributes
    ----------
    fail_writes : int
        So many of the next pieces of writes end in an error; each of them may or may not land later.
    lose_counts : int
        So many of the next pieces that land are not counted, as where an immediate is lost.
    early_writes : int
        So many of the next pieces are reported as done although they have not landed; they do in :meth:`land_early`.
    hold_writes : bool
        While True nothing of a write moves: it is accepted and stays in flight.
    drop_messages : float
        Share of control messages that get lost on the way, in silence, as no reliable provider would.
    duplicate_messages : float
        Share of control messages that arrive twice.
    prove_fences : float
        Share of fences that are proven, by keys that are taken back.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.fail_writes = 0
        self.lose_counts = 0
        self.early_writes = 0
        self.hold_writes = False
        self.drop_messages = 0.0
        self.duplicate_messages = 0.0
        self.prove_fences = 0.0
        self.engines: dict[bytes, MemoryEngine] = {}
        self._events: list[Event] = []
        self._held: list[Event] = []
        self._early: list[Event] = []
        self._calls: list[Event] = []  # Into user code, at the end of a step.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopping = False

    def engine(self, options: EngineOptions = EngineOptions()) -> Engine:
        """A new engine. It offers what the messenger uses of Engine, and is typed as one."""
        made = MemoryEngine(self, options)
        self.engines[made.epoch] = made
        return cast("Engine", made)

    def kill(self, engine: Engine) -> None:
        """End an engine's process: it does nothing any more, but what it has in flight may still land."""
        victim = self.engines[engine.epoch]
        victim.dead = True
        self.lose(engine)

    def lose(self, engine: Engine) -> None:
        """Tell everyone who monitors the engine that it has fallen silent."""
        for other in self.engines.values():
            if engine.epoch in other.monitored and not other.dead:
                other.monitored.discard(engine.epoch)
                self.add(partial(other.tell_lost, engine.epoch))

    def hold_up(self, engine: Engine) -> None:
        """Tell an engine that what it has in flight now is held up; ``hold_writes`` makes it true."""
        self.engines[engine.epoch].tell_held_up()

    def land_early(self) -> None:
        """Let what was reported as done before it had landed arrive, sometime from now on."""
        with self._changed:
            early, self._early = self._early, []
            for event in early:
                self.add(event)

    # --- The pool -----------------------------------------------------------------------------------------------------

    def add(self, event: Event, *, write: bool = False) -> None:
        """Put something in flight."""
        with self._changed:
            (self._held if write and self.hold_writes else self._events).append(event)
            self._changed.notify()

    def call_soon(self, call: Event) -> None:
        """Run user code at the end of this step, or of the next one."""
        self._calls.append(call)

    def step(self) -> bool:
        """Let one thing arrive, any one; False if nothing is in flight."""
        with self._changed:
            if not self.hold_writes and self._held:
                self._events += self._held
                self._held.clear()
            if self._events:
                index = self.random.randrange(len(self._events))
                self._events[index], self._events[-1] = self._events[-1], self._events[index]
                self._events.pop()()
            elif not self._calls:
                return False
            calls, self._calls = self._calls, []
        for call in calls:  # Without the lock: user code may wait for a thread that wants it.
            call()
        return True

    def run(self, limit: int = 1_000_000) -> int:
        """Let everything arrive, up to ``limit`` things; how many there were."""
        count = 0
        while count < limit and self.step():
            count += 1
        return count

    def start(self) -> None:
        """Let things arrive on a thread of their own, until ``stop``."""
        self._thread = threading.Thread(target=self._pump, name="memory-fabric", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is in flight stays there."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10.0)

    def _pump(self) -> None:
        while not self._stopping:
            if not self.step():
                with self._changed:
                    # Bounded, so that a change of hold_writes is noticed.
                    self._changed.wait(0.01)

    def coin(self, share: float) -> bool:
        """True with probability ``share``."""
        return self.random.random() < share


class _Write:
    """A write in flight: its pieces, of which each lands, vanishes or fails on its own."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.waiting: set[int] = set()
        self.parked: set[int] = set()  # of these: not posted, since their layers are not done
        self.cancelled = False
        self.dropped = 0
        self.error: TransferError | None = None
        self.num_bytes = 0


class _MemoryWatch:
    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.word = 0
        self.waiting: list[tuple[int, Event]] = []

    @property
    def step(self) -> int:
        return self.word >> 16

    def set(self, step: int, layers: int) -> None:
        with self.fabric._changed:
            self.word = _word(step, layers)
            ready = [go for wanted, go in self.waiting if wanted <= self.word]
            self.waiting = [(wanted, go) for wanted, go in self.waiting if wanted > self.word]
            for go in ready:
                go()


class _Slot:
    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.generation = 0
        self.expected: int | None = None
        self.received = 0
        self.counter: Counter | None = None
        self.poisoned = False


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
        self.stale_units = 0
        self.slots: list[_Slot] = []
        self._free_slots: list[int] = []
        self._peers: dict[bytes, Peer] = {}
        self._regions: list[NDArray[np.uint8]] = []  # by key
        self._keys_of: dict[bytes, dict[int, int]] = {}  # by peer: region's key -> its own
        self._closed_keys: set[int] = set()
        self._open: dict[Transfer, _Write | None] = {}
        self._on_message: Callable[[bytes, bytes], None] | None = None
        self._on_lost: Callable[[bytes, str], None] | None = None
        self._on_held_up: Callable[[list[Transfer], str], None] | None = None
        self._early: list[tuple[bytes, bytes]] = []

    # --- Memory and peers ---------------------------------------------------------------------------------------------

    def register(self, buffer: NDArray[Any], *, group: int = 0) -> MemoryRegion:
        """As Engine.register, for NumPy arrays."""
        self._check_open()
        self._regions.append(np.frombuffer(memoryview(buffer).cast("B"), np.uint8))
        remote = RemoteRegion(self.epoch, group, buffer.nbytes, (buffer.nbytes,), (((0, len(self._regions) - 1),),))
        return MemoryRegion(cast("Engine", self), cast("Any", None), buffer, remote)

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
                self._closed_keys.update(self._keys_of.pop(peer.epoch, {}).values())
            return Fence(proven, self.fence_means, "drawn from the seed")

    def _share(self, region: MemoryRegion, peer: Peer) -> RemoteRegion:
        with self.fabric._changed:
            self._check_open()
            original = region.remote.rails[0][0][1]
            keys = self._keys_of.setdefault(peer.epoch, {})
            if original not in keys:
                keys[original] = len(self._regions)
                self._regions.append(self._regions[original])
            rails = (((0, keys[original]),),)
            return RemoteRegion(self.epoch, region.remote.group, region.nbytes, (region.nbytes,), rails)

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
            copies: list[tuple[MemoryRegion, int, RemoteRegion, int, int]] = []
            wants: list[int] = []
            for piece in pieces:
                copies += _expand(piece)
                wants += [_word(step, piece.layer) if piece.layer else 0] * (len(copies) - len(wants))
            for src, src_at, dst, dst_at, nbytes in copies:
                if src_at < 0 or src_at + nbytes > src.nbytes or dst_at < 0 or dst_at + nbytes > dst.nbytes:
                    raise ConfigError(f"bytes [{src_at}, +{nbytes}) to [{dst_at}, +{nbytes}) leave their regions")
            transfer = self._open_transfer(peer, sum(copy[4] for copy in copies))
            write = self._open[transfer] = _Write(transfer)
            write.waiting = set(range(len(copies)))
            gate = cast("_MemoryWatch | None", watch)
            for index, (copy, wanted) in enumerate(zip(copies, wants, strict=True)):
                move = partial(self._move, write, index, copy, token)
                if gate is not None and gate.word < wanted:
                    write.parked.add(index)
                    gate.waiting.append((wanted, partial(self._unpark, write, index, move)))
                else:
                    self.fabric.add(move, write=True)
            if not copies:
                self.fabric.add(partial(self._retire, write))
            return transfer

    def prepare(self, peer: Peer, pieces: Iterable[PreparedPiece]) -> Prepared:
        """As Engine.prepare."""
        return cast("Prepared", _MemoryPrepared(self, peer, list(pieces)))

    def connect_rails(self, peer: Peer, dst: RemoteRegion, *, group: int = 0) -> Transfer:
        """As Engine.connect_rails."""
        with self.fabric._changed:
            transfer = self._open_transfer(peer, 0)
            write = self._open[transfer] = _Write(transfer)
            self.fabric.add(partial(self._retire, write))
            return transfer

    def watch(self) -> Watch:
        """As Engine.watch, for words that ``set`` alone writes."""
        return cast("Watch", _MemoryWatch(self.fabric))

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
            if self._free_slots:
                index = self._free_slots.pop(0)
            elif len(self.slots) < self.options.num_counters:
                index = len(self.slots)
                self.slots.append(_Slot(unit_bytes))
            else:
                raise WouldBlockError("all counters are in use", limit=self.options.num_counters)
            slot = self.slots[index]
            slot.unit_bytes, slot.expected, slot.received = unit_bytes, expected_units, 0
            slot.counter = Counter(cast("Engine", self), CounterToken(index, slot.generation, unit_bytes, group))
            if expected_units == 0:
                self.fabric.add(partial(self._fire, slot.counter, None))
            return slot.counter

    @property
    def counters_in_use(self) -> int:
        """Slots that are neither free nor poisoned."""
        return sum(slot.counter is not None and not slot.poisoned for slot in self.slots)

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
            writes = [write for write in self._open.values() if write is not None and write.waiting - write.parked]
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

    def _move(
        self,
        write: _Write,
        index: int,
        copy: tuple[MemoryRegion, int, RemoteRegion, int, int],
        token: CounterToken | None,
    ) -> None:
        """One piece reaches its end: it lands, or was never posted, or fails."""
        if self.closed or index not in write.waiting:
            return
        src, src_at, dst, dst_at, nbytes = copy
        target = self.fabric.engines.get(dst.epoch)
        stopped = write.cancelled or write.error is not None or self.dead
        if stopped and self.fabric.coin(0.5):  # Whether it had been posted before the cancel, the error or the death.
            write.dropped += 1
            self._moved(write, index)
            return
        if target is None or target.closed or target.dead:
            write.error = write.error or TransferError("the peer is gone", peer=dst.epoch.hex())
        elif dst.rails[0][0][1] in target._closed_keys:
            write.error = write.error or TransferError("the key is good no more", peer=dst.epoch.hex())
        elif self.fabric.fail_writes > 0:
            self.fabric.fail_writes -= 1
            write.error = write.error or TransferError("an injected error", peer=dst.epoch.hex())
            if self.fabric.coin(0.5):
                # The sender is told of a failure, yet the bytes are on their way.
                data = self._regions[src.remote.rails[0][0][1]][src_at : src_at + nbytes].copy()
                self.fabric.add(partial(target._land, dst, dst_at, data, token))
        else:
            data = self._regions[src.remote.rails[0][0][1]][src_at : src_at + nbytes]
            if self.fabric.early_writes > 0:
                self.fabric.early_writes -= 1
                self.fabric._early.append(partial(target._land, dst, dst_at, data.copy(), token))
            else:
                target._land(dst, dst_at, data, token)
            write.num_bytes += nbytes
        self._moved(write, index)

    def _unpark(self, write: _Write, index: int, move: Event) -> None:
        if index in write.parked:
            write.parked.discard(index)
            self.fabric.add(move, write=True)

    def _drop_parked(self, write: _Write) -> None:
        """What waits for a layer is not posted after a cancel or an error."""
        if write.parked:
            write.dropped += len(write.parked)
            write.waiting -= write.parked
            write.parked.clear()
            if not write.waiting:
                self.fabric.add(partial(self._retire, write))

    def _moved(self, write: _Write, index: int) -> None:
        write.waiting.discard(index)
        if write.error is not None:
            write.waiting -= write.parked
            write.parked.clear()
        if not write.waiting:
            self.fabric.add(partial(self._retire, write))

    def _retire(self, write: _Write) -> None:
        error: TransferError | None = write.error
        if error is None and write.dropped:
            error = TransferCancelledError("cancelled", bytes_done=write.num_bytes)
        self._end(write.transfer, error)

    def _land(self, dst: RemoteRegion, at: int, data: NDArray[np.uint8], token: CounterToken | None) -> None:
        if self.closed or self.dead or dst.rails[0][0][1] in self._closed_keys:
            return
        self._regions[dst.rails[0][0][1]][at : at + data.size] = data
        if token is None:
            return
        if self.fabric.lose_counts > 0:
            self.fabric.lose_counts -= 1
            return
        slot = self.slots[token.slot] if token.slot < len(self.slots) else None
        if slot is None or slot.counter is None or slot.generation != token.generation:
            self.stale_units += 1
            return
        before = slot.received
        slot.received += -(-data.size // token.unit_bytes)
        if slot.expected is None or slot.received < slot.expected:
            return
        if slot.received == slot.expected:
            self.fabric.add(partial(self._fire, slot.counter, None))
        elif before <= slot.expected:
            self.fabric.add(partial(self._fire, slot.counter, ProtocolError("more units arrived than were expected")))

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
        return _MemoryTransfer(cast("Engine", self), peer, nbytes)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the engine is closed")

    def _cancel(self, transfer: Transfer) -> None:
        write = self._open.get(transfer)
        if write is not None:
            write.cancelled = True
            with self.fabric._changed:
                self._drop_parked(write)

    def _arm(self, counter: Counter, expected_units: int) -> None:
        with self.fabric._changed:
            slot = self.slots[counter.token.slot]
            slot.expected = expected_units
            if slot.received == expected_units:
                self.fabric.add(partial(self._fire, counter, None))

    def _received(self, counter: Counter) -> int:
        return 0 if counter._released else self.slots[counter.token.slot].received

    def _release(self, counter: Counter, quiescent: bool | None) -> None:
        with self.fabric._changed:
            if counter._released:
                return
            counter._released = True
            slot = self.slots[counter.token.slot]
            fired = counter.done() and counter.exception(0) is None
            if fired or quiescent:
                slot.counter = None
                slot.generation = (slot.generation + 1) % 32
                self._free_slots.append(counter.token.slot)
            else:
                slot.poisoned = True
        counter._fail(ClosedError("the counter was released before it fired"))


class _MemoryPrepared(NamedTuple):
    engine: MemoryEngine
    peer: Peer
    pieces: list[PreparedPiece]

    def submit(self, lists: Sequence[tuple[Any, Any]], **options: Any) -> Transfer:
        """As Prepared.submit."""
        pieces = [PagePiece(*piece[:7], *lists[piece.lists], *piece[7:11]) for piece in self.pieces]
        return self.engine.submit(self.peer, pieces, **options)


class _MemoryTransfer(Transfer):
    def __init__(self, engine: Engine, peer: Peer, nbytes: int) -> None:
        super().__init__(engine, peer, None)
        self._nbytes = nbytes

    @property
    def id(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return self._nbytes


def _word(step: int, layers: int) -> int:
    return step << 16 | layers


def _expand(piece: PagePiece) -> list[tuple[MemoryRegion, int, RemoteRegion, int, int]]:
    """Each page and row on its own."""
    pages: Sequence[tuple[int, int]] = list(
        zip(np.asarray(piece.src_pages).tolist(), np.asarray(piece.dst_pages).tolist(), strict=True)
    )
    return [
        (
            piece.src,
            piece.src_offset + src * piece.src_stride + row * piece.src_row_stride,
            piece.dst,
            piece.dst_offset + dst * piece.dst_stride + row * piece.dst_row_stride,
            piece.nbytes,
        )
        for src, dst in pages
        for row in range(piece.rows)
    ]
