"""What an engine hands out: transfers on their way, completion counters, and registered memory.

>>> transfer = engine.write_pages(peer, memory, remote, [0, 5], [7, 2], page_bytes=4096, token=token)
>>> transfer.result(timeout=5.0)
>>> counter = engine.counter(unit_bytes=4096, expected_units=2); await counter

All three come from an :class:`~fabric_kv.engine.Engine` and keep what they need of it alive.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from .config import as_integer
from .errors import ClosedError, ConfigError, TransferCancelledError, TransferTimeoutError
from .futures import Completion, fresh
from .regions import CounterToken, RemoteRegion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from . import _native
    from .engine import Engine
    from .memory.staging import Staging
    from .submission import PageList

__all__ = ["Counter", "Fence", "MemoryRegion", "PagePiece", "Peer", "Stall", "Transfer"]

# How long a wait without a timeout goes on when the transfer may post no more.
_DRAIN_S = 5.0


class Peer:
    """Another engine, in one of its lives. Made by :meth:`Engine.add_peer`."""

    __slots__ = ("_native", "epoch")

    def __init__(self, native: _native.Peer, epoch: bytes) -> None:
        self._native = native
        self.epoch = epoch

    def describe(self) -> dict[str, Any]:
        """Operations, bytes, errors and latencies so far of what was written to it."""
        return self._native.describe()

    def __repr__(self) -> str:
        return f"Peer({self.epoch.hex()[:8]})"


class Fence(NamedTuple):
    """What :meth:`Engine.fence` has found out."""

    #: Nothing that the peer has posted can land any more, in the memory that ``means`` covers.
    proven: bool
    #: What was looked at. ``registrations``: the keys of :meth:`MemoryRegion.remote_for`, closed, which covers what was
    #: given to the peer by these and nothing else. ``exit``: the end of its process, which covers everything. ``none``:
    #: the provider has neither.
    means: str
    #: The reason, in words.
    why: str


class MemoryRegion:
    """Registered memory of this process; peers may write into it once they have :attr:`remote`.

    :meth:`remote_for` is the same for one peer alone. It holds a reference to the buffer. Made by
    :meth:`Engine.register`; a context manager that deregisters.
    """

    def __init__(self, engine: Engine, native: _native.Region, owner: object, remote: RemoteRegion) -> None:
        self._engine = engine
        self._native = native
        self._owner = owner
        self._remote = remote
        self._closed = False
        self._device_address: int | None = None  # None: on the host, or staged there
        self._staging: Staging | None = None
        self._lost: Exception | None = None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or its engine's."""
        return self._closed or self._engine.closed

    @property
    def lost(self) -> Exception | None:
        """Why its memory is not to be used any more: its owner, another process, is gone or has withdrawn it.

        The pages are still there, and harmless to whoever writes into them; submissions from it raise this error.
        """
        return None if self._lost is None else fresh(self._lost)

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._remote.nbytes

    @property
    def remote(self) -> RemoteRegion:
        """What a peer needs to write here."""
        return self._remote

    def remote_for(self, peer: Peer) -> RemoteRegion:
        """Like :attr:`remote`, with keys for this peer alone, which :meth:`Engine.fence` can take back.

        At the first call for a peer the memory is registered again on every NIC of the group, which takes as long as
        :meth:`Engine.register`; later calls give the same. The registration is closed with the region, by the fence, or
        with the engine.

        Where the NIC checks keys (``describe()``'s ``nic_checks_keys``) it takes no more from that peer from then on.
        It does if the peer has also been given :attr:`remote`, or the keys of another peer.

        Raises
        ------
        WouldBlockError
            If there are ``options.max_peer_registrations`` of them. Nothing has been registered.
        RegistrationError
            If a NIC refuses.
        ConfigError
            If the peer is another engine's, or other device memory lies where the region's was.
        ClosedError
            If the peer was removed, or the region or the engine is closed.
        SharingError
            If the region is :attr:`lost`.
        """
        if self._lost is not None:
            raise copy(self._lost)
        return self._engine._share(self, peer)

    def unstage(self, offset: int, nbytes: int) -> None:
        """Copy what has arrived to the device, of a region that is staged in host memory; see :meth:`Engine.register`.

        Parameters
        ----------
        offset, nbytes : int
            In bytes: the pages that have arrived. Others lie on the host as the device had them at registration, and
            would undo what it has computed since.

        Raises
        ------
        ConfigError
            If the region is not staged, or the range is not within it.
        DeviceError
            If the driver refuses.
        ClosedError
            If the region is closed.
        """
        offset, nbytes = as_integer("offset", offset), as_integer("nbytes", nbytes)
        if self._closed:
            raise ClosedError(f"{self!r} was deregistered")
        if self._staging is None:
            raise ConfigError(f"{self!r} is not staged: what arrives is where it belongs")
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise ConfigError(f"{nbytes} bytes from {offset} on are not within {self!r}")
        self._staging.to_device([(offset, nbytes)])

    def close(self) -> None:
        """Deregister; peers can no longer reach the memory, where the provider checks keys.

        Raises
        ------
        ConfigError
            If a transfer of this engine still reads the region. Nothing has changed then.
        """
        if self._staging is not None:
            self._staging.close()
        self._engine._deregister(self)

    def _forget_if_engine_closed(self) -> None:
        if self._engine.closed and not self._closed:
            self._engine.close()  # waits until no NIC touches the memory: another thread may be at it
            self._closed = True
            self._owner = self._staging = None

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MemoryRegion({self.nbytes} bytes, group {self._remote.group})"


