"""Binds memory to a NUMA node, by the mbind system call: no library is needed for one call.

>>> reason = bind(address, nbytes, node=1)      # None: bound

The policy of shared memory belongs to the memory, not to the mapping, and so holds for every process: set_mempolicy(2).
That of huge pages belongs to the mapping.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

from ..errors import AllocationError, ConfigError

__all__ = ["bind"]

_NUMBERS = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}  # <asm/unistd.h>
_MPOL_BIND = 2  # <linux/mempolicy.h>
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NODES = Path("/sys/devices/system/node")


def bind(address: int, nbytes: int, node: int) -> str | None:
    """Let pages that are touched from now on come from ``node`` alone.

    Returns
    -------
    str or None
        Why this system does not allow it: there is no mbind, or, as in many containers, it is forbidden.

    Raises
    ------
    ConfigError
        If the machine has no such node.
    AllocationError
        If the kernel refuses for any other reason.
    """
    if node < 0 or not (_NODES / f"node{node}").is_dir():
        there = sorted(int(path.name[4:]) for path in _NODES.glob("node[0-9]*"))
        raise ConfigError(f"numa_node={node} does not exist: this machine has {there or 'no NUMA nodes'}")
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return f"the number of mbind on {platform.machine()} is not known"
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes maxnode for one more than there are: mbind(2), BUGS.
    rc = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(len(mask) * _WORD_BITS + 1),
        ctypes.c_uint(0),
    )
    if rc == 0:
        return None
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):
        return f"mbind: {os.strerror(code)}"
    raise AllocationError(
        f"mbind of {nbytes} bytes to NUMA node {node} failed: {os.strerror(code)} ({code})",
        op="mbind",
        device="cpu",
        nbytes=nbytes,
        code=code,
    )
