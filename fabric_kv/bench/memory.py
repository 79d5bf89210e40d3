"""Memory to move pages in.

>>> allocate(1 << 20)[:4]
array([165, 165, 165, 165], dtype=uint8)
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from .stamps import POISON

__all__ = ["allocate"]


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Memory of its own, in huge pages where the system gives them, filled with :data:`~.stamps.POISON`."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = POISON
    return array
