"""Every exception that fabric_kv raises, in one tree.

>>> try: engine.write_pages(peer, src, dst, [7], [9], page_bytes=4096)
... except fabric_kv.ConfigError as error: print(error)      # names the value, the limit and the unit
... except fabric_kv.FabricKVError as error: print(type(error).__name__, error)

::

    FabricKVError
    ├─ ConfigError (ValueError)        wrong or incompatible options, found before any I/O
    │  └─ PlanError                    two layouts cannot be mapped onto each other
    ├─ TopologyError                   discovery found nothing usable; names the device or path
    ├─ AllocationError (MemoryError)   memory could not be had: op, device, nbytes, code
    │  └─ DeviceError                  the CUDA driver is missing, or a call of it failed
    ├─ SharingError (ConnectionError)  another process's buffers were refused, or their owner is gone: path, reason
    ├─ FabricError                     a libfabric call failed: op, fi_errno, provider, nic
    │  ├─ RegistrationError            memory could not be registered
    │  ├─ StuckError                   the provider has not returned from a call: close() gave up, memory stays in use
    │  └─ PeerUnreachableError (ConnectionError)
    ├─ WouldBlockError (BlockingIOError)   a bounded queue is full; nothing was taken, try again later
    ├─ TransferError                   accepted, then failed: transfer_id, peer, bytes_done
    │  ├─ TransferTimeoutError (TimeoutError)   the wait ended, the transfer has not: memory is still in use
    │  └─ TransferCancelledError
    ├─ RequestError                    a request of the messenger ended without its pages: request_id, peer, pages_clean
    │  ├─ RequestRejectedError         the prefill side said no, with its reason
    │  ├─ RequestFailedError           accepted, then failed over there
    │  ├─ RequestTimeoutError (TimeoutError)
    │  ├─ RequestCancelledError
    │  ├─ RequestStalledError          its writes were posted, and a NIC has completed none of them for too long
    │  └─ PeerLostError (ConnectionError)   the other process died, stopped or was cut off
    ├─ ProtocolError                   malformed frame, version mismatch, or more data than was announced
    ├─ ClosedError                     the caller closed it, nobody else
    └─ InternalError                   our invariant failed; asks for a report

Messages say what was tried, on what, and the exact cause; guesses follow ``Hint:``. All fields are keyword-only
and survive pickling, so errors cross process pools intact.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

__all__ = [
    "AllocationError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "FabricError",
    "FabricKVError",
    "InternalError",
    "PeerLostError",
    "PeerUnreachableError",
    "PlanError",
    "ProtocolError",
    "RegistrationError",
    "RequestCancelledError",
    "RequestError",
    "RequestFailedError",
    "RequestRejectedError",
    "RequestStalledError",
    "RequestTimeoutError",
    "SharingError",
    "StuckError",
    "TopologyError",
    "TransferCancelledError",
    "TransferError",
    "TransferTimeoutError",
    "WouldBlockError",
]


def _rebuild(cls: type[FabricKVError], message: str, fields: dict[str, Any]) -> FabricKVError:
    return cls(message, **fields)


REASONS = ("peer_gone", "refused", "no_resources", "timeout", "fabric")

_REASON_OF_ERRNO = {
    **dict.fromkeys(
        (
            errno.ECONNRESET,
            errno.ECONNREFUSED,
            errno.ECONNABORTED,
            errno.ENOTCONN,
            errno.EPIPE,
            errno.ESHUTDOWN,
            errno.EHOSTUNREACH,
            errno.EHOSTDOWN,
            errno.ENETUNREACH,
            errno.ENOENT,
        ),
        "peer_gone",
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EKEYREJECTED, errno.EINVAL, errno.EFAULT), "refused"),
    **dict.fromkeys((errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EMFILE, errno.ENFILE), "no_resources"),
    errno.ETIMEDOUT: "timeout",
}


def reason_of(fi_errno: int | None) -> str:
    """Map an error number of libfabric to one of :data:`REASONS`; the number itself stays in ``fi_errno``."""
    return _REASON_OF_ERRNO.get(fi_errno or 0, "fabric")


class FabricKVError(Exception):
    """Base of everything that fabric_kv raises on purpose.

    Parameters
    ----------
    message : str
        What was tried, on what, and why it failed.
    **fields
        Facts for programs; each class lists its own. A field that was not given reads ``None``.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **fields: Any) -> None:
        unknown = fields.keys() - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}; it has {list(self._fields)}")
        super().__init__(message)
        self._given = fields

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not set: declared fields read None until given.
        if name in type(self)._fields:
            return self.__dict__.get("_given", {}).get(name)
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self._given)


class ConfigError(FabricKVError, ValueError):
    """Wrong or incompatible options, found before any I/O; nothing has changed."""


class PlanError(ConfigError):
    """Two cache layouts cannot be mapped onto each other; the message shows both, field by field."""


class TopologyError(FabricKVError):
    """Discovery found nothing usable. Field ``device``: the device or path in question."""

    _fields = ("device",)


