"""Where a buffer's bytes are: NumPy arrays, DLPack (torch and others), CUDA arrays, the buffer protocol, addresses.

>>> locate(numpy.zeros(1024, "u1"))
Buffer(address=..., nbytes=1024, device="cpu", owner=array(...))
>>> locate((address, nbytes, "cpu"))

Only contiguous, writable memory is accepted: a registered region is a plain range that a peer may write. The order of
the axes does not matter, nor the type of what lies there.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .dlpack import CPU, CUDA, CUDA_HOST, look_into
from .errors import ConfigError

__all__ = ["Buffer", "is_same", "locate"]

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


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
    try:
        cuda = getattr(buffer, "__cuda_array_interface__", None)
    except Exception:  # noqa: BLE001  torch's raises KeyError and others where it has no name for a dtype
        cuda = None
    if cuda is not None:
        return _from_cuda(cuda, buffer)
    if hasattr(buffer, "__dlpack__") and hasattr(buffer, "__dlpack_device__"):
        return _from_dlpack(buffer)
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
    device = buffer[2]
    try:
        address, nbytes = (operator.index(number) for number in buffer[:2])
    except TypeError:
        raise ConfigError("a tuple must be (address: int, nbytes: int, device: str)") from None
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ConfigError(f"device={device!r} of a tuple (address, nbytes, device) must be 'cpu', 'cuda' or 'cuda:N'")
    if not 0 < address < 2**64 or not 0 < nbytes < 2**63 or address + nbytes > 2**64:
        raise ConfigError(f"address {address:#x} with {nbytes} bytes is not a range of memory")
    return Buffer(address, nbytes, device, None)


def _from_dlpack(buffer: Any) -> Buffer:
    name = type(buffer).__name__
    try:
        kind = int(buffer.__dlpack_device__()[0])
        if kind not in (CPU, CUDA, CUDA_HOST):
            raise ConfigError(
                f"{name} is on DLPack's device type {kind}: {CPU} and {CUDA_HOST}, the host, and {CUDA}, CUDA, can be "
                "registered. Hint: copy it to one of these; host memory of another kind can be given as "
                "(address, nbytes, 'cpu')"
            )
        # -1: no stream is made to wait, as no byte is read: __dlpack__ in the array API standard.
        stream = {"stream": -1} if kind == CUDA else {}
        try:
            capsule = buffer.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # it is from before DLPack 1.0, and must refuse to export what is read-only
            capsule = buffer.__dlpack__(**stream)
        tensor = look_into(capsule)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  what is raised differs from framework to framework
        raise ConfigError(f"{name} cannot be exported by DLPack: {error}") from None
    what = f"{name} of shape {tensor.shape}, {tensor.item_bits} bits an item"
    if tensor.item_bits % 8:
        raise ConfigError(f"{what}, has no whole bytes. Hint: pass a view of the same memory as uint8")
    _check_range(what, tensor.shape, tensor.strides, 1, read_only=tensor.read_only)
    nbytes = tensor.item_bits // 8 * math.prod(tensor.shape)
    # The capsule holds the memory, whatever becomes of the tensor.
    return Buffer(tensor.address, nbytes, "cuda" if kind == CUDA else "cpu", (capsule, buffer))


def _from_array(array: np.ndarray[Any, Any], owner: object) -> Buffer:
    what = f"array of shape {array.shape}, dtype {array.dtype}"
    if array.dtype.hasobject:
        raise ConfigError(f"{what} holds Python objects: a peer would write pointers")
    _check_range(what, array.shape, array.strides, array.itemsize, read_only=not array.flags.writeable)
    return Buffer(array.ctypes.data, array.nbytes, "cpu", (array, owner))


def _from_cuda(interface: dict[str, Any], owner: object) -> Buffer:
    address, read_only = interface["data"]
    shape, strides = interface["shape"], interface.get("strides")
    itemsize = np.dtype(interface["typestr"]).itemsize
    _check_range(f"CUDA array of shape {shape}", shape, strides, itemsize, read_only=read_only)
    return Buffer(address, itemsize * math.prod(shape), "cuda", owner)


def _check_range(what: str, shape: Sequence[int], strides: Sequence[int] | None, item: int, *, read_only: bool) -> None:
    """Raise ConfigError unless it is one range of bytes that may be written; ``item`` is an item's stride."""
    if strides is not None and 0 not in shape:
        dense = item
        for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
            if stride != dense:
                raise ConfigError(
                    f"{what} with strides {tuple(strides)} is not contiguous: register the array that it is a view of"
                )
            dense *= extent
    if read_only:
        raise ConfigError(f"{what} is read-only: a peer may write into a region")
    if 0 in shape:
        raise ConfigError(f"{what} is empty")
