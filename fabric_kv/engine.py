"""Moves registered memory between processes over RDMA, and counts what arrives.

>>> with Engine(provider="tcp", nics=["127.0.0.1"]) as engine:
...     memory = engine.register(numpy.zeros((16, 4096), "u1"))
...     peer = engine.add_peer(their_address)
...     transfer = engine.write_pages(peer, memory, their_region, [0, 5], [7, 2], page_bytes=4096, token=their_token)
...     transfer.result(timeout=5)

Data moves on the engine's own C++ threads, whatever Python does. What ends is handed over by one Python thread, the
dispatcher: callbacks and futures run there; exceptions in callbacks are logged, counted and stop nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .buffers import locate
from .closing import DRAIN_S, close_at_end
from .config import EngineOptions, as_integer, check_integer, check_seconds
from .core import load_native
from .description import Description
from .dispatcher import Dispatcher
from .errors import ClosedError, ConfigError
from .memory.buffer import SharedBuffer
from .memory.staging import stage_pieces
from .opening import open_nics, topology_arguments
from .prepared import Prepared, PreparedPiece, Watch
from .regions import CounterToken, EngineAddress, RemoteRegion
from .registry import Registry
from .submission import (
    NO_TOKEN,
    PageList,
    check_callback,
    check_deadline,
    check_peer,
    check_remote,
    check_token,
    encode_lists,
    encode_piece,
    encode_pieces,
    explain_types,
    unpack,
)
from .transfers import Counter, Fence, MemoryRegion, PagePiece, Peer, Stall, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from . import _native
    from .topology import Topology

__all__ = ["Engine"]

# What a counter can count, and one signal can add.
MAX_UNITS = 2**57 - 1

_log = logging.getLogger("fabric_kv")


class Engine:
    """A process's NICs: registers memory, knows peers, writes to them, and counts what they write here.

    Parameters
    ----------
    provider : str, optional
        libfabric provider: ``efa``, ``verbs``, ``tcp``, ``shm``... None takes any that drives a real RDMA NIC; software
        providers are used only when named.
    nics : sequence of str
        The rails of the one device group: libfabric domain names (``rdmap0s6``, ``mlx5_0``, ``eth0``) or IP addresses.
        By default the first one offered. An address may name a port (``10.0.0.5:7000``, ``[::1]:7000``); otherwise any
        free one is taken, which ``describe()`` tells.
    groups : sequence of sequence of str, optional
        Instead of ``nics``: the rails of each device group.
    cpus : sequence of sequence of int, optional
        For each group the cpus that its threads are pinned to: the progress thread, and with
        ``progress_threads="nic"`` those of its NICs, which share them.
    options : EngineOptions

    Raises
    ------
    FabricError
        If libfabric is missing, too old, or offers nothing suitable; the message lists what it offers.
    ConfigError
        If a NIC that was asked for does not exist.

    Notes
    -----
    Every method may be called from any thread, in the process that made the engine: in a forked child it is closed.
    """

    def __init__(
        self,
        provider: str | None = None,
        *,
        nics: Sequence[str] = (),
        groups: Sequence[Sequence[str]] | None = None,
        cpus: Sequence[Sequence[int]] = (),
        options: EngineOptions = EngineOptions(),
    ) -> None:
        self._opened = opened = open_nics(provider, nics=nics, groups=groups, cpus=cpus, options=options)
        self._native = opened.native
        self._address = opened.address
        self.options = options
        self._dispatcher = Dispatcher(self._native, options)
        self._registry = Registry(self._native, self._dispatcher)
        self._finalizer = close_at_end(self, self._native, self._dispatcher, self._registry)
        try:
            self._dispatcher.start()
        except BaseException:  # no thread to be had
            self._finalizer()
            raise

    @classmethod
    def from_topology(
        cls,
        topology: Topology | None = None,
        *,
        provider: str | None = None,
        options: EngineOptions = EngineOptions(),
    ) -> Engine:
        """Open an engine with one device group for each GPU that this process sees, or one for the host.

        Parameters
        ----------
        topology : Topology, optional
            Of :func:`fabric_kv.topology.discover`; by default what it finds on this machine. Group i serves device i.
        provider : str, optional
            For discovery: libfabric provider. Without it only RDMA NICs are looked for.
        options : EngineOptions

        Raises
        ------
        TopologyError
            If there is no usable NIC; the message says which were left out and why.
        FabricError
            If a NIC cannot be opened.
        ConfigError
            If both a topology and a provider are given.
        """
        return cls(**topology_arguments(topology, provider), options=options)

    # -- identity ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> bytes:
        """16 random bytes: this life of the engine."""
        return self._address.epoch

    @property
    def address(self) -> bytes:
        """Versioned bytes by which a peer finds this engine; hand them over by any means."""
        return self._address.to_bytes()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or this is a fork of the engine's process."""
        return not self._finalizer.alive

    def describe(self) -> Description:
        """What was opened, each rail's mode and why, and the figures so far: a dict that prints as a table."""
        path, version = load_native().library()
        groups = [] if self.closed else self._opened.describe()
        about = {
            "libfabric": {"path": path, "version": version},
            "epoch": self.epoch.hex(),
            "progress": self.options.progress,
            "closed": self.closed,
            "groups": groups,
            "left_out": list(self._opened.left_out),
            "staging": self._registry.staging.describe(),
            **self._dispatcher.describe(),
        }
        return Description(about)

    # -- memory --------------------------------------------------------------------------------------------------------

    def register(self, buffer: Any, *, group: int = 0, staging: Literal["host"] | None = None) -> MemoryRegion:
        """Register memory with every NIC of a group, for reading by us and for reading and writing by peers.

        Keep the region: when it is dropped, and no transfer uses it any more, the memory is deregistered and peers that
        still write to it get errors.

        The same buffer registered again gives another region over the same registration, which ends with the last of
        them; regions that only overlap have their own. A registration is never found by its address alone: memory that
        was freed and is there again for something else is registered anew. Device memory that consists of several
        allocations is registered piece by piece.

        Parameters
        ----------
        buffer
            NumPy array, DLPack or CUDA array, bytes-like, or (address, nbytes, device); see
            :func:`fabric_kv.buffers.locate`. The region keeps it alive.
        group : int
            Device group whose NICs will move it.
        staging : {"host"}, optional
            For device memory and NICs that do not reach it: register a copy in host memory instead, made now, which is
            what peers read and write. What arrives goes to the device with :meth:`MemoryRegion.unstage`. Writes from
            the region copy their pages from the device first, to memory apart from that, on the caller's thread; they
            cannot wait for a watch nor be prepared. ``describe()["staging"]`` has the cost.

        Raises
        ------
        ConfigError
            If the buffer is not a plain writable range, or is on the host and to be staged there.
        RegistrationError
            If a NIC refuses it, with the limit that it hit, or it is device memory and the provider cannot reach that.
        DeviceError
            If it is device memory and the CUDA driver cannot be asked about it.
        """
        with contextlib.ExitStack() as held:
            adopt = held.enter_context(buffer._registering()) if isinstance(buffer, SharedBuffer) else None
            group = self._check_group(group)
            region = self._registry.register(self, locate(buffer), group, staging)
            if adopt is not None:
                adopt(region)
        return region

    # -- peers ---------------------------------------------------------------------------------------------------------

    def add_peer(self, address: bytes, *, monitor: bool = False) -> Peer:
        """Make a peer known by its :attr:`address` bytes. The same life of it gives the same peer.

        Parameters
        ----------
        address : bytes
        monitor : bool
            Exchange heartbeats (both sides must ask for it) and report the peer to :meth:`on_peer_lost` when it falls
            silent.

        Raises
        ------
        ProtocolError
            If the bytes are not an address, or one of another version.
        """
        if not isinstance(monitor, bool):
            raise ConfigError(f"monitor={monitor!r} must be True or False")
        parsed = EngineAddress.from_bytes(address)
        if parsed.epoch == self.epoch and monitor:
            raise ConfigError("an engine cannot monitor itself")
        process = None
        if (theirs := parsed.process) is not None:
            process = (theirs.host, theirs.pid, theirs.start_ticks)
        native = self._native.add_peer(parsed.epoch, [list(group) for group in parsed.groups], process, monitor)
        return Peer(native, parsed.epoch)

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer: no new transfer to it is taken, and it is no longer monitored."""
        check_peer(peer)
        self._native.remove_peer(peer._native)
        self._dispatcher.forget(peer.epoch)

    def fence(self, peer: Peer, *, timeout_s: float = 1.0) -> Fence:
        """Remove a peer and look for proof that nothing it has posted can land in our memory any more.

        What it was given by :meth:`MemoryRegion.remote_for` is closed in any case. Only if the result is ``proven`` may
        its pages be used for anything else: otherwise they stay poisoned until a later fence is proven, or the engine
        is closed. Fencing a peer again is fine, also after :meth:`remove_peer`.

        By what means depends on the provider, see "Fences" in docs/engine.md: where the NIC checks keys, the closed
        registrations prove it for the memory that the peer knows by :meth:`~MemoryRegion.remote_for` *only*; over
        shared memory the peer's process must have exited; over TCP there is no proof.

        Parameters
        ----------
        timeout_s : float
            How long to wait for that, in seconds; the call takes no longer but for closing the registrations.

        Raises
        ------
        ConfigError
            If the peer is another engine's, or ``timeout_s`` is out of range. Nothing has changed.
        ClosedError
            If the engine is closed, or closes meanwhile: then no memory of ours is touched any more.
        """
        check_peer(peer)
        check_seconds("timeout_s", timeout_s, 0, 3600)
        fence = Fence(*self._native.fence(peer._native, timeout_s))
        self._dispatcher.forget(peer.epoch)
        if not fence.proven:
            _log.warning("peer %s cannot be fenced: %s", peer.epoch.hex()[:8], fence.why)
        return fence

    @property
    def fence_means(self) -> str:
        """What :meth:`fence` goes by with these NICs: ``registrations``, ``exit`` or ``none``; see :class:`Fence`."""
        return self._native.fence_means()

    def on_peer_lost(self, fn: Callable[[bytes, str], None] | None) -> None:
        """Call ``fn(epoch, reason)`` once for each monitored peer that fell silent, or has closed its engine.

        One callback; None removes it.
        """
        check_callback(fn)
        self._dispatcher.on_peer_lost = fn

    def on_stalled(self, fn: Callable[[Stall], None] | None) -> None:
        """Call ``fn(stall)`` when a NIC with work in flight completes nothing for ``options.stall_s``; once a stall.

        Also when the provider has not returned from a call for so long: ``outstanding_bytes`` is 0 then.
        """
        check_callback(fn)
        self._dispatcher.on_stalled = fn

    def on_held_up(self, fn: Callable[[list[Transfer], str], None] | None) -> None:
        """Call ``fn(transfers, why)`` when a NIC completes nothing to one peer for ``options.stall_s``.

        These transfers have operations in flight there, or have waited as long for NICs of which each either completes
        nothing to the peer, or takes nothing for it, as one that cannot connect. While it lasts, it is told again after
        as long, for those that have come since. Transfers that wait for a watch are not named, nor those that wait for
        room which others give back. The NIC may go on with other peers, and other NICs with this one; where nothing at
        all completes :meth:`on_stalled` tells, too.
        """
        check_callback(fn)
        self._dispatcher.on_held_up = fn

    # -- moving data ---------------------------------------------------------------------------------------------------

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
        """Write one range; :meth:`submit` with a single page."""
        return self.submit(peer, [PagePiece(src, src_offset, 0, dst, dst_offset, 0, nbytes, [0], [0])], token=token)

    def write_pages(
        self,
        peer: Peer,
        src: MemoryRegion,
        dst: RemoteRegion,
        src_pages: Sequence[int] | NDArray[np.integer[Any]] | PageList,
        dst_pages: Sequence[int] | NDArray[np.integer[Any]] | PageList,
        *,
        page_bytes: int,
        src_stride: int | None = None,
        dst_stride: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        token: CounterToken | None = None,
    ) -> Transfer:
        """Write pages to pages; :meth:`submit` with a single piece.

        Parameters
        ----------
        src_pages, dst_pages : integers, shape (num_pages,)
            Page ``src_pages[i]`` of ``src`` goes to page ``dst_pages[i]`` of ``dst``.
        page_bytes : int
            Bytes that are copied of each page.
        src_stride, dst_stride : int, optional
            Bytes from one page to the next; by default ``page_bytes``.
        src_offset, dst_offset : int
            Byte at which page 0 starts.
        token : CounterToken, optional
            The receiver's counter; without it the receiver is not told.
        """
        piece = PagePiece(
            src,
            src_offset,
            page_bytes if src_stride is None else src_stride,
            dst,
            dst_offset,
            page_bytes if dst_stride is None else dst_stride,
            page_bytes,
            src_pages,
            dst_pages,
        )
        try:
            if src._staging is not None:
                return self.submit(peer, [piece], token=token)
            # What submit() does, for one piece that waits for nothing: most calls are this one.
            return self._start(
                Transfer(self, peer, src),
                self._native.submit_write,
                peer._native,
                [encode_piece(self, piece, token, 0)],
                [encode_lists(piece)],
                NO_TOKEN if token is None else token.native(),
                0.0,
                None,
                0,
            )
        except (AttributeError, TypeError):
            explain_types(peer, [piece], token)
            raise

    def submit(
        self,
        peer: Peer,
        pieces: Iterable[PagePiece],
        *,
        token: CounterToken | None = None,
        deadline_s: float | None = None,
        watch: Watch | None = None,
        step: int = 0,
    ) -> Transfer:
        """Write any number of paged pieces to one peer; their source regions belong to one device group.

        Neighbouring pages become one write. With a token every write carries its units to the receiver's counter; they
        add up to the sum of ceil(nbytes / unit_bytes) over all pages and rows. Returns at once.

        Parameters
        ----------
        deadline_s : float, optional
            Seconds from now after which nothing more is posted. The transfer then ends in TransferTimeoutError, once
            what was posted is retired; see :class:`Transfer`.
        watch : Watch, optional
            Each piece waits until its ``layer`` layers of ``step`` are done; pieces are in the order of their layers.
        step : int

        Raises
        ------
        ConfigError
            If a page leaves its region (the message gives index, unit and limit), or a region belongs to another
            engine. Nothing has been posted.
        WouldBlockError
            If the group has ``max_transfers`` in flight. Nothing has been taken.
        ClosedError
            If the engine is closed or the peer was removed.
        """
        if deadline_s is not None:
            check_deadline(deadline_s)
        pieces = list(pieces)
        try:
            encoded, lists, keep = encode_pieces(self, pieces, token)
            staged = stage_pieces(pieces, waits=watch is not None)
            if staged is not pieces:
                encoded, lists, keep = encode_pieces(self, staged, token)
            return self._start(
                Transfer(self, peer, (keep, watch), deadline_s),
                self._native.submit_write,
                peer._native,
                encoded,
                lists,
                NO_TOKEN if token is None else token.native(),
                deadline_s or 0.0,
                None if watch is None else watch._native,
                step,
            )
        except (AttributeError, TypeError):
            explain_types(peer, pieces, token, watch=watch, step=step)
            raise

    def scatter(
        self,
        parts: Iterable[tuple[Peer, Iterable[PagePiece], CounterToken | None]],
        *,
        deadline_s: float | None = None,
    ) -> list[Transfer]:
        """Write to many peers in one submission: :meth:`submit` for each (peer, pieces, token), all or none of them.

        Raises
        ------
        ConfigError, WouldBlockError, ClosedError
            As for :meth:`submit`; no part has been taken then.
        """
        check_deadline(deadline_s)
        transfers, native = [], []
        for peer, given, token in unpack("parts", parts, "peer, pieces, token"):
            check_peer(peer)
            pieces = list(given)
            try:
                encoded, lists, keep = encode_pieces(self, pieces, token)
                staged = stage_pieces(pieces, waits=False)
                if staged is not pieces:
                    encoded, lists, keep = encode_pieces(self, staged, token)
                native.append((peer._native, encoded, lists, token.native() if token else NO_TOKEN, None, 0))
            except (AttributeError, TypeError):
                explain_types(peer, pieces, token)
                raise
            transfers.append(Transfer(self, peer, keep, deadline_s))
        return self._track(transfers, lambda: self._native.submit_pages(False, native, deadline_s or 0.0))

    def prepare(self, peer: Peer, pieces: Iterable[PreparedPiece]) -> Prepared:
        """Work out a submission once, to post it many times with new page lists; see :mod:`fabric_kv.prepared`.

        Raises
        ------
        ConfigError
            If a region belongs to another engine, or a size is none.
        """
        return Prepared(self, peer, pieces)

    def watch(self, word: NDArray[np.uint64] | None = None) -> Watch:
        """A word that submissions may wait for, layer by layer; see :class:`fabric_kv.prepared.Watch`.

        Parameters
        ----------
        word : uint64, shape (1,), optional
            Memory that something else writes, so that it has to be looked at; by default the engine's own, which
            :meth:`Watch.set` alone may write. Of read-only memory, :meth:`Watch.set` writes nothing.

        Raises
        ------
        ConfigError
            If it is of another type or shape.
        """
        array = np.zeros(1, np.uint64) if word is None else word
        if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.shape != (1,):
            raise ConfigError("a watch's word must be a NumPy array of one uint64")
        return Watch(self, array, is_polled=word is not None)

    def read(
        self,
        peer: Peer,
        dst: MemoryRegion,
        dst_offset: int,
        src: RemoteRegion,
        src_offset: int,
        nbytes: int,
        *,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Fetch one range from a peer, which is not told; :meth:`read_pages` with a single page."""
        piece = PagePiece(dst, dst_offset, 0, src, src_offset, 0, nbytes, [0], [0])
        return self._submit_reads(peer, piece, deadline_s)

    def read_pages(
        self,
        peer: Peer,
        dst: MemoryRegion,
        src: RemoteRegion,
        dst_pages: Sequence[int] | NDArray[np.integer[Any]],
        src_pages: Sequence[int] | NDArray[np.integer[Any]],
        *,
        page_bytes: int,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Fetch pages from a peer: page ``src_pages[i]`` there becomes page ``dst_pages[i]`` here.

        The data is in ``dst`` when the transfer has ended well. Raises as :meth:`submit`.
        """
        piece = PagePiece(dst, 0, page_bytes, src, 0, page_bytes, page_bytes, dst_pages, src_pages)
        return self._submit_reads(peer, piece, deadline_s)

    def signal(self, peer: Peer, dst: RemoteRegion, token: CounterToken, units: int = 1, *, group: int = 0) -> Transfer:
        """Add ``units`` to a peer's counter without data. ``dst`` is any region of the peer; nothing is written there.

        It is not ordered behind other transfers: use it to count an event, not to announce data.
        """
        return self.barrier([(peer, dst, token)], units=units, group=group)[0]

    def barrier(
        self, parts: Iterable[tuple[Peer, RemoteRegion, CounterToken]], *, units: int = 1, group: int = 0
    ) -> list[Transfer]:
        """:meth:`signal` for many peers in one submission, all or none; a counter fires once all its senders have."""
        units = check_integer("units", units, 1, MAX_UNITS)
        group = self._check_group(group)
        parts = unpack("parts", parts, "peer, dst, token")
        for peer, dst, token in parts:
            check_peer(peer)
            check_remote("dst", dst)
            try:
                check_token(token, dst)
            except AttributeError:
                explain_types(peer, (), token)
                raise
        native = [(peer._native, dst.native(), token.native(), units, 0) for peer, dst, token in parts]
        transfers = [Transfer(self, peer, None) for peer, _, _ in parts]
        return self._track(transfers, lambda: self._native.submit_signals(native, group))

    def flush(self, peer: Peer, dst: RemoteRegion, *, group: int = 0) -> Transfer:
        """End when all that was written before to the peer's group of ``dst`` is in the peer's memory.

        A transfer's own end says only that its source may be reused; this says that nothing of it is still under way.
        It covers what had *ended* when it was submitted, of this engine's ``group``. ``dst`` as in :meth:`signal`.

        It ends in TransferError on a NIC that does not keep writes in order (``describe()``'s ``ordered_writes``; shm,
        EFA): there only the receiver's counters prove arrival.
        """
        check_peer(peer)
        check_remote("dst", dst)
        group = self._check_group(group)
        return self._start(Transfer(self, peer, None), self._native.submit_flush, peer._native, dst.native(), group)

    def connect_rails(self, peer: Peer, dst: RemoteRegion, *, group: int = 0) -> Transfer:
        """End when every NIC of ours has reached its partner in the peer's group of ``dst``, by a write of nothing.

        The first write over a pair of NICs opens its connection, which takes milliseconds on some providers; this takes
        them off the first request. A pair that cannot connect fails it, with the NIC's name. ``dst`` as in
        :meth:`signal`.
        """
        check_peer(peer)
        check_remote("dst", dst)
        group = self._check_group(group)
        return self._start(Transfer(self, peer, None), self._native.submit_connect, peer._native, dst.native(), group)

    def notify(self, peer: Peer, dst: RemoteRegion, value: int, *, group: int = 0) -> Transfer:
        """Send 15 bits of your own as an immediate, for the peer's :meth:`on_notify`; ``dst`` as in :meth:`signal`.

        Raises
        ------
        ConfigError
            If ``value`` does not fit into 15 bits: the other 17 say that it is not a counter's.
        """
        check_peer(peer)
        check_remote("dst", dst)
        value = check_integer("value", value, 0, 2 ** load_native().NUM_USER_BITS - 1)
        group = self._check_group(group)
        native = [(peer._native, dst.native(), NO_TOKEN, 0, value)]
        return self._track([Transfer(self, peer, None)], lambda: self._native.submit_signals(native, group))[0]

    def on_notify(self, fn: Callable[[int, int], None] | None) -> None:
        """Call ``fn(group, value)`` for each :meth:`notify` of a peer. One callback; None removes it."""
        check_callback(fn)
        self._dispatcher.on_notify = fn

    def send(self, peer: Peer, payload: bytes | bytearray | memoryview) -> Transfer:
        """Send a control message; the peer's :meth:`on_message` gets it whole. Overtakes queued writes.

        Raises
        ------
        ConfigError
            If it is larger than ``options.max_message_bytes``.
        WouldBlockError, ClosedError
            As for :meth:`submit`.
        """
        if not isinstance(payload, bytes):
            payload = bytes(memoryview(payload))  # TypeError for what has no bytes, a string for example
        if len(payload) > self.options.max_message_bytes:
            raise ConfigError(
                f"a message of {len(payload)} bytes is above the limit "
                f"max_message_bytes={self.options.max_message_bytes}"
            )
        try:
            return self._start(Transfer(self, peer, None), self._native.submit_message, peer._native, payload)
        except (AttributeError, TypeError):
            check_peer(peer)
            raise

    def on_message(self, fn: Callable[[bytes, bytes], None] | None) -> None:
        """Call ``fn(sender_epoch, payload)`` for each message, on the dispatcher. One callback; None removes it.

        Messages that arrive while there is none are kept, within ``options.max_inbox_bytes``. Their order is not
        defined.
        """
        check_callback(fn)
        self._dispatcher.set_on_message(fn)

    # -- counting ------------------------------------------------------------------------------------------------------

    def counter(self, *, unit_bytes: int, expected_units: int | None = None, group: int = 0) -> Counter:
        """Take a completion counter; give its ``token`` to whoever writes.

        Parameters
        ----------
        unit_bytes : int
            A write of n bytes will count as ceil(n / unit_bytes).
        expected_units : int, optional
            The total; :meth:`Counter.arm` sets it later otherwise.
        group : int
            The device group that will be written to.

        Raises
        ------
        ConfigError
            If an argument is no integer or out of range. No counter has been taken.
        WouldBlockError
            If all counters of the group are in use.
        """
        unit_bytes = check_integer("unit_bytes", unit_bytes, 1, 2**63 - 1)
        if expected_units is not None:
            expected_units = check_integer("expected_units", expected_units, 0, MAX_UNITS)
        group = self._check_group(group)
        with self._dispatcher.lock:
            self._check_open()
            slot, generation = self._native.allocate_counter(group, unit_bytes)
            counter = Counter(self, CounterToken(slot, generation, unit_bytes, group))
            self._dispatcher.counters[group, slot, generation] = counter
        if expected_units is not None:
            try:
                counter.arm(expected_units)
            except BaseException:
                counter.release(quiescent=True)  # nobody has its token yet
                raise
        return counter

    # -- events --------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> int:
        """Handle what has happened and return how many events that was; for ``dispatch="manual"``."""
        return self._dispatcher.poll(timeout)

    def fileno(self) -> int:
        """Descriptor that is readable while events wait: for ``loop.add_reader`` with ``dispatch="manual"``."""
        return int(self._native.fileno())

    def close(self) -> None:
        """Stop, and give all memory back.

        Posted operations get a second to end by themselves. Then peers hear a goodbye, and what has been posted by
        those that monitor this engine, and are monitored by it, may arrive, within ``heartbeat_interval_s *
        heartbeat_misses`` and a quarter of ``options.close_s``. Then the endpoints are closed, after which no NIC can
        touch caller memory. Whatever is still open ends in ClosedError. Calling it twice is fine, also from two threads
        and from callbacks. A callback that is running is waited for, within five seconds.

        Raises
        ------
        StuckError
            If the provider has not returned from a call after ``options.close_s`` more: a NIC could not be closed.
            Everything has ended in ClosedError nevertheless, but peers may still write into the memory of its regions,
            which is kept until the process ends. Calling again looks again.
        """
        self._finalizer()
        # Where another thread was first, its close() may still be at work: memory is safe only after it.
        self._native.close(DRAIN_S)
        self._registry.let_go()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self.epoch.hex()[:8]}{', closed' if self.closed else ''})"

    # -- for the objects that we hand out ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed or self._dispatcher.stopped:
            raise ClosedError("the engine is closed, or belongs to the process that forked this one")

    def _check_group(self, group: int) -> int:
        index = as_integer("group", group)
        if not 0 <= index < len(self._address.groups):
            raise ConfigError(f"group {index} does not exist: the engine has {len(self._address.groups)}")
        return index

    def _start(self, transfer: Transfer, submit: Callable[..., _native.Transfer], *arguments: object) -> Transfer:
        dispatcher = self._dispatcher
        with dispatcher.lock:
            if dispatcher.stopped:  # else the core knows
                self._check_open()
            transfer._native = native = submit(*arguments)
            dispatcher.transfers[native.id] = transfer
        return transfer

    def _track(self, transfers: list[Transfer], submit: Callable[[], list[_native.Transfer]]) -> list[Transfer]:
        with self._dispatcher.lock:
            self._check_open()
            for transfer, native in zip(transfers, submit(), strict=True):
                transfer._native = native
                self._dispatcher.transfers[native.id] = transfer
        return transfers

    def _submit_reads(self, peer: Peer, piece: PagePiece, deadline_s: float | None) -> Transfer:
        check_deadline(deadline_s)
        try:
            encoded, lists, keep = encode_pieces(self, [piece], None)
            native = [(peer._native, encoded, lists, NO_TOKEN, None, 0)]
        except (AttributeError, TypeError):
            explain_types(peer, [piece], names=("dst", "src"))
            raise
        check_peer(peer)
        transfer = Transfer(self, peer, keep, deadline_s)
        transfer._reads_into = piece.src.remote.group
        return self._track([transfer], lambda: self._native.submit_pages(True, native, deadline_s or 0.0))[0]

    def _cancel(self, transfer: Transfer) -> None:
        if not self.closed:
            self._native.cancel(transfer._native)

    def _deregister(self, region: MemoryRegion) -> None:
        self._native.deregister(region._native)
        region._closed = True
        region._owner = region._staging = None

    def _share(self, region: MemoryRegion, peer: Peer) -> RemoteRegion:
        check_peer(peer)
        return self._registry.share(region, peer)

    def _arm(self, counter: Counter, expected_units: int) -> None:
        expected_units = check_integer("expected_units", expected_units, 0, MAX_UNITS)
        self._native.arm_counter(counter.token.group, counter.token.native(), expected_units)

    def _received(self, counter: Counter) -> int:
        return int(self._native.counter_received(counter.token.group, counter.token.native()))

    def _release(self, counter: Counter, quiescent: bool | None) -> None:
        token = counter.token
        with self._dispatcher.lock:
            if counter._released:
                return
            counter._released = True
            self._dispatcher.counters.pop((token.group, token.slot, token.generation), None)
        fired = counter.done() and counter.exception(0) is None
        self._native.release_counter(token.group, token.native(), fired if quiescent is None else quiescent)
        if not counter.done():
            counter._fail(ClosedError(f"{counter!r} was released before it fired"))