class AllocationError(FabricKVError, MemoryError):
    """Memory could not be had; nothing of it is left behind.

    Fields ``op`` (the call that failed), ``device`` (``cpu`` or ``cuda:N``), ``nbytes`` and ``code`` (errno, or the
    driver's ``CUresult``).
    """

    _fields = ("op", "device", "nbytes", "code")


class DeviceError(AllocationError):
    """The CUDA driver or its Python package is missing, a device lacks what is needed, or a driver call failed."""


class SharingError(FabricKVError, ConnectionError):
    """Buffers of another process were refused, or their owner is gone.

    Fields ``path`` (the server's) and ``reason``, a short stable word: ``absent`` (nobody serves there), ``foreign``
    (another user, or a process that is not expected), ``late`` (withdrawn, closed, or another epoch), ``size`` (less
    memory than announced), ``unreachable`` (device memory that NICs cannot reach), ``full`` (a limit of the server or
    of this process), ``protocol``, ``timeout``, ``gone`` (the owner's process has ended).
    """

    _fields = ("path", "reason")

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)

    def __str__(self) -> str:
        return str(self.args[0])


class FabricError(FabricKVError):
    """A libfabric call failed. Fields ``op``, ``fi_errno`` (positive, fi_errno(3)), ``provider``, ``nic``."""

    _fields: ClassVar[tuple[str, ...]] = ("op", "fi_errno", "provider", "nic")


class RegistrationError(FabricError):
    """Memory could not be registered; the range is not usable for transfers and nothing is left behind."""


class StuckError(FabricError):
    """The provider has not returned from a call, so that a NIC could not be closed.

    Memory that was registered stays so, and is kept, until the process ends: peers may write into it at any time.
    """


class PeerUnreachableError(FabricError, ConnectionError):
    """A peer did not answer within its bound, or its address cannot be used."""

    _fields = (*FabricError._fields, "peer")


class WouldBlockError(FabricKVError, BlockingIOError):
    """A bounded queue is full. Nothing was taken: submit again once a transfer has ended.

    Python's non-blocking sockets spell this status as an exception too. Field ``limit``: the queue's size.
    """

    _fields = ("limit",)

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)

    def __str__(self) -> str:
        return str(self.args[0])


class TransferError(FabricKVError):
    """A transfer was accepted and then failed; every posted operation of it is retired.

    Fields ``transfer_id``, ``peer`` (epoch, hex), ``bytes_done``, and of the operation that failed first ``op``,
    ``fi_errno`` (positive, fi_errno(3)), ``provider``, ``nic`` and ``reason``, one of :data:`REASONS`.

    For a transfer of pages, ``failed_pages`` lists (piece, first, count) of the operations that failed, and
    ``unposted`` is the (piece, index) from which on nothing was posted, or None; all other pages are known good.
    """

    _fields = (
        "transfer_id",
        "peer",
        "bytes_done",
        "op",
        "fi_errno",
        "provider",
        "nic",
        "reason",
        "failed_pages",
        "unposted",
    )


class TransferTimeoutError(TransferError, TimeoutError):
    """A wait ended before the transfer did. The transfer goes on: its memory is still in use."""


class TransferCancelledError(TransferError):
    """Cancelled by the caller; every operation that had been posted is retired."""


class RequestError(FabricKVError):
    """A request of the messenger ended without its pages.

    Fields ``request_id``, ``peer`` (epoch, hex), ``pages_clean`` (``True``: nothing can land in the pages any more,
    they may be reused; ``False``: they may still be written and stay set aside), ``reason`` (a short stable word).
    """

    _fields = ("request_id", "peer", "pages_clean", "reason")


class RequestRejectedError(RequestError):
    """The prefill side refused the request and said why; nothing was written.

    ``reason`` is ``no_capacity`` (it may be taken later, or elsewhere), ``rejected`` (the scheduler said no),
    ``incompatible`` (the two sides do not agree on what it asks for) or ``closing``.
    """


class RequestFailedError(RequestError):
    """The prefill side accepted the request and failed later."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The request's deadline passed."""


class RequestCancelledError(RequestError):
    """The decode side cancelled the request."""


class RequestStalledError(RequestError):
    """Writes of the request were posted, and do not come to their end, or never came here.

    ``reason`` is ``stalled`` where the prefill side's NIC completed none of them for ``EngineOptions.stall_s``, and
    ``uncounted`` where all have completed over there, and some were not counted here for ``Bounds.count_s``. The other
    process is alive, and may be fine for other requests.
    """


class PeerLostError(RequestError, ConnectionError):
    """The other process died, stopped, or was cut off."""


class ProtocolError(FabricKVError):
    """A malformed frame, another protocol version, or more data than was announced. Field ``peer``: epoch, hex."""

    _fields = ("peer",)


class ClosedError(FabricKVError):
    """The object was closed by its owner.

    Field ``pages_clean``, of a request of the messenger: as in RequestError.
    """

    _fields = ("pages_clean",)


class InternalError(FabricKVError):
    """An invariant of fabric_kv does not hold: please report it with the whole message."""