class Stall(NamedTuple):
    """A NIC with work in flight that completes nothing."""

    group: int
    provider: str
    nic: str
    silent_s: float  # since the last completion
    outstanding_bytes: int


class PagePiece(NamedTuple):
    """A paged copy: page i, row r goes from ``src_offset + src_pages[i] * src_stride + r * src_row_stride`` to the same
    with ``dst``; ``nbytes`` each. All in bytes but the page indices. With a watch it waits until ``layer``
    layers are done.
    """  # noqa: D205

    src: MemoryRegion
    src_offset: int
    src_stride: int
    dst: RemoteRegion
    dst_offset: int
    dst_stride: int
    nbytes: int
    src_pages: Sequence[int] | NDArray[np.integer[Any]] | PageList
    dst_pages: Sequence[int] | NDArray[np.integer[Any]] | PageList
    rows: int = 1
    src_row_stride: int = 0
    dst_row_stride: int = 0
    layer: int = 0


class Transfer(Completion[None]):
    """One submission on its way.

    It ends once, when every operation that was posted for it is retired: done, failed (:class:`TransferError`),
    cancelled (:class:`TransferCancelledError`) or closed (:class:`ClosedError`). Until then its memory is in use, also
    after a wait for it has timed out.

    After :meth:`cancel`, or when its deadline passes, it is draining: nothing more is posted, and it ends (cancelled,
    or TransferTimeoutError) when the NIC has given back what was. A peer that is stopped can delay that; waiting is
    bounded all the same, and raises TransferTimeoutError while ``done()`` is still False.
    """

    # Of the class until they are set, as most never are.
    _reads_into: int | None = None  # of a read: the device group that its data arrives in
    _stop_s = math.inf  # from when on nothing more is posted

    def __init__(self, engine: Engine, peer: Peer, keep: object, deadline_s: float | None = None) -> None:
        if deadline_s is not None:
            self._stop_s = time.monotonic() + deadline_s
        self._engine = engine
        self._native: _native.Transfer  # set while submitting
        self._keep = keep  # the regions, until the end
        self.peer = peer

    @property
    def id(self) -> int:
        """Number of the transfer in its engine, as errors and logs name it."""
        return self._native.id

    @property
    def nbytes(self) -> int:
        """Bytes to move: of all its pages, or of the message."""
        return self._native.nbytes

    @property
    def state(self) -> str:
        """``active``, ``draining``, or how it ended: ``done``, ``failed``, ``cancelled``."""
        if not self.done():
            return "draining" if time.monotonic() >= self._stop_s else "active"
        error = self.exception(0)
        return "done" if error is None else "cancelled" if isinstance(error, TransferCancelledError) else "failed"

    def cancel(self) -> None:
        """Post nothing more. It still ends by itself, once what was posted is retired."""
        self._stop_s = min(self._stop_s, time.monotonic())
        self._engine._cancel(self)

    def _wait(self, timeout: float | None) -> None:
        if timeout is None and self._stop_s < math.inf:
            timeout = max(self._stop_s - time.monotonic(), 0.0) + _DRAIN_S
        super()._wait(timeout)

    def _count_callback_error(self) -> None:
        self._engine._dispatcher.count_callback_error()

    def _timeout_error(self, timeout: float | None) -> Exception:
        return TransferTimeoutError(
            f"{self!r} has not ended after {timeout} s; it goes on and its memory is still in use",
            transfer_id=self.id,
            peer=self.peer.epoch.hex(),
        )

    def __repr__(self) -> str:
        return f"Transfer({self.id}, {self.nbytes} bytes to {self.peer!r})"


class Counter(Completion[None]):
    """Receiver-side completion counter: ends when exactly the expected units have arrived.

    Its result is None, or :class:`ProtocolError` if more units arrived than expected. A context manager that releases:
    after a regular end the slot is used again, otherwise it is poisoned.
    """

    def __init__(self, engine: Engine, token: CounterToken) -> None:
        # Not the engine itself: it keeps its counters, and one that was never released would keep it open for ever.
        self._engine_ref = weakref.ref(engine)
        self._released = False
        self.token = token

    def arm(self, expected_units: int) -> None:
        """Set the total, where it was not known at creation. What arrived before counts.

        Raises
        ------
        ConfigError
            If it is armed already, was released, or ``expected_units`` is negative.
        """
        self._alive_engine()._arm(self, expected_units)

    @property
    def received(self) -> int:
        """Units that have arrived so far; 0 after release."""
        return self._alive_engine()._received(self)

    def release(self, quiescent: bool | None = None) -> None:
        """Give the slot back. Calling it twice is fine.

        Parameters
        ----------
        quiescent : bool, optional
            Whether it is certain that no write of this counter can arrive any more. By default that is so if the
            counter has fired, which is always enough. Without that certainty the slot is poisoned: never used again
            while the engine lives.
        """
        engine = self._engine_ref()
        if engine is not None:
            engine._release(self, quiescent)

    def _count_callback_error(self) -> None:
        if (engine := self._engine_ref()) is not None:
            engine._dispatcher.count_callback_error()

    def _alive_engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise ClosedError(f"the engine of {self!r} is gone")
        return engine

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"Counter(slot {self.token.slot}, generation {self.token.generation}, unit {self.token.unit_bytes} bytes)"
        )
