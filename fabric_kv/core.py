"""The C++ core, loaded at first use: what computes plans or talks to CUDA works without it.

>>> load_native().Watch(address, False).set(7, 0)
"""

from __future__ import annotations

from types import ModuleType

from .errors import FabricError

__all__ = ["load_native"]


def load_native() -> ModuleType:
    """The extension module.

    Raises
    ------
    FabricError
        If it was not built, or libfabric is missing.
    """
    try:
        from . import _native
    except ImportError as error:
        raise FabricError(
            f"the C++ core fabric_kv._native cannot be imported: {error}. Hint: build it with pip install -e . "
            "(needs libfabric's headers: apt-get install libfabric-dev)"
        ) from error
    return _native
