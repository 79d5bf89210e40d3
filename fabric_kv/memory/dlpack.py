"""DLPack for device memory: a capsule of bytes that holds its buffer until the tensor made of it is gone.

>>> capsule = device_capsule(address, nbytes, device=0, release=count_down)

The structs are those of dlpack.h before version 1.0, which every framework takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["CUDA", "device_capsule"]

CUDA = 2  # kDLCUDA
_UINT = 1  # kDLUInt
_NAME = b"dltensor"  # whoever takes the tensor renames the capsule: used_dltensor


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


# What is handed out, by address, until its deleter is called.
_held: dict[int, tuple[Any, ...]] = {}


def _delete(address: int) -> None:
    held = _held.pop(address, None)
    if held is not None:
        held[-1]()


def _destroy(capsule: int) -> None:
    if ctypes.pythonapi.PyCapsule_IsValid(ctypes.c_void_p(capsule), _NAME):
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype = ctypes.c_void_p
        _delete(get(ctypes.c_void_p(capsule), _NAME))


# The first takes the GIL, since frameworks free tensors on threads of their own. The second is called with it, and with
# a capsule that is dying, which must not become a Python object again.
_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DESTROY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)


def device_capsule(address: int, nbytes: int, device: int, release: Callable[[], object]) -> object:
    """A capsule of ``nbytes`` unsigned bytes on CUDA device ``device``; ``release`` is called once, at its end."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _Tensor(address, _Device(CUDA, device), 1, _DataType(_UINT, 8, 1), shape, None, 0)
    managed = _ManagedTensor(tensor, None, ctypes.cast(_DELETE, ctypes.c_void_p))
    at = ctypes.addressof(managed)
    _held[at] = (managed, shape, release)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    capsule: object = new(ctypes.c_void_p(at), _NAME, _DESTROY)
    return capsule
