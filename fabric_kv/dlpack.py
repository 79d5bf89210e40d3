"""DLPack both ways: capsules of device memory of ours, and where the tensors of others lie.

>>> capsule = device_capsule(address, nbytes, device=0, release=count_down)
>>> look_into(tensor.__dlpack__()).address           # of any dtype: NumPy has no bfloat16

What is given away has the structs of dlpack.h before version 1.0, which every framework takes: the capsule holds its
buffer until the tensor made of it is gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CPU", "CUDA", "CUDA_HOST", "Tensor", "device_capsule", "look_into"]

CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
CUDA_HOST = 3  # kDLCUDAHost: pinned by cudaMallocHost or cudaHostRegister, and the host's
_UINT = 1  # kDLUInt
_NAME = b"dltensor"  # whoever takes the tensor renames the capsule: used_dltensor
_VERSIONED_NAME = b"dltensor_versioned"
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Our own prototypes: what is set on the functions of ctypes.pythonapi itself holds for everybody in the process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Held:
    """What is handed out, by address, until its deleter is called.

    A capsule may be the last thing that an interpreter frees, when this module has no names left: what its end needs
    hangs on this object.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[Any, ...]] = {}
        self._name, self._is_valid, self._pointer = _NAME, _is_valid, _pointer
        # The first takes the GIL, since frameworks free tensors on threads of their own. The second is called with it,
        # and with a capsule that is dying, which must not become a Python object again.
        self.delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        self.destroy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._destroy)

    def _delete(self, address: int) -> None:
        held = self.tensors.pop(address, None)
        if held is not None:
            held[-1]()

    def _destroy(self, capsule: int) -> None:
        if self._is_valid(capsule, self._name):
            self._delete(self._pointer(capsule, self._name))


_held = _Held()
# For ever: ctypes frees a callback's code with the callback, and the capsules that call it know nothing of that.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))


def device_capsule(address: int, nbytes: int, device: int, release: Callable[[], object]) -> object:
    """A capsule of ``nbytes`` unsigned bytes on CUDA device ``device``; ``release`` is called once, at its end."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _Tensor(address, _Device(CUDA, device), 1, _DataType(_UINT, 8, 1), shape, None, 0)
    managed = _ManagedTensor(tensor, None, ctypes.cast(_held.delete, ctypes.c_void_p))
    at = ctypes.addressof(managed)
    _held.tensors[at] = (managed, shape, release)
    capsule: object = _new_capsule(at, _NAME, ctypes.cast(_held.destroy, ctypes.c_void_p))
    return capsule


class Tensor(NamedTuple):
    """What a capsule says of its tensor. The memory is there as long as the capsule is."""

    device: tuple[int, int]  # its type, and its number among these
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in items; None: compact, the last dimension fastest
    item_bits: int
    read_only: bool


def look_into(capsule: object) -> Tensor:
    """Read a capsule without taking its tensor: who holds the capsule holds that.

    Raises
    ------
    TypeError
        If it is no capsule of DLPack's that is still to be taken, or of a version with another layout.
    """
    at = id(capsule)
    read_only = False
    if _is_valid(at, _VERSIONED_NAME):
        versioned = _ManagedTensorVersioned.from_address(_pointer(at, _VERSIONED_NAME))
        if versioned.version[0] != 1:
            raise TypeError(f"DLPack {versioned.version[0]}.{versioned.version[1]} is not known, 1.x is")
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(at, _NAME):
        tensor = _ManagedTensor.from_address(_pointer(at, _NAME)).tensor
    else:
        raise TypeError(f"{capsule!r} is no DLPack tensor")
    ndim = tensor.ndim
    return Tensor(
        (tensor.device.device_type, tensor.device.device_id),
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[:ndim]) if ndim else (),
        tuple(tensor.strides[:ndim]) if ndim and tensor.strides else None,
        tensor.dtype.bits * tensor.dtype.lanes,
        read_only,
    )
