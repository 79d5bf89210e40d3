"""Where a buffer's bytes are: NumPy arrays, DLPack, CUDA arrays, the buffer protocol, or a bare address.

>>> locate(numpy.zeros(1024, "u1"))
Buffer(address=..., nbytes=1024, device="cpu", owner=array(...))
>>> locate((address, nbytes, "cpu"))

Only contiguous, writable memory is accepted: a registered region is a plain range that a peer may write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .errors import ConfigError

__all__ = ["Buffer", "is_same", "locate"]

_DLPACK_CPU = 1  # DLDeviceType in dlpack.h
_DLPACK_CUDA = 2


class Buffer(NamedTuple):
    """A range of memory and whoever keeps it alive."""

    address: int
    nbytes: int
    device: str  # "cpu" or "cuda:N"
    owner: object


def locate(buffer: Any) -> Buffer:
    """Find out where ``buffer`` lies.

    Parameters
    ----------
    buffer : numpy.ndarray, DLPack object, CUDA array, bytes-like, or (address, nbytes, device)
        Contiguous and writable; any shape and dtype.

    Raises
    ------
    ConfigError
        If it is none of these, not contiguous, read-only, or empty.
    """
    if isinstance(buffer, tuple):
        return _from_tuple(buffer)
    if isinstance(buffer, np.ndarray):
        return _from_array(buffer, buffer)
    cuda = getattr(buffer, "__cuda_array_interface__", None)
    if cuda is not None:
        return _from_cuda(cuda, buffer)
    if hasattr(buffer, "__dlpack__") and hasattr(buffer, "__dlpack_device__"):
        device, _ = buffer.__dlpack_device__()
        if int(device) == _DLPACK_CPU:
            return _from_dlpack(buffer)
        raise ConfigError(
            f"a DLPack buffer on device type {int(device)} cannot be located: pass its __cuda_array_interface__ or "
            f"(address, nbytes, 'cuda:N'); type {_DLPACK_CUDA} is CUDA"
        )
    try:
        view = memoryview(buffer)
    except TypeError:
        raise ConfigError(
            f"{type(buffer).__name__} is not a buffer: expected a NumPy array, a DLPack or CUDA array, "
            "a bytes-like object, or (address, nbytes, device)"
        ) from None
    if view.readonly:
        raise ConfigError(
            f"{type(buffer).__name__} of {view.nbytes} bytes is read-only: a peer may write into a region"
        )
    if not view.c_contiguous:
        raise ConfigError(f"{type(buffer).__name__} of {view.nbytes} bytes is not contiguous")
    # The array holds the buffer export, so that the owner cannot be resized (bytearray) while it is registered.
    return _from_array(np.frombuffer(view.cast("B"), dtype=np.uint8), buffer)


def is_same(a: object, b: object) -> bool:
    """Whether two owners, as :func:`locate` gives them, are one object whose memory has not moved.

    Never true of bare addresses: nobody knows what lies there now.
    """
    first, second = _root(a), _root(b)
    return first is not None and first is second


def _root(owner: object) -> object:
    if not isinstance(owner, tuple):
        return owner
    root: object = owner[1]  # as _from_array puts it
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    return root


def _from_tuple(buffer: tuple[Any, ...]) -> Buffer:
    if len(buffer) != 3:
        raise ConfigError(f"a tuple must be (address, nbytes, device), not {len(buffer)} items")
    address, nbytes, device = buffer
    if not isinstance(address, int) or not isinstance(nbytes, int) or not isinstance(device, str):
        raise ConfigError("a tuple must be (address: int, nbytes: int, device: str)")
    if not 0 < address < 2**64 or not 0 < nbytes < 2**63 or address + nbytes > 2**64:
        raise ConfigError(f"address {address:#x} with {nbytes} bytes is not a range of memory")
    return Buffer(address, nbytes, device, None)


def _from_dlpack(buffer: Any) -> Buffer:
    try:
        array: np.ndarray[Any, Any] = np.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{type(buffer).__name__} cannot be imported through DLPack: {error}. Hint: NumPy has no bfloat16; pass a "
            "view of the same memory as uint8"
        ) from None
    # NumPy takes memory for read-only where the exporter speaks DLPack before 1.0, which cannot say; such an exporter
    # must refuse to export what is read-only.
    return _from_array(array, buffer, writable=array.flags.writeable or not _exports_versioned(buffer))


def _exports_versioned(buffer: Any) -> bool:
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return "dltensor_versioned" in repr(capsule)


def _from_array(array: np.ndarray[Any, Any], owner: object, *, writable: bool | None = None) -> Buffer:
    what = f"array of shape {array.shape}, dtype {array.dtype}"
    if array.dtype.hasobject:
        raise ConfigError(f"{what} holds Python objects: a peer would write pointers")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ConfigError(
            f"{what} with strides {array.strides} is not contiguous: register the array that it is a view of"
        )
    if not (array.flags.writeable if writable is None else writable):
        raise ConfigError(f"{what} is read-only: a peer may write into a region")
    if array.nbytes == 0:
        raise ConfigError(f"{what} is empty")
    return Buffer(array.ctypes.data, array.nbytes, "cpu", (array, owner))


def _from_cuda(interface: dict[str, Any], owner: object) -> Buffer:
    address, read_only = interface["data"]
    shape, strides = interface["shape"], interface.get("strides")
    itemsize = np.dtype(interface["typestr"]).itemsize
    nbytes = itemsize * int(np.prod(shape, dtype=np.int64))
    if read_only or nbytes == 0:
        raise ConfigError(f"CUDA array of shape {shape} is {'read-only' if read_only else 'empty'}")
    if strides is not None and tuple(strides) != _c_strides(shape, itemsize):
        raise ConfigError(f"CUDA array of shape {shape} with strides {strides} is not contiguous")
    return Buffer(address, nbytes, "cuda", owner)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))
